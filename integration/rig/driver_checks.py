# SPDX-License-Identifier: Apache-2.0
"""What a CUDA driver does in the corners that ctxfix stands on, found out by calling it.

    python3 driver_checks.py            every check, one JSON object
    python3 driver_checks.py NAME ...   only these

It speaks to libcuda.so.1 through ctypes alone, and runs against a real driver as against the rig's fake one.
Each check is a process of its own that prints each fact as soon as it is known: whatever crashes, the rest is
told. A fact that ctxfix relies on is pinned (PINNED); the others are only reported. Exit status: 0 when all
pinned facts are as expected, 1 when one is not, 2 when there is no usable driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

Fact = Any
NOT_INITIALIZED, INVALID_CONTEXT, NOT_FOUND = 3, 201, 500
CONTEXT, MEMORY_TYPE, SYNC_MEMOPS, BUFFER_ID, ORDINAL, LEGACY_IPC = 1, 2, 6, 7, 9, 10
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
        "set on empty": 0,
        "push push": 1,
        "set replaces the top": [0, 0, None],
        "set(NULL) pops": [1, 0, None],
        "set(NULL) on empty": 0,
        "pop on empty": INVALID_CONTEXT,
    },
    "address_range": {"no context": INVALID_CONTEXT, "owner's context": 0, "base and size": True},
    "address_range_two_gpus": {"other GPU's context": NOT_FOUND, "owner's context": 0},
    "attributes": {
        "bare thread": [0, "owner", 0, 2],
        "interior address": [0, "owner", 0, 2],
        "unknown address": 1,
        "unknown address, plural call": 0,
        "freed address": 1,
    },
    "attributes_two_gpus": {"under the other GPU": [0, "owner", 1, 2], "bare thread": [0, "owner", 1, 2]},
    "buffer_id": {"changes at the same address": True},
    "sync_memops": {"default": 0, "set from a bare thread": 0, "then": 1, "at an interior address": 1},
    "vmm": {"context": [0, None], "ordinal": [0, 0], "legacy IPC": [0, 0], "bare thread": [0, None]},
    "primary_state": {"at first": 0, "retained": 1, "released": 0},
    "primary_reset": {"active after": 0, "its memory": 1},
    "created_destroyed": {"has an id": False, "its memory": 1},
    # The driver accepts a dead context, and the process dies of it later.
    "dead_context_thread_ends": {"set": 0, "exit code": -6},
    "dead_context_replaced": {"set": 0, "exit code": -11},
    "fork_child": {"cuCtxGetCurrent": NOT_INITIALIZED, "cuInit": NOT_INITIALIZED},
    "runtime": {
        "cudaGetDevice on a bare thread": [0, 0, None],
        "first use on a bare thread": 0,
        "cudaSetDevice": 0,
    },
    "runtime_two_gpus": {"cudaSetDevice(1)": 1, "use keeps the current context": 1},
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

CHECKS: dict[str, tuple[Callable[[], None], int]] = {}


def check(gpus: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = (function, gpus)
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

    def switch_on() -> int | str:
        return cu("cuPointerSetAttribute", ctypes.byref(ctypes.c_uint(1)), SYNC_MEMOPS, address(memory))

    fact("default", attribute(SYNC_MEMOPS, memory, ctypes.c_uint)[1])
    fact("set from a bare thread", on_thread(switch_on))
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
    one = ctypes.byref(ctypes.c_uint(1))
    fact("set SYNC_MEMOPS", cu("cuPointerSetAttribute", one, SYNC_MEMOPS, address(memory)))
    fact("SYNC_MEMOPS then", attribute(SYNC_MEMOPS, memory, ctypes.c_uint))
    fact("IPC handle", ipc_handle(memory))
    must(cu("cuMemUnmap", address(memory), ctypes.c_size_t(size)))
    fact("unmapped", attribute(CONTEXT, memory, ctypes.c_void_p)[0])


@check(gpus=2)
def vmm_two_gpus() -> None:
    init()
    other, owner = retain(0), retain(1)
    set_current(owner)
    memory, _ = map_vmm(1)
    fact("ordinal from a bare thread", on_thread(lambda: attribute(ORDINAL, memory, ctypes.c_int)))
    fact("range under its GPU", range_of(memory))
    fact("range under the other GPU", under(other, lambda: range_of(memory)))


@check()
def other_memory() -> None:
    """What the rest of CUDA's kinds of memory say about their owner."""
    init()
    owner = retain(0)
    set_current(owner)
    size, memory = ctypes.c_size_t(MIB), address()

    def say(kind: str, result: int | str) -> None:
        fact(kind, result if result else whose(memory.value, owner))
        if not result:
            fact(f"{kind}: range", range_of(memory.value))
            fact(f"{kind}: legacy IPC", attribute(LEGACY_IPC, memory.value, ctypes.c_int))

    say("managed", cu("cuMemAllocManaged", ctypes.byref(memory), size, 1))
    say("pinned host", cu("cuMemHostAlloc", ctypes.byref(memory), size, 0))
    say("stream-ordered", cu("cuMemAllocAsync", ctypes.byref(memory), size, handle()))


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
    fact("its id", cu("cuCtxGetId", context, ctypes.byref(address())))
    again = retain(0)
    fact("active again", primary_active(0))
    fact("same handle again", again.value == context.value)
    fact("its id after retaining again", cu("cuCtxGetId", context, ctypes.byref(address())))


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
    its_id = cu("cuCtxGetId", context, ctypes.byref(address()))
    fact("its id", its_id)
    fact("has an id", its_id == 0)
    fact("destroy again", cu("cuCtxDestroy_v2", context))


def destroyed(gpu: int) -> ctypes.c_void_p:
    context = created(gpu)
    must(cu("cuCtxDestroy_v2", context))
    return context


@check()
def dead_context_thread_ends() -> None:
    init()
    context = destroyed(0)
    on_thread(lambda: fact("set", set_current(context)))


@check()
def dead_context_replaced() -> None:
    init()
    context, living = destroyed(0), retain(0)
    fact("set", set_current(context))
    fact("replace", set_current(living))


@check()
def dead_context_pushed() -> None:
    init()
    fact("push", push(destroyed(0)))
    os._exit(0)  # nothing more: the process may not survive its own end


@check()
def dead_primary_context_set() -> None:
    init()
    context = retain(0)
    must(cu("cuDevicePrimaryCtxReset_v2", 0))
    on_thread(lambda: fact("set", set_current(context)))


@check()
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
    attributes_ = ctypes.create_string_buffer(64)

    def ask() -> Fact:
        return [cuda.cudaPointerGetAttributes(attributes_, memory), current_device()]

    if hasattr(cuda, "cudaPointerGetAttributes"):
        fact("cudaPointerGetAttributes on a bare thread", on_thread(ask))


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


# ---- running them ----------------------------------------------------------------------------------


def run_one(name: str) -> dict[str, Any]:
    """Run a check in a process of its own; whatever happens to it, return what it said."""
    command = [sys.executable, os.path.abspath(__file__), "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        out, error = done.stdout, None
        if done.returncode and "exit code" not in PINNED.get(name, {}):
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
        CHECKS[arguments[1]][0]()
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
        needed = CHECKS[name][1]
        if len(report["devices"]) < needed:
            checks[name] = {"facts": {"skipped": f"needs {needed} GPUs"}}
        else:
            checks[name] = run_one(name)
    print(json.dumps(report))
    return int(any("differs" in entry or ("error" in entry and name in PINNED) for name, entry in checks.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
