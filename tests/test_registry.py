# SPDX-License-Identifier: Apache-2.0
"""The registry: whose registered memory an address is."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfix.driver import Owner
from ctxfix.registry import Registration, Registry

GPU0, GPU1 = Owner(0x1000, 0), Owner(0x2000, 1)


def owner_at(registry: Registry, address: int) -> Owner | None:
    found = registry.find(address)
    return found.owner if found else None


def test_borders_of_a_range() -> None:
    registry = Registry()
    registry.add(1, 100, 50, GPU1, buffer_id=7)
    assert [owner_at(registry, a) for a in (99, 100, 149, 150)] == [None, GPU1, GPU1, None]
    found = registry.find(120)
    assert found is not None and (found.start, found.end, found.buffer_id) == (100, 150, 7)


def test_latest_of_overlapping_registrations_answers_and_the_older_comes_back() -> None:
    registry = Registry()
    registry.add(1, 100, 100, GPU0)
    registry.add(2, 150, 10, GPU1)
    assert [owner_at(registry, a) for a in (149, 150, 159, 160)] == [GPU0, GPU1, GPU1, GPU0]
    assert registry.remove(2, 150, 10)
    assert owner_at(registry, 155) == GPU0
    assert registry._starts == [100], "no fragments are left behind"


def test_double_registration_needs_two_deregistrations() -> None:
    registry = Registry()
    registry.add(1, 100, 10, GPU0)
    registry.add(1, 100, 10, GPU1)
    assert registry.remove(1, 100, 10)
    assert owner_at(registry, 105) == GPU0
    assert registry.remove(1, 100, 10)
    assert owner_at(registry, 105) is None


def test_deregistering_what_is_not_registered_changes_nothing() -> None:
    registry = Registry()
    registry.add(1, 100, 10, GPU0)
    assert not registry.remove(2, 100, 10)
    assert not registry.remove(1, 100, 11)
    assert registry.remove(1, 100, 10)
    assert not registry.remove(1, 100, 10)
    assert len(registry) == 0 and registry.contexts() == ()


def test_empty_range_is_ignored() -> None:
    registry = Registry()
    registry.add(1, 100, 0, GPU0)
    assert len(registry) == 0 and owner_at(registry, 100) is None


def test_contexts_appear_and_vanish_with_their_registrations() -> None:
    registry = Registry()
    registry.add(1, 100, 10, GPU1)
    registry.add(1, 200, 10, GPU0)
    registry.add(2, 300, 10, GPU0)
    assert registry.contexts() == (GPU1.context, GPU0.context)
    assert registry.contexts_of(2) == (GPU0.context,)
    assert registry.contexts_of(3) == ()
    registry.remove(1, 100, 10)
    assert registry.contexts() == registry.contexts_of(1) == (GPU0.context,)


@pytest.mark.parametrize("before", [0, 1, 900, 100_000], ids=lambda n: f"{n} before")
@pytest.mark.parametrize("order", [1, -1, 7], ids=["up", "down", "mixed"])
def test_many_ranges_come_at_once(before: int, order: int) -> None:
    registry = Registry()
    registry.add_all(1, [Registration(20 * i, 20 * i + 10, GPU0, 0) for i in range(before)])
    starts = [20 * (i * order % 1000) + 10 for i in range(1000)]
    registry.add_all(2, [Registration(start, start + 10, GPU1, 0) for start in starts])
    assert len(registry) == len(registry._starts) == before + 1000
    assert [owner_at(registry, start) for start in starts] == [GPU1] * 1000
    assert [owner_at(registry, 20 * i) for i in range(1000)] == [GPU0 if i < before else None for i in range(1000)]
    assert registry.contexts_of(2) == (GPU1.context,)


@pytest.mark.parametrize("kept", [0, 1, 900], ids=lambda n: f"{n} kept")
def test_many_ranges_go_at_once(kept: int) -> None:
    registry = Registry()
    ranges = [(100 * i, 50 if i % 2 else 100) for i in range(1000)]
    for start, length in ranges:
        registry.add(1, start, length, GPU1)
    assert registry.remove_all(1, [*ranges[kept:], (5, 5)]) == 1000 - kept
    assert len(registry) == kept and len(registry._starts) == kept
    assert [owner_at(registry, start) for start, _ in ranges] == [GPU1] * kept + [None] * (1000 - kept)
    assert registry.contexts() == ((GPU1.context,) if kept else ())


def test_forget_drops_all_of_an_agent_and_nothing_else() -> None:
    registry = Registry()
    for i in range(10):
        registry.add(1, 100 + 10 * i, 10, GPU0)
    registry.add(2, 120, 10, GPU1)
    registry.forget(1)
    registry.forget(1)
    assert len(registry) == 1 and registry.contexts() == (GPU1.context,)
    assert owner_at(registry, 125) == GPU1 and owner_at(registry, 105) is None


RANGES = st.tuples(st.integers(0, 60), st.integers(0, 20))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3), RANGES, st.sampled_from([GPU0, GPU1])),
        st.tuples(st.just("add_all"), st.integers(1, 3), st.lists(RANGES, max_size=6), st.sampled_from([GPU0, GPU1])),
        st.tuples(st.just("remove"), st.integers(1, 3), RANGES, st.none()),
        st.tuples(st.just("forget"), st.integers(1, 3), st.just((0, 0)), st.none()),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_agrees_with_a_list_searched_from_its_end(steps: list[tuple]) -> None:
    registry, model = Registry(), []
    for kind, agent, where, owner in steps:
        if kind == "add_all":
            registry.add_all(
                agent, [Registration(start, start + length, owner, 0) for start, length in where if length]
            )
            model += [(agent, start, length, owner) for start, length in where if length]
        elif kind == "add":
            registry.add(agent, *where, owner)
            model += [(agent, *where, owner)] if where[1] else []
        elif kind == "remove":
            at = next((i for i in reversed(range(len(model))) if model[i][:3] == (agent, *where)), None)
            assert registry.remove(agent, *where) == (at is not None)
            if at is not None:
                del model[at]
        else:
            registry.forget(agent)
            model = [entry for entry in model if entry[0] != agent]
        for address in range(-1, 82):
            expected = next((o for _, s, n, o in reversed(model) if s <= address < s + n), None)
            assert owner_at(registry, address) == expected
        assert len(registry) == len(model)
        assert set(registry.contexts()) == {o.context for *_, o in model}
        assert set(registry.contexts_of(1)) == {o.context for a, *_, o in model if a == 1}
        assert all(e <= s for e, s in zip(registry._ends, registry._starts[1:], strict=False)), "segments are disjoint"
        assert all(registry._stacks), "no empty segment is kept"


def test_many_threads_register_look_up_and_deregister() -> None:
    registry = Registry()
    wrong: list[object] = []

    def work(agent: int) -> None:
        base, owner = agent * 1_000_000, Owner(agent, agent)
        for i in range(300):
            registry.add(agent, base + i * 10, 10, owner)
            if owner_at(registry, base + i * 10 + 5) != owner:
                wrong.append((agent, i))
        for i in range(300):
            if not registry.remove(agent, base + i * 10, 10):
                wrong.append((agent, i, "lost"))

    threads = [threading.Thread(target=work, args=(agent,)) for agent in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(registry) == 0


def test_a_look_up_does_not_walk_the_ranges() -> None:
    """Counted in comparisons, not in time: a binary search of 4,096 ranges looks at 13."""

    class Address(int):
        compared = 0

        def __lt__(self, other: int) -> bool:
            Address.compared += 1
            return int(self) < other

        def __gt__(self, other: int) -> bool:
            Address.compared += 1
            return int(self) > other

    registry = Registry()
    for i in range(4096):
        registry.add(1, i * 100, 50, GPU1)
    assert registry.find(Address(4095 * 100 + 10)) is not None
    assert Address.compared <= 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_starts_empty_even_if_the_lock_was_held() -> None:
    from ctxfix.registry import registry

    registry.add(1, 100, 10, GPU1)
    try:
        with registry._lock:  # as if another thread were inside
            pid = os.fork()
            if pid == 0:
                os._exit(0 if registry.find(105) is None and registry.contexts() == () else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert owner_at(registry, 105) == GPU1
    finally:
        registry.forget(1)


@pytest.mark.parametrize("method", ["_insert", "_drop_all"])
def test_an_agent_that_dies_while_the_registry_is_at_work(method: str) -> None:
    """The garbage collector calls forget() wherever it happens to run, also on the thread that holds the lock."""

    class Interrupted(Registry):
        def _insert(self, new) -> None:
            if method == "_insert" and new.owner is GPU1:
                self.forget(2)
            super()._insert(new)

        def _drop_all(self, olds) -> None:
            if method == "_drop_all" and olds and olds[0].owner is GPU1:
                self.forget(2)
            super()._drop_all(olds)

    registry = Interrupted()
    registry.add(2, 100, 10, GPU0)
    registry.add(1, 200, 10, GPU1)
    registry.remove(1, 200, 10)
    assert len(registry) == 0 and registry.contexts() == () and owner_at(registry, 105) is None


def test_an_agent_with_the_id_of_a_dead_one_keeps_its_own() -> None:
    registry = Registry()
    registry.add(1, 100, 10, GPU0)
    with registry._lock:  # somebody is at work when the agent dies
        registry.forget(1)
    registry.add(1, 200, 10, GPU1)
    assert owner_at(registry, 105) is None and owner_at(registry, 205) == GPU1
