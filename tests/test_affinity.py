# SPDX-License-Identifier: Apache-2.0
"""affinity.py: which context a thread or a call gets, and that the caller's own comes back."""

import logging
import threading

import numpy as np
import pytest
from fake_cuda import FakeCuda

import ctxfix
from ctxfix import affinity, counters, driver
from ctxfix.driver import Owner
from ctxfix.errors import DriverError, UnknownOwnerError
from ctxfix.patches.host import context_of
from ctxfix.registry import registry


def stack(cuda: FakeCuda) -> tuple[int, int]:
    return cuda.depth(), cuda.current()


def change(name: str, before: dict[str, int]) -> int:
    return counters.snapshot()[name] - before[name]


# ---- enter and leave


def test_the_right_context_costs_one_question(cuda: FakeCuda) -> None:
    cuda.make_current(1)
    calls = cuda.calls()
    assert affinity.enter(cuda.contexts[1]) is None
    assert cuda.calls() == calls + 1


def test_no_context_stays_none(cuda: FakeCuda) -> None:
    assert affinity.enter(0) is None and cuda.depth() == 0


@pytest.mark.parametrize("before", [[], [0], [0, 2], [1, 0, 1, 0]], ids=str)
def test_the_callers_stack_is_back(cuda: FakeCuda, before: list[int]) -> None:
    for device in before:
        cuda.push(device)
    was, counted = stack(cuda), counters.snapshot()
    token = affinity.enter(cuda.contexts[1])
    assert cuda.current() == cuda.contexts[1] and token is not None
    affinity.leave(token)
    assert stack(cuda) == was
    assert change("rebinds", counted) == change("restores", counted) == 1


def test_leave_undoes_what_the_call_itself_changed(cuda: FakeCuda) -> None:
    token = affinity.enter(cuda.contexts[1])
    cuda.make_current(3)
    assert token == 0
    affinity.leave(token)
    assert stack(cuda) == (0, 0)


def test_leave_counts_and_warns_if_the_callers_context_is_gone(cuda: FakeCuda, caplog) -> None:
    own = cuda.create_context(2)
    driver.set_current(own)
    token = affinity.enter(cuda.contexts[1])
    cuda.destroy_context(own)
    counted = counters.snapshot()
    assert token == own
    affinity.leave(token)
    assert change("hook_failures", counted) == 1 and "709" in caplog.text


# ---- what a new thread gets


def test_the_only_recorded_context_comes_first(cuda: FakeCuda) -> None:
    registry.add(1, 100, 10, Owner(cuda.contexts[1], 1))
    registry.add(1, 200, 10, Owner(cuda.contexts[1], 1))
    assert affinity.preferred(cuda.contexts[2]) == cuda.contexts[1]


def test_then_what_was_current_where_the_thread_was_started(cuda: FakeCuda) -> None:
    assert affinity.preferred(cuda.contexts[2]) == cuda.contexts[2]
    registry.add(1, 100, 10, Owner(cuda.contexts[1], 1))
    registry.add(1, 200, 10, Owner(cuda.contexts[0], 0))
    assert affinity.preferred(cuda.contexts[2]) == cuda.contexts[2], "two recorded contexts leave it open"


def test_then_the_only_primary_context_and_else_nothing(cuda: FakeCuda, monkeypatch) -> None:
    assert affinity.preferred() == 0, "four primary contexts leave it open"
    monkeypatch.setattr(driver, "primary_contexts", lambda: [cuda.contexts[3]])
    assert affinity.preferred() == cuda.contexts[3]


def test_a_bound_thread_stays_bound_and_is_counted(cuda: FakeCuda) -> None:
    counted, seen = counters.snapshot(), []

    def run() -> None:
        affinity.bind_new_thread(cuda.contexts[2])
        affinity.bind_new_thread(cuda.contexts[3])  # has one already
        seen.append(cuda.current())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [cuda.contexts[2]] and change("threads_bound", counted) == 1


