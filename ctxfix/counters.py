# SPDX-License-Identifier: Apache-2.0
"""Counts of what the hooks did in this process: exact under threads, about 40 ns each."""

from __future__ import annotations

import itertools
import os

#: name -> what one more of it means. ``ctxfix.stats()`` shows these names.
NAMES: dict[str, str] = {
    "posts": "transfers of GPU memory posted through nixl_agent.transfer",
    "rebinds": "calls for which another context was made current",
    "restores": "calls after which the caller's context was put back",
    "registered_ranges": "ranges of GPU memory registered",
    "unknown_owners": "calls on memory whose owner nobody knows; they went through unbound",
    "stale_owners": "answers thrown away because the memory had been freed or allocated anew",
    "device_fallbacks": "bindings by device (as cudaSetDevice does) because no usable context was recorded",
    "mixed_device_posts": "posts whose local descriptors belong to several contexts; the first decided",
    "wrong_device_ids": "descriptors whose device id is not the device that owns the address",
    "ranges_without_ipc": "registered ranges that can never take CUDA IPC (VMM memory, pools)",
    "unsynchronised_ranges": "registered ranges that may be read before their bytes have landed",
    "several_gpu_agents": "agents with memory of several GPUs; their native threads follow the first",
    "stray_contexts": "GPUs on which this process holds a context but has registered and allocated nothing",
    "threads_bound": "Python threads that started bound to a context",
    "hook_failures": "failures inside ctxfix; the original call went through",
}

# next() on itertools.count is one C call, so it needs no lock: += on an int would lose counts.
_counts = {name: itertools.count() for name in NAMES}
_inherited: dict[str, int] = {}


def count(name: str, n: int = 1) -> None:
    """Add ``n`` to counter ``name`` (one of :data:`NAMES`)."""
    counter = _counts[name]
    for _ in range(n):
        next(counter)


def ticker(name: str) -> itertools.count[int]:
    """The counter itself, for the hot path: ``next()`` on it counts one."""
    return _counts[name]


def snapshot() -> dict[str, int]:
    """What the hooks did in this process up to now: counts by name, all from zero, in a forked child too.

    The names, and what one more of each means, are ``ctxfix.counters.NAMES``. Exact under threads.
    """
    return {name: _value(counter) - _inherited.get(name, 0) for name, counter in _counts.items()}


def _value(counter: itertools.count[int]) -> int:
    # "count(7)": the only way to read an itertools.count without moving it on every Python version.
    return int(repr(counter)[6:-1])


def _after_fork() -> None:
    _inherited.update((name, _value(counter)) for name, counter in _counts.items())


os.register_at_fork(after_in_child=_after_fork)
