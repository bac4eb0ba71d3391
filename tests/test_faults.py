# SPDX-License-Identifier: Apache-2.0
"""Faults injected into the Python side. docs/faults.md lists them all, with what happens and the test that proves it.

Always the same is expected: the host's own call is made once and gives its own result, the caller's context is as it
was, and ctxfix.stats() tells; in strict mode a CtxfixError at most.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import itertools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from environments import clean_environment
from fake_cuda import FakeCuda
from fake_nixl import METHODS, MIB, VRAM, Boom, DList, Nixl, one

import ctxfix
from ctxfix import affinity, counters, driver, guard, native, settings, threads
from ctxfix.driver import Owner
from ctxfix.errors import CtxfixError
from ctxfix.patches import host as host_patch
from ctxfix.patches import nixl, registration
from ctxfix.registry import Registration, Registry, registry

TROUBLE = ("hook_failures", "unknown_owners", "device_fallbacks", "stale_owners", "unsynchronised_ranges")


def trouble() -> int:
    """How often ctxfix has counted that something was not as it should be."""
    counts = counters.snapshot()
    return sum(counts[name] for name in TROUBLE)


def state(cuda: FakeCuda) -> tuple[int, int]:
    return cuda.depth(), cuda.current()


@pytest.fixture
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Parametrised: strict mode or not."""
    if request.param:
        monkeypatch.setattr(settings, "current", lambda: settings.Settings(strict=True))
    return bool(request.param)


either_mode = pytest.mark.parametrize("strict", [False, True], ids=["", "strict"], indirect=True)

# ---- every call of ours to the driver, with every error, at every hook -----------------------------------------------

CALLS = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetId",
    "cuCtxGetDevice",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuPointerGetAttribute",
    "cuPointerSetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
]

#: What cuda.h says they may give, what a broken GPU gives to any call, and one that nobody knows yet.
ERRORS = {
    "INVALID_VALUE": 1,
    "OUT_OF_MEMORY": 2,
    "DEVICE_UNAVAILABLE": 46,
    "NO_DEVICE": 100,
    "INVALID_DEVICE": 101,
    "INVALID_CONTEXT": 201,
    "ECC_UNCORRECTABLE": 214,
    "INVALID_HANDLE": 400,
    "ILLEGAL_ADDRESS": 700,
    "CONTEXT_IS_DESTROYED": 709,
    "LAUNCH_FAILED": 719,
    "UNKNOWN": 999,
    "an error of the future": 12345,
}


class Hook:
    """``call`` a hook, once healthy: what it gives then is what it must give whatever fails."""

    def __init__(self, name: str, host: Nixl, cuda: FakeCuda) -> None:
        self.name, self._host, self._cuda = name, host, cuda
        self.address, self.vmm = cuda.alloc(1), cuda.alloc_vmm(1)
        self._agent = host.agent()
        self._agent.register_memory([(self.address, MIB, 1, ""), (self.vmm, MIB, 1, "")], "VRAM")
        self._ran: list[int] = []
        #: The context that the host's code is to run in: the memory's, or for what names none the caller's own.
        self.expected = cuda.contexts[0 if name in ("__init__", "create_backend") else 1]

    def prepare(self) -> None:
        self._handle = self._agent.initialize_xfer("WRITE", one(self.address), None, "peer")
        self._ran.clear()
        self._seen = len(self._host.seen)

    def reached(self) -> list[int]:
        """The contexts in which the host's own code was reached."""
        return self._ran + [context for name, context in self._host.seen[self._seen :] if name == self.name]

    def _body(self, *_: object) -> str:
        self._ran.append(self._cuda.current())
        return "the host's own"

    def _in_thread(self) -> str:
        thread = threading.Thread(target=self._body)
        try:
            thread.start()
        finally:
            if thread.ident is not None:
                thread.join(20)
        return "the host's own"

    def call(self) -> object:
        other = {
            "__init__": lambda: self._host.module.nixl_agent("another"),
            "create_backend": lambda: self._agent.create_backend("LIBFABRIC"),
            "register_memory of VMM": lambda: self._agent.register_memory(DList(VRAM, [(self.vmm, 64, 1)])),
            "thread start": self._in_thread,
            "a host's method": host_patch.in_context(self._body, host_patch.Hook("m", "f", lambda: self.address)),
            "a host's device": host_patch.in_context(
                self._body, host_patch.Hook("m", "f", lambda: host_patch.Device(1))
            ),
        }
        if self.name in other:
            return other[self.name]()
        return METHODS[self.name](self._agent, self.address, self._handle)


