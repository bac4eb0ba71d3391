# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors for a torch that was built without CUDA, on the rig's fake driver.

Tensors stay torch's own CPU tensors, over memory of the fake driver. What is not torch's own is where they say they are
(they ask the driver) and how they are allocated: the CUDA runtime calls that torch makes, on the calling thread, with
its habit that a thread which has chosen no device gets GPU 0. Nothing of Ray, NIXL or ctxfix is replaced.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from typing import Any

import torch

_driver = ctypes.CDLL("libcuda.so.1")
_runtime = ctypes.CDLL("libcudart.so.12")
_thread = threading.local()
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_ranges: list[tuple[int, int]] = []  # of the allocations: asking the driver for every CPU tensor would cost


def _check(error: int, call: str) -> None:
    if error:
        raise RuntimeError(f"CUDA error: {call} gave {error}")


def current_device() -> int:
    target = getattr(_thread, "target", -1)
    if target >= 0:
        return int(target)
    device = ctypes.c_int()
    _check(_runtime.cudaGetDevice(ctypes.byref(device)), "cudaGetDevice")
    return device.value


def set_device(device: Any) -> None:
    _thread.target = -1
    _check(_runtime.cudaSetDevice(_index(device)), "cudaSetDevice")


def maybe_exchange_device(device: int) -> int:
    """As torch.cuda._maybe_exchange_device: chooses a device, and makes no context on it."""
    before = current_device()
    if device != before:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        _check(_driver.cuInit(0), "cuInit")
        state = _driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        _check(state, "cuDevicePrimaryCtxGetState")
        if active.value:
            set_device(device)
        else:
            _thread.target = device
    return before


def synchronize(device: Any = None) -> None:
    before = current_device()
    wanted = before if device is None else _index(device)
    if wanted != before:
        set_device(wanted)
    _check(_runtime.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
    if wanted != before:
        maybe_exchange_device(before)  # as torch's guards: without making a context on the device it goes back to


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def _is_gpu(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


def _allocate(nbytes: int, device: Any) -> Any:
    before, wanted = current_device(), _index(device)
    if wanted != before or getattr(_thread, "target", -1) >= 0:
        set_device(wanted)
    address = ctypes.c_void_p()
    _check(_runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1))), "cudaMalloc")
    if wanted != before:
        maybe_exchange_device(before)
    _ranges.append((address.value or 0, (address.value or 0) + nbytes))
    return (ctypes.c_uint8 * nbytes).from_address(address.value)


def _making(original: Any, fill: int | None) -> Any:
    @functools.wraps(original)
    def make(*size: Any, device: Any = None, dtype: Any = None, **options: Any) -> Any:
        if not _is_gpu(device):
            return original(*size, device=device, dtype=dtype, **options)
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = dtype or torch.get_default_dtype()
        memory = _allocate(math.prod(shape) * dtype.itemsize, device)
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape)
        return tensor if fill is None else tensor.fill_(fill)

    return make


def device_of(tensor: Any) -> int:
    """The GPU that holds a tensor's memory, as the driver says; -1: none."""
    address = tensor.data_ptr()
    if not any(start <= address < end for start, end in list(_ranges)):
        return -1
    ordinal = ctypes.c_int(-1)
    error = _driver.cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    return -1 if error else ordinal.value


def _device(tensor: Any) -> torch.device:
    if tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        index = device_of(tensor) if _own_device(tensor).type == "cpu" else -1
        if index >= 0:
            return torch.device("cuda", index)
    return _own_device(tensor)


_own_device = torch._C.TensorBase.device.__get__


def install() -> None:
    """Replace the few names of torch. Idempotent."""
    if torch.cuda.set_device is set_device:
        return
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.set_device, torch.cuda.current_device = set_device, current_device
    torch.cuda._maybe_exchange_device, torch.cuda.synchronize = maybe_exchange_device, synchronize
    torch.empty, torch.zeros, torch.ones = (
        _making(torch.empty, None),
        _making(torch.zeros, 0),
        _making(torch.ones, 1),
    )
    torch.Tensor.device = property(_device)
    torch.Tensor.is_cuda = property(lambda self: _device(self).type == "cuda")
    torch.Tensor.get_device = lambda self: -1 if (index := _device(self).index) is None else index
