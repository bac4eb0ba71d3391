# SPDX-License-Identifier: Apache-2.0
"""What a CUDA driver does in the corners that ctxfix stands on, found out by calling it.

    python3 driver_checks.py            every check, one JSON object
    python3 driver_checks.py NAME ...   only these

It speaks to libcuda.so.1 through ctypes alone, and runs against a real driver as against the rig's fake one.
Each check is a process of its own that prints each fact as soon as it is known: whatever crashes, the rest is
told. A fact that a program may meet is pinned (PINNED) to what a real driver said (580.159.04, CUDA 13.0, two H200);
the others are only reported. A check that may_die does what real drivers die of: how its process ends is a fact
("exit code") and no error. Exit status: 0 when all pinned facts are as expected, 1 when one is not, 2 when there is
no usable driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

Fact = Any
INVALID_VALUE, NOT_INITIALIZED, INVALID_CONTEXT, NOT_FOUND, DESTROYED, NOT_SUPPORTED = 1, 3, 201, 500, 709, 801
CONTEXT, MEMORY_TYPE, SYNC_MEMOPS, BUFFER_ID, IS_MANAGED, ORDINAL, LEGACY_IPC = 1, 2, 6, 7, 8, 9, 10
MIB = 1 << 20
TIMEOUT = 120

PINNED: dict[str, dict[str, Fact]] = {
    "before_init": dict.fromkeys(
        ("cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxSetCurrent(NULL)", "cuDeviceGetCount")
        + ("cuDevicePrimaryCtxGetState", "cuMemGetAddressRange", "cuPointerGetAttribute"),
        NOT_INITIALIZED,
    ),
    "fresh_thread": {"current": [0, None], "cuCtxGetDevice": INVALID_CONTEXT},
    "context_stack": {
        "retain makes current": None,
        "push(NULL)": INVALID_VALUE,
        "set on empty": 0,
        "push push": 1,
        "set replaces the top": [0, 0, None],
        "set(NULL) pops": [1, 0, None],
        "set(NULL) on empty": 0,
        "pop on empty": INVALID_CONTEXT,
    },
    "address_range": {
        "no context": INVALID_CONTEXT,
        "owner's context": 0,
        "base and size": True,
        "size is the one asked for": True,
        "host address": NOT_FOUND,
        "the name without _v2": 0,
        "copy without a context": INVALID_CONTEXT,
        "IPC handle without a context": INVALID_CONTEXT,
        "another context of the same GPU": 0,
        "free without a context": 0,
    },
    "address_range_two_gpus": {
        "other GPU's context": NOT_FOUND,
        "owner's context": 0,
        "IPC handle under the other GPU": 0,
        "copy under the other GPU": 0,
        "enable peer access": 0,
        "other GPU's context, with peer access": 0,
        "free under the other GPU": 0,
    },
    "attributes": {
        "bare thread": [0, "owner", 0, 2],
        "interior address": [0, "owner", 0, 2],
        "legacy IPC": [0, 1],
        "unknown address": INVALID_VALUE,
        "unknown address, plural call": 0,
        "unknown address, plural answers": [-2, None],
        "freed address": INVALID_VALUE,
    },
    "attributes_two_gpus": {
        "under the other GPU": [0, "owner", 1, 2],
        "bare thread": [0, "owner", 1, 2],
        "plural call": [0, 1],
    },
    "buffer_id": {"changes at the same address": True},
    "sync_memops": {"default": 0, "set from a bare thread": 0, "then": 1, "at an interior address": 1},
    "vmm": {
        "context": [0, None],
        "ordinal": [0, 0],
        "legacy IPC": [0, 0],
        "bare thread": [0, None],
        "memory type": [0, 2],
        "has a buffer id": True,
        "range without a context": INVALID_CONTEXT,
        "range under its GPU": 0,
        "set SYNC_MEMOPS": NOT_SUPPORTED,
        "SYNC_MEMOPS then": [0, 0],
        "IPC handle": INVALID_VALUE,
        "unmapped": INVALID_VALUE,
    },
    "vmm_two_gpus": {
        "ordinal from a bare thread": [0, 1],
        "range under its GPU": 0,
        "range under the other GPU": NOT_FOUND,
    },
    "other_memory": {
        "managed": [0, "owner", 0, 2],
        "managed: range": 0,
        "managed: legacy IPC": [0, 0],
        "pinned host": [0, "owner", 0, 1],
        "pinned host: range": 0,
        "pinned host: legacy IPC": [0, 0],
        "stream-ordered": [0, None, 0, 2],
        "stream-ordered: range": 0,
        "stream-ordered: legacy IPC": [0, 0],
    },
    "primary_state": {
        "at first": 0,
        "release unretained": INVALID_CONTEXT,
        "retained": 1,
        "same handle twice": True,
        "still retained once": 1,
        "released": 0,
        "current handle stays": True,
        "device of the current": 0,
        "same handle again": True,
        "device of the current after retaining again": 0,
    },
    "primary_reset": {
        "reset": 0,
        "active after": 0,
        "its memory": INVALID_VALUE,
        "current handle stays": True,
        "cuCtxGetDevice": 0,
        "range under it": DESTROYED,
        "set old handle": 0,
        "push old handle": 0,
        "active again": 1,
        "same handle again": True,
        "set old handle after retaining again": 0,
    },
    "primary_ids": {
        "retained": 0,
        "after reset": DESTROYED,
        "retained again": 0,
        "same handle again": True,
        "another id": True,
        "after the last release": DESTROYED,
        "API version after the last release": INVALID_CONTEXT,
    },
    "created_ids": {"ids differ": True, "after destruction": DESTROYED, "a handle comes again": True},
    "never_a_context": {"id of an address on the heap": DESTROYED},
    "created_destroyed": {
        "destroy": 0,
        "popped from the destroying thread": True,
        "on a thread that has it current": [True, 0],
        "has an id": False,
        "its id": DESTROYED,
        "its memory": INVALID_VALUE,
        "destroy again": DESTROYED,
    },
    # The driver accepts a dead context, and the process dies of it later.
    # How such a process ends is chance: one run died of it (SIGABRT), another did not.
    "dead_context_thread_ends": {"set": 0},
    "dead_context_replaced": {"set": 0},
    "dead_context_unset": {"set": 0},
    "dead_context_pushed": {"push": 0},
    "nonsense_handle": {"set a handle that never was": 0},
    "fork_child": {"cuCtxGetCurrent": NOT_INITIALIZED, "cuInit": NOT_INITIALIZED},
    "runtime": {
        "cudaGetDevice on a bare thread": [0, 0, None],
        "first use on a bare thread": 0,
        "cudaSetDevice": 0,
        "cudaPointerGetAttributes on a bare thread": [0, None],
    },
    "runtime_two_gpus": {
        "cudaSetDevice(1)": 1,
        "use keeps the current context": 1,
        "cudaSetDevice replaces the top": [0, 0, None],
        "use after cudaSetDevice(1) and a pop": 0,
        "cudaMemcpy from GPU 1 on a bare thread": [0, 0],
        "cudaIpcGetMemHandle for GPU 1 on a bare thread": [0, 0],
    },
}

# ---- the driver ------------------------------------------------------------------------------------


def libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def cu(name: str, *args: Any) -> int | str:
    """Call a driver function; its result, or a word if this driver does not have it."""
    function = getattr(libcuda(), name, None)
    return "missing" if function is None else function(*args)


def handle(value: int | None = None) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def address(value: int = 0) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(value)


def must(result: int | str) -> None:
    if result:
        raise RuntimeError(f"unexpected result {result}")


def init() -> None:
    must(cu("cuInit", 0))


def retain(gpu: int) -> ctypes.c_void_p:
    context = handle()
    must(cu("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu))
    return context


def created(gpu: int) -> ctypes.c_void_p:
    context = handle()
    must(cu("cuCtxCreate_v2", ctypes.byref(context), 0, gpu))
    return context


def current() -> int | None:
    context = handle()
    must(cu("cuCtxGetCurrent", ctypes.byref(context)))
    return context.value


def current_device() -> int | None:
    """Return the device of the current context, or None."""
    gpu = ctypes.c_int()
    return None if cu("cuCtxGetDevice", ctypes.byref(gpu)) else gpu.value


def set_current(context: ctypes.c_void_p | None) -> int | str:
    return cu("cuCtxSetCurrent", context or handle())


def push(context: ctypes.c_void_p) -> int | str:
    return cu("cuCtxPushCurrent_v2", context)


def pop() -> int | str:
    return cu("cuCtxPopCurrent_v2", ctypes.byref(handle()))


def alloc(context: ctypes.c_void_p, size: int = MIB) -> int:
    memory = address()
    must(push(context))
    must(cu("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size)))
    must(pop())
    return memory.value


def free(context: ctypes.c_void_p, memory: int) -> None:
    must(push(context))
    must(cu("cuMemFree_v2", address(memory)))
    must(pop())


def attribute(which: int, memory: int, kind: type = ctypes.c_ulonglong) -> list[Fact]:
    """Return [result, value]; the value is None when the call failed."""
    value = kind()
    result = cu("cuPointerGetAttribute", ctypes.byref(value), which, address(memory))
    return [result, None if result else value.value]


def whose(memory: int, owner: ctypes.c_void_p) -> list[Fact]:
    """Return [result, "owner" or another handle, device, memory type]."""
    result, context = attribute(CONTEXT, memory, ctypes.c_void_p)
    gpu = attribute(ORDINAL, memory, ctypes.c_int)[1]
    kind = attribute(MEMORY_TYPE, memory, ctypes.c_uint)[1]
    return [result, "owner" if context == owner.value else context, gpu, kind]


def range_of(memory: int) -> int | str:
    base, size = address(), ctypes.c_size_t()
    return cu("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address(memory))


def primary_active(gpu: int) -> int:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    must(cu("cuDevicePrimaryCtxGetState", gpu, ctypes.byref(flags), ctypes.byref(active)))
    return active.value


def on_thread(work: Callable[[], Fact]) -> Fact:
    """Run on a thread that has never seen CUDA."""
    results: list[Fact] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def under(context: ctypes.c_void_p | None, work: Callable[[], Fact]) -> Fact:
    """Run with that context current, on a fresh thread."""

    def bound() -> Fact:
        must(set_current(context))
        return work()

    return on_thread(bound)


# ---- the checks: each says facts by name -----------------------------------------------------------


class Check(NamedTuple):
    run: Callable[[], None]
    gpus: int
    may_die: bool


CHECKS: dict[str, Check] = {}


def check(gpus: int = 1, may_die: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = Check(function, gpus, may_die)
        return function

    return register


def fact(name: str, value: Fact) -> None:
    print(json.dumps([name, value]), flush=True)


@check()
def before_init() -> None:
    word, number = handle(), ctypes.c_int()
    fact("cuDriverGetVersion", cu("cuDriverGetVersion", ctypes.byref(number)))
    fact("cuCtxGetCurrent", cu("cuCtxGetCurrent", ctypes.byref(word)))
    fact("cuCtxGetDevice", cu("cuCtxGetDevice", ctypes.byref(number)))
    fact("cuDeviceGetCount", cu("cuDeviceGetCount", ctypes.byref(number)))
    state = ctypes.byref(ctypes.c_uint()), ctypes.byref(number)
    fact("cuDevicePrimaryCtxGetState", cu("cuDevicePrimaryCtxGetState", 0, *state))
    fact("cuPointerGetAttribute", attribute(CONTEXT, id(word), ctypes.c_void_p)[0])
    fact("cuMemGetAddressRange", range_of(id(word)))
    fact("cuCtxSetCurrent(NULL)", set_current(None))


@check()
def fresh_thread() -> None:
    init()
    set_current(retain(0))
    context, gpu = handle(), ctypes.c_int()
    fact("current", on_thread(lambda: [cu("cuCtxGetCurrent", ctypes.byref(context)), context.value]))
    fact("cuCtxGetDevice", on_thread(lambda: cu("cuCtxGetDevice", ctypes.byref(gpu))))


@check(gpus=2)
def context_stack() -> None:
    init()
    first, second = retain(0), retain(1)
    fact("retain makes current", current_device())
    fact("pop on empty", pop())
    fact("push(NULL)", push(handle()))
    fact("set(NULL) on empty", set_current(None))
    set_current(first)
    fact("set on empty", current_device())
    pop()
    push(first), push(second)
    fact("push push", current_device())
    set_current(first)
    seen = [current_device()]
    for _ in range(2):
        pop()
        seen.append(current_device())
    fact("set replaces the top", seen)
    push(first), push(second)
    seen = [current_device()]
    for _ in range(2):
        set_current(None)
        seen.append(current_device())
    fact("set(NULL) pops", seen)


@check()
def address_range() -> None:
    init()
    owner = retain(0)
    memory = alloc(owner)
    fact("no context", on_thread(lambda: range_of(memory)))
    fact("owner's context", under(owner, lambda: range_of(memory)))
    base, size = address(), ctypes.c_size_t()
    must(set_current(owner))
    cu("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address(memory + 4096))
    fact("base and size", base.value == memory and size.value >= MIB)
    fact("size is the one asked for", size.value == MIB)
    fact("host address", range_of(id(size)))
    fact("the name without _v2", cu("cuMemGetAddressRange", None, None, address(memory)))
    fact("copy without a context", on_thread(lambda: copy_out(memory)))
    fact("IPC handle without a context", on_thread(lambda: ipc_handle(memory)))
    fact("another context of the same GPU", under(created(0), lambda: range_of(memory)))
    fact("free without a context", on_thread(lambda: cu("cuMemFree_v2", address(memory))))


def copy_out(memory: int) -> int | str:
    return cu("cuMemcpyDtoH_v2", ctypes.create_string_buffer(16), address(memory), ctypes.c_size_t(16))


def ipc_handle(memory: int) -> int | str:
    return cu("cuIpcGetMemHandle", ctypes.create_string_buffer(64), address(memory))


@check(gpus=2)
def address_range_two_gpus() -> None:
    init()
    other, owner = retain(0), retain(1)
    memory = alloc(owner)
    fact("other GPU's context", under(other, lambda: range_of(memory)))
    fact("owner's context", under(owner, lambda: range_of(memory)))
    fact("IPC handle under the other GPU", under(other, lambda: ipc_handle(memory)))
    fact("copy under the other GPU", under(other, lambda: copy_out(memory)))
    fact("enable peer access", under(other, lambda: cu("cuCtxEnablePeerAccess", owner, 0)))
    fact("other GPU's context, with peer access", under(other, lambda: range_of(memory)))
    fact("free under the other GPU", under(other, lambda: cu("cuMemFree_v2", address(memory))))


@check(gpus=2)
def peer_access() -> None:
    init()
    other, owner = retain(0), retain(1)
    memory = alloc(owner)
    enable = ("cuCtxEnablePeerAccess", owner, 0)
    fact("enable", under(other, lambda: cu(*enable)))
    fact("enable again", under(other, lambda: cu(*enable)))
    fact("to the own GPU", under(owner, lambda: cu(*enable)))
    fact("range", under(other, lambda: range_of(memory)))
    later, others = alloc(owner), alloc(other)
    fact("range, memory made later", under(other, lambda: range_of(later)))
    fact("range, the other way round", under(owner, lambda: range_of(others)))
    fact("range under a created context", under(created(0), lambda: range_of(memory)))
    fact("disable", under(other, lambda: cu("cuCtxDisablePeerAccess", owner)))
    fact("range then", under(other, lambda: range_of(memory)))
    fact("disable again", under(other, lambda: cu("cuCtxDisablePeerAccess", owner)))


@check()
def attributes() -> None:
    init()
    owner = retain(0)
    memory = alloc(owner)
    fact("bare thread", on_thread(lambda: whose(memory, owner)))
    fact("interior address", on_thread(lambda: whose(memory + MIB - 1, owner)))
    fact("legacy IPC", attribute(LEGACY_IPC, memory, ctypes.c_int))
    host = ctypes.addressof(ctypes.create_string_buffer(16))
    fact("unknown address", attribute(CONTEXT, host, ctypes.c_void_p)[0])
    gpu, context = ctypes.c_int(-7), handle(7)
    wanted = (ctypes.c_int * 2)(ORDINAL, CONTEXT)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(gpu), ctypes.addressof(context))
    fact("unknown address, plural call", cu("cuPointerGetAttributes", 2, wanted, values, address(host)))
    fact("unknown address, plural answers", [gpu.value, context.value])
    free(owner, memory)
    fact("freed address", attribute(CONTEXT, memory, ctypes.c_void_p)[0])


@check(gpus=2)
def attributes_two_gpus() -> None:
    init()
    other, owner = retain(0), retain(1)
    memory = alloc(owner)
    fact("bare thread", on_thread(lambda: whose(memory, owner)))
    fact("under the other GPU", under(other, lambda: whose(memory, owner)))
    gpu = ctypes.c_int(-7)
    values = (ctypes.c_void_p * 1)(ctypes.addressof(gpu))
    result = cu("cuPointerGetAttributes", 1, (ctypes.c_int * 1)(ORDINAL), values, address(memory))
    fact("plural call", [result, gpu.value])


@check()
def buffer_id() -> None:
    init()
    owner = retain(0)
    memory = alloc(owner, 4 * MIB)
    before = attribute(BUFFER_ID, memory)
    for _ in range(20):
        free(owner, memory)
        again = alloc(owner, 4 * MIB)
        if again == memory:
            fact("changes at the same address", attribute(BUFFER_ID, again)[1] != before[1])
            break
        memory, before = again, attribute(BUFFER_ID, again)
    else:
        fact("changes at the same address", "never got the same address")
    fact("answers", before[0])


@check()
def sync_memops() -> None:
    init()
    owner = retain(0)
    memory = alloc(owner)
    fact("default", attribute(SYNC_MEMOPS, memory, ctypes.c_uint)[1])
    fact("set from a bare thread", on_thread(lambda: switch_on_sync_memops(memory)))
    fact("then", attribute(SYNC_MEMOPS, memory, ctypes.c_uint)[1])
    fact("at an interior address", attribute(SYNC_MEMOPS, memory + 4096, ctypes.c_uint)[1])
    free(owner, memory)
    again = alloc(owner)
    fact("same address again", again == memory)
    fact("a new allocation", attribute(SYNC_MEMOPS, again, ctypes.c_uint)[1])


def map_vmm(gpu: int) -> tuple[int, int]:
    """Allocate as torch's expandable segments do; return address and size."""
    prop = (ctypes.c_int * 16)(1, 0, 1, gpu)  # CUmemAllocationProp: pinned memory on that device
    access = (ctypes.c_int * 3)(1, gpu, 3)
    size, memory, physical, zero = ctypes.c_size_t(), address(), address(), address()
    must(cu("cuMemGetAllocationGranularity", ctypes.byref(size), prop, 0))
    must(cu("cuMemAddressReserve", ctypes.byref(memory), size, ctypes.c_size_t(0), zero, zero))
    must(cu("cuMemCreate", ctypes.byref(physical), size, prop, zero))
    must(cu("cuMemMap", memory, size, ctypes.c_size_t(0), physical, zero))
    must(cu("cuMemSetAccess", memory, size, access, ctypes.c_size_t(1)))
    return memory.value, size.value


