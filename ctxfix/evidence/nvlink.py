# SPDX-License-Identifier: Apache-2.0
"""What went over NVLink: bytes each GPU sent and received, before and after, where the driver counts them.

Limits: the counts are of the GPU, whoever used it, in steps of 1 KiB, of payload without protocol. Copies within one
GPU never show. Drivers may refuse them to virtual machines and to MIG instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_ALL_LINKS = 0xFFFFFFFF  # scopeId of nvmlFieldValue_t: the sum over the links (nvml.h)
_FIELDS = {"sent": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "received": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"}


def read(nvml: Any = None) -> dict[str, Any]:
    """By GPU (its UUID) the bytes ``sent`` and ``received`` since the driver was loaded; ``known`` False, with the
    reason, where nobody can say. Never raises."""
    try:
        if nvml is None:
            nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - the package or the driver is absent, in the way of its version
        return {"known": False, "reason": f"NVML is not there ({type(error).__name__}: {error})", "gpus": {}}
    try:
        gpus = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            row = {}
            for what, name in _FIELDS.items():
                (value,) = nvml.nvmlDeviceGetFieldValues(handle, [(getattr(nvml, name), _ALL_LINKS)])
                if value.nvmlReturn:
                    return _unknown(f"the driver does not count NVLink's bytes here (NVML error {value.nvmlReturn})")
                row[what] = int(value.value.ullVal) * 1024
            uuid = nvml.nvmlDeviceGetUUID(handle)
            gpus[uuid.decode() if isinstance(uuid, bytes) else str(uuid)] = row
        return {"known": True, "reason": "", "gpus": gpus}
    except Exception as error:  # noqa: BLE001
        return _unknown(f"NVML could not say ({type(error).__name__}: {error})")
    finally:
        nvml.nvmlShutdown()


def _unknown(reason: str) -> dict[str, Any]:
    return {"known": False, "reason": reason, "gpus": {}}


def told(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What all GPUs together sent and received between two readings, in words; "" where nobody counted."""
    if not before["known"] or not after["known"] or set(before["gpus"]) != set(after["gpus"]):
        return ""
    total = {
        what: sum(row[what] - before["gpus"][uuid][what] for uuid, row in after["gpus"].items()) for what in _FIELDS
    }
    if any(value < 0 for value in total.values()):  # a counter was reset meanwhile
        return ""
    return f"NVLink carried {total['sent']:,} bytes from GPU to GPU meanwhile ({total['received']:,} arrived)"
