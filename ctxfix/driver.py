# SPDX-License-Identifier: Apache-2.0
"""The only file that speaks to CUDA.

It never loads the CUDA driver into a process that has not loaded it, never calls ``cuInit``, never creates a
context (also not the primary one, which cudaSetDevice does since CUDA 12), and is silent in a forked child of
a process that had initialised CUDA. All contexts and addresses are plain ``int``; 0 is "none".

What is called per post goes through ctypes.PyDLL, which keeps the GIL: these calls take nanoseconds, and a call that
lets the GIL go, as all of cuda.bindings do, waits up to the switch interval (5 ms) to get it back in a process whose
other threads are busy in Python (51 µs on average against 0.2 µs with one busy thread, benchmarks/post.py). The rest
lets it go: the driver makes it wait while another thread makes a context.

Nothing goes through cuda.bindings: the package `nixl` (1.4.0 on) takes an imported cuda.bindings for the application's
choice of a CUDA version, and loads its build for that one, or none.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ctxfix.errors import DriverError

_LIBCUDA = "libcuda.so.1"
_INVALID_VALUE = 1
_NOT_INITIALIZED = 3
_UNKNOWN = 999
_NO_CUDA_HERE = (_NOT_INITIALIZED, 4)  # 4: DEINITIALIZED, while the process ends

# CUpointer_attribute of cuda.h, the same in CUDA 12 and 13.
_CONTEXT = 1
_SYNC_MEMOPS = 6
_BUFFER_ID = 7
_DEVICE_ORDINAL = 9  # cuda.bindings 13.3.1 always answers 0; the driver itself is right (measured, H200, driver 580)
_LEGACY_IPC = 10
_RANGE_START = 11
_RANGE_SIZE = 12

_api: Any = None  # libcuda, once it is in the process, for calls that let the GIL go
_problem: str | None = None  # why CUDA cannot be spoken to although it is in the process
_forked = False  # a child of a process that had initialised CUDA: hands off for good
_initialized_at_fork = False


#: Where the driver writes an answer: a new one for each question (40 ns). One kept for the thread would not do: a
#: signal handler or a finalizer may call a hook, and so ask something else, before the answer is read.
_Answer = ctypes.c_uint64


def _absent(*_: Any) -> int:
    """Stands for each driver function while CUDA is not attached."""
    return _NOT_INITIALIZED


_cuCtxGetCurrent: Callable[[Any], int] = _absent
_cuCtxSetCurrent: Callable[[int], int] = _absent
_cuCtxGetId: Callable[[int, Any], int] = _absent
_cuPointerGetAttribute: Callable[[Any, int, int], int] = _absent
_cuPointerSetAttribute: Callable[[Any, int, int], int] = _absent
_ONE = ctypes.byref(ctypes.c_uint(1))

_pointer = ctypes.c_void_p
#: What is asked now and then, and its arguments.
_PROTOTYPES: dict[str, list[Any]] = {
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuCtxGetDevice": [_pointer],
    "cuDevicePrimaryCtxGetState": [ctypes.c_int, _pointer, _pointer],
    "cuDevicePrimaryCtxRetain": [_pointer, ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuDeviceGetCount": [_pointer],
    "cuDeviceGetUuid_v2": [_pointer, ctypes.c_int],
    "cuDeviceGetPCIBusId": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    "cuGetErrorName": [ctypes.c_int, _pointer],
}


class Owner(NamedTuple):
    """To whom GPU memory belongs: a context (never 0) and its device ordinal in this process.

    ``recorded`` is False where the memory itself knows no context and the primary one of its device stands in.
    """

    context: int
    device: int
    recorded: bool = True


def attach() -> bool:
    """Whether CUDA can be spoken to in this process. Loads nothing that is not loaded.

    Cheap once true. While libcuda is not in the process it costs a walk over the library path, so it is called
    where transfers are set up (an agent made, memory registered), never where they are posted.
    """
    if _api is not None:
        return True
    if _forked or _problem is not None:
        return False
    try:
        lib = ctypes.PyDLL(_LIBCUDA, mode=os.RTLD_NOLOAD)
        api = ctypes.CDLL(_LIBCUDA, mode=os.RTLD_NOLOAD)
    except TimeoutError:  # dlopen gives none: a signal handler of the application did
        raise
    except OSError:
        return False
    return _attach_to(lib, api)


def _attach_to(lib: Any, api: Any) -> bool:
    global _api, _problem
    global _cuCtxGetCurrent, _cuCtxSetCurrent, _cuCtxGetId, _cuPointerGetAttribute, _cuPointerSetAttribute
    try:
        answer = ctypes.POINTER(_Answer)
        lib.cuCtxGetCurrent.argtypes = [answer]
        lib.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
        lib.cuCtxGetId.argtypes = [ctypes.c_void_p, answer]  # CUDA 12.0
        lib.cuPointerGetAttribute.argtypes = [answer, ctypes.c_int, ctypes.c_uint64]
        lib.cuPointerSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
        for name, arguments in _PROTOTYPES.items():
            getattr(api, name).argtypes = arguments
    except AttributeError as error:  # half a library, or
        _problem = (
            f"libcuda is loaded, but it is too old for ctxfix ({error}). No context is set. Install a driver for "
            "CUDA 12.0 or newer (525)"
        )
        return False
    _cuCtxGetCurrent, _cuCtxSetCurrent = lib.cuCtxGetCurrent, lib.cuCtxSetCurrent
    _cuCtxGetId = lib.cuCtxGetId
    _cuPointerGetAttribute, _cuPointerSetAttribute = lib.cuPointerGetAttribute, lib.cuPointerSetAttribute
    _api = api
    return True


def problem() -> str | None:
    """Why CUDA cannot be used although it is in the process, or None."""
    if _forked:
        return "this is a forked child of a process that had initialised CUDA; CUDA does not work here"
    return _problem


def forked() -> bool:
    """Whether this is a forked child of a process that had initialised CUDA: nothing can be asked or set here."""
    return _forked


def attached() -> bool:
    """Whether :func:`attach` has succeeded already."""
    return _api is not None


def initialized() -> bool:
    """Whether somebody in this process has called cuInit."""
    return _cuCtxGetCurrent(_Answer()) != _NOT_INITIALIZED


def current() -> int:
    """The context current on this thread, or 0: none, CUDA not initialised, or not in the process. About 0.2 µs.

    Raises:
        DriverError: the driver did not say. Then nothing may be set either: it could not be undone.
    """
    answer = _Answer()
    error = _cuCtxGetCurrent(answer)
    if not error:
        return answer.value
    if error in _NO_CUDA_HERE:
        return 0
    raise _error("cuCtxGetCurrent", error, "this thread")


def set_current(context: int) -> None:
    """Make ``context`` current on this thread (0: none), as cuCtxSetCurrent does, if it still exists.

    The driver accepts a destroyed context without an error, and then the process dies of it: SIGABRT when the thread
    ends, SIGSEGV when another one is set (measured, driver 580). So the context is asked for its id first, which a
    destroyed one does not give (0.5 µs).

    Raises:
        DriverError: the context was destroyed, or the driver refused.
    """
    error = _cuCtxGetId(context, _Answer()) if context else 0
    error = error or _cuCtxSetCurrent(context)
    if error:
        raise _error("cuCtxSetCurrent", error, f"context {context:#x}")


def _attribute(attribute: int, address: int) -> int | None:
    """A pointer attribute of ``address``; None: it is no memory that the driver knows."""
    answer = _Answer()  # 0: the driver may write 4 bytes only
    return None if _cuPointerGetAttribute(answer, attribute, address) else answer.value


def owner_of(address: int) -> Owner | None:
    """Whose GPU memory ``address`` is; None for host memory, freed memory and addresses of nobody.

    Memory that knows no context (cuMemCreate/VMM, which PyTorch's expandable_segments use, and memory pools)
    belongs to the primary context of its device, if that context exists.
    """
    context = _attribute(_CONTEXT, address)
    if context is None:
        return None
    device = _attribute(_DEVICE_ORDINAL, address)
    if context:
        return Owner(context, -1 if device is None else device)
    primary = primary_context(-1 if device is None else device)
    return Owner(primary, device or 0, recorded=False) if primary else None


def context_at(address: int) -> int:
    """The context recorded for the memory at ``address``; 0: none (VMM memory, pools), or no GPU memory."""
    return _attribute(_CONTEXT, address) or 0


def why_unknown(address: int) -> str:
    """Why nobody can say whose memory ``address`` is, after :func:`owner_of` could not: the driver is asked again."""
    if _api is None:
        return problem() or "CUDA is not loaded in this process"
    answer = _Answer()
    error = _cuPointerGetAttribute(answer, _CONTEXT, address)
    if error == _INVALID_VALUE:
        return "no allocation of this process holds it"
    if error:
        return f"cuPointerGetAttribute failed with {_name(error)} ({error})"
    if not answer.value:
        return "it knows no context, and the primary one of its device is not made, or not told of"
    return "the driver did not say when it was first asked"


def buffer_id(address: int) -> int:
    """The id of the allocation that holds ``address``: never given to another allocation. 0: no allocation."""
    return _attribute(_BUFFER_ID, address) or 0


def takes_ipc(address: int) -> bool:
    """Whether cudaIpcGetMemHandle can export the memory: VMM memory and memory of pools cannot, ever."""
    return bool(_attribute(_LEGACY_IPC, address))


def set_sync_memops(address: int) -> bool:
    """Have every copy that touches the allocation at ``address`` end before the call returns; False: refused.

    VMM memory refuses it with NOT_SUPPORTED (measured, driver 580).
    """
    return _api is not None and not _cuPointerSetAttribute(_ONE, _SYNC_MEMOPS, address)


def extent_of(address: int) -> tuple[int, int]:
    """First address of the allocation that holds ``address``, and one past its last; ``(0, 0)``: unknown."""
    start, size = _attribute(_RANGE_START, address), _attribute(_RANGE_SIZE, address)
    return (start, start + size) if start and size else (0, 0)


def device_of(context: int) -> int:
    """The device ordinal of ``context``, or -1 if the context is unusable."""
    if _api is None or _cuCtxGetId(context, _Answer()):
        return -1
    device, pushed, here = ctypes.c_int(), False, _is_current(context)
    try:
        pushed = not here and not _api.cuCtxPushCurrent_v2(context)
        error = _UNKNOWN if not here and not pushed else _api.cuCtxGetDevice(ctypes.byref(device))
    finally:
        # A signal may come after the push, before it is noted. A pop that is refused is made again.
        if (pushed or (not here and _is_current(context))) and _api.cuCtxPopCurrent_v2(ctypes.byref(_pointer())):
            _api.cuCtxPopCurrent_v2(ctypes.byref(_pointer()))
    return -1 if error else device.value


def _is_current(context: int) -> bool:
    answer = _Answer()
    return not _cuCtxGetCurrent(answer) and answer.value == context


def primary_context(device: int) -> int:
    """The primary context of ``device`` if somebody has made it already, else 0.

    Making it current is what cudaSetDevice does, without creating one (cudaSetDevice does create it, since
    CUDA 12), which would cost about 0.5 GB of that GPU.
    """
    if _api is None or device < 0:
        return 0
    flags, active, context = ctypes.c_uint(), ctypes.c_int(), _pointer()
    error = _api.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if error or not active.value or _api.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return 0
    _api.cuDevicePrimaryCtxRelease_v2(device)  # it lives on: whoever made it active still holds it
    return context.value or 0


def primary_contexts() -> list[int]:
    """The primary contexts that exist in this process, by device ordinal."""
    return [context for context in map(primary_context, range(_device_count())) if context]


def active_devices() -> list[int]:
    """The ordinals of the devices whose primary context exists in this process."""
    return [device for device in range(_device_count()) if primary_context(device)]


def device_names() -> dict[int, dict[str, str]]:
    """By ordinal, what identifies a device for every process and tool: its UUID (as NVML writes it) and PCI address."""
    return {device: {"uuid": _uuid(device), "pci": _pci(device)} for device in range(_device_count())}


def _device_count() -> int:
    if not initialized():
        return 0
    devices = ctypes.c_int()
    return 0 if _api.cuDeviceGetCount(ctypes.byref(devices)) else devices.value


def _uuid(device: int) -> str:
    uuid = (ctypes.c_ubyte * 16)()
    if _api.cuDeviceGetUuid_v2(ctypes.byref(uuid), device):
        return ""
    digits = bytes(uuid).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _pci(device: int) -> str:
    address = ctypes.create_string_buffer(32)
    return "" if _api.cuDeviceGetPCIBusId(address, len(address), device) else address.value.decode()


def _name(code: int) -> str:
    text = ctypes.c_char_p()
    if _api is None or _api.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
        return "an error"  # no driver at all, or an error that it does not know
    return text.value.decode()


def _error(call: str, code: int, about: str) -> DriverError:
    where = f"pid {os.getpid()}, thread {threading.get_ident():#x}"
    return DriverError(f"{call} failed with {_name(code)} ({code}) for {about} in {where}", code)


def _before_fork() -> None:
    # CUDA may have been loaded and initialised since anybody here has looked; in the child it is too late to ask.
    global _initialized_at_fork
    _initialized_at_fork = attach() and initialized()


def _after_fork_in_child() -> None:
    global _forked, _api
    global _cuCtxGetCurrent, _cuCtxSetCurrent, _cuCtxGetId, _cuPointerGetAttribute, _cuPointerSetAttribute
    if _initialized_at_fork:
        _forked = True
        _api = None
        _cuCtxGetCurrent = _cuCtxSetCurrent = _cuCtxGetId = _absent
        _cuPointerGetAttribute = _cuPointerSetAttribute = _absent


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