def switch_on_sync_memops(memory: int) -> int | str:
    return cu("cuPointerSetAttribute", ctypes.byref(ctypes.c_uint(1)), SYNC_MEMOPS, address(memory))


@check()
def vmm() -> None:
    init()
    owner = retain(0)
    set_current(owner)
    memory, size = map_vmm(0)
    fact("context", attribute(CONTEXT, memory, ctypes.c_void_p))
    fact("bare thread", on_thread(lambda: attribute(CONTEXT, memory, ctypes.c_void_p)))
    fact("ordinal", attribute(ORDINAL, memory, ctypes.c_int))
    fact("legacy IPC", attribute(LEGACY_IPC, memory, ctypes.c_int))
    fact("memory type", attribute(MEMORY_TYPE, memory, ctypes.c_uint))
    fact("has a buffer id", attribute(BUFFER_ID, memory)[1] not in (None, 0))
    fact("range without a context", on_thread(lambda: range_of(memory)))
    fact("range under its GPU", range_of(memory))
    fact("set SYNC_MEMOPS", switch_on_sync_memops(memory))
    fact("SYNC_MEMOPS then", attribute(SYNC_MEMOPS, memory, ctypes.c_uint))
    fact("IPC handle", ipc_handle(memory))
    must(cu("cuMemUnmap", address(memory), ctypes.c_size_t(size)))
    fact("unmapped", attribute(CONTEXT, memory, ctypes.c_void_p)[0])


