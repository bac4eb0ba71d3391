# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV cache goes from prefill to decode, on one node: an ordinary program around SGLang's own classes.

Each rank is a process of its own, prefill and decode, with its KV cache on its GPU. Requests pass as in a server: the
decode rank learns of the prefill rank from the bootstrap server, registers with it and names the slots; the prefill
rank sends. First requests arrive at random (--rate, --seconds), then one follows another (--requests). At the end one
line of JSON tells of each rank which threads it had, how long each request and each of its NIXL transfers took, and
which bytes are wrong; the exit status is 0 if none are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

AUX_SLOTS, AUX_BYTES = 64, 64
FIRST_ROOM = 100


def arrivals(options: argparse.Namespace) -> list[list[float | None]]:
    """When the requests of each phase come, in seconds from its start; None: when the one before is done."""
    generator, phases, at = random.Random(options.seed), [], 0.0
    while options.rate and (at := at + generator.expovariate(options.rate)) < options.seconds:
        phases.append(at)
    return [phases, [None] * options.requests]


def slots_of(request: int, tokens: int, gaps: int, runs: int, reverse: bool) -> Any:
    """The slots of a request's tokens, in several runs, as an allocator that has been in use hands them out.

    Decode has one run more than prefill, whose ends are others: n and n + 1 runs make 2n pieces.
    """
    import numpy

    parts = numpy.array_split(numpy.arange(tokens, dtype=numpy.int32), runs)
    parts = [part + request * (tokens + gaps + 1) + index for index, part in enumerate(parts)]
    return numpy.concatenate(parts[::-1] if reverse else parts)


class Rank:
    """One process: its memory, its KV manager, the requests it serves."""

    def __init__(self, place: Any, gpu: int, options: argparse.Namespace) -> None:
        import managers
        import memory

        self.place, self.options = place, options
        self.prefill = place.mode == "prefill"
        self.schedule = arrivals(options)
        count = sum(map(len, self.schedule))
        slots = count * (options.tokens + options.runs + 1)
        self.memory = memory.KINDS[options.memory](gpu, options.layers, slots, filled=self.prefill)
        prefill = [slots_of(i, options.tokens, options.runs, options.runs, reverse=False) for i in range(count)]
        decode = [slots_of(i, options.tokens, options.runs, options.runs + 1, reverse=True) for i in range(count)]
        self.slots, sent = prefill if self.prefill else decode, prefill
        self.expected = [] if self.prefill else self.memory.expected(sent)
        self.aux = ctypes.create_string_buffer(
            b"m" * (AUX_SLOTS * AUX_BYTES) if self.prefill else b"", AUX_SLOTS * AUX_BYTES
        )
        if options.set_device:
            set_device_in_workers(managers.nixl.NixlKVManager)
        buffers = managers.Buffers(
            self.memory.addresses, slots, memory.SLOT_BYTES, ctypes.addressof(self.aux), AUX_SLOTS, AUX_BYTES
        )
        self.manager = managers.manager(place, gpu, buffers)
        self.transfers = Transfers(self.manager.agent)
        self.early: list[int] = []  # requests whose bytes had not all arrived when SGLang called them done

    def run(self, together: Callable[[], None]) -> list[list[float]]:
        """Serve all phases; the time in ms that each request's transfer took, as its prefill rank sees it."""
        times, first = [], 0
        for offsets in self.schedule:
            together()
            times.append(self.serve(offsets, first))
            first += len(offsets)
        together()
        return times

    def serve(self, offsets: list[float | None], first: int) -> list[float]:
        start = time.monotonic()
        waiting, active, times = list(enumerate(offsets, first)), [], []
        deadline = start + self.options.deadline
        while waiting or active:
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"requests {[request for request, *_ in active]} are not done")
            while waiting and (not active if waiting[0][1] is None else start + waiting[0][1] <= now):
                active.append(self.begin(waiting.pop(0)[0]))
            for one in list(active):
                if one.advance():
                    active.remove(one)
                    times.append(one.milliseconds)
                    if not self.prefill:
                        self.check(one.request)
            time.sleep(self.options.poll)
        return times

    def begin(self, request: int) -> Request:
        import managers

        kind = managers.Sending if self.prefill else managers.Receiving
        aux = request % AUX_SLOTS
        end = kind(self.manager, self.place, FIRST_ROOM + request, self.slots[request], aux)
        return Request(request, end, None if self.prefill else lambda: self.aux[aux * AUX_BYTES] == b"m")

    def check(self, request: int) -> None:
        if self.memory.checksum(self.slots[request]) != self.expected[request]:
            self.early.append(request)

    def wrong(self) -> list[int]:
        """The requests whose bytes are still not right."""
        return [r for r in self.early if self.memory.checksum(self.slots[r]) != self.expected[r]]


