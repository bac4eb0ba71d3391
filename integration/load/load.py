# SPDX-License-Identifier: Apache-2.0
"""An hour of a server's transfers, as fast as they go: 16 threads, 4 agents, 2 GPUs, on the rig.

    integration/load/test_load.py runs it; by hand, in the rig's environment: python load.py [--posts N] [--threads N]

A server at 20 requests a second posts 72,000 KV transfers an hour: --posts 72000. Each thread has a buffer on one GPU,
and sits on the other. In turn it registers its buffer, makes a transfer, posts, polls until it is done, releases and
deregisters, with one of the agents, which it shares. One line of JSON tells the rate, and what is left when all is
given back: host memory, Python objects, ranges in the registry, transfers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rig"))

from transfer import GpuMemory, make_current  # noqa: E402

GPUS, AGENTS, SIZE = 2, 4, 4096


def private_kib() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_"))


class Load:
    def __init__(self, threads: int) -> None:
        import nixl_cu12._api as api

        make_current(0)
        self.agents = [api.nixl_agent(f"load{i}", api.nixl_agent_config(backends=["LIBFABRIC"])) for i in range(AGENTS)]
        self.peer = api.nixl_agent("peer", api.nixl_agent_config(backends=["LIBFABRIC"]))
        self.target = GpuMemory(0, SIZE)
        self.peer.register_memory([(self.target.address, SIZE, 0, "")], "VRAM")
        for agent in self.agents:
            agent.add_remote_agent(self.peer.get_agent_metadata())
        self.buffers = [GpuMemory(i % GPUS, SIZE) for i in range(threads)]
        self.errors: list[str] = []
        self.heard = 0

    def once(self, number: int, agent: Any) -> None:
        buffer = self.buffers[number]
        registered = agent.register_memory([(buffer.address, SIZE, buffer.gpu, "")], "VRAM")
        local = agent.get_xfer_descs([(buffer.address, SIZE, buffer.gpu)], "VRAM")
        target = agent.get_xfer_descs([(self.target.address, SIZE, 0)], "VRAM")
        handle = agent.initialize_xfer("WRITE", local, target, "peer", b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")

    def work(self, number: int, posts: int) -> None:
        other = (number + 1) % GPUS  # never its buffer's
        make_current(other)
        agent = self.agents[number % AGENTS]
        try:
            for _ in range(posts):
                self.once(number, agent)
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
    from ctxfix.patches import nixl
    from ctxfix.registry import registry

    return {
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
    options = parser.parse_args()
    load = Load(options.threads)
    load.run(max(options.posts // 8, 10 * options.threads))  # until all that is allocated once has been
    left()
    before, objects = private_kib(), len(gc.get_objects())
    seconds = load.run(options.posts)
    rest = left()
    grown = {"grown_kib": private_kib() - before, "grown_objects": len(gc.get_objects()) - objects}
    done = options.posts // options.threads * options.threads
    result = {"posts": done, "threads": options.threads, "seconds": seconds, "per_second": done / seconds}
    print(json.dumps({**result, "errors": load.errors, "heard": load.heard, **grown, **rest}), flush=True)
    os._exit(bool(load.errors))


if __name__ == "__main__":
    sys.exit(main())
