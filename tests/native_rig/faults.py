# SPDX-License-Identifier: Apache-2.0
"""The cases of test_faults_native.py, each run in a process of its own: python faults.py NAME [ARGUMENT]."""

from __future__ import annotations

import ctypes as c
import os
import signal
import sys
import threading
import warnings

import cases
from cases import calls, fabric, on_thread, threads

from ctxfix import native

ERRORS = (1, 2, 46, 201, 400, 700, 709, 719, 999, 12345)


class Libfabric:
    """What libfabric does with CUDA, each time with memory, streams and handles that were there before the fault."""

    def __init__(self) -> None:
        self.cu = cases.cuda()
        self.rt = cases.rt
        self.threads, self.lf = threads(), fabric()
        native.install()
        assert self.lf.lf_init() == 0
        self.mine, self.other = self.cu.stub_memory(1, 64, 0), self.cu.stub_memory(1, 64, 0)
        self.vmm = self.cu.stub_memory(1, 64, 1)
        self.far, self.farther = self.cu.stub_memory(2, 64, 0), self.cu.stub_memory(2, 64, 0)
        self.host, self.handle = c.create_string_buffer(64), c.create_string_buffer(64)
        native.set_home(self.cu.stub_context(1))
        self.lf.lf_get(self.handle, self.other)
        self.mapped = c.c_void_p()
        assert self.lf.lf_open(c.byref(self.mapped), self.handle) == 0
        self.stream, self.event = c.c_void_p(), c.c_void_p()
        assert self.lf.lf_stream(c.byref(self.stream)) == 0 and self.lf.lf_event(c.byref(self.event)) == 0

    def copied(self, to: int, source: int, start) -> int:
        """The error of a copy; without one its bytes must have arrived."""
        c.memset(source, 65, 64)
        c.memset(to, 0, 64)
        error = start(to, source)
        assert error or c.string_at(to, 64) == b"A" * 64, "said to be done, but is not"
        return error

    def started(self, to: int, source: int) -> int:
        error = self.lf.lf_start(to, source, 64, self.stream, self.event)
        for _ in range(50):
            if error:
                break
            query = self.lf.lf_query(self.event)
            if query != 600:
                return query
        return error

    def opened(self) -> int:
        mapped = c.c_void_p()
        error = self.lf.lf_open(c.byref(mapped), self.handle)
        return error or self.lf.lf_close(mapped)

    def thread(self) -> int:
        with native.armed(self.cu.stub_context(1)):
            device = self.threads.t_device()
        assert device in (1, -1)
        return 0

    def work(self) -> dict:
        lf = self.lf

        def copy(to, source):
            return lf.lf_copy(to, source, 64)

        return {
            "range": lambda: lf.lf_range(self.mine),
            "range of VMM": lambda: lf.lf_range(self.vmm),
            "get": lambda: lf.lf_get(self.handle, self.other),
            "open and close": self.opened,
            "copy": lambda: self.copied(self.mine, self.other, copy),
            "copy of a mapping": lambda: self.copied(self.mine, self.mapped.value, copy),
            "copy of a mapping to another GPU": lambda: self.copied(self.far, self.mapped.value, copy),
            "copy to host": lambda: self.copied(c.addressof(self.host), self.mine, copy),
            "copy on a stream": lambda: self.copied(self.mine, self.other, self.started),
            "copy on a stream on another GPU": lambda: self.copied(self.far, self.farther, self.started),
            "register": lambda: lf.lf_register(self.host, 64),
            "synchronise": lf.lf_sync,
            "probe": lambda: 0 if lf.lf_probe() != -2 else -2,
            "thread": self.thread,
        }


