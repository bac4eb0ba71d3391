# SPDX-License-Identifier: Apache-2.0
"""What runs at interpreter start touches nothing, and what is written or read cannot be turned against its user."""

from __future__ import annotations

import ast
import html.parser
import io
import json
import os
import re
import stat
import sys
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from environments import ROOT, Interpreter, make_venv, pip, run
from evidence_of import perfect, run_of, write
from rich.console import Console
from test_verdict import through_the_host

from ctxfix import cli, settings
from ctxfix.errors import EvidenceError, VerifyError
from ctxfix.evidence import identity, merge, records
from ctxfix.verify import report, verdict
from ctxfix.verify import run as verify_run

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")

# Seen by this: whatever Python itself does, and every environment variable that is read. It must not import anything.
WATCH = """
import os, sys
seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, str(arguments[0]) if arguments else "")))
read = os._Environ.__getitem__
def recorded(self, name):
    seen.append(("environment", name))
    return read(self, name)
os._Environ.__getitem__ = recorded
os._Environ.__contains__ = lambda self, name: (seen.append(("environment", name)), name in list(self))[1]
"""


def watched(folder: Path, wheel: Path | None) -> Interpreter:
    """A virtual environment whose first start-up file notes what happens after it, with ctxfix or without."""
    python = make_venv(folder)
    (python.site_packages / "watch.py").write_text(WATCH)
    (python.site_packages / "0-watch.pth").write_text("import watch\n")
    if wheel is not None:
        pip("--python", str(python.executable), "install", "--no-deps", "--no-index", str(wheel))
    python("import watch")
    return python


@pytest.fixture(scope="module")
def watched_pair(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Interpreter, Interpreter]:
    folder = tmp_path_factory.mktemp("watched")
    return watched(folder / "with", wheel), watched(folder / "without", None)


# ---- interpreter start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("-I",), ("-E",), ("-s",)], ids=" ".join)
def test_interpreter_start_reads_its_own_two_modules_and_one_variable(
    watched_pair: tuple[Interpreter, Interpreter], tmp_path: Path, options: tuple[str, ...]
) -> None:
    variables = {"CTXFIX_RECORD": str(tmp_path / "r"), "CTXFIX_STRICT": "1", "CTXFIX_LOG": "debug"}
    seen = []
    for python in watched_pair:
        events = ast.literal_eval(python("import watch; print(watch.seen)", *options, cwd=tmp_path, **variables))
        home = str(python.executable.parent.parent)
        seen.append(Counter((event, what.replace(home, "")) for event, what in events))
    ours = seen[0] - seen[1]
    assert {event for event, _ in ours} <= {"open", "os.listdir", "import", "exec", "compile", "marshal.loads",
                                            "environment"}  # fmt: skip
    site_packages = str(watched_pair[0].site_packages).replace(str(watched_pair[0].executable.parent.parent), "")
    files = {what for event, what in ours if event in ("open", "os.listdir")}
    names = {Path(file).name.partition(".")[0] for file in files}
    assert all(file.startswith(site_packages) for file in files), files
    assert names <= {"ctxfix-init", "ctxfix", "__init__", "_startup", "site-packages"}
    assert {what for event, what in ours if event == "import"} == {"ctxfix", "ctxfix._startup"}
    assert {what for event, what in ours if event == "environment"} == {"CTXFIX_DISABLE"}
    assert not os.listdir(tmp_path), "nothing is recorded before NIXL is imported"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder such as /tmp: whoever imports anything from here leaves a trace."""
    folder = tmp_path / "hostile"
    code = f"import os; os.close(os.open({str(tmp_path / 'taken')!r} + os.path.basename(__file__), os.O_CREAT))"
    for name in ("ctxfix", "cuda", "rich"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code)
    (folder / "ctxfix" / "_startup.py").write_text(code)
    for name in ("base64", "logging", "queue", "sitecustomize", "usercustomize", "traceback", "wrapt"):
        (folder / f"{name}.py").write_text(code)
    return folder


def taken(hostile: Path) -> list[Path]:
    return list(hostile.parent.glob("taken*"))


def test_the_current_folder_reaches_nothing(installed: Interpreter, hostile: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.modules['ctxfix'].__file__)")
    ours = str(installed.site_packages / "ctxfix" / "__init__.py")
    assert installed.process(str(program), cwd=hostile).stdout.strip() == ours
    assert installed("import sys; print(sys.modules['ctxfix'].__file__)", cwd=hostile) == ours
    assert taken(hostile) == []


def test_the_current_folder_reaches_nothing_under_run(bare: Interpreter, hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.modules['ctxfix'].__file__)")
    command = "import sys; sys.path.remove(''); from ctxfix.cli import main; main(sys.argv[1:])"
    arguments = ["run", "--", str(bare.executable), str(tmp_path / "program.py")]
    done = run([sys.executable, "-c", command, *arguments], cwd=hostile)
    assert (done.stdout.strip(), done.stderr) == (str(ROOT / "ctxfix" / "__init__.py"), "")
    assert taken(hostile) == []


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_run_respects_an_interpreter_that_is_isolated(bare: Interpreter, option: str) -> None:
    code = "import sys; print('ctxfix' in sys.modules)"
    done = run([sys.executable, "-m", "ctxfix", "run", "--", str(bare.executable), option, "-c", code])
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_run_from_a_folder_that_pythonpath_cannot_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/opt/a:b/…` in PYTHONPATH would be two entries, the second one relative to the current folder."""
    monkeypatch.setattr(cli, "BOOTSTRAP", "/opt/a:b/ctxfix/_bootstrap")
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("it was run"))
    assert cli.main(["run", "--", "true"]) == 2
    assert "PYTHONPATH cannot hold" in capsys.readouterr().err