class Transfers:
    """Times the NIXL transfers of one agent, on the thread that makes them: how much of a request they are.

    Each is [pieces, ms to make it, ms from its post to the post's return, ms from its post to DONE seen].
    """

    def __init__(self, agent: Any) -> None:
        self.finished: list[list[float]] = []
        self._open: dict[int, list[float]] = {}  # by NIXL's handle: pieces, ms, when it was posted, ms
        self._agent = agent
        for make in ("initialize_xfer", "make_prepped_xfer"):
            setattr(agent, make, self._timed(getattr(agent, make)))
        self._transfer, self._state = agent.transfer, agent.check_xfer_state
        agent.transfer, agent.check_xfer_state = self.transfer, self.check_xfer_state

    def _timed(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def timed(operation: str, local: Any, second: Any, *more: Any, **others: Any) -> Any:
            since = time.perf_counter()
            handle = make(operation, local, second, *more, **others)
            took = (time.perf_counter() - since) * 1e3
            pieces = local.descCount() if hasattr(local, "descCount") else len(second)
            self._open[handle._handle] = [pieces, took]
            return handle

        return timed

    def transfer(self, handle: Any, *more: Any, **others: Any) -> Any:
        since = time.perf_counter()
        state = self._transfer(handle, *more, **others)
        self._open[handle._handle] += [since, (time.perf_counter() - since) * 1e3]
        return state

    def check_xfer_state(self, handle: Any) -> Any:
        state = self._state(handle)
        if state == "DONE" and (one := self._open.pop(handle._handle, None)):
            pieces, made, since, posted = one
            self.finished.append([pieces, made, posted, (time.perf_counter() - since) * 1e3])
        return state


class Request:
    """A request on its way through one rank."""

    def __init__(self, request: int, end: Any, has_metadata: Callable[[], bool] | None) -> None:
        self.request, self._end, self._has_metadata = request, end, has_metadata
        self._since = time.perf_counter() if has_metadata else None
        self.milliseconds = 0.0

    def advance(self) -> bool:
        """Ask SGLang how it stands; whether the request is done."""
        if self._since is None:  # prefill, waiting for its decode rank
            if self._end.bootstrapped:
                self._since = time.perf_counter()
                self._end.send()
            return False
        if not self._end.done:
            return False
        # SGLang's scheduler too waits for the metadata: small host memory is reported as sent before it has arrived.
        if self._has_metadata is not None and not self._has_metadata():
            return False
        self.milliseconds = (time.perf_counter() - self._since) * 1e3
        return True


def set_device_in_workers(manager: Any) -> None:
    """The line that the article adds at the top of transfer_worker."""
    import torch

    original = manager.transfer_worker

    def transfer_worker(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.set_device(self.kv_args.gpu_id)
        original(self, *args, **kwargs)

    manager.transfer_worker = transfer_worker


# ---- the processes ---------------------------------------------------------------------------------------------------


def threads() -> dict[int, str]:
    """This process's Python threads, by the number the system gives them: the function each began in, else its name."""
    names = {}
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None)
        names[thread.native_id or 0] = getattr(target, "__name__", thread.name)
    return names


def counted() -> dict[str, Any]:
    """What a library that watches the transfers has counted in this process, if there is one."""
    watcher = sys.modules.get("ctxfix")
    if watcher is None:
        return {}
    native = sys.modules.get("ctxfix.native")
    available = native is not None and native.available()
    return {"stats": watcher.stats(), "native": native.counters() if available else None}


def used_mib() -> list[int]:
    """Memory in use on each GPU, by all processes; empty where there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetMemoryInfo(handle).used >> 20 for handle in handles]
    except Exception:  # not installed, or no driver
        return []


def serve_bootstrap(port: int, peer: Connection) -> None:
    import managers

    managers.bootstrap_server(port)
    managers.wait_for(lambda: reachable(port), "the bootstrap server", poll=0.01)
    peer.send(("bootstrap", {}))


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serve_rank(place: Any, gpu: int, options: argparse.Namespace, barrier: Any, result: dict[str, Any]) -> None:
    import managers
    import memory

    rank = Rank(place, gpu, options)
    result.update(sglang=managers.sglang.__version__, used_mib_idle=used_mib())
    result["milliseconds"] = rank.run(lambda: barrier.wait(options.deadline))
    result.update(used_mib_last=used_mib(), contexts=memory.devices_with_contexts(), threads=threads())
    result.update(early=rank.early, wrong=rank.wrong(), counted=counted(), transfers=rank.transfers.finished)


def child(mode: str, rank: int, port: int, peer: Connection, barrier: Any, options: argparse.Namespace) -> None:
    name = f"{mode}-{rank}"
    if options.logs:
        log = os.open(os.path.join(options.logs, f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)  # libfabric writes there
    try:
        if mode == "bootstrap":
            serve_bootstrap(port, peer)
        else:
            import managers

            gpu = (options.gpus if mode == "prefill" else options.decode_gpus)[rank]
            result: dict[str, Any] = {"pid": os.getpid(), "gpu": gpu}
            serve_rank(managers.Place(mode, rank, options.tp, port), gpu, options, barrier, result)
            peer.send((name, result))
    except Exception:  # told in the result
        barrier.abort()
        peer.send((name, {"pid": os.getpid(), "error": traceback.format_exc()}))
    peer.recv()  # its memory and its agent live on until all are done
    if options.logs:
        ctypes.CDLL(None).exit(0)  # lets a preloaded library write its counts; SGLang's threads never end by themselves
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """The ranks' processes and the bootstrap server's. Whoever is not done by the deadline is killed."""

    def __init__(self, options: argparse.Namespace) -> None:
        # As in SGLang, each process imports it anew ("spawn"), or, to save time on the rig, it is imported once, in the
        # server that the ranks are forked from ("forkserver"): that goes only where importing it does not start CUDA.
        # Before Python 3.13 that server looks for modules where its environment says, and nowhere else.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self._context = multiprocessing.get_context(options.start_method)
        if options.start_method == "forkserver":
            self._context.set_forkserver_preload(["managers"])
        self._options = options
        self._deadline = time.monotonic() + options.deadline
        self._port = free_port()
        self._barrier = self._context.Barrier(2 * options.tp)
        self._children: dict[Connection, Any] = {}
        self.results: dict[str, Any] = {}

    def start(self, mode: str, rank: int) -> None:
        mine, theirs = self._context.Pipe()
        arguments = (mode, rank, self._port, theirs, self._barrier, self._options)
        process = self._context.Process(target=child, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._children[mine] = process

    def gather(self, *names: str) -> None:
        """Wait for what these processes say."""
        waiting = list(self._children)
        while missing := set(names) - self.results.keys():
            ready = wait(waiting, max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"not done after {self._options.deadline:.0f} s: {sorted(missing)}")
            for peer in ready:
                try:
                    name, result = peer.recv()
                except EOFError:
                    process = self._children[peer]
                    process.join(5)
                    raise RuntimeError(f"a process died, exit code {process.exitcode}") from None
                if result.get("error"):
                    raise RuntimeError(f"{name}: {result['error']}")
                self.results[name] = result

    def end(self) -> None:
        for peer in self._children:
            try:
                peer.send("end")
            except OSError:
                pass  # it is gone
        for process in self._children.values():
            process.join(10 if self._options.logs else 0)
            process.kill()


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    before, error = used_mib(), None
    ranks = [(mode, rank) for mode in ("prefill", "decode") for rank in range(options.tp)]
    processes = Processes(options)
    try:
        processes.start("bootstrap", 0)
        processes.gather("bootstrap")
        for mode, rank in ranks:
            processes.start(mode, rank)
        processes.gather(*(f"{mode}-{rank}" for mode, rank in ranks))
    except (RuntimeError, TimeoutError) as failure:
        error = str(failure)
    finally:
        processes.end()
    processes.results.pop("bootstrap", None)
    return {"ranks": processes.results, "error": error, "used_mib_before": before}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks of prefill, and of decode")
    parser.add_argument("--gpus", type=numbers, help="GPU of each prefill rank, 0,1,… if not given")
    parser.add_argument("--decode-gpus", type=numbers, help="GPU of each decode rank, the prefill rank's if not given")
    parser.add_argument("--memory", choices=("rig", "torch"), default="rig", help="a fake GPU's, or a real one's")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--runs", type=int, default=3, help="of neighbouring slots, in each request of prefill")
    parser.add_argument("--rate", type=float, default=0, help="requests a second, on average; 0: none arrive so")
    parser.add_argument("--seconds", type=float, default=20, help="how long they arrive")
    parser.add_argument("--seed", type=int, default=1, help="of their arrivals")
    parser.add_argument("--requests", type=int, default=2, help="that follow one another")
    parser.add_argument("--poll", type=float, default=0.0005, help="seconds between looks at a request")
    parser.add_argument("--set-device", action="store_true", help="with the article's line in transfer_worker")
    parser.add_argument("--start-method", choices=("spawn", "forkserver"), default="spawn")
    parser.add_argument("--logs", help="folder for each process's stderr")
    parser.add_argument("--deadline", type=float, default=90, help="seconds until all are killed")
    options = parser.parse_args(arguments)
    options.gpus = options.gpus or list(range(options.tp))
    options.decode_gpus = options.decode_gpus or options.gpus

    result = run_all(options)
    ranks = result["ranks"].values()
    result["data_ok"] = len(ranks) == 2 * options.tp and not any(rank["wrong"] or rank["early"] for rank in ranks)
    print(json.dumps(result), flush=True)
    return 0 if result["data_ok"] and not result["error"] else 1


if __name__ == "__main__":
    sys.exit(main())
