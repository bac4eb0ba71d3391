# SPDX-License-Identifier: Apache-2.0
"""The rig's fake CUDA driver in the test's own process: GPUs to allocate on, contexts, and failures on demand."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration" / "rig"))

GPUS = 4


class FakeCuda:
    """The fake driver, loaded under the name of the real one: whoever asks for libcuda.so.1 afterwards gets it."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._lib.fakecuda_calls.restype = ctypes.c_ulong
        self("cuInit", 0)
        self.contexts = [self._retain(device) for device in range(GPUS)]
        self._living: set[int] = set()
        self._mapped: list[tuple[int, int, int]] = []

    def __call__(self, name: str, *args: object) -> None:
        error = getattr(self._lib, name)(*args)
        assert error == 0, f"{name} gave {error}"

    def _retain(self, device: int) -> int:
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        assert context.value
        return context.value

    # ---- contexts of the calling thread

    def current(self) -> int:
        """The current context, 0: none, -1: made to fail."""
        context = ctypes.c_void_p()
        return -1 if self._lib.cuCtxGetCurrent(ctypes.byref(context)) else context.value or 0

    def make_current(self, device: int | None) -> None:
        self("cuCtxSetCurrent", ctypes.c_void_p(0 if device is None else self.contexts[device]))

    def push(self, device: int) -> None:
        self("cuCtxPushCurrent_v2", ctypes.c_void_p(self.contexts[device]))

    def pop(self) -> None:
        self("cuCtxPopCurrent_v2", None)

    def depth(self) -> int:
        return int(self._lib.fakecuda_stack_depth())

    def create_context(self, device: int) -> int:
        """A context beside the primary one; it is not left current."""
        context = ctypes.c_void_p()
        self("cuCtxCreate_v2", ctypes.byref(context), 0, device)
        self.pop()
        assert context.value
        return context.value

    def destroy_context(self, context: int) -> None:
        self("cuCtxDestroy_v2", ctypes.c_void_p(context))

    # ---- memory

    def alloc(self, device: int, size: int = 1 << 20, context: int | None = None) -> int:
        address = ctypes.c_uint64()
        self("cuCtxPushCurrent_v2", ctypes.c_void_p(context or self.contexts[device]))
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.pop()
        self._living.add(address.value)
        return address.value

    def alloc_vmm(self, device: int, size: int = 2 << 20) -> int:
        """Memory that belongs to no context, as PyTorch's expandable segments are made."""
        address, handle, zero = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(0)
        prop, access = (ctypes.c_int * 16)(1, 0, 1, device), (ctypes.c_int * 3)(1, device, 3)
        length = ctypes.c_size_t(size)
        self("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), zero, zero)
        self("cuMemCreate", ctypes.byref(handle), length, prop, zero)
        self("cuMemMap", address, length, ctypes.c_size_t(0), handle, zero)
        self("cuMemSetAccess", address, length, access, ctypes.c_size_t(1))
        self._mapped.append((address.value, size, handle.value))
        return address.value

    def attribute(self, attribute: int, address: int) -> int:
        """A pointer attribute of 4 bytes or less."""
        value = ctypes.c_uint()
        self("cuPointerGetAttribute", ctypes.byref(value), attribute, ctypes.c_uint64(address))
        return value.value

    def free(self, address: int) -> None:
        self("cuMemFree_v2", ctypes.c_uint64(address))
        self._living.discard(address)

    def free_all(self) -> None:
        """Give back what tests left behind: each allocation is an open file."""
        for address in self._living:  # some went with their context
            self._lib.cuMemFree_v2(ctypes.c_uint64(address))
        for address, size, handle in self._mapped:
            length = ctypes.c_size_t(size)
            self("cuMemUnmap", ctypes.c_uint64(address), length)
            self("cuMemRelease", ctypes.c_uint64(handle))
            self("cuMemAddressFree", ctypes.c_uint64(address), length)
        self._living.clear()
        self._mapped.clear()

    # ---- what tests want to know, and do

    def fail(self, name: str, error: int, after: int = 0, times: int = 0) -> None:
        """Let calls of ``name`` give ``error``: all, or ``times`` of them after ``after`` more."""
        self("fakecuda_fail", name.encode(), error, after, times)

    def heal(self) -> None:
        self("fakecuda_fail", None, 0, 0, 0)

    def calls(self, name: str | None = None) -> int:
        return int(self._lib.fakecuda_calls(name.encode() if name else None))

    def living_contexts(self) -> list[int]:
        return [self._lib.fakecuda_contexts(device) for device in range(GPUS)]

    def retained(self) -> list[int]:
        return [self._lib.fakecuda_retained(device) for device in range(GPUS)]
