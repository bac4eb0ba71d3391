# SPDX-License-Identifier: Apache-2.0
"""Whatever an application does, in whatever order: owners are true, and every caller's context comes back.

``--hypothesis-profile=long`` looks harder (conftest.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda import GPUS, FakeCuda
from fake_nixl import METHODS, MIB, VRAM, Boom, DList, Nixl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import ctxfix
from ctxfix import affinity
from ctxfix.driver import Owner
from ctxfix.registry import registry

# ---- owners, against the truth ---------------------------------------------------------------------------------------

PIECE = 4096


def test_an_owner_is_never_a_stale_one(host: Nixl, cuda: FakeCuda) -> None:
    """Memory is allocated, freed and allocated again elsewhere at the same address, registered in overlapping ranges by
    several agents, deregistered or not: the answer is the truth of the moment."""

    class Memory(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            registry._clear()
            self.agents = [host.agent() for _ in range(3)]
            self.living: dict[int, int] = {}  # address -> device
            self.addresses: set[int] = set()
            self.registered: list[tuple[int, DList]] = []

        @rule(device=st.integers(0, GPUS - 1))
        def allocate(self, device: int) -> None:
            address = cuda.alloc(device)
            self.living[address] = device
            self.addresses.add(address)

        @precondition(lambda self: self.living)
        @rule(data=st.data())
        def free(self, data: st.DataObject) -> None:
            address = data.draw(st.sampled_from(sorted(self.living)))
            cuda.free(address)
            del self.living[address]

        @precondition(lambda self: self.living)
        @rule(data=st.data(), agent=st.integers(0, 2), first=st.integers(0, 5), pieces=st.integers(1, 5))
        def register(self, data: st.DataObject, agent: int, first: int, pieces: int) -> None:
            address = data.draw(st.sampled_from(sorted(self.living)))
            wrong = data.draw(st.integers(0, GPUS - 1))
            descs = DList(VRAM, [(address + first * PIECE, pieces * PIECE, wrong)])
            self.agents[agent].register_memory(descs)
            self.registered.append((agent, descs))

        @precondition(lambda self: self.registered)
        @rule(data=st.data())
        def deregister(self, data: st.DataObject) -> None:
            agent, descs = self.registered.pop(data.draw(st.integers(0, len(self.registered) - 1)))
            self.agents[agent].deregister_memory(descs)

        @rule(agent=st.integers(0, 2))
        def an_agent_dies(self, agent: int) -> None:
            self.agents[agent] = host.agent()
            self.registered = [kept for kept in self.registered if kept[0] != agent]

        @precondition(lambda self: self.living)
        @rule(data=st.data(), piece=st.integers(0, 10), caller=st.sampled_from([None, *range(GPUS)]))
        def post(self, data: st.DataObject, piece: int, caller: int | None) -> None:
            address = data.draw(st.sampled_from(sorted(self.living)))
            cuda.make_current(caller)
            before = cuda.depth(), cuda.current()
            descs = DList(VRAM, [(address + piece * PIECE, 64, 0)])
            handle = self.agents[0].initialize_xfer("WRITE", descs, None, "peer")
            self.agents[0].transfer(handle)
            handle.release()
            assert host.context_of("transfer") == cuda.contexts[self.living[address]]
            assert (cuda.depth(), cuda.current()) == before
            cuda.make_current(None)

        @invariant()
        def owners_are_true(self) -> None:
            for address in self.addresses:
                device = self.living.get(address)
                owner = None if device is None else Owner(cuda.contexts[device], device)
                for piece in (0, 2, 7):
                    assert affinity.owner_at(address + piece * PIECE) == owner

        @invariant()
        def what_is_counted_as_registered_is(self) -> None:
            assert len(registry) == len(self.registered)

        def teardown(self) -> None:
            for address in self.living:
                cuda.free(address)
            self.agents.clear()

    run_state_machine_as_test(Memory)


# ---- contexts, against what a block promises -------------------------------------------------------------------------

#: The calls made per post and per poll put back what they changed themselves: NIXL changes nothing there, or it is
#: known to (`nixl_switches`).
ONLY_IF_CHANGED = (
    "transfer",
    "check_xfer_state",
    "get_new_notifs",
    "update_notifs",
    "check_remote_xfer_done",
)
DEVICES = st.integers(0, GPUS - 1)
STEPS = st.recursive(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from([None, *range(GPUS)])),
        st.tuples(st.just("raise")),
        st.tuples(st.just("nothing")),
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("bound"), DEVICES, st.lists(inner, max_size=3)),
        st.tuples(st.just("push"), DEVICES, st.lists(inner, max_size=3)),
        st.tuples(st.just("call"), DEVICES, st.sampled_from(sorted(METHODS)), st.lists(inner, max_size=3)),
    ),
    max_leaves=12,
)


def without_sets(steps: list[Any]) -> list[Any]:
    """Also in blocks: one of no context in a ``bound`` in a ``push`` takes off what the push put on."""
    kept = [step for step in steps if step[0] != "set"]
    return [(*step[:-1], without_sets(step[-1])) if isinstance(step[-1], list) else step for step in kept]


@pytest.mark.parametrize("switches", [False, True], ids=["", "NIXL switches devices"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(caller=st.sampled_from([None, *range(GPUS)]), steps=st.lists(STEPS, max_size=4))
def test_the_callers_context_is_back_whatever_is_nested_in_what(
    host: Nixl, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, switches: bool, caller: int | None, steps: list[Any]
) -> None:
    from ctxfix.patches import registration

    monkeypatch.setattr(registration, "nixl_switches", switches)
    agents = [host.agent() for _ in range(GPUS)]
    memory = [cuda.alloc(device) for device in range(GPUS)]
    chosen: list[int | None] = []
    for device, agent in enumerate(agents):
        agent.register_memory([(memory[device], MIB, device, "")], "VRAM")

    def run(step: Any) -> None:
        kind, *rest = step
        if kind == "raise":
            raise Boom
        if kind == "set":
            cuda.make_current(rest[0])
            chosen.append(rest[0])  # of no context it takes the present one off the stack, which nobody puts back
            return
        if kind == "nothing":
            return
        before = cuda.depth(), cuda.current()
        try:
            if kind == "bound":
                with ctxfix.bound(memory[rest[0]]):
                    assert cuda.current() == cuda.contexts[rest[0]]
                    run_all(rest[1])
            elif kind == "push":
                cuda.push(rest[0])
                try:
                    run_all(rest[1])
                finally:
                    while cuda.depth() > before[0]:
                        cuda.pop()
            else:
                call(*rest)
        except Boom:
            pass
        if kind != "push":  # that is the application's own
            assert cuda.current() == before[1] and (cuda.depth() == before[0] or None in chosen)

    def call(device: int, method: str, inside: list[Any]) -> None:
        handle = agents[device].initialize_xfer("WRITE", DList(VRAM, [(memory[device], 64, device)]), None, "peer")

        if method in ONLY_IF_CHANGED and not (switches and method == "transfer"):
            inside = without_sets(inside)

        def body() -> None:
            del host.module.actions[method]
            assert cuda.current() == cuda.contexts[device]
            run_all(inside)

        host.on(method, body)
        # METHODS speak of GPU 1; an address says which one it is, so the device id does not matter.
        METHODS[method](agents[device], memory[device], handle)

    def run_all(inner: list[Any]) -> None:
        for step in inner:
            run(step)

    cuda.make_current(caller)
    try:
        run_all(steps)
    except Boom:
        pass
    finally:
        host.module.actions.clear()
        while cuda.depth():
            cuda.pop()
        registry._clear()
        for address in memory:
            cuda.free(address)