@check(gpus=2)
def vmm_two_gpus() -> None:
    init()
    other, owner = retain(0), retain(1)
    set_current(owner)
    memory, size = map_vmm(1)
    fact("ordinal from a bare thread", on_thread(lambda: attribute(ORDINAL, memory, ctypes.c_int)))
    fact("range under its GPU", range_of(memory))
    fact("range under the other GPU", under(other, lambda: range_of(memory)))
    fact("enable peer access", under(other, lambda: cu("cuCtxEnablePeerAccess", owner, 0)))
    fact("range under the other GPU, with peer access", under(other, lambda: range_of(memory)))
    fact("disable peer access", under(other, lambda: cu("cuCtxDisablePeerAccess", owner)))
    both = (ctypes.c_int * 6)(1, 0, 3, 1, 1, 3)
    fact("access for both", cu("cuMemSetAccess", address(memory), ctypes.c_size_t(size), both, ctypes.c_size_t(2)))
    fact("range under the other GPU, access for both", under(other, lambda: range_of(memory)))


def other_kinds() -> dict[str, tuple[int | str, int]]:
    """Allocate what is neither plain nor VMM memory; return result and address by kind."""
    size, memory, kinds = ctypes.c_size_t(MIB), address(), {}
    for kind, function, last in (
        ("managed", "cuMemAllocManaged", 1),
        ("pinned host", "cuMemHostAlloc", 0),
        ("stream-ordered", "cuMemAllocAsync", handle()),
    ):
        kinds[kind] = cu(function, ctypes.byref(memory), size, last), memory.value
    return kinds


