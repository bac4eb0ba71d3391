# SPDX-License-Identifier: Apache-2.0
"""driver.py: what it learns from CUDA, and what it never does to a process."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from fake_cuda import GPUS, FakeCuda

from ctxfix import driver
from ctxfix.errors import DriverError

CALLS = [
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent",
    "cuPointerGetAttribute",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceGetCount",
]


def on_a_bare_thread(work) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_current_and_set_current(cuda: FakeCuda) -> None:
    assert driver.current() == 0
    driver.set_current(cuda.contexts[2])
    assert driver.current() == cuda.current() == cuda.contexts[2]
    driver.set_current(0)
    assert driver.current() == 0 and cuda.depth() == 0


def test_owner_is_found_from_a_thread_without_context(cuda: FakeCuda) -> None:
    address = cuda.alloc(1)
    on_a_bare_thread(lambda: _assert_owner(address + 4096, cuda.contexts[1], 1))


def _assert_owner(address: int, context: int, device: int, recorded: bool = True) -> None:
    before = driver.current()
    assert driver.owner_of(address) == (context, device, recorded)
    assert driver.current() == before, "asking leaves the thread as it was"


def test_owner_of_memory_of_a_created_context_is_that_context(cuda: FakeCuda) -> None:
    context = cuda.create_context(1)
    address = cuda.alloc(1, context=context)
    cuda.make_current(3)
    _assert_owner(address, context, 1)
    cuda.destroy_context(context)


def test_memory_that_knows_no_context_belongs_to_its_devices_primary_context(cuda: FakeCuda) -> None:
    _assert_owner(cuda.alloc_vmm(2), cuda.contexts[2], 2, recorded=False)


def test_memory_of_nobody(cuda: FakeCuda) -> None:
    freed = cuda.alloc(1)
    cuda.free(freed)
    for address in (0, 1, freed, id(cuda), 2**64 - 1):
        assert driver.owner_of(address) is None
        assert driver.buffer_id(address) == 0 and driver.extent_of(address) == (0, 0)


def test_an_allocation_at_the_same_address_has_another_id(cuda: FakeCuda) -> None:
    first = cuda.alloc(1)
    first_id = driver.buffer_id(first)
    cuda.free(first)
    second = cuda.alloc(1)
    assert first_id and driver.buffer_id(second) not in (0, first_id)
    cuda.free(second)


def test_extent_is_the_whole_allocation(cuda: FakeCuda) -> None:
    address = cuda.alloc(1, 3 << 20)
    start, end = driver.extent_of(address + 12345)
    assert start == address and end >= address + (3 << 20)


def test_a_destroyed_context_is_refused_with_a_message_that_names_it(cuda: FakeCuda) -> None:
    context = cuda.create_context(1)
    cuda.destroy_context(context)
    with pytest.raises(DriverError) as raised:
        driver.set_current(context)
    assert raised.value.code == 709
    assert f"{context:#x}" in str(raised.value) and str(os.getpid()) in str(raised.value)
    assert driver.device_of(context) == -1


def test_nothing_is_created_retained_or_initialised(cuda: FakeCuda) -> None:
    addresses = [cuda.alloc(0), cuda.alloc_vmm(1), 12345]
    before = cuda.living_contexts(), cuda.retained(), cuda.calls("cuInit"), cuda.depth()
    for address in addresses:
        driver.owner_of(address)
        driver.extent_of(address)
        driver.buffer_id(address)
    assert driver.primary_contexts() == cuda.contexts
    assert driver.primary_context(99) == driver.primary_context(-1) == 0
    assert (cuda.living_contexts(), cuda.retained(), cuda.calls("cuInit"), cuda.depth()) == before


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error", [1, 3, 201, 709, 999])
def test_any_call_may_fail_with_any_error(cuda: FakeCuda, name: str, error: int) -> None:
    plain, vmm = cuda.alloc(1), cuda.alloc_vmm(1)
    cuda.make_current(0)
    cuda.fail(name, error)
    for address in (plain, vmm):
        owner = driver.owner_of(address)
        assert owner is None or owner.context == cuda.contexts[1]
    if name == "cuCtxGetCurrent" and error != 3:
        with pytest.raises(DriverError, match=f"({error})"):
            driver.current()
    assert set(driver.primary_contexts()) <= set(cuda.contexts)
    driver.extent_of(plain), driver.buffer_id(plain)
    cuda.heal()
    assert cuda.current() == cuda.contexts[0] and cuda.depth() == 1


@pytest.mark.parametrize(("code", "name"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (123456, "an error")])
def test_errors_have_the_driver_s_names(cuda: FakeCuda, code: int, name: str) -> None:
    cuda.fail("cuCtxSetCurrent", code)
    with pytest.raises(DriverError, match=rf"cuCtxSetCurrent failed with {name} \({code}\) for context 0x"):
        driver.set_current(cuda.contexts[1])


def test_devices_have_names_of_their_own(cuda: FakeCuda) -> None:
    names = driver.device_names()
    assert sorted(names) == list(range(GPUS)) and len({name["uuid"] for name in names.values()}) == GPUS
    assert names[1]["uuid"].startswith("GPU-63747866-6978-") and names[1]["pci"] == "0000:11:00.0"


def test_why_an_owner_is_unknown(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    address, vmm = cuda.alloc(1), cuda.alloc_vmm(1)
    assert driver.why_unknown(4096) == "no allocation of this process holds it"
    cuda.fail("cuPointerGetAttribute", 201)
    assert driver.owner_of(address) is None
    assert driver.why_unknown(address).startswith("cuPointerGetAttribute failed with CUDA_ERROR_INVALID_CONTEXT (201)")
    cuda.heal()
    assert driver.why_unknown(address) == "the driver did not say when it was first asked"
    cuda.fail("cuDevicePrimaryCtxGetState", 999)
    assert driver.owner_of(vmm) is None
    assert "it knows no context" in driver.why_unknown(vmm)
    monkeypatch.setattr(driver, "_api", None)
    assert driver.why_unknown(address) == "CUDA is not loaded in this process"


def test_each_thread_has_its_own_answers(cuda: FakeCuda) -> None:
    wrong: list[tuple[int, int]] = []

    def work(device: int) -> None:
        driver.set_current(cuda.contexts[device])
        for _ in range(2000):
            if driver.current() != cuda.contexts[device]:
                wrong.append((device, driver.current()))

    threads = [threading.Thread(target=work, args=(i % GPUS,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- processes with less than a working CUDA -------------------------------------------------------------------------


def script(code: str, environ: dict[str, str], tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, path], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


NOTHING = """
    import sys
    from ctxfix import affinity, driver
    {before}
    assert not driver.attach() and not driver.attached() and not driver.initialized()
    assert driver.current() == 0 and driver.owner_of(4096) is None and driver.buffer_id(4096) == 0
    assert driver.primary_contexts() == [] and driver.extent_of(4096) == (0, 0)
    affinity.bind_new_thread(1)
    try:
        with affinity.bound(4096): pass
    except affinity.UnknownOwnerError as error:
        print(error)
    assert not [m for m in sys.modules if m.split(".")[0] == "cuda"]
    print(driver.problem())
