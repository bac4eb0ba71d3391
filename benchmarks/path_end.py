# SPDX-License-Identifier: Apache-2.0
"""One end of a transfer for path.py: sender or receiver, told line by line (JSON) what to do.

An ordinary NIXL program: its memory on its GPU, one registration, and all posts from a bare ``threading.Thread``.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACE = 4096  # bytes looked at in each place
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "integration" / "gpu"), str(HERE.parent / "integration" / "rig")]

from common import make_agent, transfer  # noqa: E402


class TorchBuffer:
    """On a real GPU."""

    def __init__(self, gpu: int, size: int, filled: bool) -> None:
        import torch

        self.torch, self.gpu = torch, gpu
        torch.cuda.set_device(gpu)
        device = torch.device("cuda", gpu)
        self.memory: Any = (
            torch.randint(-(2**62), 2**62, (size // 8,), dtype=torch.int64, device=device)
            if filled
            else torch.zeros(size // 8, dtype=torch.int64, device=device)
        )
        self.stream = torch.cuda.Stream(device)  # one that waits for no other, as an engine's are
        self.host = [torch.empty(PLACE // 8, dtype=torch.int64, pin_memory=True) for _ in range(3)]
        torch.cuda.synchronize()
        self.address = self.memory.data_ptr()

    def choose(self) -> None:
        """The line that the article adds at the top of the posting thread."""
        self.torch.cuda.set_device(self.gpu)

    def zero(self) -> None:
        self.memory.zero_()
        self.torch.cuda.synchronize(self.gpu)

    def places(self, size: int) -> list[int]:
        """What stands at the beginning, in the middle and at the end of ``size`` bytes now, on a stream of its own."""
        with self.torch.cuda.stream(self.stream):
            for place, target in zip((0, size // 2, size - PLACE), self.host, strict=True):
                target.copy_(self.memory[place // 8 : (place + PLACE) // 8], non_blocking=True)
        self.stream.synchronize()
        return [int(target.sum()) for target in self.host]

    def checksum(self, size: int) -> int:
        return int(self.memory[: size // 8].sum().item())

    def settle(self) -> None:
        self.torch.cuda.synchronize(self.gpu)


class RigBuffer:
    """On the fake GPU of integration/rig."""

    def __init__(self, gpu: int, size: int, filled: bool) -> None:
        from transfer import GpuMemory

        self.memory = GpuMemory(gpu, size)
        self.gpu, self.size, self.address = gpu, size, self.memory.address
        self.memory.fill(bytes(i % 251 for i in range(256)) * (size // 256) if filled else bytes(size))

    def choose(self) -> None:
        import ctypes

        ctypes.CDLL("libcudart.so.12").cudaSetDevice(self.gpu)

    def zero(self) -> None:
        self.memory.fill(bytes(self.size))

    def places(self, size: int) -> list[int]:
        found = self.memory.read()
        return [sum(found[place : place + PLACE]) for place in (0, size // 2, size - PLACE)]

    def checksum(self, size: int) -> int:
        return sum(self.memory.read()[:size])

    def settle(self) -> None:
        pass


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


LARGE = 8  # pieces, of a transfer that ends late


def pieces(size: int, count: int, late: bool) -> list[tuple[int, int]]:
    """Start and length of each, in bytes: of equal length, or small ones first and then some large ones.

    Of these all but the last are the same, so that its bytes come long after those of the small ones.
    """
    if not late:
        return [(i * (size // count), size // count) for i in range(count)]
    large = min(LARGE, count)
    found = [(i * PLACE, PLACE) for i in range(count - large)]
    start = len(found) * PLACE
    middle = start + (size - start) // 2 if large > 1 else start
    return [*found, *[(start, middle - start)] * (large - 1), (middle, size - middle)]


def receive(a: dict[str, Any]) -> None:
    buffer = a["kind"](a["gpu"], a["size"], False)
    agent = make_agent("receiver", a["backend"])
    agent.register_memory([(buffer.address, a["size"], a["gpu"], "")], "VRAM")
    say(metadata=agent.get_agent_metadata().hex(), address=buffer.address)
    for order in orders():
        # One transfer is looked at: are its bytes there when NIXL tells of it?
        agent.get_new_notifs()
        buffer.zero()
        say(watching=True)
        deadline = time.monotonic() + order["limit_s"]
        told = False
        while not told and time.monotonic() < deadline:
            told = any(b"watch" in text for texts in agent.get_new_notifs().values() for text in texts)
        at_once = buffer.places(order["bytes"])
        buffer.settle()
        say(told=told, at_once=at_once, later=buffer.checksum(order["bytes"]))


def send(a: dict[str, Any]) -> None:
    buffer = a["kind"](a["gpu"], a["size"], True)
    agent = make_agent("sender", a["backend"])
    agent.register_memory([(buffer.address, a["size"], a["gpu"], "")], "VRAM")
    say(ready=True)
    commands = orders()
    peer = next(commands)
    agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
    agent.make_connection("receiver")
    say(connected=True)

    def once(order: dict[str, Any], note: bytes) -> float:
        parts = pieces(order["bytes"], order["count"], order.get("late", False))
        local, target = (
            agent.get_xfer_descs([(base + start, length, gpu) for start, length in parts], "VRAM")
            for base, gpu in ((buffer.address, a["gpu"]), (peer["address"], peer["gpu"]))
        )
        handle = agent.initialize_xfer("WRITE", local, target, "receiver", note)
        state, _, ms = transfer(agent, handle, order["limit_s"])
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        return ms

    def post() -> None:
        if a["choose"]:
            buffer.choose()
        for order in commands:
            try:
                times: list[float] = []
                until = time.monotonic() + order["seconds"]
                while len(times) < order["rounds"] and (not times or time.monotonic() < until):
                    times.append(once(order, b"watch" if order["watch"] else b"done"))
                wanted = {"at_once": buffer.places(order["bytes"]), "later": buffer.checksum(order["bytes"])}
                say(ms=times, **(wanted if order["watch"] else {}))
            except Exception as error:  # told, not lost in a thread
                say(error=repr(error))

    thread = threading.Thread(target=post, name="transfer_worker")
    thread.start()
    thread.join()


def plain(a: dict[str, Any]) -> None:
    """No NIXL: torch's copy from one buffer to another, and the wait for its end."""
    source = a["kind"](a["gpu"], a["size"], True)
    target = a["kind"](a["other"], a["size"], False)
    say(ready=True)
    for order in orders():
        words, times = order["bytes"] // 8, []
        until = time.monotonic() + order["seconds"]
        while len(times) < order["rounds"] and (not times or time.monotonic() < until):
            source.settle(), target.settle()
            start = time.perf_counter()
            target.memory[:words].copy_(source.memory[:words])
            source.settle(), target.settle()
            times.append((time.perf_counter() - start) * 1e3)
        say(ms=times, median=statistics.median(times))


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    arguments["kind"] = {"torch": TorchBuffer, "rig": RigBuffer}[arguments["memory"]]
    {"receive": receive, "send": send, "plain": plain}[arguments["role"]](arguments)
