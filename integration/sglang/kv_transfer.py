# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV cache goes from prefill to decode, on one node: an ordinary program around SGLang's own classes.

    kv_transfer.py [--tp 2] [--layers 4] [--tokens 48] [--requests 2]

Each rank is a process of its own, prefill and decode, with its KV cache on the GPU of its rank. Requests pass as in a
server: the decode rank learns of the prefill rank from the bootstrap server, registers with it and names the slots, the
prefill rank sends. At the end one line of JSON tells of each rank which threads it had and whether the bytes are right;
the exit status is 0 if all are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

SLOT_BYTES = 1152  # of DeepSeek-V2-Lite: 512 + 64 values of bf16 a token and layer
AUX_SLOTS, AUX_BYTES = 8, 64


def cuda_runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.12")


def choose_device(gpu: int) -> None:
    """What torch.cuda.set_device does; the torch of a machine without a GPU cannot."""
    if error := cuda_runtime().cudaSetDevice(gpu):
        raise RuntimeError(f"cudaSetDevice({gpu}) failed with error {error}")


def contents(layer: int, slot: int) -> bytes:
    return (bytes((layer * 31 + slot * 7 + i) % 251 for i in range(64)) * (SLOT_BYTES // 64 + 1))[:SLOT_BYTES]


def slots_of(request: int, tokens: int, reverse: bool) -> Any:
    """The slots of a request's tokens, in three runs, as an allocator that has been in use hands them out."""
    import numpy

    start = request * (tokens + 2)
    parts = numpy.array_split(numpy.arange(start, start + tokens, dtype=numpy.int32), 3)
    gap = [part + index for index, part in enumerate(parts)]
    return numpy.concatenate(gap[::-1] if reverse else gap).astype(numpy.int32)


class Rank:
    """One process: its memory, its KV manager."""

    def __init__(self, place: Any, gpu: int, options: argparse.Namespace) -> None:
        import managers
        import torch
        from transfer import GpuMemory

        torch.version.cuda = "12.9"  # by which the package nixl chooses among its builds
        torch.cuda.set_device = choose_device
        torch.cuda.set_device(gpu)
        self.place, self.options = place, options
        slots = options.requests * (options.tokens + 2)
        self.layers = [GpuMemory(gpu, slots * SLOT_BYTES) for _ in range(options.layers)]
        for layer, memory in enumerate(self.layers):
            prefill = place.mode == "prefill"
            memory.fill(b"".join(contents(layer, s) for s in range(slots)) if prefill else bytes(memory.size))
        filled = b"m" * (AUX_SLOTS * AUX_BYTES) if place.mode == "prefill" else b""
        self.aux = ctypes.create_string_buffer(filled, AUX_SLOTS * AUX_BYTES)
        buffers = managers.Buffers(
            [memory.address for memory in self.layers],
            slots,
            SLOT_BYTES,
            ctypes.addressof(self.aux),
            AUX_SLOTS,
            AUX_BYTES,
        )
        self.manager = managers.manager(place, gpu, buffers)

    def run(self) -> None:
        import managers

        end = managers.Sending if self.place.mode == "prefill" else managers.Receiving
        for request in range(self.options.requests):
            slots = slots_of(request, self.options.tokens, reverse=self.place.mode == "decode")
            one = end(self.manager, self.place, 100 + request, slots, request % AUX_SLOTS)
            if self.place.mode == "prefill":
                managers.wait_for(lambda one=one: one.bootstrapped, "the decode rank")
                one.send()
            managers.wait_for(lambda one=one: one.done, "the end of the transfer")
            if self.place.mode == "decode":
                # SGLang's scheduler too waits for them: small host memory is reported as sent before it has arrived.
                managers.wait_for(lambda request=request: self.has_metadata(request), "the metadata")

    def has_metadata(self, request: int) -> bool:
        at = request % AUX_SLOTS * AUX_BYTES
        return self.aux.raw[at : at + AUX_BYTES] == b"m" * AUX_BYTES

    def wrong(self) -> list[str]:
        """The decode slots that do not hold what their prefill slots held."""
        found = []
        for layer, memory in enumerate(self.layers):
            data = memory.read()
            for request in range(self.options.requests):
                sources, targets = (slots_of(request, self.options.tokens, reverse) for reverse in (False, True))
                for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                    if data[target * SLOT_BYTES : (target + 1) * SLOT_BYTES] != contents(layer, source):
                        found.append(f"request {request} layer {layer} slot {target}")
        return found


def threads() -> dict[int, str]:
    """This process's Python threads, by the number the system gives them: the function each began in, else its name."""
    names = {}
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None)
        names[thread.native_id or 0] = getattr(target, "__name__", thread.name)
    return names


def serve(port: int, ready: Any) -> None:
    import managers

    managers.bootstrap_server(port)
    managers.wait_for(lambda: reachable(port), "the bootstrap server", poll=0.01)
    ready.send(("bootstrap", None))
    ready.recv()  # until the parent ends


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def child(mode: str, rank: int, port: int, peer: Connection, options: argparse.Namespace) -> None:
    name = f"{mode}-{rank}"
    result: dict[str, Any] = {"pid": os.getpid(), "gpu": options.gpus[rank]}
    try:
        if mode == "bootstrap":
            serve(port, peer)
            return
        import managers

        place = managers.Place(mode, rank, options.tp, port)
        process = Rank(place, options.gpus[rank], options)
        result["sglang"] = managers.sglang.__version__
        process.run()
        result["threads"] = threads()
        result["wrong"] = process.wrong() if mode == "decode" else []
    except Exception:  # told in the result
        result["error"] = traceback.format_exc()
    peer.send((name, result))
    peer.recv()  # its memory and its agent live on until all are done
    os._exit(0)  # SGLang's threads never end


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks and gather what they say; whoever is not done by the deadline is killed."""
    # SGLang is imported once, in the server that the ranks are forked from before there is CUDA or a thread.
    # That server looks for modules where its environment says, and nowhere else, before Python 3.13.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["managers"])
    deadline = time.monotonic() + options.deadline
    port = free_port()
    peers: dict[Connection, Any] = {}
    results: dict[str, Any] = {}

    def start(mode: str, rank: int) -> None:
        mine, theirs = processes.Pipe()
        process = processes.Process(target=child, args=(mode, rank, port, theirs, options), daemon=True)
        process.start()
        theirs.close()
        peers[mine] = process

    def gather(names: set[str]) -> None:
        waiting = [peer for peer in peers if not peer.closed]
        while not names <= results.keys():
            for peer in wait(waiting, max(0.0, deadline - time.monotonic())) or [None]:
                if peer is None:
                    raise TimeoutError(f"not done after {options.deadline:.0f} s: {sorted(names - results.keys())}")
                try:
                    name, result = peer.recv()
                except EOFError:
                    waiting.remove(peer)
                    raise RuntimeError(f"a process died: exit code {peers[peer].exitcode}") from None
                results[name] = result
                if result and result.get("error"):
                    raise RuntimeError(f"{name}: {result['error']}")

    error = None
    try:
        start("bootstrap", 0)
        gather({"bootstrap"})
        ranks = [(mode, rank) for mode in ("prefill", "decode") for rank in range(options.tp)]
        for mode, rank in ranks:
            start(mode, rank)
        gather({f"{mode}-{rank}" for mode, rank in ranks})
    except (RuntimeError, TimeoutError) as failure:
        error = str(failure)
    finally:
        for process in peers.values():
            process.kill()
    results.pop("bootstrap", None)
    return {"ranks": results, "error": error}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks of prefill, and of decode")
    parser.add_argument("--gpus", type=lambda text: [int(g) for g in text.split(",")], help="GPU of each rank")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=90, help="seconds until all are killed")
    options = parser.parse_args(arguments)
    options.gpus = options.gpus or list(range(options.tp))

    result = run_all(options)
    decoders = [rank for name, rank in result["ranks"].items() if name.startswith("decode")]
    result["data_ok"] = len(decoders) == options.tp and not any(rank.get("wrong", True) for rank in decoders)
    print(json.dumps(result), flush=True)
    return 0 if result["data_ok"] and not result["error"] else 1


if __name__ == "__main__":
    sys.exit(main())