"""


def test_without_libcuda_nothing_happens(tmp_path: Path) -> None:
    out = script(NOTHING.format(before=""), dict(os.environ), tmp_path)
    assert "CUDA is not loaded" in out and out.endswith("None\n")


def test_with_libcuda_on_the_path_but_not_loaded_it_stays_unloaded(fake_driver: FakeCuda, tmp_path: Path) -> None:
    from rig import Rig

    code = NOTHING.format(before="") + "\n    assert 'libcuda' not in open('/proc/self/maps').read()\n"
    script(code, Rig.driver_only().env(), tmp_path)


def test_before_somebody_calls_cuinit_it_is_not_called(fake_driver: FakeCuda, tmp_path: Path) -> None:
    from rig import Rig

    code = """
        import ctypes
        lib = ctypes.CDLL("libcuda.so.1")
        from ctxfix import affinity, driver
        assert driver.attach() and not driver.initialized()
        assert driver.current() == 0 and driver.owner_of(4096) is None and driver.primary_contexts() == []
        affinity.bind_new_thread(0)
        assert lib.fakecuda_calls(b"cuInit") == 0
        assert lib.cuInit(0) == 0 and driver.initialized() and driver.current() == 0
        assert [lib.fakecuda_contexts(i) for i in range(4)] == [0] * 4 and driver.primary_contexts() == []
    """
    script(code, Rig.driver_only().env(), tmp_path)


def test_a_driver_that_is_too_old_is_one_clear_message(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        pytest.skip("no C compiler to make such a driver with")
    library = tmp_path / "libcuda.so.1"
    make = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-x", "c", "-"]
    functions = ("cuInit", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuPointerGetAttribute", "cuPointerSetAttribute")
    source = "".join(f"int {name}(void) {{ return 3; }}" for name in functions)
    subprocess.run(make, input=source, text=True, check=True, timeout=60)
    before = f"import ctypes; ctypes.CDLL({str(library)!r})"
    out = script(NOTHING.format(before=before), dict(os.environ), tmp_path)
    assert "too old for ctxfix" in out and "cuCtxGetId" in out and "CUDA 12.0" in out


def test_a_forked_child_never_touches_cuda(cuda: FakeCuda) -> None:
    cuda.make_current(1)
    address = cuda.alloc(1)
    pid = os.fork()
    if pid == 0:
        calls = cuda.calls()
        quiet = not driver.attach() and driver.current() == 0 and driver.owner_of(address) is None
        quiet = quiet and driver.primary_contexts() == [] and "forked" in (driver.problem() or "")
        os._exit(0 if quiet and cuda.calls() == calls else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert driver.current() == cuda.contexts[1]


def test_a_child_forked_before_cuda_was_initialised_may_use_it(fake_driver: FakeCuda, tmp_path: Path) -> None:
    from rig import Rig

    code = """
        import ctypes, os
        lib = ctypes.CDLL("libcuda.so.1")
        from ctxfix import driver
        assert driver.attach()
        pid = os.fork()
        if pid == 0:
            context = ctypes.c_void_p()
            ok = lib.cuInit(0) == 0 and lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
            os._exit(0 if ok and driver.primary_contexts() == [context.value] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    """
    script(code, Rig.driver_only().env(), tmp_path)


def test_a_child_forked_after_cuda_was_initialised_where_nobody_had_asked_yet(tmp_path: Path) -> None:
    """A program imports NIXL, works with CUDA, forks, and makes its first agent in the child."""
    from rig import Rig

    code = """
        import ctypes, os
        from ctxfix import driver
        assert not driver.attach()
        lib = ctypes.CDLL("libcuda.so.1")
        assert lib.cuInit(0) == 0 and not driver.attached()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if not driver.attach() and driver.forked() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert driver.attach() and driver.initialized(), "the parent goes on"
    """
    script(code, Rig.driver_only().env(), tmp_path)
