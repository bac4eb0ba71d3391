# SPDX-License-Identifier: Apache-2.0
"""methods.py: what others have put in a method's place is called with its instance."""

from __future__ import annotations

import threading
from functools import partialmethod
from typing import Any

import pytest
import wrapt
from fake_cuda import FakeCuda
from fake_nixl import make_module, one

from ctxfix import threads
from ctxfix.methods import unbound
from ctxfix.patches import nixl


class Example:
    def plain(self, a: int, b: int = 2) -> tuple[Any, int, int]:
        return self, a, b

    preset = partialmethod(plain, 7)


def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    assert instance is not None, "wrapt tells it so when it is called as a function"
    return wrapped(*args, **kwargs)


def test_what_may_stand_in_a_class() -> None:
    one = Example()
    assert unbound(vars(Example)["plain"]) is Example.plain, "no cost where nobody has wrapped"
    assert unbound(vars(Example)["preset"])(one, b=3) == (one, 7, 3)
    wrapped = unbound(wrapt.FunctionWrapper(Example.plain, wrapper))
    assert wrapped(one, 1, b=5) == (one, 1, 5)
    assert wrapped.__name__ == "plain"
    assert unbound(len)([1, 2]) == 2


def test_a_thread_whose_start_was_wrapped_before_us(monkeypatch: pytest.MonkeyPatch) -> None:
    threads.remove()
    monkeypatch.setattr(threading.Thread, "start", wrapt.FunctionWrapper(threading.Thread.start, wrapper))
    threads.apply()
    try:
        seen: list[int] = []
        thread = threading.Thread(target=seen.append, args=(1,))
        thread.start()
        thread.join()
        assert seen == [1]
    finally:
        threads.remove()


def test_calls_of_nixl_that_were_wrapped_before_us(cuda: FakeCuda) -> None:
    seen: list[tuple[str, int]] = []
    module = make_module(seen, cuda)
    for name in ("transfer", "get_new_notifs", "register_memory"):
        original = vars(module.nixl_agent)[name]
        setattr(module.nixl_agent, name, wrapt.FunctionWrapper(original, wrapper))
    nixl.apply(module)
    try:
        agent, address = module.nixl_agent("a"), cuda.alloc(1)
        agent.register_memory([(address, 64, 1)], "VRAM")
        handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
        assert agent.transfer(handle) == "PROC"
        agent.get_new_notifs()
        assert {method for method, _ in seen} >= {"register_memory", "transfer", "get_new_notifs"}
    finally:
        nixl.remove()