@check()
def other_memory() -> None:
    """What the rest of CUDA's kinds of memory say about their owner."""
    init()
    owner = retain(0)
    set_current(owner)
    kinds = other_kinds()
    for kind, (result, memory) in kinds.items():
        fact(kind, result if result else whose(memory, owner))
        if not result:
            fact(f"{kind}: range", range_of(memory))
            fact(f"{kind}: legacy IPC", attribute(LEGACY_IPC, memory, ctypes.c_int))
            fact(f"{kind}: range without a context", on_thread(lambda at=memory: range_of(at)))
            fact(f"{kind}: is managed", attribute(IS_MANAGED, memory, ctypes.c_uint))
            fact(f"{kind}: has a buffer id", attribute(BUFFER_ID, memory)[1] not in (None, 0))
            fact(f"{kind}: IPC handle", ipc_handle(memory))
            fact(f"{kind}: set SYNC_MEMOPS", switch_on_sync_memops(memory))
            fact(f"{kind}: SYNC_MEMOPS then", attribute(SYNC_MEMOPS, memory, ctypes.c_uint))
    fact("managed: free", cu("cuMemFree_v2", address(kinds["managed"][1])))
    fact("pinned host: free", cu("cuMemFreeHost", handle(kinds["pinned host"][1])))
    fact("stream-ordered: free", cu("cuMemFreeAsync", address(kinds["stream-ordered"][1]), handle()))