def test_a_dead_recorded_context_leaves_the_new_thread_alone(cuda: FakeCuda) -> None:
    dead = cuda.create_context(1)
    cuda.destroy_context(dead)
    registry.add(1, 100, 10, Owner(dead, 1))
    with pytest.raises(DriverError):
        affinity.bind_new_thread(0)
    assert cuda.depth() == 0


# ---- whose is it


def test_the_recorded_owner_answers_while_the_allocation_lives(cuda: FakeCuda) -> None:
    address = cuda.alloc(1)
    mark = Owner(cuda.contexts[3], 3)  # not what the driver would say: so we see who answers
    registry.add(1, address, 1 << 20, mark, driver.buffer_id(address))
    assert affinity.owner_at(address + 5) == mark


@pytest.mark.parametrize("device", [0, 1])
def test_memory_freed_and_allocated_anew_gets_its_new_owner(cuda: FakeCuda, device: int) -> None:
    address = cuda.alloc(1)
    registry.add(1, address, 1 << 20, Owner(cuda.contexts[1], 1), driver.buffer_id(address))
    cuda.free(address)
    again = cuda.alloc(device)
    assert again == address, "the fake gives the address out again at once, as the real driver often does"
    counted = counters.snapshot()
    assert affinity.owner_at(address) == Owner(cuda.contexts[device], device)
    assert change("stale_owners", counted) == 1
    cuda.free(again)
    assert affinity.owner_at(address) is None


# ---- bound()


class Tensor:
    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def test_bound_by_tensor_descriptor_and_address(cuda: FakeCuda) -> None:
    address = cuda.alloc(2)
    cuda.make_current(0)
    for obj in (Tensor(address), (address, 10, 7), address):
        with ctxfix.bound(obj) as context:
            assert context == cuda.current() == cuda.contexts[2]
        assert stack(cuda) == (1, cuda.contexts[0])


def test_bound_by_numbers_of_numpy(cuda: FakeCuda) -> None:
    """Tables of addresses are arrays in many hosts."""
    address = cuda.alloc(2)
    for number in (np.uint64(address), np.array([[address, 64, 2]], dtype=np.uint64)[0]):
        with affinity.bound(number) as context:
            assert cuda.current() == context == cuda.contexts[2]
    assert context_of(np.uint64(address)) == context_of([np.uint64(0), np.uint64(address)]) == cuda.contexts[2]


def test_bound_gives_back_also_after_an_exception(cuda: FakeCuda) -> None:
    with pytest.raises(KeyError), ctxfix.bound(cuda.alloc(2)):
        raise KeyError
    assert stack(cuda) == (0, 0)


def test_bound_to_memory_of_nobody_says_so(cuda: FakeCuda) -> None:
    with (
        pytest.raises(UnknownOwnerError, match="0x1000 is no GPU memory .*no allocation of this"),
        ctxfix.bound(0x1000),
    ):
        pytest.fail("entered")
    assert cuda.depth() == 0


@pytest.mark.parametrize("obj", [None, [], (), {}, "x", b"x", bytearray(b"x"), 1.5, (None, 8), ["4096"], object()])
def test_bound_says_what_it_takes(cuda: FakeCuda, obj: object) -> None:
    with (
        pytest.raises(TypeError, match=r" is no memory: give a tensor \(with data_ptr\), a descriptor .* an address$"),
        ctxfix.bound(obj),
    ):
        pytest.fail("entered")


def test_bound_raises_what_the_driver_refuses(cuda: FakeCuda) -> None:
    address = cuda.alloc(2)
    cuda.fail("cuCtxSetCurrent", 201)
    with pytest.raises(DriverError) as raised, ctxfix.bound(address):
        pytest.fail("entered")
    assert raised.value.code == 201


def test_warnings_go_to_the_ctxfix_logger(cuda: FakeCuda, caplog) -> None:
    from ctxfix import guard

    guard.warn_once("key", "text")
    guard.warn_once("key", "text")
    assert [(r.name, r.levelno) for r in caplog.records] == [("ctxfix", logging.WARNING)]
