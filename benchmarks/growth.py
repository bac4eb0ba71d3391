# SPDX-License-Identifier: Apache-2.0
"""How what the hooks add grows: with registered ranges, with agents, with threads.

    python benchmarks/growth.py [--quick]

Runs on the rig's fake CUDA driver around a NIXL that does nothing, as post.py. Added is hooked less plain, in turns,
the median of the turns, of CPU time. "At once": that many threads post or poll, each in its context, and the time of
all is divided by all calls; threads of Python take turns, so what is added must stay what it is for one. (Whether they
wait for each other: integration/load.) A thread is started while that many others wait, and bound: unlike threads.py,
which measures the hook alone, the driver's calls are in the figure. "One more range" is registered below all others, so
that all move. An interpreter that starts has no ranges, agents and threads: startup.py. Draws results/growth.png if
matplotlib is installed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from post import Gpu, added, load_driver, make_module, nanoseconds
from results import RESULTS, write

RANGES = (1, 10, 100, 1_000, 10_000, 100_000)
AGENTS = (1, 4, 16, 64)
THREADS = (1, 4, 16, 64, 256)
TARGET_NS = 1000  # a post


def at_once(call: Callable[..., Any], arguments: tuple[Any, ...], calls: int, threads: int, gpu: Gpu) -> float:
    """CPU time of a call in nanoseconds, of ``threads`` threads that share the calls."""
    ready = threading.Barrier(threads)
    each: list[float] = []

    def work() -> None:
        gpu.make_current(True)
        ready.wait()
        each.append(nanoseconds(call, arguments, calls // threads))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return statistics.mean(each)


@contextmanager
def waiting(number: int) -> Iterator[None]:
    """So many threads that do nothing."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


@contextmanager
def one_core() -> Iterator[None]:
    """For starts of threads: on two, where the scheduler puts a new one decides the figure (threads.py)."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Costs:
    """What is added to each kind of call, with the registrations, agents and threads that there are."""

    def __init__(self, gpu: Gpu, plain: Any, quick: bool) -> None:
        self._gpu, self._plain = gpu, plain
        self._calls, self._turns = (512, 3) if quick else (20_000, 15)
        self.handle: Any = None
        self.rows: dict[str, float] = {}

    def of(self, agent: Any, number: int, what: str, at: int = 1) -> None:
        """A post, a poll and the start of a thread; ``at`` threads at once."""
        where, together = f"{number:,} {what}", " at once" if what == "threads" else ""
        self.rows[f"post{together}, {where}"] = self._call(agent.transfer, self._plain.transfer, (self.handle,), at)
        poll = self._call(agent.get_new_notifs, self._plain.get_new_notifs, (), at)
        self.rows[f"poll for notifications{together}, {where}"] = poll
        with one_core(), waiting(at - 1):
            self.rows[f"start of a thread, {where}"] = self._start()

    def _call(
        self, hooked: Callable[..., Any], plain: Callable[..., Any], arguments: tuple[Any, ...], threads: int
    ) -> float:
        def measured(call: Callable[..., Any]) -> Callable[[], float]:
            if threads == 1:
                return lambda: nanoseconds(call, arguments, self._calls)
            return lambda: at_once(call, arguments, self._calls, threads, self._gpu)

        return added(measured(hooked), measured(plain), self._turns)

    def _start(self) -> float:
        from ctxfix import threads

        def start(switch: Callable[[], Any]) -> float:
            switch()
            begin = time.process_time_ns()
            for _ in range(self._calls // 100):
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()
            return (time.process_time_ns() - begin) / (self._calls // 100)

        try:
            return added(lambda: start(threads.apply), lambda: start(threads.remove), self._turns)
        finally:
            threads.apply()

    def registrations(self, agent: Any, plain: Any, number: int) -> None:
        """Of so many ranges in one call, from the lowest up and in no order; then of one more."""
        step = (32 << 20) // number
        ranges = [(self._gpu.address + (32 << 20) + i * step, step, self._gpu.device) for i in range(number)]
        mixed = random.Random(1).sample(ranges, number)
        turns = 3 if number > 1000 else self._turns
        for name, order in (("", ranges), (" in no order", mixed)):
            times = []
            for _ in range(turns):
                hooked = nanoseconds(agent.register_memory, (order, "VRAM"), 1)
                times.append((hooked - nanoseconds(plain.register_memory, (order, "VRAM"), 1)) / number)
                agent.deregister_memory(order)
            self.rows[f"registration of a range{name}, {number:,} ranges"] = statistics.median(times)
        agent.register_memory(ranges, "VRAM")
        one = [(self._gpu.address, 4096, self._gpu.device)]
        times = []
        for _ in range(self._turns):
            hooked = nanoseconds(agent.register_memory, (one, "VRAM"), 1)
            times.append(hooked - nanoseconds(plain.register_memory, (one, "VRAM"), 1))
            agent.deregister_memory(one)
        self.rows[f"registration of one more range, {number:,} ranges"] = statistics.median(times)


def draw(rows: dict[str, float]) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no drawing: matplotlib is not installed (pip install 'ctxfix[bench]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, dict[str, list[tuple[int, float]]]] = {"ranges": {}, "agents": {}, "threads": {}}
    for name, value in rows.items():
        what, _, number = name.rpartition(", ")
        count, _, of = number.partition(" ")
        curves[of].setdefault(what, []).append((int(count.replace(",", "")), value))
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 5), sharey=True)
    for axis, (of, lines) in zip(axes, curves.items(), strict=True):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.axhline(TARGET_NS, color="grey", linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel=of, ylim=(100, 300_000))
        axis.legend(fontsize=8, loc="upper right")
        axis.grid(True, alpha=0.3)
    axes[0].set(ylabel="ns added")
    figure.tight_layout()
    figure.savefig(RESULTS / "growth.png", dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few calls: to see that it runs")
    options = parser.parse_args()

    gpu = Gpu(load_driver(False))
    from ctxfix.patches import nixl

    plain_module, module = make_module(), make_module()
    nixl.apply(module)
    plain = plain_module.nixl_agent()
    costs = Costs(gpu, plain, options.quick)
    gpu.make_current(True)

    def transfer_of(agent: Any) -> Any:
        return agent.initialize_xfer("WRITE", module.DList([(gpu.address + (32 << 20), 64, gpu.device)]))

    for number in RANGES:
        agent = module.nixl_agent()
        costs.registrations(agent, plain, number)
        costs.handle = transfer_of(agent)
        costs.of(agent, number, "ranges")
        del agent  # its registrations go with it
    agents = []
    for number in AGENTS:
        while len(agents) < number:
            agents.append(module.nixl_agent())
            agents[-1].register_memory([(gpu.address, 64 << 20, gpu.device)], "VRAM")
        costs.handle = transfer_of(agents[-1])
        costs.of(agents[-1], number, "agents")
    for number in THREADS:
        costs.of(agents[0], number, "threads", number)
    details: dict[str, object] = {"driver": "the rig's fake", "target_ns": TARGET_NS}
    write("growth", "Added to one call, or to one range", "ns", costs.rows, details)
    draw(costs.rows)
    return int(max(value for name, value in costs.rows.items() if name.startswith("post,")) > TARGET_NS)


if __name__ == "__main__":
    sys.exit(main())
