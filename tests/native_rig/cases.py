# SPDX-License-Identifier: Apache-2.0
"""The cases of test_native.py, each run in a process of its own: python cases.py NAME [ARGUMENT]."""

from __future__ import annotations

import ctypes as c
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import warnings

from ctxfix import native

rig = os.environ["RIG"]


def lib(name, mode=os.RTLD_NOW):
    return c.CDLL(f"{rig}/{name}", mode=mode)


def cuda():
    global cu, rt
    cu, rt = lib("libcuda.so.1", os.RTLD_NOW | os.RTLD_GLOBAL), lib("libcudart.so.99", os.RTLD_NOW | os.RTLD_GLOBAL)
    for f in ("stub_context", "stub_memory"):
        getattr(cu, f).restype = c.c_void_p
    cu.stub_memory.argtypes = [c.c_int, c.c_size_t, c.c_int]
    cu.cuCtxSetCurrent.argtypes = [c.c_void_p]
    return cu


def fabric(name="libfabric.so.1"):
    lf = lib(name)
    lf.lf_range.argtypes = [c.c_uint64]
    for f in ("lf_get", "lf_open"):
        getattr(lf, f).argtypes = [c.c_void_p, c.c_void_p]
    lf.lf_copy.argtypes = [c.c_void_p, c.c_void_p, c.c_size_t]
    lf.lf_start.argtypes = [c.c_void_p, c.c_void_p, c.c_size_t, c.c_void_p, c.c_void_p]
    for f in ("lf_close", "lf_query"):
        getattr(lf, f).argtypes = [c.c_void_p]
    lf.lf_destroy.argtypes = [c.c_void_p, c.c_void_p]
    for f in ("lf_next", "lf_own", "lf_ask"):
        getattr(lf, f).restype = c.c_void_p
    return lf


def threads(binding="lazy"):
    t = lib(f"libthreads-{binding}.so")
    for f in ("t_device", "t_exit", "t_cancel", "t_stack", "t_impossible", "t_grandchild"):
        getattr(t, f).restype = c.c_ssize_t
    t.t_stack.argtypes = [c.c_size_t]
    t.t_other.restype = c.c_void_p
    return t


def engine():
    e = lib("libplugin_LIBFABRIC.so")
    e.engine_make.restype = c.c_void_p
    for f in ("engine_device", "engine_stop"):
        getattr(e, f).argtypes = [c.c_void_p]
    return e


def on_thread(f):
    out = []
    t = threading.Thread(target=lambda: out.append(f()))
    t.start()
    t.join()
    return out[0]


