# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, in pytest runs of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
#: Records of a run that never was, written as child processes would write them.
RECORDS = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
import evidence_of
from test_verdict import through_the_host
def leave(recorder, spoil=lambda files: None):
    files = evidence_of.perfect()
    spoil(files)
    evidence_of.write(files, Path(recorder.folder))
"""


@pytest.fixture(autouse=True)
def as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """In continuous integration pytest says in its summary, too, what failed tests say."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)


def run(pytester: pytest.Pytester, code: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(RECORDS + code)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--ctxfix-require-gpu", *options)


def test_a_marked_test_passes_if_every_rank_is_proven(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import pytest
@pytest.mark.cuda_ipc(ranks=2)
def test_it(ctxfix_recorder):
    leave(ctxfix_recorder)
""",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*ctxfix: paths of transfers*", "*test_it", "*prefill rank 0*CUDA_IPC*", "*prefill rank 1*CUDA_IPC*"]
    )


def test_a_marked_test_fails_if_a_rank_is_not(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import pytest
@pytest.mark.cuda_ipc
def test_sar(ctxfix_recorder):
    leave(ctxfix_recorder, through_the_host)
@pytest.mark.cuda_ipc(ranks=3)
def test_a_rank_is_missing(ctxfix_recorder):
    leave(ctxfix_recorder)
@pytest.mark.cuda_ipc
def test_nothing_was_recorded():
    pass
@pytest.mark.cuda_ipc(compared=True)
def test_fails_by_itself(ctxfix_recorder):
    assert False, "its own reason"
""",
    )
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        ["*prefill rank 1*: SAR,*", "*there is no record of it*", "*none of them posted*", "*own reason*"]
    )


def test_every_kind_of_test_is_judged(pytester: pytest.Pytester) -> None:
    """Not functions only: unittest calls its methods itself, and tells pytest of a failure when all is over."""
    pytester.makeconftest(
        """
import pytest
class Word(pytest.Item):
    def runtest(self): pass
def pytest_collect_file(parent, file_path):
    if file_path.suffix == ".word":
        return File.from_parent(parent, path=file_path)
class File(pytest.File):
    def collect(self):
        word = Word.from_parent(self, name="word")
        word.add_marker(pytest.mark.cuda_ipc)
        yield word
"""
    )
    pytester.makefile(".word", marked="")
    result = run(
        pytester,
        """
import pytest, unittest
@pytest.mark.cuda_ipc
class TestClass(unittest.TestCase):
    def test_nothing(self): pass
    def test_skips(self): self.skipTest("its own skip")
    def test_fails(self): self.fail("its own reason")
    @unittest.expectedFailure
    def test_expected(self): self.fail()
@pytest.mark.cuda_ipc(ranks=2)
class TestAsync(unittest.IsolatedAsyncioTestCase):
    @pytest.fixture(autouse=True)
    def recorder(self, ctxfix_recorder):
        self.recorder = ctxfix_recorder
    async def test_nothing(self): pass
    async def test_good(self): leave(self.recorder)
@pytest.mark.cuda_ipc
@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception)
def test_nothing(): pass
""",
    )
    result.assert_outcomes(passed=1, failed=4, skipped=1, xfailed=2)
    assert result.stdout.str().count("none of them posted a transfer") == 2
    result.stdout.fnmatch_lines(["*its own reason*"])
    result.stdout.fnmatch_lines(["nothing was recorded, so nothing is proven: *a test without fixtures*"])


@pytest.mark.parametrize(
    ("conftest", "said"),
    [
        (
            "@pytest.hookimpl(trylast=True)\n"
            "def pytest_collection_modifyitems(items): items[0].add_marker(pytest.mark.cuda_ipc)",
            "none of them posted a transfer",
        ),
        (
            "def pytest_runtest_setup(item): item.add_marker(pytest.mark.cuda_ipc)",
            "none of them posted a transfer",
        ),
        (
            "@pytest.fixture(autouse=True)\ndef mark(request): request.node.add_marker('cuda_ipc')",
            "nothing was recorded, so nothing is proven: the marker cuda_ipc came when the test was being set up",
        ),
        (
            "@pytest.hookimpl(trylast=True)\ndef pytest_runtest_setup(item): item.add_marker('cuda_ipc')",
            "nothing was recorded, so nothing is proven: the marker cuda_ipc came when the test was being set up",
        ),
    ],
    ids=["after collection", "before setup", "in a fixture", "in setup"],
)
def test_a_marker_that_comes_late_is_judged_or_fails(pytester: pytest.Pytester, conftest: str, said: str) -> None:
    pytester.makeconftest(f"import pytest\n{conftest}")
    result = run(pytester, "def test_nothing(): pass")
    result.assert_outcomes(failed=1)
    assert said in result.stdout.str()