def a_call_of_the_driver_fails(name: str) -> None:
    """Any error, once or for ever, on a bare thread and on one of another GPU: libfabric gets its own answer or that
    error, a copy that is said to be done is done, and the thread has its own context afterwards."""
    f = Libfabric()
    cu = f.cu
    cu.stub_fail.argtypes = [c.c_char_p, c.c_int, c.c_int, c.c_int]
    stray = c.c_int.in_dll(f.rt, "stub_strays")
    hits = 0

    def attempt(what: str, call, error: int, after: int, times: int) -> bool:
        before, strays = (cu.stub_depth(), cu.stub_current()), stray.value
        cu.stub_fail(name.encode(), error, after, times)
        try:
            result = call()
        except AssertionError as error_:
            raise AssertionError((what, error, after, times)) from error_
        made = cu.stub_fail(b"", 0, 0, 0)
        cu.stub_finish()
        if stray.value > strays:  # it could not be bound, so the runtime has made GPU 0's current: as without us
            assert before == (0, -1)
            cu.cuCtxSetCurrent(None)
        # A pop that never works leaves what was pushed; nobody can do better.
        if name != "cuCtxPopCurrent_v2" or times:
            assert (cu.stub_depth(), cu.stub_current()) == before, (what, error, after)
        while (cu.stub_depth(), cu.stub_current()) != before:
            cu.cuCtxPopCurrent_v2(c.byref(c.c_void_p()))
        assert result in (0, error, 201, 400, 999, 1, 500, -2), (what, error, after, result)
        assert call() == 0, (what, "after the fault")
        cu.stub_finish()
        return made > after

    def attempts() -> None:
        nonlocal hits
        for what, call in f.work().items():
            assert call() == 0, what
            cu.stub_finish()
            for error in ERRORS:
                after = 0
                while attempt(what, call, error, after, 1):
                    after += 1
                    hits += 1
                attempt(what, call, error, 0, 0)

    on_thread(attempts)
    cu.cuCtxSetCurrent(cu.stub_context(0))
    attempts()
    assert hits > 0, f"{name} is never called"


def a_full_gpu_has_no_streams_and_no_events() -> None:
    """They are made when first needed, so not where libfabric would have noticed: the copy is made without."""
    f = Libfabric()
    f.cu.stub_fail.argtypes = [c.c_char_p, c.c_int, c.c_int, c.c_int]
    for name in (b"cuStreamCreate", b"cuEventCreate"):
        f.cu.stub_fail(name, 2, 0, 0)
        work = f.work()
        assert work["copy"]() == work["copy on a stream"]() == 0
        f.cu.stub_fail(b"", 0, 0, 0)
    assert calls(1, "copy_async") == dict(calls=2, failures=0, bytes=128, rebinds=2)


def no_memory(nth: str) -> None:
    """The nth allocation of the extension fails (nomemory.c): MemoryError at most, and everything else works."""
    no = c.CDLL(None)
    no.nomemory_fail(int(nth))
    told = 0
    native_calls = cases.native
    cu, t, lf = cases.cuda(), threads(), fabric()
    for step in (
        native_calls.install,
        lambda: native_calls.import_log("/nowhere"),
        native_calls.new_group,
        native_calls.install,
        native_calls.counters,
        native_calls.log_said,
    ):
        try:
            step()
        except MemoryError:
            told += 1
            step()
    assert lf.lf_init() == 0 and told <= 1
    with native_calls.armed(cu.stub_context(1)):
        assert t.t_device() in (1, -1)
        assert t.t_device() == 1 or int(nth) == no.nomemory_allocations()
    a, b, far, h = (
        cu.stub_memory(1, 64, 0),
        cu.stub_memory(1, 64, 0),
        cu.stub_memory(2, 64, 0),
        c.create_string_buffer(64),
    )
    native_calls.set_home(cu.stub_context(1))
    assert lf.lf_get(h, a) == 0
    m = c.c_void_p()
    assert lf.lf_open(c.byref(m), h) == 0
    c.memset(a, 66, 64)
    for to in (b, far):
        assert lf.lf_copy(to, m, 64) in (0, 400)
        cu.stub_finish()
    assert c.string_at(b, 64) == b"B" * 64
    assert lf.lf_close(m) == 0
    assert native_calls.remove().left == 0
    print(no.nomemory_allocations())


def fork_at_any_moment() -> None:
    """Threads are inside every hook while the process forks: the child neither hangs nor touches CUDA."""
    warnings.simplefilter("ignore")
    f = Libfabric()
    work = f.work()
    stop = threading.Event()
    busy = [work[name] for name in ("copy", "range", "synchronise", "register")]

    def keep_busy(call) -> None:
        while not stop.is_set():
            call()

    def query() -> None:
        while not stop.is_set():
            f.lf.lf_query(f.event)

    workers = [threading.Thread(target=keep_busy, args=(call,)) for call in busy[1:]] + [threading.Thread(target=query)]
    for worker in workers:
        worker.start()
    for _ in range(150):
        pid = os.fork()
        if not pid:
            signal.alarm(10)
            f.lf.lf_range(f.mine)
            f.lf.lf_query(f.event)
            f.lf.lf_destroy(f.stream, f.event)
            native.install()
            fine = f.threads.t_device() == -1 or f.cu.stub_current() != -1
            os._exit(0 if fine else 1)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("END")
