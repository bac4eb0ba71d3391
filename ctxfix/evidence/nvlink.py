# SPDX-License-Identifier: Apache-2.0
"""What went over NVLink: bytes each GPU sent and received, before and after, where the driver counts them.

Limits: the counts are of the GPU, whoever used it, in steps of 1 KiB, of payload without protocol. Copies within one
GPU never show. Drivers may refuse them to virtual machines and to MIG instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxfix.evidence import nvml as ask_nvml

_ALL_LINKS = 0xFFFFFFFF  # scopeId of nvmlFieldValue_t: the sum over the links (nvml.h)
_FIELDS = {"sent": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "received": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"}


def read(nvml: Any = None) -> dict[str, Any]:
    """By GPU (its UUID) the bytes ``sent`` and ``received`` since the driver was loaded; ``known`` False, with the
    reason, where nobody can say. Never raises."""

    def question(nvml: Any) -> dict[str, Any]:
        gpus = {}
        for uuid, handle in ask_nvml.gpus(nvml).items():
            row = {}
            for what, name in _FIELDS.items():
                (value,) = nvml.nvmlDeviceGetFieldValues(handle, [(getattr(nvml, name), _ALL_LINKS)])
                if value.nvmlReturn:
                    why = f"the driver does not count NVLink's bytes here (NVML error {value.nvmlReturn})"
                    return ask_nvml.unknown(why)
                row[what] = int(value.value.ullVal) * 1024
            gpus[uuid] = row
        return {"known": True, "reason": "", "gpus": gpus}

    return {"gpus": {}, **ask_nvml.ask(question, nvml)}


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
