# SPDX-License-Identifier: Apache-2.0
"""On which GPUs this process holds a CUDA context, and on which it has memory registered.

The driver tells of this process's own primary contexts, in any container; NVML adds what each process holds on each
GPU. Limits: contexts made by cuCtxCreate are seen by NVML only. NVML names processes as the host does, so inside a PID
namespace our own cannot be found there, which is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ctxfix import driver
from ctxfix.evidence import nvml as ask_nvml


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

    def question(nvml: Any) -> dict[str, Any]:
        used: dict[str, int | None] = {}
        for uuid, handle in ask_nvml.gpus(nvml).items():
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == (pid or os.getpid()):
                    used[uuid] = process.usedGpuMemory
        if not used:
            return ask_nvml.unknown("NVML knows no process of this pid: separate PID namespaces, or no context yet")
        return {"known": True, "used": used}

    return ask_nvml.ask(question, nvml)
