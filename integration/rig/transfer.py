# SPDX-License-Identifier: Apache-2.0
"""An ordinary NIXL program: one process moves bytes between its GPU and a GPU of another process.

    transfer.py MODE [--gpu 1] [--other-gpu 0] [--peer-gpu 1] [--backend LIBFABRIC] ...

MODE says what the application does around the transfer: which thread posts it, with which context, what it
calls its memory. At the end one line of JSON tells how it went; the exit status is 0 if the transfer
completed and the bytes are right.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import multiprocessing
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

# ---- CUDA, by its driver API ---------------------------------------------------------------------


@cache
def cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    if error := getattr(cuda(), name)(*args):
        raise RuntimeError(f"{name} failed with CUDA error {error}")


@cache
def primary_context(gpu: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
    return context


def make_current(gpu: int) -> None:
    call("cuCtxSetCurrent", primary_context(gpu))


def context_stack() -> list[int]:
    """Return the devices of this thread's contexts, the current one last."""
    contexts: list[ctypes.c_void_p] = []
    devices: list[int] = []
    device, context = ctypes.c_int(), ctypes.c_void_p()
    while cuda().cuCtxGetDevice(ctypes.byref(device)) == 0:
        devices.append(device.value)
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
        contexts.append(ctypes.c_void_p(context.value))
    for context in reversed(contexts):
        call("cuCtxPushCurrent_v2", context)
    return devices[::-1]


class GpuMemory:
    """A buffer in one GPU's memory."""

    kind = "VRAM"

    def __init__(self, gpu: int, size: int, vmm: bool = False) -> None:
        self.gpu, self.size = gpu, size
        address = ctypes.c_ulonglong()
        call("cuCtxPushCurrent_v2", primary_context(gpu))
        if vmm:
            self._map(address)
        else:
            call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        call("cuCtxPopCurrent_v2", None)
        self.address = address.value

    def _map(self, address: ctypes.c_ulonglong) -> None:
        """Allocate as torch's expandable segments do; such memory belongs to no context."""
        location = (1, self.gpu)  # CU_MEM_LOCATION_TYPE_DEVICE
        prop = (ctypes.c_int * 16)(1, 0, *location)  # CUmemAllocationProp: pinned memory on that device
        access = (ctypes.c_int * 3)(*location, 3)  # read and write
        granularity, handle = ctypes.c_size_t(), ctypes.c_ulonglong()
        call("cuMemGetAllocationGranularity", ctypes.byref(granularity), prop, 0)
        size = ctypes.c_size_t(-(-self.size // granularity.value) * granularity.value)
        zero = ctypes.c_ulonglong(0)
        call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
        call("cuMemCreate", ctypes.byref(handle), size, prop, zero)
        call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
        call("cuMemSetAccess", address, size, access, ctypes.c_size_t(1))

    def fill(self, data: bytes) -> None:
        call("cuCtxPushCurrent_v2", primary_context(self.gpu))
        call("cuMemcpyHtoD_v2", ctypes.c_ulonglong(self.address), data, ctypes.c_size_t(len(data)))
        call("cuCtxPopCurrent_v2", None)

    def read(self) -> bytes:
        data = ctypes.create_string_buffer(self.size)
        call("cuCtxPushCurrent_v2", primary_context(self.gpu))
        call("cuMemcpyDtoH_v2", data, ctypes.c_ulonglong(self.address), ctypes.c_size_t(self.size))
        call("cuCtxPopCurrent_v2", None)
        return data.raw


class HostMemory:
    """A buffer in host memory: a program that uses only these never touches CUDA."""

    kind = "DRAM"

    def __init__(self, gpu: int, size: int, vmm: bool = False) -> None:
        self.gpu, self.size = 0, size
        self._buffer = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self._buffer)

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self._buffer, data, len(data))

    def read(self) -> bytes:
        return self._buffer.raw


# ---- which thread makes the transfer -------------------------------------------------------------

Work = Callable[[], None]
MakeBuffers = Callable[[], list[Any]]


def on_main(work: Work) -> None:
    work()