@check(gpus=2)
def other_memory_two_gpus() -> None:
    init()
    other, owner = retain(0), retain(1)
    set_current(owner)
    for kind, (result, memory) in other_kinds().items():
        fact(kind, result if result else under(other, lambda at=memory: whose(at, owner)))
        if not result:
            fact(f"{kind}: range under the other GPU", under(other, lambda at=memory: range_of(at)))


@check()
def primary_state() -> None:
    init()
    fact("at first", primary_active(0))
    fact("release unretained", cu("cuDevicePrimaryCtxRelease_v2", 0))
    context = retain(0)
    fact("retained", primary_active(0))
    fact("same handle twice", retain(0).value == context.value)
    cu("cuDevicePrimaryCtxRelease_v2", 0)
    fact("still retained once", primary_active(0))
    set_current(context)
    cu("cuDevicePrimaryCtxRelease_v2", 0)
    fact("released", primary_active(0))
    fact("current handle stays", current() == context.value)
    fact("device of the current", current_device())
    again = retain(0)
    fact("same handle again", again.value == context.value)
    fact("device of the current after retaining again", current_device())


@check()
def primary_reset() -> None:
    init()
    context = retain(0)
    memory = alloc(context)
    set_current(context)
    fact("reset", cu("cuDevicePrimaryCtxReset_v2", 0))
    fact("active after", primary_active(0))
    fact("its memory", attribute(CONTEXT, memory, ctypes.c_void_p)[0])
    fact("current handle stays", current() == context.value)
    fact("cuCtxGetDevice", cu("cuCtxGetDevice", ctypes.byref(ctypes.c_int())))
    fact("range under it", range_of(memory))
    set_current(None)
    fact("set old handle", set_current(context))
    fact("push old handle", push(context))
    again = retain(0)
    fact("active again", primary_active(0))
    fact("same handle again", again.value == context.value)
    fact("set old handle after retaining again", set_current(context))


