# SPDX-License-Identifier: Apache-2.0
"""Contexts that this process holds on GPUs where it has nothing: found and reported, never touched.

A runtime call on a thread without a context makes one on GPU 0, which costs that GPU 524 MiB (H200, driver 580), for
each process of a node. ctxfix makes none; those that others made before or beside it stay until the process ends.
"""

from __future__ import annotations

import os
import sys

from ctxfix import counters, driver, guard
from ctxfix.registry import registry

_checked = False


def stray_devices() -> list[int]:
    """Ordinals of devices with a primary context of this process, but no memory registered and none held by PyTorch."""
    owned = {driver.device_of(context) for context in registry.contexts()}
    return [device for device in driver.active_devices() if device not in owned and not _held_by_torch(device)]


def _held_by_torch(device: int) -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return False
    return bool(cuda.memory_reserved(device))


def check() -> None:
    """Look once a process, after its first transfer, when whatever makes a stray context has made it."""
    global _checked
    if _checked or not registry.contexts():
        return
    _checked = True
    for device in stray_devices():
        counters.count("stray_contexts")
        guard.warn_once(
            f"stray_context:{device}",
            f"ctxfix: this process (pid {os.getpid()}) holds a CUDA context on device {device}, where it registered "
            "and allocated nothing: about 0.5 GB of that GPU. Some thread used CUDA before it had a context: call "
            "torch.cuda.set_device first in every process and thread, or set CUDA_VISIBLE_DEVICES to what it needs.",
        )


def _after_fork() -> None:
    global _checked
    _checked = False


os.register_at_fork(after_in_child=_after_fork)