def on_thread(work: Work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def on_timer(work: Work) -> None:
    timer = threading.Timer(0, work)
    timer.start()
    timer.join()


def on_executor(work: Work) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


class EarlyThread:
    """A thread that runs before the program has set up anything, and is handed the work later."""

    def __init__(self) -> None:
        self._todo: queue.Queue[Work] = queue.Queue()
        self._done: queue.Queue[None] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._todo.get()()
            self._done.put(None)

    def __call__(self, work: Work) -> None:
        self._todo.put(work)
        self._done.get()


@dataclass(frozen=True)
class Mode:
    """What the application does; the default is the common case, a bare thread."""

    text: str
    run: Callable[[Work], None] | type[EarlyThread] = on_thread
    operation: str = "WRITE"
    gpus: tuple[str, ...] = ("gpu",)  # where its buffers are; "other" is --other-gpu
    one_post: bool = False  # all buffers in one post, instead of one post each
    current: str | None = None  # which GPU's context the posting thread makes current
    dev_id: str | None = None  # which GPU the application tells NIXL, if not the memory's
    prepped: bool = False
    vmm: bool = False
    memory: type[GpuMemory] | type[HostMemory] = GpuMemory


MODES = {
    "main": Mode("main thread, its GPU's context current", on_main),
    "thread": Mode("bare threading.Thread"),
    "timer": Mode("threading.Timer", on_timer),
    "executor": Mode("ThreadPoolExecutor", on_executor),
    "preexisting-thread": Mode("thread started before CUDA was set up", EarlyThread),
    "wrong-context": Mode("thread that made another GPU current", current="other"),
    "wrong-devid": Mode("devId that is not the memory's", dev_id="other"),
    "two-gpus": Mode("buffers on two GPUs, a thread for each", gpus=("gpu", "other")),
    "mixed": Mode("one post with descriptors of two GPUs", gpus=("gpu", "other"), one_post=True),
    "read": Mode("READ from a bare thread", operation="READ"),
    "prepped": Mode("prepared descriptor lists", prepped=True),
    "vmm": Mode("memory that belongs to no context", vmm=True),
    "dram": Mode("host memory", memory=HostMemory),
}

# ---- the two processes ---------------------------------------------------------------------------


def pattern(index: int, size: int) -> bytes:
    return (bytes((i * 7 + index) % 251 for i in range(251)) * (size // 251 + 1))[:size]


def new_buffers(mode: Mode, gpus: list[int], size: int, filled: bool) -> list[Any]:
    buffers = [mode.memory(gpu, size, mode.vmm) for gpu in gpus]
    for index, buffer in enumerate(buffers):
        buffer.fill(pattern(index, size) if filled else bytes(size))
    return buffers


def all_right(buffers: list[Any]) -> bool:
    return all(buffer.read() == pattern(index, buffer.size) for index, buffer in enumerate(buffers))


def new_agent(name: str, options: argparse.Namespace) -> Any:
    api = importlib.import_module(f"{options.module}._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=[options.backend]))


def agent_on_other_gpu(name: str, options: argparse.Namespace) -> Any:
    """Make the agent on a helper thread that sits on another GPU, as some servers do."""
    made: list[Any] = []

    def make() -> None:
        make_current(options.other_gpu)
        made.append(new_agent(name, options))

    on_thread(make)
    return made[0]


def set_up(name: str, options: argparse.Namespace, gpu: int, make_buffers: MakeBuffers) -> tuple[Any, list[Any]]:
    """Make the agent and the buffers, in the order that --agent asks for; the main thread is on ``gpu`` afterwards."""
    mode = MODES[options.mode]
    agent = new_agent(name, options) if options.agent == "first" else None
    if mode.memory is GpuMemory:
        make_current(gpu)
    buffers = make_buffers()
    if agent is None:
        agent = (agent_on_other_gpu if options.agent == "on-other-gpu" else new_agent)(name, options)
    return agent, buffers


def register(agent: Any, buffers: list[Any], dev_ids: list[int]) -> Any:
    descs = [(b.address, b.size, dev, "") for b, dev in zip(buffers, dev_ids, strict=True)]
    return agent.register_memory(descs, buffers[0].kind)


def sender(peer: Connection, options: argparse.Namespace) -> dict[str, Any]:
    mode = MODES[options.mode]
    run: Callable[[Work], None] = EarlyThread() if mode.run is EarlyThread else mode.run
    gpu_of = {"gpu": options.gpu, "other": options.other_gpu}
    on_gpu = mode.memory is GpuMemory
    filled = mode.operation == "WRITE"
    gpus = [gpu_of[name] for name in mode.gpus]
    agent, buffers = set_up("sender", options, options.gpu, lambda: new_buffers(mode, gpus, options.size, filled))
    dev_ids = [gpu_of[mode.dev_id] if mode.dev_id else buffer.gpu for buffer in buffers]
    registered = register(agent, buffers, dev_ids)

    metadata, remote = peer.recv()
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name

    def transfer(indices: list[int], notification: bytes) -> str:
        kind = buffers[0].kind
        local = agent.get_xfer_descs([(buffers[i].address, options.size, dev_ids[i]) for i in indices], kind)
        target = agent.get_xfer_descs([remote[i] for i in indices], kind)
        if mode.prepped:
            mine, theirs = (
                agent.prep_xfer_dlist("NIXL_INIT_AGENT", local),
                agent.prep_xfer_dlist(name, target),
            )
            every = list(range(len(indices)))
            handle = agent.make_prepped_xfer(mode.operation, mine, every, theirs, every, notification)
        else:
            handle = agent.initialize_xfer(mode.operation, local, target, name, notification)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0005)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        return state

    posts: list[dict[str, Any]] = []

    def post(indices: list[int], notification: bytes) -> None:
        if mode.current:
            make_current(gpu_of[mode.current])
        before = context_stack() if on_gpu else []
        try:
            state = transfer(indices, notification)
        except Exception as error:  # told in the result
            state = f"{type(error).__name__}: {error}"
        after = context_stack() if on_gpu else []
        thread = threading.current_thread().name
        posts.append({"thread": thread, "state": state, "before": before, "after": after})

    everything = list(range(len(buffers)))
    batches = [everything] if mode.one_post else [[index] for index in everything]
    for round_number in range(options.transfers):
        for batch in batches:
            notification = f"{round_number}.{batch[0]}".encode()
            run(lambda batch=batch, notification=notification: post(batch, notification))
            peer.send(notification if posts[-1]["state"] == "DONE" else None)
            peer.recv()
    peer.send("end")
    written = peer.recv()
    data_ok = written and all_right(buffers)
    agent.deregister_memory(registered)
    return {"posts": posts, "data_ok": data_ok}


def receiver(peer: Connection, options: argparse.Namespace) -> dict[str, Any]:
    mode = MODES[options.mode]
    filled = mode.operation == "READ"
    gpus = [options.peer_gpu] * len(mode.gpus)
    agent, buffers = set_up(
        "receiver", options, options.peer_gpu, lambda: new_buffers(mode, gpus, options.size, filled)
    )
    registered = register(agent, buffers, [buffer.gpu for buffer in buffers])
    peer.send((agent.get_agent_metadata(), [(b.address, b.size, b.gpu) for b in buffers]))
    while (notification := peer.recv()) != "end":
        while notification and not agent.check_remote_xfer_done("sender", notification):
            time.sleep(0.0005)
        peer.send("next")
    peer.send(all_right(buffers))
    agent.deregister_memory(registered)
    return {}


def child(role: str, peer: Connection, parent: Connection, options: argparse.Namespace) -> None:
    try:
        result = {"sender": sender, "receiver": receiver}[role](peer, options)
    except EOFError:
        result = {"error": f"the {role} lost its peer"}
    except Exception:  # told in the result
        result = {"error": f"{role}: {traceback.format_exc()}"}
    parent.send((role, result))


def run_both(options: argparse.Namespace) -> dict[str, Any]:
    """Start the two processes and gather what they say; whoever is not done by the deadline is killed."""
    processes = multiprocessing.get_context(options.start_method)
    left, right = processes.Pipe()
    roles = {}
    for role, end in (("receiver", left), ("sender", right)):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=child, args=(role, end, theirs, options), daemon=True)
        process.start()
        theirs.close()
        end.close()  # so that one's death ends the other's waiting
        roles[ours] = (role, process)
    results: dict[str, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + options.deadline
    open_ends = list(roles)
    while open_ends:
        ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(roles[end][0] for end in open_ends)
            errors.append(f"killed after {options.deadline} s: {late}")
            break
        for end in ready:
            open_ends.remove(end)
            try:
                role, results[role] = end.recv()
            except EOFError:
                role, process = roles[end]
                process.join(5)
                errors.append(f"the {role} died with exit code {process.exitcode}")
    for _, process in roles.values():
        process.join(max(0.0, min(10.0, deadline - time.monotonic())) if not errors else 0)
        if process.is_alive():
            process.kill()
            process.join()
            if not errors:
                errors.append("a process did not end after its work")
    errors += [result["error"] for result in results.values() if "error" in result]
    return {**results.get("sender", {}), "error": "; ".join(errors) or None}


def main(arguments: list[str] | None = None) -> int:
    modes = "\n".join(f"  {name:20}{mode.text}" for name, mode in MODES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nmodes:\n{modes}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=MODES, metavar="MODE")
    parser.add_argument("--gpu", type=int, default=1, help="the sender's GPU")
    parser.add_argument("--other-gpu", type=int, default=0, help="the GPU that the mode confuses it with")
    parser.add_argument("--peer-gpu", type=int, default=1, help="the receiver's GPU")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes per buffer")
    parser.add_argument("--transfers", type=int, default=1, help="how often to do it")
    parser.add_argument(
        "--agent",
        choices=("last", "first", "on-other-gpu"),
        default="last",
        help="when the agent is made: after the memory, before any CUDA, or on a thread that sits on --other-gpu",
    )
    parser.add_argument("--backend", default="LIBFABRIC")
    parser.add_argument("--module", default="nixl_cu12")
    parser.add_argument("--start-method", choices=("spawn", "forkserver"), default="spawn")
    parser.add_argument("--deadline", type=float, default=40, help="seconds until both are killed")
    options = parser.parse_args(arguments)

    result = run_both(options)
    posts = result.get("posts", [])
    states = [post["state"] for post in posts]
    summary = {
        "mode": options.mode,
        "state": next((s for s in states if s != "DONE"), "DONE") if states else "NONE",
        "data_ok": result.get("data_ok", False),
        "context_before": posts[0]["before"][-1] if posts and posts[0]["before"] else None,
        "context_after": posts[0]["after"][-1] if posts and posts[0]["after"] else None,
        "context_kept": all(post["before"] == post["after"] for post in posts),
        "posts": posts,
        "error": result["error"],
    }
    print(json.dumps(summary), flush=True)
    return 0 if summary["state"] == "DONE" and summary["data_ok"] and not result["error"] else 1


if __name__ == "__main__":
    sys.exit(main())