def test_workers_of_verify_import_nothing_from_the_current_folder(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    plan = verify_run.Plan([0], 1, "test", 1, "no_such_nixl", "LIBFABRIC", 1 << 20, 64, 1, 60, None, False)
    folder = records.open_folder(str(tmp_path / "r"))
    os.close(folder)
    with verify_run.Process(plan, "prefill", 0, str(tmp_path / "r"), False, time.monotonic() + 60) as worker:
        with pytest.raises(VerifyError, match="No module named 'no_such_nixl'"):
            worker.answer()
    assert taken(hostile) == []


def test_a_worker_s_log_follows_no_link(tmp_path: Path) -> None:
    plan = verify_run.Plan([0], 1, "test", 1, "no_such_nixl", "LIBFABRIC", 1 << 20, 64, 1, 60, None, False)
    (tmp_path / "prefill0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        verify_run.Process(plan, "prefill", 0, str(tmp_path), False, 0)
    assert not (tmp_path / "elsewhere").exists()


# ---- network and code ------------------------------------------------------------------------------------------------

# The host's name is asked for: no packet is sent for it.
NO_NETWORK = """
import sys
def refuse(event, arguments):
    if event.startswith(("socket.", "urllib.", "http.", "ftplib.", "smtplib.")) and event != "socket.gethostname":
        raise RuntimeError(f"network: {event} {arguments}")
sys.addaudithook(refuse)
"""


@pytest.mark.parametrize("arguments", [["status"], ["doctor"], ["report", "RECORDS", "--html", "page.html"]], ids=str)
def test_no_command_uses_the_network(tmp_path: Path, arguments: list[str]) -> None:
    folder = write(perfect(), tmp_path / "r")
    arguments = [str(folder) if argument == "RECORDS" else argument for argument in arguments]
    code = f"{NO_NETWORK}\nfrom ctxfix.cli import main\nsys.exit(main({arguments!r}))"
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert "network:" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert done.returncode in ((0, 1) if arguments == ["doctor"] else (0,))


def test_recording_uses_no_network_and_keeps_no_arguments(tmp_path: Path) -> None:
    code = f"""{NO_NETWORK}
from ctxfix.evidence import recorder
recorder.start({str(tmp_path / "r")!r}).snapshot(final=True)
try:
    import socket; socket.socket()
except RuntimeError as error:
    print(error)
"""
    done = run([sys.executable, "-c", code, "--password=xyzzy"])
    assert done.stdout.startswith("network: socket.__new__"), done.stdout + done.stderr  # the guard itself works
    (file,) = (tmp_path / "r").iterdir()
    assert '"command"' in file.read_text() and "xyzzy" not in file.read_text()


def python_sources() -> list[Path]:
    return sorted((ROOT / "ctxfix").rglob("*.py"))


def test_what_no_source_does() -> None:
    """Read from the sources, because a path that no test takes counts too."""
    modules = {"asyncio", "atexit", "ftplib", "http", "marshal", "multiprocessing", "pickle", "requests", "shelve",
               "signal", "smtplib", "socket", "ssl", "subprocess", "urllib", "xmlrpc", "yaml"}  # fmt: skip
    calls = {"eval", "exec", "compile", "input", "os.fork", "os.system", "os.popen", "threading.Thread"}
    programs = ("os.exec", "os.spawn", "os.posix_spawn")
    found = set()
    for path in python_sources():
        name = str(path.relative_to(ROOT / "ctxfix"))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {(name, alias.name) for alias in node.names if alias.name.partition(".")[0] in modules}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in modules:
                found.add((name, str(node.module)))
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in calls or "socket." in called or called.startswith(programs):
                    found.add((name, called))
    assert found == {
        ("cli.py", "os.execvpe"),  # `ctxfix run` becomes the command
        ("cli.py", "signal"),  # and that has its signals as the shell gave them
        ("evidence/cupti.py", "atexit"),  # in the workers of `ctxfix verify`
        ("evidence/identity.py", "socket"),
        ("evidence/identity.py", "socket.gethostname"),
        ("evidence/recorder.py", "atexit"),  # with CTXFIX_RECORD only
        ("evidence/recorder.py", "threading.Thread"),
        ("guard.py", "signal"),  # asks which handlers there are, and sets none
        ("verify/run.py", "subprocess"),  # starts the workers of `ctxfix verify`
        ("verify/run.py", "threading.Thread"),
        ("verify/worker.py", "threading.Thread"),
    }


def read_variables(tree: ast.AST) -> set[str]:
    """The names of environment variables that a source asks for."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.get"):
            found.append(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            found.append(node.slice)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            found.append(node.left)
    return {node.value for node in found if isinstance(node, ast.Constant)}


def test_the_page_names_every_variable_and_place_and_its_tests_exist() -> None:
    """Of what runs in applications; the commands are there to look around."""
    page = (ROOT / "docs" / "security.md").read_text()
    variables = {*settings._CHOICES, *settings._SWITCHES, *settings._PATHS}
    variables |= {name for pair in identity._VARIABLES.values() for name in pair}
    places = set()
    for path in python_sources():
        if path.parent.name != "verify":
            tree = ast.parse(path.read_text())
            variables |= read_variables(tree)
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            places |= {text for text in texts if re.fullmatch(r"/(dev|etc|opt|proc|sys|usr|var)/[^\s{}]+", str(text))}
    assert len(variables) > 15 and len(places) > 5
    assert {name for name in variables | places if f"`{name}`" not in page} == set()
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(tests) > 20
    for file, name in tests:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_each_line_of_the_page_names_its_test() -> None:
    """A row of a table, an item of a list, a paragraph: all but commands to copy, and what is said of no code."""
    page = (ROOT / "docs" / "security.md").read_text()
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    sections = dict(re.findall(r"^## (.*)$((?:\n(?!## ).*)*)", page, re.MULTILINE))
    assert set(sections) >= {"What runs", "What it never does", "What it writes", "The extension", "Remove it"}
    without = []
    for title, text in sections.items():
        for block in re.split(r"\n\s*\n|\n(?=- )", text.strip()):
            lines = [block] if not block.startswith("|") else block.splitlines()[2:]
            calls = block.startswith("| In | Calls |")  # all of it is shown by the test that the text above names
            without += [f"{title}: {line}" for line in lines if line and not calls and "::test_" not in line]
    none = ("Forms of installation: Not tested: ", "Report a vulnerability: See [SECURITY.md]")
    assert [line for line in without if not line.startswith(none)] == []


def test_the_page_names_every_call_that_is_replaced() -> None:
    sources = "".join((ROOT / "ctxfix" / "native" / name).read_text() for name in ("threads.c", "fabric.c"))
    replaced = set(re.findall(r'(?:\.symbol = |ONE\(|CALL\(\w+, )"(\w+)"', sources))
    assert {"pthread_create", "dlsym", "cudaMemcpy", "cuCtxCreate_v2", "poll"} <= replaced
    page = (ROOT / "docs" / "security.md").read_text()
    assert {name for name in replaced if f"`{name.removesuffix('_v2')}`" not in page} == set()


@pytest.mark.parametrize(
    "arguments", [["status"], ["doctor"], ["report", "RECORDS"], ["verify", "--timeout", "5"], ["run", "true"]], ids=str
)
def test_nothing_remains_of_a_command(tmp_path: Path, arguments: list[str]) -> None:
    folder = write(perfect(), tmp_path / "r")
    places = [tmp_path / name for name in ("here", "home", "tmp")]
    for place in places:
        place.mkdir()
    command = [sys.executable, "-B", "-m", "ctxfix", *(str(folder) if a == "RECORDS" else a for a in arguments)]
    done = run(command, cwd=places[0], HOME=str(places[1]), TMPDIR=str(places[2]), PYTHONPATH=str(ROOT))
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
    assert [path for place in places for path in place.rglob("*")] == []


def test_without_its_start_files_it_waits_to_be_asked(wheel: Path, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv")
    pip("--python", str(python.executable), "install", "--no-deps", "--no-index", str(wheel))
    for name in ("ctxfix-init.pth", "ctxfix-init.start"):
        (python.site_packages / name).unlink()
    state = "import sys; print('ctxfix' in sys.modules)"
    assert python(state) == "False"
    assert python("import ctxfix; print(ctxfix.status()['active'], ctxfix.status()['started_by'])") == (
        "True import ctxfix"
    )
    done = run([sys.executable, "-m", "ctxfix", "run", "--", str(python.executable), "-c", state], cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


# ---- the folder of records -------------------------------------------------------------------------------------------


def test_every_folder_that_is_made_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writer = records.Writer(str(tmp_path / "a" / "b" / "c"), "host.1")
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b" / "c" / writer.name).stat().st_mode) == 0o600


def test_the_way_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, with dots, through links of one's own: as everywhere else."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    for path in ("x/./y//", "real/../z", "link/records", "absolute/records", f"{tmp_path}/absolute/other"):
        os.close(records.open_folder(path))
        assert Path(path).is_dir()
    (tmp_path / "loop").symlink_to("loop/x")
    (tmp_path / "file").touch()
    for path in ("loop/records", "file", "file/records", "absolute", "link/"):
        with pytest.raises(EvidenceError, match="no records"):
            records.open_folder(path)
    assert not list((tmp_path / "real").glob("real"))


@as_root
def test_a_link_of_another_user_on_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "planted").symlink_to(tmp_path / "mine")
    os.lchown(tmp_path / "planted", NOBODY, NOBODY)
    with pytest.raises(EvidenceError, match="another user's"):
        records.open_folder(str(tmp_path / "planted" / "records"))
    assert not list((tmp_path / "mine").iterdir())


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """As in /tmp, where anybody may have made it first."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "tmp" / "records").mkdir(mode=0o755)
    os.chown(tmp_path / "tmp" / "records", NOBODY, NOBODY)
    with pytest.raises(EvidenceError, match="belongs to another user"):
        records.Writer(str(tmp_path / "tmp" / "records"), "host.1")
    assert not list((tmp_path / "tmp" / "records").iterdir())


@as_root
def test_a_folder_that_may_be_entered_but_not_read_leads_on() -> None:
    """As /home is on some machines."""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o711)
        os.mkdir(f"{home}/user")
        os.chown(f"{home}/user", NOBODY, NOBODY)
        code = (
            f"import os; from ctxfix.evidence import records; os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            f"os.close(records.open_folder({home + '/user/r'!r}))"
        )
        done = run([sys.executable, "-c", code])
        assert done.returncode == 0, done.stderr
        assert os.stat(f"{home}/user/r").st_uid == NOBODY


@pytest.mark.parametrize("planted", ["link", "dangling link", "hard link", "FIFO", "folder", "file"])
def test_what_lies_in_the_place_of_a_file_is_left_as_it_is(tmp_path: Path, planted: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.close(records.open_folder(str(tmp_path / "r")))
    place = tmp_path / "r" / f"host.1{records.SUFFIX}"
    if planted == "link":
        place.symlink_to(precious)
    elif planted == "dangling link":
        place.symlink_to(tmp_path / "new")
    elif planted == "hard link":
        place.hardlink_to(precious)
    elif planted == "FIFO":
        os.mkfifo(place)
    elif planted == "folder":
        place.mkdir()
    else:
        place.write_text("precious")
    before = os.lstat(place)
    writer = records.Writer(str(tmp_path / "r"), "host.1")
    assert writer.write({"kind": "post"})
    assert writer.name == f"host.1.1{records.SUFFIX}"
    assert precious.read_text() == "precious" and not (tmp_path / "new").exists()
    assert os.lstat(place).st_size == before.st_size


def test_a_folder_that_is_swapped_meanwhile_gets_the_file_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = records.open_folder

    def swap(path: str) -> int:
        folder = opened(path)
        os.rename(path, tmp_path / "moved")
        os.symlink(tmp_path / "elsewhere", path)
        return folder

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(records, "open_folder", swap)
    writer = records.Writer(str(tmp_path / "r"), "host.1")
    assert [path.name for path in (tmp_path / "moved").iterdir()] == [writer.name]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_reading_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    folder = write(perfect(), tmp_path / "r")
    secret = tmp_path / "secret"
    secret.write_text("libfabric:1:1::shm:ep_data:f():1<warn> unable to use IPC for msg, fallback to using SAR\n")
    (folder / "planted.log").symlink_to(secret)
    os.mkfifo(folder / "pipe.log")
    os.mkfifo(folder / f"pipe{records.SUFFIX}")
    (folder / "elsewhere").symlink_to(write({"theirs": perfect()["prefill0"]}, tmp_path / "elsewhere"))
    assert merge._logs_in(str(folder)) == []
    files, problems = records.read_folder(str(folder))
    assert len(files) == 4 and [problem.split()[0] for problem in problems] == [f"pipe{records.SUFFIX}"]


# ---- reports ---------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("planted", ["file", "link"])
def test_a_report_is_not_written_into_what_another_user_laid_there(tmp_path: Path, planted: str) -> None:
    page = tmp_path / "page.html"
    if planted == "file":
        page.write_text("theirs")
    else:
        (tmp_path / "mine").write_text("theirs")
        page.symlink_to(tmp_path / "mine")
    os.lchown(page, NOBODY, NOBODY)
    with pytest.raises(EvidenceError, match="belongs to another user"):
        report.write(str(page), "report")
    assert page.read_text() == "theirs"


def test_a_report_is_written_where_one_says(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "page")
    for path in (tmp_path / "page", tmp_path / "page", tmp_path / "link"):
        report.write(str(path), f"to {path.name}")
    assert (tmp_path / "page").read_text() == "to link"
    code = "from ctxfix.verify import report; report.write('/dev/stdout', 'x'); report.write('/dev/null', 'x')"
    assert run([sys.executable, "-c", code]).stdout == "x"


HOSTILE_TEXT = "</style></svg><script>alert(1)</script><img src=x onerror='alert(1)'>\"'&\x1b]0;title\x07\x9b31m\u202e"


def poisoned(value: Any) -> Any:
    """``value`` with hostile text on both ends of every text in it."""
    if isinstance(value, dict):
        return {poisoned(key): item for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return f"{HOSTILE_TEXT}{value}{HOSTILE_TEXT}" if type(value) is str else value


def judgements() -> tuple[verdict.Judgement, verdict.Judgement]:
    """The same judgement twice, the second with hostile text in all its texts, some of which come from records."""
    files = perfect(2, both_ways=True)
    through_the_host(files)
    clean = verdict.judge(run_of(files))
    clean.problems.append("a problem")
    clean.rows[-1].advice.append("a cure")
    rows = [
        replace(row, **{key: poisoned(value) for key, value in vars(row).items() if key != "path"})
        for row in clean.rows
    ]
    bad = replace(clean, rows=rows, problems=poisoned(clean.problems), reason=poisoned(clean.reason))
    return clean, bad


class Shape(html.parser.HTMLParser):
    """The elements of a page, with their attributes' names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(" ".join([tag, *sorted(name for name, _ in attrs)]))


def test_nothing_in_a_record_becomes_part_of_the_page() -> None:
    clean, bad = judgements()
    page = report.html(bad, f"title {HOSTILE_TEXT}")
    assert "alert(1)" in page, "it is shown"
    assert Shape(page).elements <= Shape(report.html(clean, "title")).elements
    assert "default-src 'none'" in page


def test_nothing_in_a_record_steers_the_terminal() -> None:
    _, bad = judgements()
    out = io.StringIO()
    Console(file=out, width=500, force_terminal=False).print(report.table(bad, f"[/x] {HOSTILE_TEXT}"))
    assert "alert(1)" in out.getvalue(), "it is shown"
    assert not set(out.getvalue()) & set("\x1b\x07\x9b\u202e")


def test_nothing_in_a_record_breaks_out_of_json_and_xml() -> None:
    _, bad = judgements()
    json.loads(report.as_text(bad))
    assert "\x1b" not in report.as_text(bad) and "<script" not in report.junit(bad)


# ---- the extension's file --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extension(wheel: Path) -> ELFFile:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        if not names:
            pytest.skip("the wheel was built without its extension: no C compiler")
        return ELFFile(io.BytesIO(archive.read(names[0])))


def dynamic_entries(extension: ELFFile) -> dict[str, int]:
    return {tag.entry.d_tag: tag.entry.d_val for tag in extension.get_section_by_name(".dynamic").iter_tags()}


def test_extension_has_no_memory_that_is_writable_and_executable(extension: ELFFile) -> None:
    segments = list(extension.iter_segments())
    (stack,) = (segment for segment in segments if segment["p_type"] == "PT_GNU_STACK")
    assert not stack["p_flags"] & 1, "the stack is executable"
    assert not [segment for segment in segments if segment["p_type"] == "PT_LOAD" and segment["p_flags"] & 3 == 3]
    assert not {"DT_TEXTREL"} & set(dynamic_entries(extension)) and not dynamic_entries(extension)["DT_FLAGS"] & 4


def test_extension_is_bound_at_once_and_its_tables_are_sealed(extension: ELFFile) -> None:
    assert [segment for segment in extension.iter_segments() if segment["p_type"] == "PT_GNU_RELRO"]
    assert dynamic_entries(extension)["DT_FLAGS"] & 8, "BIND_NOW"
    assert dynamic_entries(extension)["DT_FLAGS_1"] & 1, "NOW"


def test_extension_looks_for_libraries_nowhere_of_its_own(extension: ELFFile) -> None:
    assert not {"DT_RPATH", "DT_RUNPATH"} & set(dynamic_entries(extension))
    needed = [tag.needed for tag in extension.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    assert all(name.startswith(("libc.", "ld-linux", "libdl.", "libpthread.")) for name in needed), needed


def test_extension_checks_its_stack_and_its_buffers(extension: ELFFile) -> None:
    wanted = {symbol.name for symbol in extension.get_section_by_name(".dynsym").iter_symbols()}
    assert "__stack_chk_fail" in wanted and {"__snprintf_chk", "__read_chk"} <= wanted


def test_extension_exports_its_entry_point_only_and_calls_neither_network_nor_programs(extension: ELFFile) -> None:
    symbols = list(extension.get_section_by_name(".dynsym").iter_symbols())
    assert [s.name for s in symbols if s.name and s["st_shndx"] != "SHN_UNDEF"] == ["PyInit__native"]
    barred = {"socket", "connect", "bind", "listen", "accept", "send", "sendto", "sendmsg", "getaddrinfo", "fork",
              "vfork", "pthread_create", "execve", "execvp", "posix_spawn", "system", "popen", "getenv",
              "secure_getenv", "setenv", "syscall", "shm_open", "unlink", "chmod"}  # fmt: skip
    assert not barred & {symbol.name for symbol in symbols}


def test_extension_names_no_place_of_the_machine_that_built_it(extension: ELFFile) -> None:
    content = extension.stream.getvalue()
    assert str(ROOT).encode() not in content and b"/tmp" not in content and b"/home" not in content
