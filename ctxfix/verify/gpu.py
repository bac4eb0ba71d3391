# SPDX-License-Identifier: Apache-2.0
"""The GPU memory of the verification's own processes, by CUDA's driver API.

The workload is an application: it initialises CUDA and has a context, on its own GPU and no other. Every method that
works on memory may be called on any thread and leaves the thread's context as it was.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from ctxfix.errors import VerifyError

_CHUNK = 16 << 20
_NO_DEVICE = 100
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call the driver; its result without the error code. Raises VerifyError."""
    error, *values = function(*args)
    if int(error):
        raise VerifyError(f"{function.__name__} failed with {error.name} ({int(error)})")
    return values[0] if len(values) == 1 else tuple(values)


def count() -> int:
    """How many GPUs this process sees. Raises VerifyError if there is no driver."""
    try:
        if int(cu.cuInit(0)[0]) == _NO_DEVICE:
            return 0
        return int(call(cu.cuDeviceGetCount))
    except RuntimeError as error:  # cuda.bindings: the library is not there
        raise VerifyError(f"there is no CUDA driver on this machine ({error})") from error


class Pattern:
    """Bytes that are different in every transfer and at every place: a misplaced or old block cannot look right."""

    def __init__(self, seed: int) -> None:
        # A length that divides no power of two, so that whole blocks that change places are seen.
        self._period = _CHUNK - 4_099
        block = random.Random(seed).randbytes(self._period)
        self._bytes = ctypes.create_string_buffer(block + block[: _CHUNK + 1])
        self._address = ctypes.addressof(self._bytes)

    def at(self, offset: int, transfer: int) -> int:
        """The host address of what ``transfer`` has at ``offset``; up to 16 MiB from there are right."""
        return self._address + (offset + transfer * 1_000_003) % self._period


class Gpu:
    """One GPU, its primary context, and a buffer."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        call(cu.cuInit, 0)
        self.context = call(cu.cuDevicePrimaryCtxRetain, call(cu.cuDeviceGet, ordinal))
        self._host = ctypes.create_string_buffer(_CHUNK)
        self._stream: Any = None
        self.stream_problem = ""
        #: Told of each copy that is made here: kind (see evidence.cupti) and bytes.
        self.tell: Callable[[str, int], object] = lambda kind, size: None

    def make_current(self) -> None:
        """As an application's main thread does, once and for all."""
        call(cu.cuCtxSetCurrent, self.context)

    def _inside(self) -> _Inside:
        return _Inside(self.context)

    def synchronize(self) -> None:
        """Wait for all that this GPU was told to do."""
        with self._inside():
            call(cu.cuCtxSynchronize)

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory; its address."""
        with self._inside():
            address = int(call(cu.cuMemAlloc, size))
            call(cu.cuMemsetD8, address, 0, size)
            call(cu.cuCtxSynchronize)
            return address

    def fill(self, address: int, size: int, pattern: Pattern, transfer: int) -> None:
        """Write the pattern into ``size`` bytes at ``address``."""
        with self._inside():
            for offset in range(0, size, _CHUNK):
                n = min(_CHUNK, size - offset)
                call(cu.cuMemcpyHtoD, address + offset, pattern.at(offset, transfer), n)
                self.tell("htod", n)
            call(cu.cuCtxSynchronize)

    def same(self, address: int, size: int, pattern: Pattern, transfer: int, source: int) -> bool:
        """Whether the memory holds what the pattern has from ``source`` on."""
        with self._inside():
            for offset in range(0, size, _CHUNK):
                n = min(_CHUNK, size - offset)
                call(cu.cuMemcpyDtoH, self._host, address + offset, n)
                self.tell("dtoh", n)
                if _libc.memcmp(self._host, pattern.at(source + offset, transfer), n):
                    return False
        return True

    def peek(self, places: list[tuple[int, int]]) -> list[bytes]:
        """Read (address, size) places at once, on a stream that waits for no other: what has landed by now."""
        with self._inside():
            stream = self._non_blocking_stream()
            result = []
            for address, size in places:
                if stream is None:
                    call(cu.cuMemcpyDtoH, self._host, address, size)
                else:
                    call(cu.cuMemcpyDtoHAsync, self._host, address, size, stream)
                    call(cu.cuStreamSynchronize, stream)
                self.tell("dtoh", size)
                result.append(self._host.raw[:size])
            return result

    def _non_blocking_stream(self) -> Any:
        if self._stream is None and not self.stream_problem:
            try:
                self._stream = call(cu.cuStreamCreate, 1)
            except (RuntimeError, VerifyError) as error:  # a stand-in driver without streams
                self.stream_problem = f"no stream of its own: {error}"
        return self._stream

    def copy_limit(self, address: int, size: int) -> float:
        """Bytes a second of a copy within this GPU, from the first to the second half of the memory."""
        half = size // 2
        with self._inside():
            best = float("inf")
            for _ in range(4):
                started = time.perf_counter()
                call(cu.cuMemcpyDtoD, address + half, address, half)
                call(cu.cuCtxSynchronize)
                best = min(best, time.perf_counter() - started)
                self.tell("dtod", half)
        return half / best


class _Inside:
    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        call(cu.cuCtxPushCurrent, self._context)

    def __exit__(self, *_: object) -> None:
        call(cu.cuCtxPopCurrent)
