# SPDX-License-Identifier: Apache-2.0
"""An hour of a server's transfers, as fast as they go: 16 threads, 4 agents, 2 GPUs, on the rig.

    integration/load/test_load.py runs it; by hand, in the rig's environment: python load.py [--posts N] [--threads N]

A rank of a server at 20 requests a second posts 72,000 KV transfers an hour, one for each request: --posts 72000. Each
thread has a buffer on one GPU, and sits on the other. In turn it registers its buffer, makes a transfer, posts, polls
until it is done, releases and deregisters, with one of the agents, which it shares. One line of JSON tells the rate,
and what is left when all is given back: host memory, Python objects, ranges in the registry, transfers, and import
slots and thread groups of the extension. With --own-lock the program itself keeps threads from registering with one
agent at once, as it must without ctxfix: NIXL crashes. convoy.py compares the rates.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rig"))

from transfer import GpuMemory, make_current  # noqa: E402

AGENTS, SIZE = 4, 4096
PARTS = 4  # memory is looked at after each


def private_kib() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_"))


class Load:
    def __init__(self, count: int, gpus: list[int], own_lock: bool) -> None:
        import nixl_cu12._api as api

        make_current(0)
        self.agents = [api.nixl_agent(f"load{i}", api.nixl_agent_config(backends=["LIBFABRIC"])) for i in range(AGENTS)]
        self.peer = api.nixl_agent("peer", api.nixl_agent_config(backends=["LIBFABRIC"]))
        self.locks = [threading.Lock() if own_lock else nullcontext() for _ in self.agents]
        self.target = GpuMemory(gpus[-1], SIZE)
        self.peer.register_memory([(self.target.address, SIZE, self.target.gpu, "")], "VRAM")
        for agent in self.agents:
            agent.add_remote_agent(self.peer.get_agent_metadata())
        self.buffers = [GpuMemory(gpus[i % len(gpus)], SIZE) for i in range(count)]
        self.errors: list[str] = []
        self.heard = 0

    def once(self, number: int) -> None:
        buffer = self.buffers[number]
        agent, lock = self.agents[number % AGENTS], self.locks[number % AGENTS]
        with lock:
            registered = agent.register_memory([(buffer.address, SIZE, buffer.gpu, "")], "VRAM")
        local = agent.get_xfer_descs([(buffer.address, SIZE, buffer.gpu)], "VRAM")
        target = agent.get_xfer_descs([(self.target.address, SIZE, self.target.gpu)], "VRAM")
        handle = agent.initialize_xfer("WRITE", local, target, "peer", b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        with lock:
            agent.deregister_memory(registered)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")

    def work(self, number: int, posts: int) -> None:
        make_current(1 - self.buffers[number].gpu)  # never its buffer's
        try:
            for _ in range(posts):
                self.once(number)
        except Exception as error:  # told in the result
            self.errors.append(f"thread {number}: {error!r}")

    def run(self, posts: int) -> float:
        """``posts`` by all threads together; the seconds."""
        each = posts // len(self.buffers)
        threads = [threading.Thread(target=self.work, args=(i, each)) for i in range(len(self.buffers))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            # Notifications would pile up in the peer, as in a server that does not look.
            self.heard += sum(len(texts) for texts in self.peer.get_new_notifs().values())
            time.sleep(0.002)
        return time.perf_counter() - start


def left() -> dict[str, Any]:
    """What ctxfix still holds when nobody has anything registered or posted."""
    gc.collect()
    if os.environ.get("CTXFIX_DISABLE") == "1":
        return {}
    import ctxfix
    from ctxfix import native
    from ctxfix.native import agents
    from ctxfix.patches import nixl, registration
    from ctxfix.registry import registry

    return {
        "slots": native.counters()["slots"]["patched"] if native.available() else 0,
        "groups": len(agents._groups),
        "agents": len(registration._watched),
        "ranges": len(registry),
        "transfers": len(nixl._transfers),
        "prepared": len(nixl._prepared),
        "stats": ctxfix.stats(),
        "failures": ctxfix.status()["failures"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--posts", type=int, default=72_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--gpus", type=lambda text: [int(gpu) for gpu in text.split(",")], default=[0, 1])
    parser.add_argument("--own-lock", action="store_true")
    options = parser.parse_args()
    load = Load(options.threads, options.gpus, options.own_lock)
    load.run(max(options.posts // 8, 10 * options.threads))  # until all that is allocated once has been
    first = left()
    memory, seconds, objects = [private_kib()], 0.0, len(gc.get_objects())
    for _ in range(PARTS):
        seconds += load.run(options.posts // PARTS)
        rest = left()
        memory.append(private_kib())
    grown = {"kib": memory, "grown_objects": len(gc.get_objects()) - objects}
    done = options.posts // PARTS // options.threads * options.threads * PARTS
    result = {"posts": done, "threads": options.threads, "seconds": seconds, "per_second": done / seconds}
    rest["slots_before"] = first.get("slots")
    print(json.dumps({**result, "errors": load.errors, "heard": load.heard, **grown, **rest}), flush=True)
    os._exit(bool(load.errors))


if __name__ == "__main__":
    sys.exit(main())
