# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: tests that assert which path their transfers took.

    @pytest.mark.cuda_ipc(ranks=2)
    def test_kv_cache_transfer(): ...          # fails unless both ranks are proven to use CUDA IPC

    def test_prefill(ctxfix_recorder):
        ...
        ctxfix_recorder.assert_no_stray_contexts()

Each test has records of its own. What a session-scoped fixture starts goes on writing into those of the first test.

pytest loads it in every run of the environment: nothing but pytest is imported until a test asks for it.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ctxfix.verify.recording import Recording

_PROPERTY = "ctxfix"
_RECORDING: pytest.StashKey[Any] = pytest.StashKey[Any]()
_OPTIONS = {
    "record": ("keep the records of each test in a folder of its own under DIR", "DIR"),
    "strict": ("let failures of ctxfix itself fail the tests (CTXFIX_STRICT)", None),
    "require-gpu": ("fail instead of skip where there is no GPU", None),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Each setting as an option and as an ini value: --ctxfix-record, ctxfix_record."""
    group = parser.getgroup("ctxfix", "paths of GPU transfers")
    for name, (text, value) in _OPTIONS.items():
        kind: dict[str, Any] = {"metavar": value} if value else {"action": "store_true"}
        group.addoption(f"--ctxfix-{name}", default=None, help=text, **kind)
        ini: Any = "string" if value else "bool"
        parser.addini(f"ctxfix_{name.replace('-', '_')}", text, type=ini, default=None)


def _setting(config: pytest.Config, name: str) -> Any:
    option = config.getoption(f"--ctxfix-{name}")
    return option if option is not None else config.getini(f"ctxfix_{name.replace('-', '_')}") or None


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker."""
    config.addinivalue_line(
        "markers",
        "cuda_ipc(ranks=None, compared=False): the test passes only if all transfers of all ranks are proven to go by "
        "CUDA IPC (ctxfix); ranks: how many must have posted; compared: the bytes must have been compared through "
        "ctxfix_recorder.compared, too",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    """Tell what is set, if anything is."""
    told = {name: _setting(config, name) for name in _OPTIONS}
    told = {name: value for name, value in told.items() if value}
    return f"ctxfix: {', '.join(f'{name}={value}' for name, value in told.items())}" if told else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a marker that makes no sense before any test runs, with a GPU or without."""
    if not hasattr(session.config, "workerinput"):  # a worker of xdist would die of it, wordless: there its test errs
        for item in session.items:
            _asked(item)


def pytest_runtest_setup(item: Any) -> None:
    """A test with the marker uses the fixture, without naming it."""
    names = getattr(item, "fixturenames", None)  # a list that all parameters of a function share
    if _asked(item) and names is not None and "ctxfix_recorder" not in names:
        item.fixturenames = ["ctxfix_recorder", *names]


def cuda_ipc(ranks: int | None = None, compared: bool = False) -> dict[str, Any]:
    """The marker's signature; TypeError says what is wrong with a use of it."""
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise TypeError(f"ranks={ranks!r} is no number of ranks: 1 or more")
    if type(compared) is not bool:
        raise TypeError(f"compared={compared!r} is neither True nor False")
    return {"ranks": ranks, "compared": compared}


def _asked(item: pytest.Item) -> dict[str, Any]:
    """What the marker of a test asks for; empty if it has none. Raises UsageError if that makes no sense."""
    marker = item.get_closest_marker("cuda_ipc")
    try:
        return cuda_ipc(*marker.args, **marker.kwargs) if marker is not None else {}
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.cuda_ipc: {error}") from None


def _no_gpu() -> str:
    """Why there is no GPU here, or "". Initialises nothing."""
    if glob.glob("/dev/nvidia[0-9]*") or glob.glob("/proc/driver/nvidia/gpus/*") or os.path.exists("/dev/dxg"):
        return ""
    return "there is no NVIDIA GPU in this machine (--ctxfix-require-gpu runs the test nevertheless)"


@pytest.fixture
def ctxfix_recorder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """Record every NIXL transfer of the test, in this process and in those it starts; assert which path they took.

    Skips where there is no GPU, unless ``--ctxfix-require-gpu`` is given. What a fixture of wider scope starts is
    recorded for the first test only: start it in the test, or in a fixture of function scope that uses this one.
    """
    config = request.config
    missing = _no_gpu()
    if missing and not _setting(config, "require-gpu"):
        pytest.skip(missing)
    from ctxfix import settings
    from ctxfix.evidence import recorder
    from ctxfix.verify.recording import Recording

    folder = _folder(config, request.node, tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CTXFIX_RECORD", folder)
        if _setting(config, "strict"):
            patch.setenv("CTXFIX_STRICT", "1")  # for processes that the test starts; here it was read already
            strict = dataclasses.replace(settings.current(), strict=True)
            patch.setattr(settings, "current", lambda: strict)
        with recorder.recording(folder) as recorded:
            recording = Recording(folder, recorded)
            request.node.stash[_RECORDING] = recording
            yield recording
            rows = recording.rows(_asked(request.node).get("ranks"))
            if rows:
                request.node.user_properties.append((_PROPERTY, rows))
            del request.node.stash[_RECORDING]


def _folder(config: pytest.Config, node: pytest.Item, factory: pytest.TempPathFactory) -> str:
    """A private folder for one test; under xdist a name is used by one worker only."""
    name = re.sub(r"[^\w.-]+", "_", node.nodeid)[-100:]
    kept = _setting(config, "record")
    if not kept:
        return str(factory.mktemp("ctxfix"))
    parent = os.path.join(config.rootpath, kept)
    for number in range(1000):
        folder = os.path.join(parent, f"{name}{f'.{number}' if number else ''}")
        try:
            os.makedirs(folder, mode=0o700)
            return folder
        except FileExistsError:
            continue
    raise pytest.UsageError(f"{parent} holds a thousand records of {name}: give --ctxfix-record another folder")


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """After a marked test, of whatever kind, has passed: fail it if a path is not proven.

    A unittest.TestCase that failed or skipped has not raised by now; what it says wins over what is said here.
    """
    outcome: Any = yield
    if item.get_closest_marker("cuda_ipc") is None or outcome.excinfo is not None:
        return
    recording = item.stash.get(_RECORDING, None)
    from ctxfix.errors import CtxfixError

    try:
        if recording is None:
            raise AssertionError(
                "nothing was recorded, so nothing is proven: the marker cuda_ipc came when the test was being set up, "
                "or this is a test without fixtures. Mark the function or its class, or use the fixture ctxfix_recorder"
            )
        recording.assert_cuda_ipc(**_asked(item))
    except (AssertionError, CtxfixError, pytest.UsageError) as error:
        # Without a traceback of ours: the message says it all.
        outcome.force_exception(pytest.fail.Exception(str(error), pytrace=False))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One section with a row for each direction of each test that recorded something."""
    lines = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "teardown":
                continue
            for name, rows in getattr(report, "user_properties", ()):
                if name == _PROPERTY:
                    lines += [(report.nodeid, row) for row in rows]
    if not lines:
        return
    terminalreporter.section("ctxfix: paths of transfers")
    width = max(len(row["name"]) for _, row in lines)
    before = None
    for nodeid, row in lines:
        if nodeid != before:
            terminalreporter.write_line(nodeid)
        before = nodeid
        time = "" if row["mean_ms"] is None else f"  {row['mean_ms']:.2f} ms"
        terminalreporter.write(f"  {row['name']:{width}}  ")
        terminalreporter.write(f"{row['path']:8}", green=row["good"], red=not row["good"])
        terminalreporter.write_line(f"  {row['bytes']:,} bytes  {row['posts']} posts  {row['failures']} failures{time}")
