# SPDX-License-Identifier: Apache-2.0
"""Python threads start bound: every kind of the standard library, and never at the cost of a thread."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import functools
import gc
import multiprocessing.pool
import os
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ctxfix
from ctxfix import _startup, threads
from ctxfix.errors import CtxfixError, PatchError

pytestmark = pytest.mark.usefixtures("startup_state")


class Affinity(types.ModuleType):
    """Stands in for ``ctxfix.affinity``: a "context" is a number kept for each thread."""

    def __init__(self) -> None:
        super().__init__("ctxfix.affinity")
        self.local = threading.local()
        self.error: BaseException | None = None
        self.calls = 0

    def current_context(self) -> int:
        return getattr(self.local, "context", 0)

    def bind_new_thread(self, parent: int) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.local.context = parent


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> Iterator[Affinity]:
    """The hook in place, and context 7 current on the thread that runs the test."""
    monkeypatch.delenv("CTXFIX_STRICT", raising=False)
    affinity = Affinity()
    affinity.local.context = 7
    monkeypatch.setitem(sys.modules, "ctxfix.affinity", affinity)
    _startup.failures.clear()
    assert threads.apply()
    yield affinity
    threads.remove()
    assert threads._bindings == {} and threads._unannounced == []


def in_thread(affinity: Affinity, start: Callable[[Callable[[], None]], object]) -> int:
    """The context that code started by ``start`` runs in."""
    seen: list[int] = []
    done = threading.Event()

    def body() -> None:
        seen.append(affinity.current_context())
        done.set()

    keep = start(body)
    assert done.wait(20), "the thread never ran"
    del keep
    return seen[0]


def by_target(body: Callable[[], None]) -> None:
    threading.Thread(target=body).start()


def by_daemon(body: Callable[[], None]) -> None:
    threading.Thread(target=body, daemon=True).start()


def by_run_override(body: Callable[[], None]) -> None:
    class Worker(threading.Thread):
        def run(self) -> None:
            body()

    Worker().start()


def by_start_override(body: Callable[[], None]) -> None:
    class Worker(threading.Thread):
        def start(self) -> None:
            super().start()

    Worker(target=body).start()


def by_timer(body: Callable[[], None]) -> None:
    threading.Timer(0.01, body).start()


def by_executor(body: Callable[[], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(body).result(20)


def by_executor_initializer(body: Callable[[], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1, initializer=body) as pool:
        pool.submit(int).result(20)


def by_thread_pool(body: Callable[[], None]) -> None:
    with multiprocessing.pool.ThreadPool(1) as pool:
        pool.apply(body)


def by_thread_pool_initializer(body: Callable[[], None]) -> None:
    with multiprocessing.pool.ThreadPool(1, body) as pool:
        pool.apply(int)


def by_to_thread(body: Callable[[], None]) -> None:
    async def main() -> None:
        await asyncio.to_thread(body)

    asyncio.run(main())


def by_run_in_executor(body: Callable[[], None]) -> None:
    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(None, body)

    asyncio.run(main())


def by_thread_of_thread(body: Callable[[], None]) -> None:
    outer = threading.Thread(target=by_target, args=(body,))
    outer.start()
    outer.join(20)


@pytest.mark.parametrize(
    "start",
    [
        by_target,
        by_daemon,
        by_run_override,
        by_start_override,
        by_timer,
        by_executor,
        by_executor_initializer,
        by_thread_pool,
        by_thread_pool_initializer,
        by_to_thread,
        by_run_in_executor,
        by_thread_of_thread,
    ],
)
def test_every_kind_of_thread_starts_bound(affinity: Affinity, start: Callable[[Callable[[], None]], object]) -> None:
    assert in_thread(affinity, start) == 7


def test_thread_starts_in_what_was_current_where_it_was_started(affinity: Affinity) -> None:
    seen = []

    def starter(context: int) -> None:
        affinity.local.context = context
        for _ in range(20):
            seen.append((context, in_thread(affinity, by_target)))

    starters = [threading.Thread(target=starter, args=(context,)) for context in (1, 2, 3, 4)]
    for thread in starters:
        thread.start()
    for thread in starters:
        thread.join(20)
    assert len(seen) == 80 and all(started == found for started, found in seen)


def test_thread_started_without_a_context_is_still_offered_one(affinity: Affinity) -> None:
    affinity.local.context = 0
    assert in_thread(affinity, by_target) == 0
    assert affinity.calls == 1, "affinity decides: there may be an only recorded context"


def test_nothing_is_called_or_loaded_without_affinity(affinity: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ctxfix.affinity")
    before = set(sys.modules)
    assert in_thread(affinity, by_target) == 0
    assert affinity.calls == 0 and set(sys.modules) == before


def test_affinity_half_imported(affinity: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctxfix.affinity", types.ModuleType("ctxfix.affinity"))
    assert in_thread(affinity, by_target) == 0
    assert _startup.failures == {}


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_failing_hook_never_hangs_start(
    affinity: Affinity, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    affinity.error = error
    assert [in_thread(affinity, by_target) for _ in range(3)] == [0, 0, 0]
    # Said once, and by the thread that starts: in the new one logging would make a dummy thread of it.
    (record,) = caplog.records
    assert record.name == "ctxfix" and "binding a new thread" in record.getMessage()
    assert record.thread == threading.get_ident()
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading._DummyThread)]


def test_failing_look_at_the_context_never_stops_start(affinity: Affinity, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> int:
        raise ValueError("broken")

    good, affinity.current_context = affinity.current_context, fail  # type: ignore[method-assign]
    ran = threading.Event()
    threading.Thread(target=ran.set).start()
    assert ran.wait(20) and "starting a thread: ValueError: broken" in caplog.text
    affinity.current_context = good  # type: ignore[method-assign]


def test_strict_mode_raises_where_the_thread_was_started(affinity: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXFIX_STRICT", "1")
    affinity.error = ValueError("broken")
    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    with pytest.raises(CtxfixError, match="binding a new thread: ValueError: broken"):
        thread.start()
    assert ran.wait(20)
    thread.join(20)


def test_failures_are_counted(affinity: Affinity) -> None:
    before = ctxfix.stats()["hook_failures"]
    affinity.error = ValueError("broken")
    for _ in range(3):
        in_thread(affinity, by_target)
    assert ctxfix.stats()["hook_failures"] == before + 3


def test_errors_of_the_program_stay_its_own(affinity: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def fail() -> None:
        raise KeyError("theirs")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join(20)
    (told,) = seen
    assert told.exc_type is KeyError
    names = []
    traceback = told.exc_traceback
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    assert threads.__file__ not in names
    with pytest.raises(RuntimeError, match="only be started once"):
        thread.start()


def test_thread_that_cannot_be_started(affinity: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, threads._STARTER, no_more)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread().start()
    assert threads._bindings == {}


def test_thread_object_is_left_as_it_was(affinity: Affinity) -> None:
    threads.remove()
    before = set(vars(threading.Thread()))
    threads.apply()
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, args=(20,))
    thread.start()
    assert set(vars(thread)) <= before
    gate.set()
    thread.join(20)
    alive = weakref.ref(thread)
    gc.disable()
    try:
        del thread
        assert alive() is None, "a reference cycle keeps the thread"
    finally:
        gc.enable()


def test_apply_and_remove_are_idempotent_and_symmetric(affinity: Affinity) -> None:
    ours = threading.Thread.start, threading.Thread._bootstrap_inner
    assert threads.apply() and (threading.Thread.start, threading.Thread._bootstrap_inner) == ours
    assert threads.status() == {"installed": True, "reason": ""}
    threads.remove()
    threads.remove()
    assert not threads.status()["installed"]
    assert threading.Thread.start.__module__ == "threading" and not hasattr(threading.Thread.start, "__wrapped__")
    assert in_thread(affinity, by_target) == 0 and affinity.calls == 0


@pytest.mark.parametrize("name", ["start", "_bootstrap_inner"])
def test_removal_tells_who_wrapped_on_top(affinity: Affinity, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ours = getattr(threading.Thread, name)

    @functools.wraps(ours)
    def theirs(self: threading.Thread) -> None:
        ours(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, name, theirs)
        assert in_thread(affinity, by_target) == 7
        with pytest.raises(PatchError, match=rf"Thread\.{name} was wrapped after ctxfix by .*test_threads\.py:\d+"):
            threads.remove()
        assert "replaced on top" in threads.status()["reason"]
    assert in_thread(affinity, by_target) == 7, "a refused removal must change nothing"


def test_original_put_back_by_somebody_else(affinity: Affinity) -> None:
    threading.Thread.start = threads._replaced["start"]  # type: ignore[method-assign]
    threads.remove()
    assert not threads.status()["installed"]


def test_python_without_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_METHODS", ("start", "_bootstrap_renamed"))
    with pytest.raises(PatchError, match="no method _bootstrap_renamed"):
        threads.apply()
    assert not threads.status()["installed"]


def test_debugger_on_the_starter_is_not_taken_for_gevent(affinity: Affinity, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = getattr(threading, threads._STARTER)
    monkeypatch.setattr(threading, threads._STARTER, lambda *a, **k: starter(*a, **k))
    assert threads.green() == "" and in_thread(affinity, by_target) == 7


@pytest.mark.parametrize(
    ("library", "module", "question"),
    [("gevent", "gevent.monkey", "is_module_patched"), ("eventlet", "eventlet.patcher", "is_monkey_patched")],
)
def test_green_threads_are_recognised(
    affinity: Affinity, monkeypatch: pytest.MonkeyPatch, library: str, module: str, question: str
) -> None:
    starter = getattr(threading, threads._STARTER)

    def green(*args: object, **options: object) -> object:
        return starter(*args, **options)

    monkeypatch.setattr(threading, threads._STARTER, green)
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{question: lambda name: name == "thread"}))
    assert threads.green() == library
    assert in_thread(affinity, by_target) == 0 and affinity.calls == 0
    monkeypatch.delitem(sys.modules, module)
    green.__module__ = f"{library}.thread"
    assert threads.green() == library
    threads.remove()
    assert threads.apply() is False and library in threads.status()["reason"]


GEVENT = """
import sys, types
order = sys.argv[1]
import gevent.monkey
if order == "gevent first":
    gevent.monkey.patch_all()
