# SPDX-License-Identifier: Apache-2.0
"""The load of integration/load on NIXL's stand-in: for Pythons without a GIL, for which there is no NIXL yet.

16 threads on 2 GPUs use 4 agents that they share and agents of their own, which come and go; one looks at everything
meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_nixl import VRAM, DList, Nixl

import ctxfix
from ctxfix.native import agents
from ctxfix.patches import nixl, registration
from ctxfix.registry import registry

THREADS, ROUNDS, OWN = 16, 48, 6  # each OWN-th round is with an agent of the thread's own
IN_CONTEXT = (
    "register_memory", "deregister_memory", "initialize_xfer", "prep_xfer_dlist", "make_prepped_xfer", "transfer",
    "check_xfer_state", "release",
)  # fmt: skip


@pytest.fixture
def often() -> Iterator[None]:
    """Where there is a GIL, another thread gets it as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_every_call_of_many_threads_and_agents_that_come_and_go(host: Nixl, cuda: FakeCuda, often: None) -> None:
    local, problems = threading.local(), []
    start = threading.Barrier(THREADS + 1, timeout=60)
    shared = [host.agent() for _ in range(4)]
    memory = [cuda.alloc(i % 2) for i in range(THREADS)]
    for method in IN_CONTEXT:
        host.on(method, lambda method=method: cuda.current() == local.right or problems.append((method, local.right)))
    stopped = threading.Event()

    def once(agent: Any, address: int, device: int, dropped: bool) -> None:
        rows = [(address, 4096, device), (address + 8192, 4096, device)]
        registered = agent.register_memory(DList(VRAM, rows))
        handle = agent.initialize_xfer("WRITE", DList(VRAM, rows[:1]), None, "peer")
        agent.transfer(handle)
        agent.check_xfer_state(handle)
        handle.release()
        side = agent.prep_xfer_dlist("", DList(VRAM, rows))
        handle = agent.make_prepped_xfer("READ", side, [1], None, [0])
        agent.transfer(handle)
        side.release()
        if not dropped:
            handle.release()
            agent.deregister_memory(registered)

    def work(number: int) -> None:
        device = number % 2
        cuda.make_current((1 - device, None, 2)[number % 3])
        own, local.right = cuda.current(), cuda.contexts[device]
        with ExitStack() as told:
            told.callback(lambda: cuda.current() == own or problems.append(("caller", number)))
            start.wait()
            for n in range(ROUNDS):
                fresh = n % OWN == 0
                once(host.agent() if fresh else shared[number % 4], memory[number], device, fresh)

    def look() -> None:
        start.wait()
        while not stopped.is_set():
            ctxfix.status()
            assert len(registry) <= 2 * THREADS and len(registry.contexts()) <= 2
            gc.collect()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    looking = threading.Thread(target=look)
    for thread in (*threads, looking):
        thread.start()
    for thread in threads:
        thread.join()
    stopped.set()
    looking.join()
    gc.collect()

    assert problems == []
    assert host.counted_since("posts") == 2 * THREADS * ROUNDS, "counted exactly"
    assert host.counted_since("registered_ranges") == 2 * THREADS * ROUNDS
    assert host.counted_since("rebinds") == host.counted_since("restores") > 0
    for counter in ("unknown_owners", "stale_owners", "hook_failures"):
        assert host.counted_since(counter) == 0, counter
    assert (len(registry), registry.contexts(), registry._starts) == (0, (), [])
    assert (nixl._transfers, nixl._prepared) == ({}, {})
    assert registration._watched.keys() == registration._registering.keys() == {id(agent) for agent in shared}
    assert not agents.enabled() or agents._groups.keys() == registration._watched.keys()