def slot_of_pthread_create():
    """The word in libthreads-lazy.so, found as binutils sees it."""
    command = ["readelf", "-rW", f"{rig}/libthreads-lazy.so"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    offset = int(re.search(r"^([0-9a-f]+) .*JUMP_SLO.* pthread_create", listing, re.M)[1], 16)
    base = min(int(line.split("-")[0], 16) for line in open("/proc/self/maps") if "libthreads" in line)
    return c.c_void_p.from_address(base + offset)


def calls(device, kind):
    return native.counters()["calls"].get(device, {}).get(kind, {"calls": 0, "failures": 0, "bytes": 0, "rebinds": 0})


def threads_of_an_armed_thread_inherit(binding: str) -> None:
    """The hooked pthread_create: armed threads' children start in the context, others' do not."""
    cuda()
    t = threads(binding)
    native.install()
    assert t.t_device() == -1
    with native.armed(cu.stub_context(3)):
        assert t.t_device() == 3 and t.t_grandchild() == 3
        assert on_thread(t.t_device) == 3  # a Python thread started here is a member too
        with native.armed(cu.stub_context(2)):
            assert t.t_device() == 2
        assert t.t_device() == 3
    assert t.t_device() == -1 and on_thread(t.t_device) == -1
    assert cu.stub_current() == -1


def attributes_exit_values_and_cancellation_pass() -> None:
    """The trampoline: nothing between the creator and the routine is lost."""
    cuda()
    t = threads()
    native.install()
    with native.armed(cu.stub_context(1)):
        assert t.t_exit() == 4711
        assert t.t_cancel() == -1  # PTHREAD_CANCELED
        assert t.t_stack(1 << 20) < 64 << 20 <= t.t_stack(64 << 20)


def a_thread_that_cannot_be_made() -> None:
    """The creator's error comes back, and the thread is not counted."""
    cuda()
    t = threads()
    native.install()
    g = native.new_group()
    with native.armed(cu.stub_context(1), g):
        assert t.t_impossible() < -1000
        assert native.counters()["threads"]["created"] == 0 and native.group_info(g).threads == 0
        native._extension.fault("malloc", 1)
        assert t.t_device() == -1 and native.counters()["threads"]["plain"] == 1


def groups_are_bound_late_and_again() -> None:
    """Late binding: a running progress thread follows its own group's context, not another's."""
    cuda()
    e = engine()
    native.install()
    a, b = native.new_group(), native.new_group()
    with native.armed(0, a):
        x = e.engine_make()
    with native.armed(cu.stub_context(0), b):
        y = e.engine_make()
    assert e.engine_device(x) == -1 and e.engine_device(y) == 0
    native.bind_group(a, cu.stub_context(1))
    native.bind_group(b, cu.stub_context(2))
    assert e.engine_device(x) == 1 and e.engine_device(y) == 2
    native.bind_group(a, cu.stub_context(3))
    assert e.engine_device(x) == 3 and e.engine_device(y) == 2
    assert native.group_info(a) == (cu.stub_context(3), 1, 2, 0)
    native.bind_group(a, 0)
    assert e.engine_device(x) == 3  # forgotten, not taken away
    with native.armed(0, b):
        z = e.engine_make()
    assert e.engine_device(z) == 2
    for i in (x, y, z):
        e.engine_stop(i)


def a_destroyed_context_leaves_the_thread_alone() -> None:
    """A context that cannot be set: the thread keeps what it has, and it is counted."""
    cuda()
    t = threads()
    e = engine()
    native.install()
    g = native.new_group()
    with native.armed(cu.stub_context(1), g):
        x = e.engine_make()
    assert e.engine_device(x) == 1
    cu.stub_context(2)
    cu.stub_destroy(2)
    native.bind_group(g, cu.stub_context(2))
    assert e.engine_device(x) == 1
    with native.armed(cu.stub_context(2)):
        assert t.t_device() == -1
    assert native.counters()["threads"]["failed"] == 2 and native.group_info(g).failed == 1
    lf = fabric()
    native.install()
    lf.lf_init()
    native.set_home(cu.stub_context(2))
    assert lf.lf_register(None, 0) == 0 and c.c_int.in_dll(cu, "stub_dead_uses").value == 0
    e.engine_stop(x)


def a_plugin_loaded_while_armed_is_covered() -> None:
    """The hooked dlsym: what a library loads inside the armed call starts its threads in the context."""
    cuda()
    loader = lib("libloader.so")
    loader.load_engine.restype = c.c_void_p
    native.install()
    with native.armed(cu.stub_context(1)):
        x = loader.load_engine(f"{rig}/libplugin_LIBFABRIC.so".encode())
    e = engine()
    assert e.engine_device(x) == 1
    e.engine_stop(x)


def nothing_is_loaded_or_initialised_without_cuda() -> None:
    """No libcuda in the process: arming and hooking leave it so."""
    native.install()
    with native.armed(0, native.new_group()):
        on_thread(lambda: None)
    assert "libcuda" not in open("/proc/self/maps").read()
    assert native.status()["problems"] == []


def everything_is_put_back(binding: str) -> None:
    """Undo: threads are plain again, sealed pages are sealed, and a second round works as the first."""
    cuda()
    t = threads(binding)

    def writable():
        return [line.split()[:2] for line in open("/proc/self/maps") if "libthreads" in line]

    t.t_device()
    before = writable()
    for _ in range(2):
        native.install()
        assert writable() == before
        native.arm(cu.stub_context(1))
        assert t.t_device() == 1
        report = native.remove()
        assert report.restored > 0 and report.left == 0
        native._extension.arm(False, cu.stub_context(1), 0)
        assert t.t_device() == -1
        assert writable() == before


def a_slot_taken_over_is_left() -> None:
    """Undo restores only what still is ours, and says what is not."""
    cuda()
    t = threads("lazy")
    native.install()
    slot = slot_of_pthread_create()
    slot.value = t.t_other()
    assert t.t_device() == -1077
    assert native.remove().left == 1 and slot.value == t.t_other()


def another_interposer_stays_in_the_line() -> None:
    """What the slot held before us is what we call."""
    cuda()
    t = threads("lazy")
    seen = []
    real = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p)(("pthread_create", c.CDLL(None)))

    @c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p)
    def mine(*a):
        seen.append(1)
        return real(*a)

    slot_of_pthread_create().value = c.cast(mine, c.c_void_p).value
    native.install()
    with native.armed(cu.stub_context(1)):
        assert t.t_device() == 1
    assert seen == [1]
    native.remove()
    assert t.t_device() == -1 and seen == [1, 1]


