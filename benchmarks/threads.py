# SPDX-License-Identifier: Apache-2.0
"""What the thread hook adds to starting a Python thread, in microseconds.

Measured is ``Thread(target=int).start()`` with ``join()``, in rounds of random order: without the hook; with it and no
CUDA in the process (``ctxfix.affinity`` not loaded); and with it around an affinity that does nothing, which leaves
the hook's own cost. What affinity itself costs depends on the driver and is not in it. All runs on one core: on two,
where the scheduler puts a new thread decides the figure, by tens of microseconds.

    python benchmarks/threads.py [--rounds N] [--starts N]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
import types

from results import write

from ctxfix import threads

TARGET_US = 2.0


def start_us(starts: int) -> float:
    """Mean time of one start and join."""
    begin = time.perf_counter()
    for _ in range(starts):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    return (time.perf_counter() - begin) / starts * 1e6


def hook_us(calls: int) -> float:
    """Mean time of both hooks around methods that do nothing: no thread, so no scheduler in the figure."""

    def nothing(_: threading.Thread) -> None:
        pass

    start, bootstrap = threads._wrap_start(nothing), threads._wrap_bootstrap_inner(nothing)
    thread = threading.Thread()
    begin = time.perf_counter()
    for _ in range(calls):
        start(thread)
        bootstrap(thread)
    middle = time.perf_counter()
    for _ in range(calls):
        nothing(thread)
        nothing(thread)
    return (2 * middle - begin - time.perf_counter()) / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--starts", type=int, default=200)
    options = parser.parse_args()
    affinity = types.ModuleType("ctxfix.affinity")
    affinity.current_context = lambda: 7  # type: ignore[attr-defined]
    affinity.bind_new_thread = lambda parent: None  # type: ignore[attr-defined]
    names = ["start without the hook", "start with it, no CUDA", "start with it, null affinity"]
    samples: dict[str, list[float]] = {name: [] for name in names}
    hooks: dict[str, list[float]] = {"hook alone, no CUDA": [], "hook alone, null affinity": []}
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(options.rounds):
        for name in random.sample(names, len(names)):
            (threads.remove if name == names[0] else threads.apply)()
            sys.modules.pop("ctxfix.affinity", None)
            if name == names[2]:
                sys.modules["ctxfix.affinity"] = affinity
            samples[name].append(start_us(options.starts))
            if name != names[0]:
                hooks[name.replace("start with it", "hook alone")].append(hook_us(10_000))
    rows = {name: statistics.median(values) for name, values in {**samples, **hooks}.items()}
    rows["added, null affinity"] = rows[names[2]] - rows[names[0]]
    details: dict[str, object] = {"rounds": options.rounds, "starts": options.starts, "target_us": TARGET_US}
    write("threads", "Starting a Python thread", "µs", rows, details)
    return int(rows["added, null affinity"] > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())