def id_of(context: ctypes.c_void_p) -> list[Fact]:
    """Return [result, id]."""
    number = address()
    result = cu("cuCtxGetId", context, ctypes.byref(number))
    return [result, None if result else number.value]


@check()
def primary_ids() -> None:
    init()
    context, version = retain(0), ctypes.c_uint()
    result, first = id_of(context)
    fact("retained", result)
    fact("API version", cu("cuCtxGetApiVersion", context, ctypes.byref(version)))
    must(cu("cuDevicePrimaryCtxReset_v2", 0))
    fact("after reset", id_of(context)[0])
    again = retain(0)
    result, second = id_of(again)
    fact("retained again", result)
    fact("same handle again", again.value == context.value)
    fact("another id", second != first)
    fact("ids", [first, second])
    for _ in range(2):
        cu("cuDevicePrimaryCtxRelease_v2", 0)
    fact("active after the last release", primary_active(0))
    fact("after the last release", id_of(context)[0])
    fact("API version after the last release", cu("cuCtxGetApiVersion", context, ctypes.byref(version)))


@check()
def created_ids() -> None:
    init()
    handles, ids, after = [], [], set()
    for _ in range(20):
        context = created(0)
        handles.append(context.value)
        ids.append(id_of(context)[1])
        must(cu("cuCtxDestroy_v2", context))
        after.add(id_of(context)[0])
    fact("ids", ids)
    fact("ids differ", len(set(ids)) == len(ids) and None not in ids)
    fact("after destruction", after.pop() if len(after) == 1 else sorted(after))
    fact("different handles", len(set(handles)))
    fact("a handle comes again", len(set(handles)) < len(handles))
    living = {created(0).value for _ in range(8)}
    old = set(handles)
    fact("old handles that live again", len(old & living))
    fact("ids of the others", sorted({id_of(handle(other))[0] for other in old - living}))


@check()
def never_a_context() -> None:
    init()
    retain(0)
    memory = ctypes.create_string_buffer(4096)
    fact("id of an address on the heap", id_of(handle(ctypes.addressof(memory)))[0])


@check(may_die=True)
def never_a_context_unmapped() -> None:
    init()
    retain(0)
    fact("id of an unmapped address", id_of(handle(0x1234000))[0])


@check()
def created_destroyed() -> None:
    init()
    context = created(0)
    memory = alloc(context)
    ready, go = threading.Event(), threading.Event()

    def elsewhere() -> Fact:
        set_current(context)
        ready.set()
        go.wait()
        return [current() == context.value, cu("cuCtxGetDevice", ctypes.byref(ctypes.c_int()))]

    results: list[Fact] = []
    thread = threading.Thread(target=lambda: results.append(elsewhere()))
    thread.start()
    ready.wait()
    fact("destroy", cu("cuCtxDestroy_v2", context))
    fact("popped from the destroying thread", current() is None)
    go.set()
    thread.join()
    fact("on a thread that has it current", results[0])
    fact("its memory", attribute(CONTEXT, memory, ctypes.c_void_p)[0])
    its_id = id_of(context)[0]
    fact("its id", its_id)
    fact("has an id", its_id == 0)
    fact("destroy again", cu("cuCtxDestroy_v2", context))


def destroyed(gpu: int) -> ctypes.c_void_p:
    context = created(gpu)
    must(cu("cuCtxDestroy_v2", context))
    return context


@check(may_die=True)
def dead_context_thread_ends() -> None:
    init()
    context = destroyed(0)
    on_thread(lambda: fact("set", set_current(context)))


@check(may_die=True)
def dead_context_replaced() -> None:
    init()
    context, living = destroyed(0), retain(0)
    fact("set", set_current(context))
    fact("replace", set_current(living))


@check(may_die=True)
def dead_context_unset() -> None:
    init()
    fact("set", set_current(destroyed(0)))
    fact("unset", set_current(None))
    os._exit(0)


@check(may_die=True)
def dead_context_pushed() -> None:
    init()
    fact("push", push(destroyed(0)))
    fact("pop", pop())
    os._exit(0)


