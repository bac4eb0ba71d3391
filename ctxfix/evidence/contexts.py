# SPDX-License-Identifier: Apache-2.0
"""On which GPUs this process holds a CUDA context, and on which it has memory registered.

The driver tells of this process's own primary contexts, in any container; NVML adds what each process holds on each
GPU. Limits: contexts made by cuCtxCreate are seen by NVML only. NVML names processes as the host does, so inside a PID
namespace our own cannot be found there, which is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ctxfix import driver


def read(owners: Iterable[int], nvml: Any = None) -> dict[str, Any]:
    """Device ordinals with a primary context, ``owners`` (where memory was registered), identities, and NVML's view."""
    if not driver.attached():
        return {"known": False, "reason": driver.problem() or "no CUDA in this process"}
    return {
        "known": True,
        "active": driver.active_devices(),
        "owners": sorted(owners),
        "devices": {str(ordinal): name for ordinal, name in driver.device_names().items()},
        "nvml": read_nvml(nvml),
    }


def read_nvml(nvml: Any = None, pid: int | None = None) -> dict[str, Any]:
    """By GPU (its UUID) the bytes this process holds there; ``known`` False, with the reason, where NVML cannot say."""
    try:
        if nvml is None:
            nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - the package or the driver is absent, in the way of its version
        return {"known": False, "reason": f"NVML is not there ({type(error).__name__}: {error})"}
    try:
        used: dict[str, int | None] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == (pid or os.getpid()):
                    used[_text(nvml.nvmlDeviceGetUUID(handle))] = process.usedGpuMemory
        if not used:
            reason = "NVML knows no process of this pid: separate PID namespaces, or no context yet"
            return {"known": False, "reason": reason}
        return {"known": True, "used": used}
    except Exception as error:  # noqa: BLE001
        return {"known": False, "reason": f"NVML could not say ({type(error).__name__}: {error})"}
    finally:
        nvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
