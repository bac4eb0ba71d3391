# SPDX-License-Identifier: Apache-2.0
"""Questions to NVML, for as long as they take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any


def ask(question: Callable[[Any], dict[str, Any]], nvml: Any = None) -> dict[str, Any]:
    """What ``question``, called with NVML, answers; ``known`` False, with the reason, where it cannot. Never raises."""
    try:
        if nvml is None:
            nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - the package or the driver is absent, in the way of its version
        return unknown(f"NVML is not there ({type(error).__name__}: {error})")
    try:
        return question(nvml)
    except Exception as error:  # noqa: BLE001
        return unknown(f"NVML could not say ({type(error).__name__}: {error})")
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def unknown(reason: str) -> dict[str, Any]:
    """The answer of who does not know."""
    return {"known": False, "reason": reason}


def gpus(nvml: Any) -> dict[str, Any]:
    """NVML's handle of each GPU, by its UUID."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