@check(may_die=True)
def dead_context_pushed_thread_ends() -> None:
    init()
    context = destroyed(0)
    on_thread(lambda: fact("push", push(context)))
    os._exit(0)


def say_of_the_current(context: ctypes.c_void_p, memory: int) -> None:
    fact("stays current", current() == context.value)
    fact("cuCtxGetDevice", [cu("cuCtxGetDevice", ctypes.byref(ctypes.c_int())), current_device()])
    fact("id of the current", id_of(handle())[0])
    fact("range of living memory", range_of(memory))
    fact("its attributes", attribute(ORDINAL, memory, ctypes.c_int))
    fact("cuCtxSynchronize", cu("cuCtxSynchronize"))
    fact("cuMemAlloc", cu("cuMemAlloc_v2", ctypes.byref(address()), ctypes.c_size_t(MIB)))


@check(may_die=True)
def dead_context_used() -> None:
    init()
    memory, context = alloc(retain(0)), destroyed(0)
    fact("set", set_current(context))
    say_of_the_current(context, memory)
    os._exit(0)


@check(gpus=2, may_die=True)
def dead_primary_context_used() -> None:
    init()
    context, memory = retain(0), alloc(retain(1))
    must(cu("cuDevicePrimaryCtxReset_v2", 0))
    fact("set", set_current(context))
    say_of_the_current(context, memory)
    os._exit(0)


@check(may_die=True)
def dead_context_lives_again() -> None:
    """A thread makes a dead handle current; the next context gets it; the thread ends."""
    init()
    context = destroyed(0)

    def set_and_create() -> None:
        fact("set", set_current(context))
        other = on_thread(lambda: created(0))
        fact("the handle comes again", other.value == context.value)
        fact("id of the current", id_of(handle())[0])

    on_thread(set_and_create)
    fact("thread ended", True)
    os._exit(0)


@check(may_die=True)
def dead_primary_context_set() -> None:
    init()
    context = retain(0)
    must(cu("cuDevicePrimaryCtxReset_v2", 0))
    on_thread(lambda: fact("set", set_current(context)))
    fact("thread ended", True)
    os._exit(0)


@check(may_die=True)
def dead_primary_context_unset() -> None:
    init()
    context = retain(0)
    must(cu("cuDevicePrimaryCtxReset_v2", 0))
    fact("set", set_current(context))
    fact("unset", set_current(None))
    os._exit(0)


@check(may_die=True)
def nonsense_handle() -> None:
    init()
    retain(0)
    nonsense = ctypes.create_string_buffer(4096)
    fact("set a handle that never was", set_current(handle(ctypes.addressof(nonsense))))


@check()
def fork_child() -> None:
    init()
    set_current(retain(0))
    if os.fork() == 0:
        fact("cuCtxGetCurrent", cu("cuCtxGetCurrent", ctypes.byref(handle())))
        fact("cuInit", cu("cuInit", 0))
        os._exit(0)
    os.wait()


def cudart() -> ctypes.CDLL | None:
    """Load the runtime: CTXFIX_CUDART names the file where the loader does not find one."""
    for name in (os.environ.get("CTXFIX_CUDART"), "libcudart.so.13", "libcudart.so.12"):
        try:
            if name:
                return ctypes.CDLL(name)
        except OSError:
            continue
    fact("skipped", "no CUDA runtime found (CTXFIX_CUDART=path names one)")
    return None


@check()
def runtime() -> None:
    if (cuda := cudart()) is None:
        return
    gpu, memory, count = ctypes.c_int(-1), handle(), ctypes.c_int()

    def use() -> Fact:
        cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(MIB))
        return current_device()

    fact("cudaGetDeviceCount", cuda.cudaGetDeviceCount(ctypes.byref(count)))
    init()
    fact("active after counting", primary_active(0))
    fact(
        "cudaGetDevice on a bare thread",
        on_thread(lambda: [cuda.cudaGetDevice(ctypes.byref(gpu)), gpu.value, current_device()]),
    )
    fact("first use on a bare thread", on_thread(use))

    def choose() -> Fact:
        must(cuda.cudaSetDevice(0))
        return current_device()

    fact("cudaSetDevice", on_thread(choose))
    answers = (ctypes.c_int * 32)()

    def ask(about: ctypes.c_void_p) -> Fact:
        return [cuda.cudaPointerGetAttributes(answers, about), current_device()]

    fact("cudaPointerGetAttributes on a bare thread", on_thread(lambda: ask(memory)))
    fact("its type and device", answers[:2])
    fact("cudaPointerGetAttributes of the heap", on_thread(lambda: ask(handle(ctypes.addressof(answers)))))
    fact("type and device of the heap", answers[:2])


