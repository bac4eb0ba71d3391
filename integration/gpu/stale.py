# SPDX-License-Identifier: Apache-2.0
"""Are the bytes there when NIXL says so, and is the sender's buffer free when NIXL says so?

The receiver reads three places of its buffer on another stream the moment the notification is there. The sender
overwrites its buffer the moment the transfer is DONE. Old bytes at the receiver's read count as ``stale``, bytes of the
overwriting in the received buffer as ``torn``.

With --small the pieces come behind so many of 4 KiB, which fill libfabric's queue. Its development head (2.7) copies
asynchronously and asks for the end; a message that took the last place in the queue it copies as the releases do
(prov/shm, FI_SHM_BUFFER_THRESHOLD).
"""

from __future__ import annotations

import argparse
import threading
from multiprocessing.connection import Connection
from typing import Any

from common import MIB, case, make_agent, print_result, run_pair, transfer

JUNK = 255  # what the sender writes over its buffer; no round sends it
PROBE = SMALL = 4096  # bytes read at each place; of a small piece


def value(round_: int) -> int:
    return round_ % 250 + 1


def receiver(pipe: Connection, a: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.cuda.set_device(a["dst"])
    size = max(size for size, _ in a["cases"])
    size += a["small"] * SMALL  # behind all places that are looked at
    buffer = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{a['dst']}")
    stream = torch.cuda.Stream(device=a["dst"])
    host = [torch.empty(PROBE, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
    agent = make_agent("receiver", a["backend"])
    agent.register_memory([(buffer.data_ptr(), size, a["dst"], "")], "VRAM")
    torch.cuda.synchronize()
    pipe.send((agent.get_agent_metadata(), buffer.data_ptr()))
    stale = torn = 0
    for round_ in range(a["rounds"]):
        used, _ = a["cases"][round_ % len(a["cases"])]
        while not any(agent.get_new_notifs().values()):
            pass
        with torch.cuda.stream(stream):
            for place, target in zip((0, used // 2, used - PROBE), host, strict=True):
                target.copy_(buffer[place : place + PROBE], non_blocking=True)
        stream.synchronize()
        stale += any(bool((target != value(round_)).any()) for target in host)
        pipe.recv()  # the sender has overwritten its buffer
        torch.cuda.synchronize()
        torn += not bool((buffer[:used] == value(round_)).all())
        pipe.send("next")
    return {"stale": stale, "torn": torn, "rounds": a["rounds"]}


def sender(pipe: Connection, a: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.cuda.set_device(a["src"])
    large = max(size for size, _ in a["cases"])
    size = large + a["small"] * SMALL
    buffer = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{a['src']}")
    agent = make_agent("sender", a["backend"])
    agent.register_memory([(buffer.data_ptr(), size, a["src"], "")], "VRAM")
    metadata, remote = pipe.recv()
    agent.add_remote_agent(metadata)
    agent.make_connection("receiver")
    fill_now, filled, states = threading.Semaphore(0), threading.Semaphore(0), set()
    pending: list[int | None] = []

    # The thread that posts sets no device; filling is another thread's work, as compute is in an engine.
    def fill() -> None:
        torch.cuda.set_device(a["src"])
        stream = torch.cuda.Stream(device=a["src"])
        with torch.cuda.stream(stream):
            while True:
                fill_now.acquire()
                content = pending.pop()
                if content is None:
                    return
                buffer.fill_(content)
                stream.synchronize()
                filled.release()

    def fill_with(content: int) -> None:
        pending.append(content)
        fill_now.release()
        filled.acquire()

    def post() -> None:
        for round_ in range(a["rounds"]):
            used, count = a["cases"][round_ % len(a["cases"])]
            fill_with(value(round_))
            pieces = [(large + i * SMALL, SMALL) for i in range(a["small"])]
            pieces += [(i * (used // count), used // count) for i in range(count)]
            local, target = (
                agent.get_xfer_descs([(base + start, length, device) for start, length in pieces], "VRAM")
                for base, device in ((buffer.data_ptr(), a["src"]), (remote, a["dst"]))
            )
            handle = agent.initialize_xfer("WRITE", local, target, "receiver", b"done%d" % round_)
            state, _, _ = transfer(agent, handle)
            states.add(state)
            fill_with(JUNK)
            agent.release_xfer_handle(handle)
            pipe.send("overwritten")
            pipe.recv()

    threads = [threading.Thread(target=fill), threading.Thread(target=post)]
    for thread in threads:
        thread.start()
    threads[1].join()
    pending.append(None)
    fill_now.release()
    threads[0].join()
    return {"states": sorted(states)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--src", type=int, default=1)
    parser.add_argument("--dst", type=int, default=1)
    parser.add_argument("--backend", default="LIBFABRIC")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument(
        "--cases",
        type=case,
        nargs="+",
        default=[(256 * MIB, 8), (64 * MIB, 1), case("64000000/321"), (MIB, 4), (1024 * MIB, 8)],
    )
    parser.add_argument("--small", type=int, default=0, help="pieces of 4 KiB before those of each transfer")
    parser.add_argument("--limit", type=float, default=300, help="seconds")
    a = vars(parser.parse_args())
    print_result(run_pair(sender, receiver, a, a["limit"]))


if __name__ == "__main__":
    main()