affinity = sys.modules["ctxfix.affinity"] = types.ModuleType("ctxfix.affinity")
calls = []
affinity.bind_new_thread = calls.append
affinity.current_context = lambda: 7
import ctxfix.threads
applied = ctxfix.threads.apply()
if order == "ctxfix first":
    gevent.monkey.patch_all()
import threading
seen = []
thread = threading.Thread(target=seen.append, args=(1,))
thread.start()
thread.join()
print(applied, seen, calls, ctxfix.threads.status()["reason"])
"""


@pytest.mark.parametrize("order", ["gevent first", "ctxfix first"])
def test_gevent_is_left_alone(order: str) -> None:
    pytest.importorskip("gevent")
    done = subprocess.run(
        [sys.executable, "-c", GEVENT, order],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(ctxfix.__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    expected = f"{order == 'ctxfix first'} [1] [] threads are greenlets of gevent: left alone"
    assert done.stdout.strip() == expected


def forked(body: Callable[[], bool]) -> bool:
    """Run ``body`` in a forked child; whether it returned true."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            code = 0 if body() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_child_binds_nothing_until_it_has_a_context(affinity: Affinity) -> None:
    def unbound() -> bool:
        affinity.local.context = 0
        return in_thread(affinity, by_target) == 0 and affinity.calls == 0

    def bound() -> bool:
        affinity.local.context = 0
        in_thread(affinity, by_target)
        affinity.local.context = 9
        if in_thread(affinity, by_target) != 9:
            return False
        affinity.local.context = 0
        return in_thread(affinity, by_target) == 0 and affinity.calls == 2

    assert forked(unbound) and forked(bound)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_forgets_threads_that_others_were_starting(affinity: Affinity) -> None:
    threads._bindings[1] = list
    threads._unannounced.append("x")
    try:
        with threads._lock:
            assert forked(lambda: threads._bindings == {} and threads._unannounced == [] and threads.apply())
    finally:
        threads._bindings.clear()
        threads._unannounced.clear()


def test_bare_thread_of_the_interpreter_is_not_ours(affinity: Affinity) -> None:
    assert in_thread(affinity, lambda body: _thread.start_new_thread(body, ())) == 0


def test_failure_that_another_starter_has_announced(affinity: Affinity, caplog: pytest.LogCaptureFixture) -> None:
    threads._announce()
    assert caplog.records == []
