# SPDX-License-Identifier: Apache-2.0
"""Ray actors that hand tensors to each other by RDT over NIXL, as an application would write them.

On the rig, importing this puts the stand-in for CUDA tensors in place and has Ray take the loopback fabric for EFA.
On a real machine nothing is replaced.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.experimental
import torch
from ray.experimental.rdt import nixl_tensor_transport

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ON_RIG = "RIG_POSTS" in os.environ

if ON_RIG:
    import standin

    standin.install()
if ON_RIG or os.environ.get("RDT_LIBFABRIC"):
    nixl_tensor_transport._is_efa_available = lambda: True


@functools.lru_cache(maxsize=1)
def pattern(nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes, dtype=torch.int32) % 251).to(torch.uint8)


def own_gpu() -> int:
    """The last of the GPUs that Ray assigned to this actor, as an ordinal of its process."""
    ids = ray.get_gpu_ids()
    return int(ids[-1]) if NOSET in os.environ else len(ids) - 1


def contexts() -> list[int]:
    """The GPUs, by ordinal, on which somebody in this process has made a context."""
    driver = ctypes.CDLL("libcuda.so.1")
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    found = []
    if driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for device in range(count.value):
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            found += [device] * bool(active.value)
    return found


class Source:
    """Holds a tensor on its GPU. With ``keep`` NIXL keeps its registration from one transfer to the next."""

    def __init__(self, nbytes: int, keep: bool = False) -> None:
        torch.cuda.set_device(own_gpu())
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.tensor.copy_(pattern(nbytes))
        if keep:
            ray.experimental.register_nixl_memory(self.tensor)

    @ray.method(tensor_transport="nixl")
    def produce(self) -> torch.Tensor:
        return self.tensor


class Sink:
    """Receives tensors. With ``choose`` its constructor makes its own GPU current; else it leaves CUDA alone."""

    def __init__(self, choose: bool) -> None:
        if choose:
            torch.cuda.set_device(own_gpu())
            torch.zeros(1, device="cuda")

    def argument(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The tensor has arrived as an argument, on the thread of the concurrency group _ray_system."""
        return self._report(tensor)

    def get_on_main(self, refs: list[Any]) -> dict[str, Any]:
        started = time.perf_counter()
        tensor = ray.get(refs[0])
        return self._report(tensor, time.perf_counter() - started)

    def get_on_thread(self, refs: list[Any]) -> dict[str, Any]:
        return on_thread(lambda: self.get_on_main(refs))

    def get_on_target(self, refs: list[Any]) -> dict[str, Any]:
        """As on a thread, where the program says "cuda" and Ray allocates outside of its transport."""
        from ray.experimental import set_target_device_for_ref

        set_target_device_for_ref(refs[0], "cuda")
        return on_thread(lambda: self.get_on_main(refs))

    def _report(self, tensor: torch.Tensor, seconds: float | None = None) -> dict[str, Any]:
        import ctxfix

        made = contexts()  # before the check, which makes one on the caller's current GPU
        started = time.perf_counter()
        data_ok = bool((tensor.cpu() == pattern(tensor.numel())).all())
        return {
            "device": tensor.get_device(),
            "own": own_gpu(),
            "contexts": made,
            "data_ok": data_ok,
            "checking": time.perf_counter() - started,
            "seconds": seconds,
            "thread": threading.current_thread().name,
            "stats": {name: value for name, value in ctxfix.stats().items() if value},
            "failures": ctxfix.status()["failures"],
            "patched": ctxfix.status()["targets"]["ray.experimental.rdt.nixl_tensor_transport"]["state"],
            "started_by": ctxfix.status()["started_by"],
        }


def on_thread(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    done: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: done.append(work()), name="bare")
    thread.start()
    thread.join(20)
    return done[0] if done else {"error": "the thread gave nothing"}
