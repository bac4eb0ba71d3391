# SPDX-License-Identifier: Apache-2.0
"""evidence/posts.py and recorder.py around NIXL's stand-in: what they keep, and that they harm nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_nixl import MIB, Nixl, make_module, one

from ctxfix import _startup, activation, counters, driver, settings
from ctxfix.errors import CtxfixError, EvidenceError, PatchError
from ctxfix.evidence import posts, recorder
from ctxfix.patches import nixl


@pytest.fixture
def observed(cuda: FakeCuda) -> Iterator[tuple[Any, posts.Observer]]:
    """A NIXL that is observed, and its observer."""
    module, observer = make_module([], cuda), posts.Observer()
    posts.watch(module, observer)
    yield module, observer
    posts.unwatch(module.__name__)


@pytest.mark.parametrize("handle", [None, 7, object()], ids=["None", "a number", "some object"])
def test_nixls_own_error_arrives_whatever_it_was_given(observed: tuple[Any, posts.Observer], handle: Any) -> None:
    module, observer = observed

    def refuse() -> None:
        raise ValueError("NIXL's own")

    module.actions["transfer"] = refuse
    agent = module.nixl_agent("me")
    with pytest.raises(ValueError, match="NIXL's own"):
        agent.transfer(handle)
    assert list(observer.problems) == [
        f"transfer: AttributeError: {type(handle).__name__!r} object has no attribute '_handle'"
    ]


@pytest.mark.parametrize("method", ["posted", "polled", "agent", "current"])
@pytest.mark.parametrize("error", [TimeoutError, RuntimeError], ids=lambda error: error.__name__)
def test_what_a_signal_handler_raises_within_an_observer_arrives(
    observed: tuple[Any, posts.Observer],
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: type[Exception],
) -> None:
    module, observer = observed
    raised = error("the time is up")

    def handler(*_: object) -> None:
        raise raised

    def transfer() -> None:
        agent = module.nixl_agent("me")
        handle = agent.initialize_xfer("WRITE", one(cuda.alloc(1)), None, "you")
        agent.transfer(handle)
        agent.check_xfer_state(handle)

    before = signal.signal(signal.SIGUSR1, handler)
    where = driver if method == "current" else observer
    monkeypatch.setattr(where, method, lambda *_: signal.raise_signal(signal.SIGUSR1))
    try:
        with pytest.raises(error) as caught:
            transfer()
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()
    assert caught.value is raised and observer.problems == {}


def test_nothing_is_kept_of_handles_that_are_gone(observed: tuple[Any, posts.Observer], cuda: FakeCuda) -> None:
    module, observer = observed
    agent, address = module.nixl_agent("me"), cuda.alloc(1)
    for n in range(50):
        here, there = agent.prep_xfer_dlist("", [(address, 64, 1)] * 9, "VRAM"), agent.prep_xfer_dlist("you", [])
        transfers = [agent.make_prepped_xfer("WRITE", here, [0, 1], there, [0, 1])]
        transfers.append(agent.initialize_xfer("WRITE", one(address), None, "you"))
        for transfer in transfers:
            agent.transfer(transfer)
        if n % 2:  # the others are dropped: __del__ does it
            for handle in (*transfers, here, there):
                handle.release()
        del here, there, transfers, transfer
    handle = None
    del handle
    (row,) = observer.snapshot()["posts"]
    assert (row["remote"], row["posts"], row["bytes"]) == ("you", 100, 50 * (2 * 64 + 4096))
    kept = {name: len(value) for name, value in vars(observer).items() if isinstance(value, dict) and value}
    assert set(kept) <= {"totals", "agents", "_names"}, kept
    assert observer.problems == {}


def test_a_release_that_is_refused_leaves_the_list_known(observed: tuple[Any, posts.Observer], cuda: FakeCuda) -> None:
    module, observer = observed
    agent, address = module.nixl_agent("me"), cuda.alloc(1)
    here, there = agent.prep_xfer_dlist("", [(address, 64, 1)], "VRAM"), agent.prep_xfer_dlist("you", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(here), "refuse", True)
        for handle in (here, there):
            with pytest.raises(RuntimeError):
                handle.release()
    agent.transfer(agent.make_prepped_xfer("WRITE", here, [0], there, [0]))
    (row,) = observer.snapshot()["posts"]
    assert (row["remote"], row["device"], row["bytes"]) == ("you", 1, 64)


def test_a_recorder_that_cannot_begin_leaves_the_hooks_on(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where no thread can be started any more."""

    def refuse(self: recorder.Recorder) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(recorder.Recorder, "start", refuse)
    monkeypatch.setattr(settings, "current", lambda: settings.Settings(record=str(tmp_path / "r")))
    host = Nixl(cuda)
    nixl.apply(host.module)
    try:
        host.agent().register_memory([(cuda.alloc(1), MIB, 1, "")], "VRAM")
        assert host.context_of("register_memory") == cuda.contexts[1]
    finally:
        nixl.remove()
    assert "can't start new thread" in caplog.text and recorder.current() is None
    assert host.counted_since("hook_failures") == 1
    monkeypatch.setattr(settings, "current", lambda: settings.Settings(record=str(tmp_path / "r"), strict=True))
    with pytest.raises(CtxfixError, match="can't start new thread"):
        nixl.apply(make_module([], cuda))


def test_recording_that_cannot_begin_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PatchError("somebody wrapped it")

    with monkeypatch.context() as patch:
        patch.setattr(activation, "unpatch_nixl", refuse)
        with pytest.raises(PatchError), recorder.recording(str(tmp_path / "r")):
            pytest.fail("it began")
    assert recorder.current() is None
    unwanted = set(_startup.unwanted)
    with recorder.recording(str(tmp_path / "r")) as recorded:
        assert recorder.current() is recorded
        with pytest.raises(EvidenceError, match="being recorded already"), recorder.recording(str(tmp_path / "s")):
            pytest.fail("twice")
    assert recorder.current() is None and _startup.unwanted == unwanted
    assert counters.snapshot()
