# SPDX-License-Identifier: Apache-2.0
"""What lives in the same processes as ctxfix behaves with it as without: CPython's own tests, and other libraries.

Each test is a job that can be run alone. CPython's tests may fail on a machine for reasons of its own; what fails with
ctxfix must fail without it too.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from conftest import Twice

CPYTHON = [
    "test_threading", "test_thread", "test_threading_local", "test_threadsignals", "test_threadedtempfile",
    "test_concurrent_futures", "test_multiprocessing_fork", "test_multiprocessing_forkserver",
    "test_multiprocessing_spawn", "test_multiprocessing_main_handling", "test_asyncio", "test_queue", "test_fork1",
    "test_signal", "test_context", "test_contextlib",
]  # fmt: skip
GEVENT = [
    "test__monkey.py", "test__threadpool.py", "test__threading_patched_local.py", "test__threading_vs_settrace.py",
    "test__threading_monkey_in_thread.py", "test__threading_native_before_monkey.py", "test__thread.py",
    "test__threading.py", "test__threading_2.py", "test__threadpool_executor_patched.py",
]  # fmt: skip


DDTRACE_RUN = ["-m", "ddtrace.commands.ddtrace_run", "python"]
DDTRACE_QUIET = {
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "DD_TRACE_AGENT_URL": "http://127.0.0.1:9", "DD_TRACE_STARTUP_LOGS": "false",
}  # fmt: skip


def said(twice: Twice, script: str, *before: str, **variables: str) -> dict[str, Any]:
    """What a script prints as JSON, with ctxfix as without; it is checked that both are the same."""
    runs = twice(*before, "-c", dedent(script), **variables)
    texts = [done.stdout.strip().splitlines()[-1:] for done in runs]
    assert texts[0] and texts[0] == texts[1], [(done.stdout[-1000:], done.stderr[-3000:]) for done in runs]
    result: dict[str, Any] = json.loads(texts[0][0])
    return result


@pytest.mark.parametrize("before", [[], DDTRACE_RUN], ids=["python", "ddtrace-run"])
def test_the_hooks_are_on(twice: Twice, before: list[str]) -> None:
    """Else all of the others would show nothing. ddtrace-run puts a sitecustomize of its own before ours."""
    script = """
        import threading, ctypes, ctxfix
        seen = []
        def look():
            context = ctypes.c_void_p()
            ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
            seen.append(bool(context.value))
        thread = threading.Thread(target=look)
        thread.start(); thread.join()
        print(seen, ctxfix.stats()["threads_bound"])
    """
    with_, without = twice(*before, "-c", dedent(script), **DDTRACE_QUIET)
    assert with_.stdout.splitlines()[-1] == "[True] 1", with_.stderr
    assert without.stdout.splitlines()[-1] == "[False] 0", without.stderr


def failing(report: Path) -> set[str]:
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {
        case.get("name") or "?" for case in cases if case.find("failure") is not None or case.find("error") is not None
    }


def ran(report: Path) -> int:
    return sum(1 for case in ElementTree.parse(report).getroot().iter("testcase") if case.find("skipped") is None)


@pytest.mark.parametrize("module", CPYTHON)
def test_cpython(twice: Twice, module: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(f"test.{module}") is None:
        pytest.skip(f"this Python ({sys.version.split()[0]}) comes without test.{module}")
    reports = [tmp_path / name / "report.xml" for name in ("with", "without")]

    def run() -> tuple[set[str], set[str]]:
        twice("-m", "test", module, "--timeout", "300", "--junit-xml", "report.xml", limit=900)
        return failing(reports[0]), failing(reports[1])

    with_, without = run()
    if not with_ <= without:  # some of these tests depend on time: ours fails every time
        again, too = run()
        with_, without = with_ & again, without | too
    print(f"{module}: {ran(reports[0])} run; failing with ctxfix {len(with_)}, without {len(without)}")
    assert ran(reports[0]) == ran(reports[1]) > 0
    assert with_ <= without, with_ - without


def failing_of_gevents(done: subprocess.CompletedProcess[str], file: str) -> tuple[set[str], int]:
    """The failing tests of a file, and how many it has; a file without any is a test itself."""
    assert re.search(rf"gevent\.tests\.{file.removesuffix('.py')}\b.*\[took", done.stderr), done.stderr[-3000:]
    named = set(re.findall(r"^(?:FAIL|ERROR): (.+)$", done.stderr, re.M))
    # The runner's own sum, "Ran 0 tests in 1 files", counts wrongly.
    ran = sum(int(n) for n in re.findall(r"^Ran (\d+) tests? in [\d.]+s$", done.stderr, re.M))
    return named or ({file} if done.returncode else set()), ran


@pytest.mark.parametrize("file", GEVENT)
def test_gevents_own_tests(twice: Twice, file: str) -> None:
    def run() -> list[tuple[set[str], int]]:
        return [failing_of_gevents(done, file) for done in twice("-m", "gevent.tests", "--verbose", file, limit=300)]

    (with_, ran), (without, ran_without) = run()
    if not with_ <= without:  # some measure times of a tenth of a second: ours fails every time
        (again, _), (too, _) = run()
        with_, without = with_ & again, without | too
    print(f"{file}: {ran} run; failing with ctxfix {sorted(with_)}, without {sorted(without)}")
    assert ran == ran_without
    assert with_ <= without, with_ - without


def test_gevent(twice: Twice) -> None:
    """Greenlets are one thread of the operating system: none of them is bound."""
    assert said(
        twice,
        """
        from gevent import monkey
        monkey.patch_all()
        import json, threading, queue, concurrent.futures as futures, ctxfix
        local, lock, done = threading.local(), threading.Lock(), queue.Queue()
        def work(i):
            local.i = i
            with lock:
                pass
            done.put(local.i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(50)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        with futures.ThreadPoolExecutor(4) as pool:
            squares = sum(pool.map(lambda i: i * i, range(100)))
        bound = ctxfix.stats()["threads_bound"]
        print(json.dumps({"sum": sum(done.get() for _ in threads), "squares": squares, "bound": bound}))
        """,
    ) == {"sum": 1225, "squares": 328350, "bound": 0}


OPENTELEMETRY = """
    import json, threading
    from concurrent.futures import ThreadPoolExecutor
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.instrumentation.threading import ThreadingInstrumentor
    {deactivate}
    before = threading.Thread.start, threading.Thread.run, threading.Timer.run
    ThreadingInstrumentor().instrument()
    {activate}
    trace.set_tracer_provider(TracerProvider())
    tracer, seen = trace.get_tracer("t"), []
    def look():
        seen.append(trace.get_current_span().get_span_context().span_id)
    with tracer.start_as_current_span("outer") as span:
        mine = span.get_span_context().span_id
        for thread in (threading.Thread(target=look), threading.Timer(0.01, look)):
            thread.start()
            thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(look).result()
    ThreadingInstrumentor().uninstrument()
    {restored}
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    print(json.dumps({{"same": [s == mine for s in seen]}}))
"""


def test_opentelemetry_after_ctxfix(twice: Twice) -> None:
    script = OPENTELEMETRY.format(
        deactivate="",
        activate="",
        restored="assert (threading.Thread.start, threading.Thread.run, threading.Timer.run) == before",
    )
    assert said(twice, script) == {"same": [True, True, True, False]}


def test_opentelemetry_before_ctxfix(twice: Twice) -> None:
    """It wraps Thread.start first, then ctxfix does, then it takes its own wrapper off from under ours."""
    script = OPENTELEMETRY.format(
        deactivate="import ctxfix; ctxfix.deactivate()", activate="ctxfix.activate()", restored=""
    )
    assert said(twice, script) == {"same": [True, True, True, False]}


def test_ddtrace(twice: Twice) -> None:
    result = said(
        twice,
        """
        import json, threading
        from concurrent.futures import ThreadPoolExecutor
        from ddtrace import tracer
        def look(_=None):
            span = tracer.current_span() or tracer.current_trace_context()
            return getattr(span, "trace_id", None) == mine
        with tracer.trace("outer") as span:
            mine = span.trace_id
            with ThreadPoolExecutor(2) as pool:
                futures = list(pool.map(look, range(4)))
            seen = []
            thread = threading.Thread(target=lambda: seen.append(look()))
            thread.start()
            thread.join()
        print(json.dumps({"futures": futures, "thread": seen}))
        """,
        *DDTRACE_RUN,
        **DDTRACE_QUIET,
    )
    assert result == {"futures": [True] * 4, "thread": [False]}  # ddtrace takes its context to executors only


@pytest.mark.parametrize("first", ["ddtrace", "ctxfix"])
def test_ddtraces_profiler(twice: Twice, first: str) -> None:
    """It replaces Thread._bootstrap_inner, as ctxfix does, below it or on top: both see each thread."""
    script = """
        {start}
        import json, threading
        from concurrent.futures import ThreadPoolExecutor
        import ctxfix
        from ddtrace.internal.datadog.profiling import stack
        unregister, ended, done = stack.unregister_thread, [], []
        stack.unregister_thread = lambda ident: (ended.append(ident), unregister(ident))[1]
        threads = [threading.Thread(target=done.append, args=(i,)) for i in range(5)]
        threads.append(threading.Timer(0.01, done.append, (5,)))
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        with ThreadPoolExecutor(1) as pool:
            done += pool.map(int, "67")
        print(ctxfix.stats()["threads_bound"])
        print(json.dumps({{"done": sorted(done), "ended": len(ended)}}))
    """
    runs = twice(
        *(DDTRACE_RUN if first == "ddtrace" else ()),
        "-c",
        dedent(script.format(start="import ddtrace.profiling.auto" if first == "ctxfix" else "")),
        DD_PROFILING_ENABLED=str(first == "ddtrace"),
        # Where gevent is installed, ddtrace-run drops the threading module that it has patched and the program gets
        # another one: the two would never meet.
        DD_UNLOAD_MODULES_FROM_SITECUSTOMIZE="false",
        **DDTRACE_QUIET,
    )
    for bound, run in zip(("7", "0"), runs, strict=True):
        said_bound, result = run.stdout.splitlines()[-2:]
        assert json.loads(result) == {"done": list(range(8)), "ended": 7}, run.stderr[-3000:]
        assert said_bound == bound, run.stderr[-3000:]


def test_coverage_of_threads(twice: Twice, tmp_path: Path) -> None:
    program = """
        import threading
        from concurrent.futures import ThreadPoolExecutor

        def work(n):
            total = 0
            for i in range(n):
                if i % 2:
                    total += i
            return total

        class Own(threading.Thread):
            def run(self):
                self.result = work(10)

        own = Own()
        own.start()
        own.join()
        timer = threading.Timer(0.01, work, (5,))
        timer.start()
        timer.join()
        with ThreadPoolExecutor(2) as pool:
            print(own.result, sum(pool.map(work, range(20))))
    """
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(dedent(program))
    twice("-m", "coverage", "run", "--branch", "program.py")
    twice("-m", "coverage", "json", "-q", "-o", "out.json")
    lines = [
        {key: entry[key] for key in ("executed_lines", "missing_lines", "executed_branches")}
        for name in ("with", "without")
        for file, entry in json.loads((tmp_path / name / "out.json").read_text())["files"].items()
        if file.endswith("program.py")
    ]
    assert lines[0] == lines[1] and not lines[0]["missing_lines"]


def test_torch_multiprocessing(twice: Twice, tmp_path: Path) -> None:
    program = """
        import json
        import torch
        import torch.multiprocessing as mp

        def fill(rank, shared, queue, received):
            shared[rank] = rank + 1
            queue.put((rank, torch.full((3,), rank)))
            received.wait(100)  # whoever sent a tensor must live until it has been taken

        if __name__ == "__main__":
            found = {}
            for method in ("fork", "spawn", "forkserver"):
                context = mp.get_context(method)
                shared, queue, received = torch.zeros(4).share_memory_(), context.Queue(), context.Event()
                children = [context.Process(target=fill, args=(i, shared, queue, received)) for i in range(4)]
                [child.start() for child in children]
                sums = sorted((rank, int(tensor.sum())) for rank, tensor in (queue.get(timeout=100) for _ in children))
                received.set()
                [child.join() for child in children]
                found[method] = [int(shared.sum()), sums, [child.exitcode for child in children]]
            print(json.dumps(found))
    """
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(dedent(program))
    with_, without = twice("program.py", torch=True)
    assert with_.stdout == without.stdout != "", (with_.stderr, without.stderr)
    wanted = [10, [[i, 3 * i] for i in range(4)], [0] * 4]
    assert json.loads(with_.stdout) == dict.fromkeys(("fork", "spawn", "forkserver"), wanted)


def test_pytest_xdist(twice: Twice, tmp_path: Path) -> None:
    module = """
        import threading, pytest
        @pytest.mark.parametrize("n", range(40))
        def test_threads(n):
            seen = []
            threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(n)]
            [t.start() for t in threads]; [t.join() for t in threads]
            assert sorted(seen) == list(range(n))
        def test_that_fails():
            assert threading.active_count() < 0
        def test_in_a_thread():
            raise_in = threading.Thread(target=lambda: 1 / 0)
            raise_in.start(); raise_in.join()
    """
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_module.py").write_text(dedent(module))
    with_, without = twice("-m", "pytest", "-n", "3", "-q", "--junit-xml", "report.xml", "-p", "no:cacheprovider")
    reports = [tmp_path / name / "report.xml" for name in ("with", "without")]
    assert failing(reports[0]) == failing(reports[1]) == {"test_that_fails"}, with_.stdout
    assert ran(reports[0]) == ran(reports[1]) == 42
    assert "PytestUnhandledThreadExceptionWarning" in with_.stdout and "PytestUnhandledThread" in without.stdout