def test_a_late_marker_with_the_recorder_is_judged(pytester: pytest.Pytester) -> None:
    code = "import pytest\n@pytest.fixture(autouse=True)\n"
    code += "def mark(request): request.node.add_marker(pytest.mark.cuda_ipc(ranks=2))\n"
    code += "def test_it(ctxfix_recorder): leave(ctxfix_recorder)\ndef test_nothing(ctxfix_recorder): pass"
    run(pytester, code).assert_outcomes(passed=1, failed=1)


def test_the_marker_of_one_parameter_leaves_the_others_alone(pytester: pytest.Pytester) -> None:
    code = "import os, pytest\n@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.cuda_ipc), 2])\n"
    code += "def test_it(n): assert ('CTXFIX_RECORD' in os.environ) == (n == 1)"
    run(pytester, code).assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("1, 2, 3, 4", "cuda_ipc() takes from 0 to 2 positional arguments but 4 were given"),
        ("2, ranks=3", "cuda_ipc() got multiple values for argument 'ranks'"),
        ("rank=2", "cuda_ipc() got an unexpected keyword argument 'rank'"),
        ("0", "ranks=0 is no number of ranks"),
        ("-1", "ranks=-1 is no number of ranks"),
        ("True", "ranks=True is no number of ranks"),
        ("'2'", "ranks='2' is no number of ranks"),
        ("2, 3", "compared=3 is neither True nor False"),
    ],
)
def test_a_marker_that_makes_no_sense_is_refused_at_collection(
    pytester: pytest.Pytester, marker: str, said: str
) -> None:
    pytester.makepyfile(test_file=f"import pytest\n@pytest.mark.cuda_ipc({marker})\ndef test_it(): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")  # with a GPU or without
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_file.py::test_it: @pytest.mark.cuda_ipc: {said}*"])


def test_arguments_of_the_marker_may_be_positional(pytester: pytest.Pytester) -> None:
    code = "import pytest\n@pytest.mark.cuda_ipc(2, True)\ndef test_it(ctxfix_recorder):\n"
    code += "    leave(ctxfix_recorder, lambda files: [rows.__delitem__(slice(1, -1)) for rows in files.values()])"
    result = run(pytester, code)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*CUDA_IPC by all counts, but nobody compared the bytes*"])


def test_what_a_test_may_ask(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import pytest
def test_good(ctxfix_recorder):
    leave(ctxfix_recorder)
    ctxfix_recorder.assert_cuda_ipc(ranks=2, compared=True)
    ctxfix_recorder.assert_no_sar()
    ctxfix_recorder.assert_no_stray_contexts()
def test_sar(ctxfix_recorder):
    leave(ctxfix_recorder, through_the_host)
    with pytest.raises(AssertionError, match="through host memory"):
        ctxfix_recorder.assert_no_sar()
def test_stray(ctxfix_recorder):
    leave(ctxfix_recorder, lambda files: files["decode1"][-1]["contexts"]["active"].append(0))
    with pytest.raises(AssertionError, match=r"rank 1.*context on GPU \\[0\\]"):
        ctxfix_recorder.assert_no_stray_contexts()
def test_unknown_contexts(ctxfix_recorder):
    leave(ctxfix_recorder, lambda files: files["decode1"][-1]["contexts"].update(known=False))
    with pytest.raises(AssertionError, match="unknown"):
        ctxfix_recorder.assert_no_stray_contexts()
@pytest.mark.parametrize("rebinds, restores, failures", [(3, 3, 0), (3, 4, 0), (3, 2, 0), (3, 3, 1)])
def test_restored(ctxfix_recorder, rebinds, restores, failures):
    counters = {"rebinds": rebinds, "restores": restores, "hook_failures": failures}
    leave(ctxfix_recorder, lambda files: [rows[-1].update(counters=counters) for rows in files.values()])
    if rebinds <= restores and not failures:
        ctxfix_recorder.assert_contexts_restored()
    else:
        with pytest.raises(AssertionError, match="put back"):
            ctxfix_recorder.assert_contexts_restored()
def test_nothing(ctxfix_recorder):
    for ask in ("cuda_ipc", "no_sar", "no_stray_contexts", "contexts_restored"):
        with pytest.raises(AssertionError):
            getattr(ctxfix_recorder, "assert_" + ask)()
""",
    )
    result.assert_outcomes(passed=9)


def test_children_are_recorded(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import os, subprocess
def test_child(ctxfix_recorder):
    code = "from ctxfix.evidence import recorder, identity; import os; identity.declare(1, 2);"
    code += "recorder.start(os.environ['CTXFIX_RECORD'])"
    subprocess.run([sys.executable, "-c", code], check=True)
    (child,) = ctxfix_recorder.run().processes
    assert (child.identity.rank, child.identity.world, child.final) == (1, 2, True)
    assert ctxfix_recorder.environment()["CTXFIX_RECORD"] == os.environ["CTXFIX_RECORD"]
def test_after(): assert "CTXFIX_RECORD" not in os.environ
""",
    )
    result.assert_outcomes(passed=2)


