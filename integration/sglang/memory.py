# SPDX-License-Identifier: Apache-2.0
"""A rank's KV cache on its GPU, as SGLang lays it out for an MLA model: one buffer a layer, a slot for each token.

Its contents follow from a seed, so that a decode rank knows by itself what it is to receive: nothing but the transfer
under test carries bytes. Checksums weigh each word by its place in the request: words that change places are seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy
import torch

SLOT_BYTES = 1152  # of DeepSeek-V2-Lite: 512 + 64 values of bf16 a token and layer
WORDS = SLOT_BYTES // 8


class TorchMemory:
    """On a real GPU: torch's own allocations, as SGLang's pools are."""

    def __init__(self, gpu: int, layers: int, slots: int, filled: bool) -> None:
        torch.cuda.set_device(gpu)
        self.gpu, self.slots = gpu, slots
        device = torch.device("cuda", gpu)
        self._layers = [
            self._contents(layer) if filled else torch.zeros((slots, WORDS), dtype=torch.int64, device=device)
            for layer in range(layers)
        ]
        self._stream = torch.cuda.Stream(device)  # one that waits for no other, as SGLang's are
        torch.cuda.synchronize()

    @property
    def addresses(self) -> list[int]:
        return [layer.data_ptr() for layer in self._layers]

    def _contents(self, layer: int) -> Any:
        generator = torch.Generator(torch.device("cuda", self.gpu)).manual_seed(layer)
        return torch.randint(
            -(2**62), 2**62, (self.slots, WORDS), dtype=torch.int64, device=generator.device, generator=generator
        )

    def _sum(self, layer: Any, slots: numpy.ndarray) -> Any:
        index = torch.from_numpy(slots.astype(numpy.int64)).to(layer.device)
        weights = torch.arange(1, len(slots) + 1, dtype=torch.int64, device=layer.device)
        return (layer[index] * weights[:, None]).sum()

    def checksum(self, slots: numpy.ndarray) -> int:
        with torch.cuda.stream(self._stream):
            return int(sum(self._sum(layer, slots) for layer in self._layers).item())  # waits for this stream alone

    def expected(self, requests: Sequence[numpy.ndarray]) -> list[int]:
        sums = [0] * len(requests)
        for number in range(len(self._layers)):
            contents = self._contents(number)
            sums = [before + self._sum(contents, slots) for before, slots in zip(sums, requests, strict=True)]
        return [int(total) for total in sums]


class RigMemory:
    """On the rig's fake GPU, through CUDA's driver API: the torch of a machine without a GPU cannot."""

    def __init__(self, gpu: int, layers: int, slots: int, filled: bool) -> None:
        from transfer import GpuMemory  # of the rig

        choose_device(gpu)
        torch.cuda.set_device = choose_device
        torch.version.cuda = torch.version.cuda or "12.9"  # by which the package nixl chooses among its builds
        self.gpu, self.slots = gpu, slots
        self._layers = [GpuMemory(gpu, slots * SLOT_BYTES) for _ in range(layers)]
        for number, layer in enumerate(self._layers):
            layer.fill(self._contents(number).tobytes() if filled else bytes(layer.size))

    @property
    def addresses(self) -> list[int]:
        return [layer.address for layer in self._layers]

    def _contents(self, layer: int) -> numpy.ndarray:
        return numpy.random.default_rng(layer).integers(-(2**62), 2**62, (self.slots, WORDS), dtype=numpy.int64)

    @staticmethod
    def _sum(layer: numpy.ndarray, slots: numpy.ndarray) -> int:
        return int((layer[slots] * numpy.arange(1, len(slots) + 1)[:, None]).sum())

    def checksum(self, slots: numpy.ndarray) -> int:
        layers = (numpy.frombuffer(layer.read(), numpy.int64).reshape(-1, WORDS) for layer in self._layers)
        return sum(self._sum(layer, slots) for layer in layers)

    def expected(self, requests: Sequence[numpy.ndarray]) -> list[int]:
        contents = [self._contents(number) for number in range(len(self._layers))]
        return [sum(self._sum(layer, slots) for layer in contents) for slots in requests]


KINDS = {"torch": TorchMemory, "rig": RigMemory}


def choose_device(gpu: int) -> None:
    """What torch.cuda.set_device does."""
    if error := ctypes.CDLL("libcudart.so.12").cudaSetDevice(gpu):
        raise RuntimeError(f"cudaSetDevice({gpu}) failed with error {error}")


def devices_with_contexts() -> list[int]:
    """The devices on which this process has a primary context: each costs memory of that device."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for device in range(count.value):
        cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if active.value:
            found.append(device)
    return found
