# SPDX-License-Identifier: Apache-2.0
"""How what the hooks add grows: with registered ranges, with agents, with threads that post at once.

    python benchmarks/growth.py [--quick]

Runs on the rig's fake CUDA driver around a NIXL that does nothing, as post.py. Added is hooked less plain, in turns,
the median of the turns. "At once": that many threads post, each in its context, and the time of all is divided by all
posts; threads of Python take turns, so what is added must stay what it is for one. Draws results/growth.png if
matplotlib is installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from post import Gpu, load_driver, make_module
from results import RESULTS, write

RANGES = (1, 10, 100, 1_000, 10_000, 100_000)
AGENTS = (1, 4, 16, 64)
THREADS = (1, 4, 16, 64, 256)
TARGET_NS = 1000


def per_call(call: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    """Nanoseconds."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call(*arguments)
    return (time.perf_counter_ns() - start) / calls


def at_once(call: Callable[..., Any], arguments: tuple[Any, ...], calls: int, threads: int, gpu: Gpu) -> float:
    """Nanoseconds a call, of ``threads`` threads that share the calls."""
    ready = threading.Barrier(threads + 1)

    def work() -> None:
        gpu.make_current(True)
        ready.wait()
        for _ in range(calls // threads):
            call(*arguments)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter_ns()
    for worker in workers:
        worker.join()
    return (time.perf_counter_ns() - start) / (calls // threads * threads)


def added(hooked: Callable[[], float], plain: Callable[[], float], turns: int) -> float:
    return statistics.median(hooked() - plain() for _ in range(turns))


def draw(rows: dict[str, float]) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no drawing: matplotlib is not installed (pip install 'ctxfix[bench]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, list[tuple[int, float]]] = {}
    for name, value in rows.items():
        what, _, number = name.rpartition(", ")
        count, _, of = number.partition(" ")
        curves.setdefault(f"{what}, by {of}", []).append((int(count.replace(",", "")), value))
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for name, points in curves.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.axhline(TARGET_NS, color="grey", linestyle=":")
    axis.set(xscale="log", yscale="log", xlabel="number", ylabel="ns added", ylim=(100, None))
    axis.legend(fontsize=8)
    axis.grid(True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(RESULTS / "growth.png", dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few calls: to see that it runs; nothing is kept")
    options = parser.parse_args()
    calls, turns = (512, 3) if options.quick else (20_000, 15)

    gpu = Gpu(load_driver(False))
    from ctxfix.patches import nixl

    plain_module, module = make_module(), make_module()
    nixl.apply(module)
    plain = plain_module.nixl_agent()
    handle = None
    rows: dict[str, float] = {}
    gpu.make_current(True)

    def post(agent: Any, threads: int = 1) -> float:
        if threads == 1:
            return added(
                lambda: per_call(agent.transfer, (handle,), calls),
                lambda: per_call(plain.transfer, (handle,), calls),
                turns,
            )
        return added(
            lambda: at_once(agent.transfer, (handle,), calls, threads, gpu),
            lambda: at_once(plain.transfer, (handle,), calls, threads, gpu),
            turns,
        )

    for number in RANGES:
        agent, unwatched = module.nixl_agent(), plain_module.nixl_agent()
        step = (64 << 20) // number
        ranges = [(gpu.address + i * step, step, gpu.device) for i in range(number)]
        registering = []
        for _ in range(3 if number > 1000 else turns):
            hooked = per_call(agent.register_memory, (ranges, "VRAM"), 1)
            registering.append((hooked - per_call(unwatched.register_memory, (ranges, "VRAM"), 1)) / number)
        handle = agent.initialize_xfer("WRITE", module.DList([(gpu.address, 4096, gpu.device)]))
        rows[f"post, {number:,} ranges"] = post(agent)
        rows[f"registration of a range, {number:,} ranges"] = statistics.median(registering)
        del agent  # its registrations go with it
    agents = []
    for number in AGENTS:
        while len(agents) < number:
            agents.append(module.nixl_agent())
            agents[-1].register_memory([(gpu.address, 64 << 20, gpu.device)], "VRAM")
        rows[f"post, {number} agents"] = post(agents[-1])
        rows[f"poll for notifications, {number} agents"] = added(
            lambda: per_call(agents[0].get_new_notifs, (), calls),
            lambda: per_call(plain.get_new_notifs, (), calls),
            turns,
        )
    for number in THREADS:
        rows[f"post at once, {number} threads"] = post(agents[0], number)
    if options.quick:
        print(rows)
        return 0
    write(
        "growth", "Added to one call, or to one range", "ns", rows, {"driver": "the rig's fake", "target_ns": TARGET_NS}
    )
    draw(rows)
    return int(max(value for name, value in rows.items() if name.startswith("post,")) > TARGET_NS)


if __name__ == "__main__":
    sys.exit(main())