HOOKS = [
    *METHODS,
    "__init__",
    "create_backend",
    "thread start",
    "a host's method",
    "a host's device",
]


@pytest.fixture
def python_threads(cuda: FakeCuda, startup_state: None) -> Iterator[None]:
    assert threads.apply()
    yield
    threads.remove()
    threads._unannounced.clear()


def alike(result: object, healthy: object) -> bool:
    return type(result) is type(healthy) and (result == healthy or not isinstance(result, (str, int, dict)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("hook", HOOKS)
@either_mode
def test_each_call_of_the_driver_fails_at_each_hook(
    host: Nixl, cuda: FakeCuda, python_threads: None, strict: bool, hook: str, name: str, monkeypatch
) -> None:
    if strict:
        monkeypatch.setenv("CTXFIX_STRICT", "1")  # what the thread hook asks
    tried = Hook(hook, host, cuda)
    tried.prepare()
    healthy = tried.call()

    def attempt(error: int, after: int, times: int) -> bool:
        """Whether it came to the failing call."""
        tried.prepare()
        cuda.make_current(0)
        before, counted = state(cuda), trouble()
        calls = cuda.calls(name)
        cuda.fail(name, error, after, times)
        try:
            assert alike(tried.call(), healthy)
        except CtxfixError:
            assert strict
        hit = cuda.calls(name) > calls + after
        cuda.heal()
        assert state(cuda) == before, "the caller's context is never lost"
        reached = tried.reached()
        assert len(reached) == 1 or (strict and not reached)
        # A device whose primary context cannot be told counts as one without: that is no trouble.
        untold = hook == "a host's device" and name.startswith("cuDevicePrimaryCtx")
        # -1: it was the test's own question that failed
        assert strict or untold or trouble() > counted or reached[0] in (tried.expected, -1)
        return hit

    for error in ERRORS.values():
        for nth in itertools.count():
            if not attempt(error, nth, 1):
                break
        if name != "cuCtxPopCurrent":  # if that never works again, nobody can undo a push
            attempt(error, 0, 0)


@pytest.mark.parametrize("name", CALLS)
@either_mode
def test_each_call_of_the_driver_fails_under_our_own_api(cuda: FakeCuda, strict: bool, name: str) -> None:
    """bound() and native_threads() may say so, by a CtxfixError; nothing else."""
    address = cuda.alloc(1)
    cuda.make_current(0)
    before = state(cuda)
    for error, work in itertools.product(ERRORS.values(), (ctxfix.bound, ctxfix.native_threads)):
        for nth in itertools.count():
            calls = cuda.calls(name)
            cuda.fail(name, error, nth, 1)
            entered = False
            try:
                with work(address):
                    entered = True
            except CtxfixError:
                assert strict or not entered
            hit = cuda.calls(name) > calls + nth
            cuda.heal()
            assert state(cuda) == before
            if not hit:
                break


@pytest.mark.parametrize("error", [3, 4], ids=["NOT_INITIALIZED", "DEINITIALIZED"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_driver_that_is_shut_down(host: Nixl, cuda: FakeCuda, python_threads: None, hook: str, error: int) -> None:
    """While a process ends, or in a driver that was never started, every call gives one of these."""
    tried = Hook(hook, host, cuda)
    tried.prepare()
    healthy = tried.call()
    tried.prepare()
    cuda.make_current(0)
    before = state(cuda)
    for name in CALLS:
        cuda.fail(name, error)
    assert alike(tried.call(), healthy)
    cuda.heal()
    assert state(cuda) == before and len(tried.reached()) == 1


def test_a_failing_call_is_told_once_and_counted_each_time(host: Nixl, cuda: FakeCuda, caplog) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    cuda.fail("cuCtxSetCurrent", 700)
    for _ in range(5):
        assert agent.transfer(handle) == "PROC"
    assert host.counted_since("hook_failures") == 5 and len(caplog.records) == 1
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in caplog.text and "CTXFIX_STRICT=1" in caplog.text


# ---- contexts and memory that go away under us -----------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["gone", "and made again"])
@pytest.mark.parametrize("method", METHODS)
def test_a_context_destroyed_before_a_call(host: Nixl, cuda: FakeCuda, method: str, again: bool) -> None:
    """cudaDeviceReset or cuCtxDestroy of what was recorded: the call goes through, and never in the dead context."""
    context = cuda.create_context(1)
    agent, address = host.agent(), cuda.alloc(1, context=context)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    cuda.make_current(0)
    before = state(cuda)
    cuda.destroy_context(context)
    new = cuda.create_context(1) if again else 0
    METHODS[method](agent, address, handle)
    # One made again may have the same address: then it is a living one, of the same GPU.
    assert host.context_of(method) in (cuda.contexts[0], cuda.contexts[1], new) and state(cuda) == before
    if again:
        cuda.destroy_context(new)


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_own_context_destroyed_within_a_call(host: Nixl, cuda: FakeCuda, method: str, caplog) -> None:
    """It cannot be given back: the thread is left with none, not with ours, and not with a dead one."""
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    own = cuda.create_context(2)
    driver.set_current(own)
    host.on(method, lambda: cuda.destroy_context(own))
    METHODS[method](agent, address, handle)
    assert state(cuda) == (0, 0) and host.counted_since("hook_failures") == 1
    assert sum("709" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("switches", [False, True], ids=["", "NIXL switches devices"])
@pytest.mark.parametrize("caller", [None, 2], ids=["no context", "another context"])
def test_memory_allocated_on_another_gpu_between_making_and_posting(
    host: Nixl, cuda: FakeCuda, caller: int | None, switches: bool, monkeypatch
) -> None:
    """A thread is never moved into a context that no longer owns the memory."""
    monkeypatch.setattr(registration, "nixl_switches", switches)
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    cuda.free(address)
    assert cuda.alloc(0) == address
    cuda.make_current(caller)
    before = state(cuda)
    for method in ("transfer", "check_xfer_state"):
        METHODS[method](agent, address, handle)
        assert host.context_of(method) == cuda.contexts[0]
    assert state(cuda) == before and host.counted_since("stale_owners") == 1
    cuda.free(address)


@pytest.mark.parametrize("device", [None, 0], ids=["freed", "on another GPU"])
@pytest.mark.parametrize("method", METHODS)
def test_memory_that_has_gone_since_it_was_registered(
    host: Nixl, cuda: FakeCuda, method: str, device: int | None
) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    cuda.free(address)
    if device is not None:
        assert cuda.alloc(device) == address
    cuda.make_current(3)
    before = state(cuda)
    METHODS[method](agent, address, handle)
    assert host.seen[-1][0] == method and state(cuda) == before
    if device is not None:
        cuda.free(address)


# ---- NIXL itself fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Boom, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("method", [*METHODS, "__init__", "create_backend"])
def test_what_nixl_raises_arrives(host: Nixl, cuda: FakeCuda, method: str, kind: type[BaseException]) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    cuda.make_current(0)
    before, error = state(cuda), kind()

    def fail() -> None:
        raise error

    making = {"__init__": lambda *_: host.agent(), "create_backend": lambda *_: agent.create_backend("X")}
    host.on(method, fail)
    with pytest.raises(kind) as raised:
        {**METHODS, **making}[method](agent, address, handle)
    assert raised.value is error and state(cuda) == before
    assert host.counted_since("hook_failures") == 0
    if native.available():
        assert not native.present().on and native.hold(False) is False


# ---- signals, at every moment ----------------------------------------------------------------------------------------


class Limit(Exception):
    """What a time limit raises, out of a signal handler."""


class Moments:
    """Python looks for signals when a function begins, and when one of C returns: such moments in our code, all where a
    function of ours begins and where the driver has answered.

    ``strike(n, work)`` calls ``blow`` at the n-th of them; whether it came so far. (Python 3.10 looks, beyond these,
    when a call of a Python function returns: between `enter` and the caller's `try`, where nothing can be done.)
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blow: Callable[[], object]) -> None:
        self._left, self._blow = -1, blow
        self.struck = False
        monkeypatch.setattr(driver, "_api", _Ticking(driver._api, self._tick))
        for name in ("_cuCtxGetCurrent", "_cuCtxSetCurrent", "_cuCtxGetId", "_cuPointerGetAttribute"):
            monkeypatch.setattr(driver, name, _ticking(getattr(driver, name), self._tick))
        for name in ("_rebinds", "_restores"):
            monkeypatch.setattr(affinity, name, iter(_ticking(getattr(affinity, name).__next__, self._tick), None))

    def _tick(self) -> None:
        if self._left == 0:
            sys.settrace(None)
            self._left = -1
            self.struck = True
            self._blow()
        self._left -= 1

    def _look(self, frame: types.FrameType, event: str, _: object) -> Any:
        # At the first line: an error at "call" itself, or at "c_return" of a profiler, breaks Python 3.11. Not where a
        # generator goes on, which is said, too, where one is closed; and not in `__del__`, which lets no error out.
        if event == "line":
            frame.f_trace_lines = False
            self._tick()
        code = frame.f_code
        ours = frame.f_globals.get("__name__", "").startswith("ctxfix.") and code.co_name != "finalize"
        return self._look if event == "call" and ours and not code.co_flags & inspect.CO_GENERATOR else None

    def strike(self, moment: int, work: Callable[[], object]) -> bool:
        self._left, self.struck = moment, False
        gc.disable()  # from what it calls back no error gets out
        sys.settrace(self._look)
        try:
            work()
        finally:
            sys.settrace(None)
            gc.enable()
            self._left = -1
        return self.struck


def _ticking(call: Callable[..., Any], tick: Callable[[], None]) -> Callable[..., Any]:
    def ticking(*args: Any) -> Any:
        answer = call(*args)
        tick()
        return answer

    return ticking


class _Ticking:
    def __init__(self, api: Any, tick: Callable[[], None]) -> None:
        self._wrapped, self._tick = api, tick

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        return _ticking(found, self._tick) if name.startswith("cu") else found


@contextmanager
def moments(monkeypatch: pytest.MonkeyPatch, handler: Callable[..., object]) -> Iterator[Moments]:
    """Moments for a signal that ``handler`` handles."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patched:
            yield Moments(patched, lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeoutError, Limit, RuntimeError])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_signal_handler_that_raises_at_every_moment(
    host: Nixl, cuda: FakeCuda, python_threads: None, hook: str, kind: type[BaseException], monkeypatch
) -> None:
    """What it raises arrives, always: a time limit must not get lost in a hook. And the caller's context is back."""
    tried = Hook(hook, host, cuda)
    tried.prepare()
    healthy = tried.call()
    error: BaseException

    def handler(*_: object) -> None:
        raise error

    with moments(monkeypatch, handler) as at:
        for moment in itertools.count():
            tried.prepare()
            cuda.make_current(0)
            before, failures, error = state(cuda), counters.snapshot()["hook_failures"], kind("now")
            try:
                struck = at.strike(moment, tried.call)
                assert not struck, f"lost at moment {moment}"
                break
            except BaseException as raised:  # noqa: B036
                assert raised is error
            assert state(cuda) == before, f"at moment {moment}"
            assert counters.snapshot()["hook_failures"] == failures
            if native.available():
                assert native.hold(False) is False and not native.present().on
    assert moment > 3
    tried.prepare()
    assert alike(tried.call(), healthy)
    assert registry.contexts() == (cuda.contexts[1],)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_signal_handler_that_uses_nixl_at_every_moment(
    host: Nixl, cuda: FakeCuda, python_threads: None, hook: str, monkeypatch
) -> None:
    """As a finalizer may, which the garbage collector runs: it neither waits for ever nor spoils the answers."""
    tried = Hook(hook, host, cuda)
    other, memory = host.agent(), cuda.alloc(2)
    other.register_memory([(memory, MIB, 2, "")], "VRAM")
    tried.prepare()
    healthy = tried.call()
    contexts: list[int] = []

    def handler(*_: object) -> None:
        other.deregister_memory(one(memory, 2))
        other.register_memory([(memory, 4096, 2, "")], "VRAM")
        handle = other.initialize_xfer("WRITE", one(memory, 2), None, "peer")
        other.transfer(handle)
        contexts.append(host.context_of("transfer"))
        handle.release()

    with moments(monkeypatch, handler) as at:
        for moment in itertools.count():
            tried.prepare()
            cuda.make_current(0)
            before, failures = state(cuda), counters.snapshot()["hook_failures"]
            result: list[object] = []
            struck = at.strike(moment, lambda result=result: result.append(tried.call()))
            assert alike(result[0], healthy) and state(cuda) == before, f"at moment {moment}"
            assert counters.snapshot()["hook_failures"] == failures
            if not struck:
                break
            assert contexts.pop() == cuda.contexts[2]
    assert moment > 3


@pytest.mark.parametrize("change", ["add", "add_all", "remove", "forget", "find"])
def test_a_change_of_the_registry_broken_off_at_every_moment(change: str, monkeypatch) -> None:
    """It is made or not made, and all that follows from it; of many ranges the first may be known alone."""

    def handler(*_: object) -> None:
        raise Limit

    gpu = [Owner(0x1000, 0), Owner(0x2000, 1)]
    work: dict[str, Callable[[Registry], object]] = {
        "add": lambda r: r.add(3, 120, 100, gpu[1]),
        "add_all": lambda r: r.add_all(3, [Registration(210, 250, gpu[1], 0), Registration(90, 100, gpu[0], 0)]),
        "remove": lambda r: r.remove(2, 150, 100),
        "forget": lambda r: r.forget(2),
        "find": lambda r: r.find(160),
    }

    def made() -> Registry:
        registry = Registry()
        for agent, start, length, owner in ((1, 100, 100, 0), (2, 150, 100, 1), (1, 300, 50, 0), (2, 400, 10, 1)):
            registry.add(agent, start, length, gpu[owner])
        return registry

    def seen(registry: Registry) -> object:
        owners = [found and (found.start, found.end, found.owner) for found in map(registry.find, range(90, 420))]
        return owners, registry.contexts(), [registry.contexts_of(agent) for agent in (1, 2, 3)], len(registry)

    before, after, first = made(), made(), made()
    work[change](after)
    if change == "add_all":
        first.add(3, 210, 40, gpu[1])
    allowed = [seen(before), seen(first), seen(after)]
    with moments(monkeypatch, handler) as at:
        for moment in itertools.count():
            registry = made()
            try:
                if not at.strike(moment, lambda registry=registry: work[change](registry)):
                    break
            except Limit:
                pass
            assert seen(registry) in allowed, f"at moment {moment}"
    assert moment > 0


@pytest.mark.parametrize("question", ["_cuCtxGetCurrent", "_cuCtxGetId", "_cuPointerGetAttribute"])
def test_a_question_within_a_question_to_the_driver(host: Nixl, cuda: FakeCuda, question: str, monkeypatch) -> None:
    """The garbage collector may release a transfer between the driver's answer and our reading of it."""
    agent, address, elsewhere = host.agent(), cuda.alloc(1), cuda.alloc(2)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    others = [agent.initialize_xfer("WRITE", one(elsewhere, 2), None, "peer") for _ in range(50)]
    asked, cuda_context = getattr(driver, question), cuda.contexts[0]

    def interrupted(*args: Any) -> int:
        error = asked(*args)
        with monkeypatch.context() as quiet:
            quiet.setattr(driver, question, asked)
            others.pop().release()
        return error

    cuda.make_current(0)
    monkeypatch.setattr(driver, question, interrupted)
    agent.transfer(handle)
    assert host.context_of("transfer") == cuda.contexts[1] and cuda.current() == cuda_context
    assert driver.owner_of(address) == Owner(cuda.contexts[1], 1)
    assert driver.buffer_id(address) != driver.buffer_id(elsewhere) and len(others) < 49


@pytest.mark.parametrize(("kind", "theirs"), [(TimeoutError, True), (Limit, True), (ValueError, False)])
def test_what_another_thread_sets_is_told_by_its_class(kind: type[Exception], theirs: bool) -> None:
    """It comes up in our own code, without a trace of who sent it."""
    within_ours: dict[str, Any] = {"__name__": "ctxfix.patches.nixl", "kind": kind}
    exec("def hook(): raise kind", within_ours)
    with pytest.raises(kind) as raised:
        within_ours["hook"]()
    assert guard.interrupted(raised.value) == theirs


# ---- threads that die ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 may raise between enter() and the caller's try")
@pytest.mark.parametrize("kind", [Limit, SystemExit, TimeoutError])
def test_a_thread_that_another_one_ends(host: Nixl, cuda: FakeCuda, kind: type[BaseException]) -> None:
    """PyThreadState_SetAsyncExc, wherever it hits: it arrives, and the thread dies in its own context."""
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    ends: list[tuple[int, int]] = []
    running = threading.Event()

    def work() -> None:
        cuda.make_current(0)
        try:
            running.set()
            while True:
                agent.transfer(handle)
                host.seen.clear()
        except kind:
            ends.append(state(cuda))

    for _ in range(100):
        running.clear()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        running.wait()
        raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
        assert raised == 1
        thread.join(20)
        assert not thread.is_alive(), "the exception got lost"
    assert ends == [(1, cuda.contexts[0])] * 100


# ---- our own code and the extension fail -----------------------------------------------------------------------------

NATIVE = ["install", "new_group", "present", "arm", "disarm", "bind_group", "group_info", "set_home", "hold", "status"]


@pytest.mark.skipif(not native.available(), reason=f"ctxfix.native: {native.reason()}")
@pytest.mark.parametrize("name", NATIVE)
@either_mode
def test_each_call_of_the_extension_fails_at_each_hook(
    request: pytest.FixtureRequest, host: Nixl, cuda: FakeCuda, strict: bool, name: str, monkeypatch
) -> None:
    """As when it is out of memory: the call is made, and in the right context, which Python sees to."""

    def fail(*_: object) -> None:
        raise MemoryError("injected")

    agent, address = host.agent(), cuda.alloc(1)
    calls: dict[str, Callable[[], object]] = {
        "__init__": lambda: host.module.nixl_agent("another"),
        "create_backend": lambda: agent.create_backend("X"),
        "register_memory": lambda: agent.register_memory([(address, MIB, 3, "")], "VRAM"),  # with a wrong device id
        "transfer": lambda: agent.transfer(agent.initialize_xfer("WRITE", one(address), None, "peer")),
        "deregister_memory": lambda: agent.deregister_memory(one(address)),
    }
    cuda.make_current(0)
    before = state(cuda)
    disarm = native.disarm  # the true one
    request.addfinalizer(disarm)
    monkeypatch.setattr(native, name, fail)
    for method, call in calls.items():
        try:
            call()
        except CtxfixError:
            assert strict
        assert state(cuda) == before
        if not strict:
            making = method in ("__init__", "create_backend")
            assert host.context_of(method) == cuda.contexts[0 if making else 1]
    assert strict or host.counted_since("hook_failures") > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_logging_set_up_that_fails(host: Nixl, cuda: FakeCuda, method: str, monkeypatch) -> None:
    """A filter or a handler of the application that raises is no reason to lose NIXL's answer."""

    def broken(_: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    address, agent = cuda.alloc(1), host.agent()
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    monkeypatch.setattr(guard.logger, "filters", [broken])
    cuda.fail("cuCtxSetCurrent", 999)
    cuda.fail("cuPointerGetAttribute", 999)
    METHODS[method](agent, address, handle)
    cuda.heal()
    assert host.seen[-1][0] == method and trouble() > 0


def test_an_error_that_cannot_be_printed(host: Nixl, cuda: FakeCuda, monkeypatch) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    agent = host.agent()
    monkeypatch.setattr(nixl, "context_of_agent", lambda _: (_ for _ in ()).throw(Silent()))
    assert agent.get_new_notifs() == {} and host.counted_since("hook_failures") == 1


# ---- no memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MemoryError, RecursionError])
@pytest.mark.parametrize("hook", HOOKS)
def test_no_memory_at_every_moment(
    host: Nixl, cuda: FakeCuda, python_threads: None, hook: str, kind: type[Exception], monkeypatch
) -> None:
    """The host's answer, and a count; or the error, as it may come to any code. In any case the caller's context."""
    tried = Hook(hook, host, cuda)
    tried.prepare()
    healthy = tried.call()

    def blow() -> None:
        raise kind

    answers = 0
    with monkeypatch.context() as patched:
        at = Moments(patched, blow)
        for moment in itertools.count():
            tried.prepare()
            cuda.make_current(0)
            before, failures = state(cuda), counters.snapshot()["hook_failures"]
            result: list[object] = []
            try:
                if not at.strike(moment, lambda result=result: result.append(tried.call())):
                    break
            except kind:
                pass
            assert state(cuda) == before, f"at moment {moment}"
            assert not native.available() or not native.present().on, f"at moment {moment}"
            if result:
                answers += 1
                assert alike(result[0], healthy) and counters.snapshot()["hook_failures"] > failures
    assert answers > 0 or hook in ("__init__", "create_backend")


# ---- fork ------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], bool]) -> None:
    """Fork here; in the child ``work`` must be true within 20 seconds."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("caller", [None, 0], ids=["no context", "another context"])
@pytest.mark.parametrize("method", [*METHODS, "create_backend"])
@either_mode
def test_fork_within_a_hook(
    host: Nixl, cuda: FakeCuda, strict: bool, method: str, caller: int | None, monkeypatch
) -> None:
    """The child comes back out of the hook with NIXL's answer, and has touched no CUDA."""
    address, agent = cuda.alloc(1), host.agent()
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    calls = {**METHODS, "create_backend": lambda *_: agent.create_backend("X")}
    healthy = calls[method](agent, address, handle)
    handle._released = False
    cuda.make_current(caller)
    before, parent, child = state(cuda), os.getpid(), []
    host.on(method, lambda: child.append(os.fork()))
    ask = cuda.current
    try:
        result = calls[method](agent, address, handle)
        if os.getpid() != parent:
            signal.alarm(20)
            calls_of_cuda = cuda.calls()
            monkeypatch.setattr(cuda, "current", lambda: 0)  # the stand-in asks for the context itself
            host.on(method, lambda: None)
            fine = alike(result, healthy) and counters.snapshot()["hook_failures"] == 0
            fine = fine and agent.transfer(handle) == "PROC" and len(registry) == 0
            agent.register_memory([(address, MIB, 1, "")], "VRAM")
            os._exit(0 if fine and cuda.calls() == calls_of_cuda else 1)
    finally:
        if os.getpid() != parent:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]) == 0
    assert alike(result, healthy) and state(cuda) == before and cuda.current == ask


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_while_other_threads_hold_every_lock_of_ours(host: Nixl, cuda: FakeCuda) -> None:
    address, agent = cuda.alloc(1), host.agent()
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with registration._one_at_a_time(agent), registry._lock, threads._lock:
            held.set()
            done.wait(60)

    def works() -> bool:
        cuda.current = lambda: 0  # type: ignore[method-assign]
        agent.register_memory([(address, MIB, 1, "")], "VRAM")
        agent.deregister_memory(one(address))
        answer = agent.transfer(handle)
        threads.apply()
        threads.remove()
        thread = threading.Thread(target=agent.get_new_notifs)
        thread.start()
        thread.join(10)
        return answer == "PROC" and registry.find(address) is None and not thread.is_alive()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(20)
        in_child(works)
    finally:
        done.set()
        holder.join(20)


# ---- finalizers ------------------------------------------------------------------------------------------------------


def test_the_garbage_collector_deregisters_within_a_change_of_the_registry(host: Nixl, cuda: FakeCuda) -> None:
    """An object of the application whose __del__ gives its memory back, collected where the registry is at work."""
    agent, address = host.agent(), cuda.alloc(1)

    class Buffer:
        def __init__(self, start: int) -> None:
            self.start, self.cycle = start, self
            agent.register_memory([(start, 64, 1, "")], "VRAM")

        def __del__(self) -> None:
            agent.deregister_memory(DList(VRAM, [(self.start, 64, 1)]))

    class Collecting(list):  # type: ignore[type-arg]
        def insert(self, *args: Any) -> None:
            gc.collect()
            super().insert(*args)

    Buffer(address + 4096)
    assert len(registry) == 1
    registry._ends = Collecting(registry._ends)
    agent.register_memory([(address, 64, 1, "")], "VRAM")
    assert len(registry) == 1 and registry.find(address) is not None and registry.find(address + 4096) is None
    assert registry._starts == [address] and registry._ends == [address + 64] and len(registry._stacks) == 1
    assert host.counted_since("hook_failures") == 0


# ---- the end of a process --------------------------------------------------------------------------------------------

SHUTDOWN = """
    import atexit, gc, sys, threading
    from fake_cuda import FakeCuda
    from fake_nixl import DList, Nixl, VRAM, one
    from pathlib import Path
    cuda = FakeCuda(Path(sys.argv[1]))
    from ctxfix import driver, threads
    from ctxfix.patches import nixl
    assert driver.attach()
    host = Nixl(cuda)
    nixl.apply(host.module)
    threads.apply()
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, 1 << 20, 1, "")], "VRAM")
    begun = threading.Barrier(5)

    def post():
        handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
        cuda.make_current(0)
        begun.wait()
        while True:
            agent.transfer(handle)
            agent.check_xfer_state(handle)
            agent.deregister_memory(agent.register_memory([(address + 4096, 64, 1, "")], "VRAM"))
            host.seen.clear()

    for _ in range(4):
        threading.Thread(target=post, daemon=True).start()
    begun.wait()
    kept = agent.initialize_xfer("WRITE", one(address), None, "peer")  # dies with the module
    cycle = [agent]; cycle.append(cycle)
    atexit.register(lambda: print(agent.transfer(kept)))
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2)], ids=["end", "exit", "interrupt"]
)
def test_the_interpreter_ends_while_daemon_threads_post(fake_driver: FakeCuda, end: str, code: int) -> None:
    from rig import Rig

    library = Rig.driver_only().libraries / "libcuda.so.1"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(SHUTDOWN).format(end=end), str(library)],
        env=clean_environment(PYTHONPATH=str(Path(__file__).parent)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = done.stderr.replace("\n", " ").strip()
    assert done.returncode in (code, 130 if code == -2 else code), done.stderr
    assert done.stdout == "PROC\n" and (not told or (code == -2 and told.endswith("KeyboardInterrupt"))), done.stderr