def forbidden_mprotect_breaks_nothing() -> None:
    """Sealed slots that cannot be opened: reported, all else works."""
    cuda()
    t = threads("now")
    native._extension.fault("mprotect", 1)
    native.install()
    with native.armed(cu.stub_context(1)):
        assert t.t_device() == -1
    assert any("could not be written (errno 1)" in p for p in native.status()["problems"])
    assert native.remove().left == 0


def a_forked_child_is_off_until_it_arms() -> None:
    """Fork: no hook does anything in the child, and nothing of the parent's is used there."""
    warnings.simplefilter("ignore")
    cuda()
    t = threads()
    native.install()
    native.arm(cu.stub_context(1))
    pid = os.fork()
    if not pid:
        off = t.t_device() == -1
        native.arm(cu.stub_context(2))
        os._exit(0 if off and t.t_device() == 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0 and t.t_device() == 1


def a_forked_child_counts_from_zero() -> None:
    """Fork: what the parent did and heard is no evidence of the child's, and the child can ask at any moment."""
    warnings.simplefilter("ignore")
    cuda()
    lf, t = fabric(), threads()
    native.install()
    lf.lf_init()
    p = cu.stub_memory(1, 4096, 0)
    assert lf.lf_range(p) == 0 and native.import_log(f"{rig}/libfabric.so.1") == ""
    with native.armed(cu.stub_context(1)):
        assert t.t_device() == 1
    lf.lf_say(b"fallback to using SAR", 1)
    assert native.log_said()["sar"] == (1, ["?:f():1 fallback to using SAR"])
    libfabric_calls = native.status()["libfabric_calls"]
    talker = threading.Thread(target=lf.lf_say, args=(b"fallback to using SAR", 20_000_000))
    talker.start()
    for _ in range(30):
        pid = os.fork()
        if not pid:
            signal.alarm(10)
            counters = native.counters()
            fine = native.log_said()["sar"] == (0, []) and counters["calls"] == {}
            fine = fine and set(counters["threads"].values()) == {0}
            fine = fine and native.status()["libfabric_calls"] == libfabric_calls  # what is hooked stays so
            os._exit(0 if fine else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert talker.is_alive() and calls(1, "range")["calls"] == 1
    os._exit(print("END", flush=True) or 0)  # without waiting for the talker


def calls_are_made_in_the_owners_context(name: str) -> None:
    """Answered dlsym and replaced imports: right on a bare thread and on a wrong one, the caller's context restored."""
    cuda()
    lf = fabric(name)
    native.install()
    assert lf.lf_init() == 0
    p, v, h = cu.stub_memory(1, 4096, 0), cu.stub_memory(2, 4096, 1), c.create_string_buffer(64)
    assert lf.lf_range(p) == 0 and lf.lf_get(h, p) == 0 and cu.stub_current() == -1
    cu.cuCtxSetCurrent(cu.stub_context(0))
    assert lf.lf_range(p) == 0 and lf.lf_range(v) == 0 and cu.stub_current() == 0 and cu.stub_depth() == 1
    assert rt.cudaSetDevice(1) == 0 and lf.lf_range(p) == 0
    assert calls(1, "range") == dict(calls=3, failures=0, bytes=0, rebinds=2)
    assert calls(2, "range") == dict(calls=1, failures=0, bytes=0, rebinds=1)  # VMM: the device's primary context
    assert lf.lf_range(8) == 500 and calls(1, "range")["failures"] == 1
    assert c.c_int.in_dll(rt, "stub_strays").value == 0


def a_libfabric_in_use_before_us_is_adopted() -> None:
    """Too late for dlsym: the words of its table are exchanged, and status says so; undo turns them off."""
    cuda()
    lf = fabric()
    p = cu.stub_memory(1, 4096, 0)
    assert lf.lf_init() == 0 and lf.lf_range(p) == 201
    native.install()
    assert lf.lf_range(p) == 0
    assert any("too late" in x for x in native.status()["problems"])
    native.remove()
    assert lf.lf_range(p) == 201


def host_calls_on_a_bare_thread_make_no_stray_context() -> None:
    """Footprint: registration and synchronisation run at home, else where the only context is."""
    cuda()
    lf = fabric()
    native.install()
    lf.lf_init()
    b = c.create_string_buffer(64)
    cu.stub_context(2)
    assert lf.lf_register(b, 64) == 0 and calls(2, "runtime")["calls"] == 1
    cu.stub_context(3)
    native.set_home(cu.stub_context(3))
    assert lf.lf_register(b, 64) == 0 and calls(3, "runtime")["calls"] == 1
    p = cu.stub_memory(1, 64, 0)
    assert lf.lf_copy(p, b, 64) == 0 and lf.lf_sync() == 0 and calls(1, "runtime")["calls"] == 1
    assert calls(1, "copy_htod") == dict(calls=1, failures=0, bytes=64, rebinds=1)
    assert c.c_int.in_dll(rt, "stub_strays").value == 0 and cu.stub_current() == -1


def whole_copies() -> None:
    """G5: with modes 1 and 2 the bytes are there when cudaMemcpy returns; with 0 they are not."""
    cuda()
    lf = fabric()
    native.install()
    lf.lf_init()
    a, b = cu.stub_memory(1, 64, 0), cu.stub_memory(1, 64, 0)
    assert native.copy_mode(0) == 1
    for mode in (0, 1, 2):
        native.copy_mode(mode)
        c.memset(a, 65 + mode, 64)
        c.memset(b, 0, 64)
        assert on_thread(lambda: lf.lf_copy(b, a, 64)) == 0
        assert c.string_at(b, 64) == (b"\0" if mode == 0 else bytes([65 + mode])) * 64
        rt.stub_finish()
    assert calls(1, "copy_dtod") == dict(calls=3, failures=0, bytes=192, rebinds=3)
    assert native.counters()["fabric"]["own_stream"] == 2
    assert c.c_int.in_dll(cu, "stub_streams").value == 1  # threads come and go, the stream is lent again


def a_mapping_is_opened_where_it_is_copied_into() -> None:
    """Several GPUs: libfabric's IPC cache gives one mapping for both, each copy goes through one of its own GPU."""
    cuda()
    lf = fabric()
    native.install()
    lf.lf_init()
    src, one, two, h = (
        cu.stub_memory(0, 8192, 0),
        cu.stub_memory(1, 64, 0),
        cu.stub_memory(2, 64, 0),
        c.create_string_buffer(64),
    )
    c.memset(src + 4096, 66, 64)
    lf.lf_get(h, src)
    native.set_home(cu.stub_context(1))
    m = c.c_void_p()
    assert lf.lf_open(c.byref(m), h) == 0 and cu.stub_device_of(c.c_uint64(m.value)) == 1
    for _ in range(2):
        for to in (one, two):
            c.memset(to, 0, 64)
            assert lf.lf_copy(to, m.value + 4096, 64) == 0 and c.string_at(to, 64) == b"B" * 64
    f = native.counters()["fabric"]
    assert f["translated"] == 2 and f["untranslated"] == 0
    assert calls(2, "open_handle")["calls"] == 1 and calls(2, "copy_dtod")["calls"] == 2
    c.memset(two, 67, 64)
    assert lf.lf_copy(m.value + 4096, two, 64) == 0  # RMA read: ours is the source
    assert c.string_at(src + 4096, 64) == b"C" * 64
    assert lf.lf_close(m) == 0 and calls(2, "close_handle")["calls"] == 1 and calls(1, "close_handle")["calls"] == 1


def a_mapping_closed_while_off_is_forgotten() -> None:
    """Deactivated, closed, activated again: what lies at that address now is nobody's mapping any more."""
    cuda()
    lf = fabric()
    native.install()
    lf.lf_init()
    src, to, h, m = cu.stub_memory(0, 8192, 0), cu.stub_memory(2, 64, 0), c.create_string_buffer(64), c.c_void_p()
    c.memset(src, 83, 64)
    lf.lf_get(h, src)
    cu.cuCtxSetCurrent(cu.stub_context(1))
    assert lf.lf_open(c.byref(m), h) == 0
    native.remove()
    assert lf.lf_close(m) == 0
    native.install()
    libc = c.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = c.c_void_p, [c.c_void_p, c.c_size_t, c.c_int, c.c_int, c.c_int, c.c_long]
    private, fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x100000  # MAP_FIXED_NOREPLACE
    new = libc.mmap(m.value, 8192, mmap.PROT_READ | mmap.PROT_WRITE, private | fixed, -1, 0)
    assert new == m.value
    c.memset(new, 78, 64)
    assert lf.lf_copy(to, new, 64) == 0 and c.string_at(to, 64) == b"N" * 64
    assert calls(2, "open_handle")["calls"] == 0 and calls(2, "copy_htod")["calls"] == 1


def streams_and_events_are_at_home_everywhere() -> None:
    """libfabric's newer copies: one stream of its pool serves memory of two GPUs, and the event waits for both."""
    cuda()
    lf = fabric()
    native.install()
    lf.lf_init()
    s, e = c.c_void_p(), c.c_void_p()
    assert on_thread(lambda: lf.lf_stream(c.byref(s)) or lf.lf_event(c.byref(e))) == 0  # on a bare thread
    assert c.c_int.in_dll(cu, "stub_streams").value == 0
    pairs = [(cu.stub_memory(d, 64, 0), cu.stub_memory(d, 64, 0)) for d in (1, 2)]
    for a, b in pairs:
        c.memset(a, 70, 64)
        assert lf.lf_start(b, a, 64, s, e) == 0
    for _ in range(20):
        r = lf.lf_query(e)
        assert r in (0, 600)
        if not r:
            break
    assert r == 0 and all(c.string_at(b, 64) == b"F" * 64 for _, b in pairs)
    assert calls(1, "copy_async")["calls"] == calls(2, "copy_async")["calls"] == 1
    cu.stub_destroy(2)  # its stream and event are gone, those of the other GPU go on
    a, b = pairs[0]
    c.memset(a, 71, 64)
    assert lf.lf_start(b, a, 64, s, e) == 0
    while lf.lf_query(e):
        pass
    assert c.string_at(b, 64) == b"G" * 64
    more = [(c.c_void_p(), c.c_void_p()) for _ in range(20)]
    for s2, e2 in more:
        assert lf.lf_stream(c.byref(s2)) == 0 and lf.lf_event(c.byref(e2)) == 0
        assert lf.lf_start(b, a, 64, s2, e2) == 0
    assert c.c_int.in_dll(cu, "stub_streams").value == 9  # eight in use on GPU 1, one that GPU 2 had
    native.remove()
    assert lf.lf_query(e) in (0, 600)  # what was handed out stays usable
    for s2, e2 in [(s, e), *more]:
        assert lf.lf_destroy(s2, e2) == 0


def unknown_stream_calls_switch_the_stand_ins_off() -> None:
    """A libfabric newer than this file: true streams, and status says that they are not bound."""
    cuda()
    lf = fabric()
    native.install()
    lf.lf_init()
    lf.lf_ask(b"cuStreamWaitEvent")
    cu.cuCtxSetCurrent(cu.stub_context(1))
    s = c.c_void_p()
    assert lf.lf_stream(c.byref(s)) == 0
    assert c.c_int.in_dll(cu, "stub_streams").value == 1
    assert any("stream calls unknown" in p for p in native.status()["problems"])


def dlsym_sees_its_true_caller(hooked: str) -> None:
    """RTLD_NEXT goes by the caller's address: libfabric's memory hooks must not get themselves."""
    lf = fabric()
    if hooked:
        native.install()
    found = lf.lf_next()
    assert found and found != lf.lf_own()
    assert c.CFUNCTYPE(c.c_int)(found)() == 2


def nixl_cannot_leave_a_held_context() -> None:
    """A wrong devId: while Python holds the right context, the plugin's cudaSetDevice does nothing."""
    cuda()
    e = engine()
    native.install()
    cu.cuCtxSetCurrent(cu.stub_context(1))
    assert native.hold(True) is False and e.engine_set_device(0) == 0 and cu.stub_current() == 1
    assert native.hold(False) is True and e.engine_set_device(0) == 0 and cu.stub_current() == 0
    assert native.counters()["threads"]["held"] == 1
    cu.cuCtxSetCurrent(None)
    native.hold(True)
    e.engine_set_device(2)
    assert cu.stub_current() == 2


def a_probe_for_peer_to_peer_makes_no_context() -> None:
    """Footprint: efa's probe of newer releases runs in a context that is there, not in one of its own on GPU 0."""
    cuda()
    lf = fabric()
    native.install()
    lf.lf_init()
    cu.stub_context(1)
    native.set_home(cu.stub_context(1))
    assert lf.lf_probe() == 1 and cu.stub_current() == -1  # the device that it ran on
    cu.cuCtxSetCurrent(cu.stub_context(2))
    assert lf.lf_probe() == 2 and cu.stub_current() == 2 and cu.stub_depth() == 1
    native.remove()
    assert lf.lf_probe() == 7  # the stub's own new context


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("END")