def test_without_a_gpu_tests_are_skipped(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxfix import pytest_plugin

    if not pytest_plugin._no_gpu():
        pytest.skip("there is a GPU")
    pytester.makepyfile("import pytest\n@pytest.mark.cuda_ipc\ndef test_it(): pass\ndef test_other(): pass")
    result = pytester.runpytest_subprocess("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*no NVIDIA GPU in this machine*"])


def test_records_are_kept_and_settings_shown(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nctxfix_record = kept\nctxfix_strict = true\n")
    result = run(
        pytester,
        """
import os
def test_it(ctxfix_recorder):
    assert os.environ["CTXFIX_STRICT"] == "1"
    leave(ctxfix_recorder)
""",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["ctxfix: record=kept, strict=True, require-gpu=True"])
    (folder,) = (pytester.path / "kept").iterdir()
    assert len(list(folder.iterdir())) == 5
    result = run(pytester, "def test_it(ctxfix_recorder): leave(ctxfix_recorder)")
    assert len(list((pytester.path / "kept").iterdir())) == 2


def test_strict_reaches_the_hooks_of_this_process(pytester: pytest.Pytester) -> None:
    """Also where they are there before the first test, as when a conftest.py imports NIXL."""
    pytester.makeconftest("from ctxfix import guard")
    result = run(
        pytester,
        """
import pytest
from ctxfix import guard
from ctxfix.errors import CtxfixError
def test_it(ctxfix_recorder):
    with pytest.raises(CtxfixError, match="broken"):
        guard.failed("a hook", ValueError("broken"))
def test_another():
    guard.failed("a hook", ValueError("broken"))
""",
        "--ctxfix-strict",
    )
    result.assert_outcomes(passed=2)


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_rows_come_through_xdist(pytester: pytest.Pytester) -> None:
    code = "import pytest\n@pytest.mark.parametrize('n', range(4))\n"
    code += "def test_it(ctxfix_recorder, n): leave(ctxfix_recorder)"
    result = run(pytester, code, "-n", "2")
    result.assert_outcomes(passed=4)
    assert result.stdout.str().count("prefill rank 1") == 4


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_a_marker_that_makes_no_sense_is_refused_under_xdist(pytester: pytest.Pytester) -> None:
    result = run(pytester, "import pytest\n@pytest.mark.cuda_ipc(rank=2)\ndef test_it(): pass", "-n", "2")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*UsageError: *::test_it: @pytest.mark.cuda_ipc: cuda_ipc() got an unexpected*"])


def test_without_the_plugin_strict_markers_refuse_a_marked_test(pytester: pytest.Pytester) -> None:
    """As the documentation advises: otherwise the marker is a warning, and the test passes unjudged."""
    pytester.makepyfile("import pytest\n@pytest.mark.cuda_ipc\ndef test_it(): pass")
    result = pytester.runpytest_subprocess("-p", "no:ctxfix", "--strict-markers")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*'cuda_ipc' not found in `markers` configuration option*"])


def test_what_a_session_fixture_starts_is_recorded_for_one_test(pytester: pytest.Pytester) -> None:
    """As the documentation says: it inherits the folder of the first."""
    code = "import os, pytest\n@pytest.fixture(scope='session')\ndef server(): return os.environ['CTXFIX_RECORD']\n"
    code += "@pytest.mark.parametrize('n', [0, 1])\n@pytest.mark.cuda_ipc\n"
    code += "def test_it(server, n): assert (server == os.environ['CTXFIX_RECORD']) == (n == 0)"
    result = run(pytester, code)
    result.assert_outcomes(failed=2)
    assert result.stdout.str().count("none of them posted a transfer") == 2  # its own assertion holds in both


def test_an_unused_plugin_says_nothing_and_loads_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import sys
def test_it():
    loaded = {name for name in sys.modules if name.startswith("ctxfix.")}
    assert loaded <= {"ctxfix._startup", "ctxfix.pytest_plugin"}, loaded
    assert not {"rich", "pynvml", "cuda", "wrapt"} & set(sys.modules)
"""
    )
    result = pytester.runpytest_subprocess("-W", "error", "--strict-markers")
    result.assert_outcomes(passed=1)
    assert "ctxfix" not in result.stdout.str().replace("plugins: ", "", 1).replace("ctxfix-", "")


def test_pytest_does_not_warn_of_us() -> None:
    """We are imported before pytest can rewrite our asserts, which strict projects would see as an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "rewritten" in done.stderr) == (0, False)