@check(gpus=2)
def runtime_two_gpus() -> None:
    if (cuda := cudart()) is None:
        return
    init()
    first, second = retain(0), retain(1)
    memory = handle()

    def choose(gpu: int) -> Fact:
        must(cuda.cudaSetDevice(gpu))
        return current_device()

    def use() -> Fact:
        cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(MIB))
        return current_device()

    fact("cudaSetDevice(1)", on_thread(lambda: choose(1)))
    fact("use keeps the current context", under(second, use))

    def replaced() -> Fact:
        push(first), push(second)
        seen = [choose(0)]
        while pop() == 0:
            seen.append(current_device())
        return seen

    fact("cudaSetDevice replaces the top", on_thread(replaced))

    def popped() -> Fact:
        choose(1)
        set_current(None)
        return use()

    fact("use after cudaSetDevice(1) and a pop", on_thread(popped))

    def asked() -> Fact:
        choose(1)
        set_current(None)
        gpu = ctypes.c_int(-1)
        return [cuda.cudaGetDevice(ctypes.byref(gpu)), gpu.value, current_device()]

    fact("cudaGetDevice after cudaSetDevice(1) and a pop", on_thread(asked))
    target = alloc(second)

    def copy() -> Fact:
        host = ctypes.create_string_buffer(16)
        return [cuda.cudaMemcpy(host, handle(target), ctypes.c_size_t(16), 4), current_device()]

    fact("cudaMemcpy from GPU 1 on a bare thread", on_thread(copy))
    ipc = ctypes.create_string_buffer(64)
    fact(
        "cudaIpcGetMemHandle for GPU 1 on a bare thread",
        on_thread(lambda: [cuda.cudaIpcGetMemHandle(ipc, handle(target)), current_device()]),
    )


@check()
def costs() -> None:
    """Microseconds a call, through ctypes without letting the GIL go, as ctxfix calls them."""
    init()
    owner = retain(0)
    memory, word = alloc(owner), address()
    set_current(owner)
    library, out = ctypes.PyDLL("libcuda.so.1"), ctypes.byref(word)
    library.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    library.cuCtxGetId.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    for name, arguments in (
        ("cuPointerGetAttribute", (out, BUFFER_ID, memory)),
        ("cuCtxGetId", (owner.value, out)),
        ("cuCtxGetCurrent", (out,)),
        ("cuCtxSetCurrent", (owner.value,)),
    ):
        function = getattr(library, name)
        best = min(timeit.repeat(lambda f=function, a=arguments: f(*a), number=10_000, repeat=3))
        fact(name, round(best * 100, 2))


# ---- running them ----------------------------------------------------------------------------------


def run_one(name: str) -> dict[str, Any]:
    """Run a check in a process of its own; whatever happens to it, return what it said."""
    command = [sys.executable, os.path.abspath(__file__), "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        out, error = done.stdout, None
        if done.returncode and not CHECKS[name].may_die:
            error = f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        error = f"no end after {TIMEOUT} s"
    facts = dict(json.loads(line) for line in out.splitlines())
    if not error or "exit code" in error:
        facts["exit code"] = done.returncode
    pinned = {} if "skipped" in facts else PINNED.get(name, {})
    differs = {k: {"expected": v, "is": facts.get(k, "not said")} for k, v in pinned.items()}
    differs = {k: v for k, v in differs.items() if v["is"] != v["expected"]}
    return {
        "facts": facts,
        **({"differs": differs} if differs else {}),
        **({"error": error} if error else {}),
    }


def describe() -> dict[str, Any]:
    """Return what the driver is; raises OSError or RuntimeError where there is none to use."""
    init()
    version, count = ctypes.c_int(), ctypes.c_int()
    must(cu("cuDriverGetVersion", ctypes.byref(version)))
    must(cu("cuDeviceGetCount", ctypes.byref(count)))
    devices = []
    for gpu in range(count.value):
        name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
        must(cu("cuDeviceGetName", name, len(name), gpu))
        must(cu("cuDeviceGetPCIBusId", bus, len(bus), gpu))
        devices.append(f"{name.value.decode()} {bus.value.decode()}")
    fake = hasattr(libcuda(), "fakecuda_calls")
    return {"driver": version.value, "fake": fake, "devices": devices}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        CHECKS[arguments[1]].run()
        return 0
    if arguments[:1] == ["--describe"]:
        try:
            print(json.dumps(describe()))
        except (OSError, RuntimeError) as error:
            print(json.dumps({"error": str(error)}))
            return 2
        return 0
    # In a process of its own too: this one stays free of CUDA, and so do the checks it starts.
    told = subprocess.run([sys.executable, os.path.abspath(__file__), "--describe"], capture_output=True, text=True)
    report = json.loads(told.stdout or json.dumps({"error": told.stderr[-300:]}))
    if "error" in report:
        print(json.dumps(report))
        return 2
    checks = report["checks"] = {}
    for name in arguments or CHECKS:
        needed = CHECKS[name].gpus
        if len(report["devices"]) < needed:
            checks[name] = {"facts": {"skipped": f"needs {needed} GPUs"}}
        else:
            checks[name] = run_one(name)
    print(json.dumps(report))
    return int(any("differs" in entry or ("error" in entry and name in PINNED) for name, entry in checks.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
