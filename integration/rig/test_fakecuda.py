# SPDX-License-Identifier: Apache-2.0
"""What the fake driver offers to tests: failures on demand, counters, several views of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

from rig import HERE, Rig, topology

PREAMBLE = """
import ctypes, json
from driver_checks import *
fake = libcuda()
def say(**facts): print(json.dumps(facts))
"""


def run(rig: Rig, code: str, **extra: str) -> dict[str, Any]:
    """Run code on the fake driver, in a process of its own; it tells its result with say()."""
    env = rig.env(**extra)
    env["PYTHONPATH"] = str(HERE)
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_call_fails_on_demand_after_some_and_a_number_of_times(fake_driver: Rig) -> None:
    said = run(
        fake_driver,
        """
        init(); context = retain(0)
        fake.fakecuda_fail(b"cuCtxSetCurrent", 201, 1, 2)
        some = [set_current(context) for _ in range(4)]
        fake.fakecuda_fail(b"cuMemAlloc", 2, 0, 0)
        memory = address()
        for_ever = [cu("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1)) for _ in range(3)]
        fake.fakecuda_fail(None, 0, 0, 0)
        say(some=some, for_ever=for_ever, after=cu("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1)))
        """,
    )
    assert said == {"some": [0, 201, 201, 0], "for_ever": [2, 2, 2], "after": 0}


def test_a_call_fails_from_the_environment(fake_driver: Rig) -> None:
    said = run(
        fake_driver,
        "init(); c = retain(0); say(results=[set_current(c) for _ in range(4)], count=cu('cuInit', 0))",
        FAKECUDA_FAIL="cuCtxSetCurrent:709:2:1,cuInit:999:2",
    )
    assert said == {"results": [0, 709, 0, 0], "count": 999}


def test_an_unreadable_failure_list_is_said(fake_driver: Rig) -> None:
    env = fake_driver.env(FAKECUDA_FAIL="cuInit")
    code = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode and 'cannot read "cuInit"' in done.stderr


def test_calls_are_counted_and_contexts_too(fake_driver: Rig) -> None:
    said = run(
        fake_driver,
        """
        untouched = [fake.fakecuda_calls(None), fake.fakecuda_contexts(0)]
        current_result = cu("cuCtxGetCurrent", ctypes.byref(handle()))
        inits = fake.fakecuda_calls(b"cuInit")
        init(); context = retain(1); other = created(1)
        counts = [fake.fakecuda_contexts(1), fake.fakecuda_retained(1), fake.fakecuda_stack_depth()]
        cu("cuCtxDestroy_v2", other); cu("cuDevicePrimaryCtxRelease_v2", 1)
        left = [fake.fakecuda_contexts(1), fake.fakecuda_retained(1), fake.fakecuda_stack_depth()]
        fake.fakecuda_reset_calls()
        say(untouched=untouched, current=current_result, inits=inits, counts=counts, left=left,
            reset=fake.fakecuda_calls(None))
        """,
    )
    assert said == {
        "untouched": [0, 0],
        "current": 3,
        "inits": 0,
        "counts": [2, 1, 1],
        "left": [0, 0, 0],
        "reset": 0,
    }


def test_the_runtime_makes_device_0_current_on_a_bare_thread(fake_driver: Rig) -> None:
    said = run(
        fake_driver,
        """
        cuda = ctypes.CDLL("libcudart.so.12"); memory = handle()
        result = on_thread(lambda: cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(64)))
        say(result=result, contexts=[fake.fakecuda_contexts(gpu) for gpu in range(4)])
        """,
    )
    assert said == {"result": 0, "contexts": [1, 0, 0, 0]}


def test_visible_devices_renumber_the_machine(fake_driver: Rig) -> None:
    code = """
        init(); bus = ctypes.create_string_buffer(32); count = ctypes.c_int()
        cu("cuDeviceGetCount", ctypes.byref(count)); cu("cuDeviceGetPCIBusId", bus, 32, 0)
        say(count=count.value, first=bus.value.decode())
        """
    assert run(fake_driver, code) == {"count": 4, "first": "0000:10:00.0"}
    assert run(fake_driver, code, CUDA_VISIBLE_DEVICES="2,0") == {"count": 2, "first": "0000:12:00.0"}
    assert run(fake_driver, code, FAKECUDA_NDEV="8", CUDA_VISIBLE_DEVICES="7") == {
        "count": 1,
        "first": "0000:17:00.0",
    }


def test_memory_crosses_processes_by_ipc(fake_driver: Rig) -> None:
    said = run(
        fake_driver,
        """
        import subprocess, sys
        init(); owner = retain(1); memory = alloc(owner); ctypes.memset(memory, 7, 16); set_current(owner)
        key = ctypes.create_string_buffer(64)
        must(cu("cuIpcGetMemHandle", key, address(memory)))
        child = '''
        import sys
        from driver_checks import *
        class Key(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 64)]
        init(); context = retain(2); set_current(context); there = address()
        key = Key.from_buffer_copy(bytes.fromhex(sys.argv[1]))
        must(libcuda().cuIpcOpenMemHandle_v2(ctypes.byref(there), key, 1))
        print(json.dumps([list(ctypes.string_at(there.value, 3)), whose(there.value, context)]))
        must(cu("cuIpcCloseMemHandle", there))
        '''
        import textwrap
        command = [sys.executable, "-c", textwrap.dedent(child), key.raw.hex()]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        say(there=json.loads(said.stdout or "null"), error=said.stderr)
        """,
    )
    assert said == {"there": [[7, 7, 7], [0, "owner", 2, 2]], "error": ""}


def test_cuda_python_works_on_it(fake_driver: Rig) -> None:
    said = run(
        fake_driver,
        """
        from cuda.bindings import driver
        before = int(driver.cuCtxGetCurrent()[0])
        driver.cuInit(0); _, context = driver.cuDevicePrimaryCtxRetain(1); driver.cuCtxSetCurrent(context)
        _, memory = driver.cuMemAlloc(4096)
        owner = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT, memory)
        say(before=before, device=int(driver.cuCtxGetDevice()[1]), owned=int(owner[1]) == int(context),
            created=int(driver.cuCtxCreate(None, 0, 2)[0]))
        """,
    )
    assert said == {"before": 3, "device": 1, "owned": True, "created": 0}


def test_topology_has_the_fake_gpus_addresses(fake_driver: Rig) -> None:
    code = """
        init(); buses = []
        for gpu in range(8):
            bus = ctypes.create_string_buffer(32); must(cu("cuDeviceGetPCIBusId", bus, 32, gpu))
            buses.append(bus.value.decode())
        say(buses=buses)
        """
    shown = topology()
    for bus in run(fake_driver, code, FAKECUDA_NDEV="8")["buses"]:
        assert f'pci_busid="{bus}" pci_type="0302' in shown


def test_the_default_stream_is_always_through(fake_driver: Rig) -> None:
    """Who makes copies whole waits for it where there is no stream of its own."""
    script = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
print(cuda.cuStreamSynchronize(None), end=" ")
assert cuda.cuCtxSetCurrent(context) == 0
print(cuda.cuStreamSynchronize(None), cuda.cuStreamSynchronize(ctypes.c_void_p(8)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=fake_driver.env(), capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split() == ["201", "0", "801"], done.stderr
