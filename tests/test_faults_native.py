# SPDX-License-Identifier: Apache-2.0
"""Faults injected into the C extension, each case in a process of its own; docs/faults.md lists them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from native_stub import CC, RIG, compile_c, environment

from ctxfix import native

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"ctxfix.native: {native.reason()}"),
    pytest.mark.skipif(CC is None, reason="no C compiler"),
]


def run(rig: Path, *case: str, **extra: str) -> str:
    """Run a case of native_rig/faults.py, where it is said what it guards; what it printed."""
    command = [sys.executable, "-X", "faulthandler", str(RIG / "faults.py"), *case]
    done = subprocess.run(command, env=environment(rig, **extra), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stdout.endswith("END\n"), done.stdout + done.stderr
    return done.stdout


#: The calls that the extension makes to the driver, and those of libfabric's that it passes on. (For cuStreamCreate and
#: cuEventCreate, made once a context, see the full GPU below.)
CALLS = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetDevice",
    "cuCtxGetId",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuPointerGetAttribute",
    "cuPointerGetAttributes",
    "cuMemGetAddressRange_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamSynchronize",
    "cuEventRecord",
    "cuEventQuery",
    "cudaIpcGetMemHandle",
    "cudaIpcOpenMemHandle",
    "cudaIpcCloseMemHandle",
    "cudaMemcpy",
    "cudaMemcpyAsync",
    "cudaHostRegister",
    "cudaDeviceSynchronize",
]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_driver_fails(rig: Path, name: str) -> None:
    run(rig, "a_call_of_the_driver_fails", name)


def test_a_full_gpu_has_no_streams_and_no_events(rig: Path) -> None:
    run(rig, "a_full_gpu_has_no_streams_and_no_events")


def test_no_memory_for_any_allocation(rig: Path) -> None:
    library = compile_c(rig / "nomemory.so", "-shared", "-fPIC", RIG / "nomemory.c", "-ldl")
    nth = made = 0
    while nth <= made:
        nth += 1
        made = int(run(rig, "no_memory", str(nth), LD_PRELOAD=str(library)).split()[0])
    assert made > 5, "the extension's allocations were not seen"


def test_fork_at_any_moment(rig: Path) -> None:
    run(rig, "fork_at_any_moment")
