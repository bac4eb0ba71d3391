# SPDX-License-Identifier: Apache-2.0
"""What the thread hook adds to starting a Python thread, in microseconds.

Measured is ``Thread(target=int).start()`` with ``join()``, in rounds that take turns: without the hook; with it and no
CUDA in the process (``ctxfix.affinity`` not loaded); and with it around an affinity that does nothing, which leaves
the hook's own cost. What affinity itself costs depends on the driver and is not in it.

    python benchmarks/threads.py [--rounds N] [--starts N]
"""

from __future__ import annotations

import argparse
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
    names = ("start without the hook", "start with it, no CUDA", "start with it, null affinity")
    samples: dict[str, list[float]] = {name: [] for name in names}
    hooks: dict[str, list[float]] = {"hook alone, no CUDA": [], "hook alone, null affinity": []}
    for _ in range(options.rounds):
        sys.modules.pop("ctxfix.affinity", None)
        samples[names[0]].append(start_us(options.starts))
        threads.apply()
        samples[names[1]].append(start_us(options.starts))
        hooks["hook alone, no CUDA"].append(hook_us(10_000))
        sys.modules["ctxfix.affinity"] = affinity
        samples[names[2]].append(start_us(options.starts))
        hooks["hook alone, null affinity"].append(hook_us(10_000))
        threads.remove()
    rows = {name: statistics.median(values) for name, values in {**samples, **hooks}.items()}
    details: dict[str, object] = {"rounds": options.rounds, "starts": options.starts, "target_us": TARGET_US}
    write("threads", "Starting a Python thread", "µs", rows, details)
    return int(rows["hook alone, null affinity"] > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())
