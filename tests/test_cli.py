# SPDX-License-Identifier: Apache-2.0
"""The command line: status tells the truth, run reaches every interpreter and gets out of the way."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from environments import Interpreter, clean_environment, run
from evidence_of import perfect, write

import ctxfix
from ctxfix import _startup, cli

pytestmark = pytest.mark.usefixtures("startup_state")

WHO = "import sys; m = sys.modules.get('ctxfix._startup'); print(m.started_by if m and m.installed() else None)"
CTXFIX = [sys.executable, "-m", "ctxfix"]


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist sets it in its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)


def ctxfix_run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([*CTXFIX, "run", *arguments], cwd=cwd, **environment)


def status_in(code: str = "", cwd: Path | None = None, **environment: str) -> dict:
    """What ``ctxfix.status()`` says in a new process, after ``code``."""
    program = f"import json, ctxfix\n{code}\nprint(json.dumps(ctxfix.status()))"
    done = run([sys.executable, "-c", program], cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_run_reaches_an_interpreter_without_start_file(bare: Interpreter) -> None:
    assert bare(WHO) == "None"
    done = ctxfix_run("--", str(bare.executable), "-c", WHO)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ctxfix run", "")


def test_run_reaches_children_too(bare: Interpreter) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHO!r}], check=True)"
    assert ctxfix_run("--", str(bare.executable), "-c", code).stdout.strip() == "ctxfix run"


def test_run_leaves_the_path_as_it_was(bare: Interpreter, tmp_path: Path) -> None:
    code = "import sys; print(sys.path)"
    expected = bare(code, PYTHONPATH=str(tmp_path))
    assert ctxfix_run("--", str(bare.executable), "-c", code, PYTHONPATH=str(tmp_path)).stdout.strip() == expected


def test_run_where_the_start_file_runs_too(installed: Interpreter) -> None:
    done = ctxfix_run("--", str(installed.executable), "-c", WHO)
    assert (done.stdout.strip(), done.stderr) == ("start-up file", "")


def test_run_chains_to_the_sitecustomize_that_was_there(bare: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; theirs = 'ctxfix' in sys.modules")
    code = f"import sitecustomize; print(sitecustomize.theirs, sitecustomize.__file__); {WHO}"
    done = ctxfix_run("--", str(bare.executable), "-c", code, PYTHONPATH=str(tmp_path))
    assert done.stdout.splitlines() == [f"True {tmp_path / 'sitecustomize.py'}", "ctxfix run"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import module_that_is_missing", "No module named 'module_that_is_missing'"),
        ("1 / 0", "division by zero"),
        ("raise ImportError('their own words')", "their own words"),
    ],
)
def test_errors_of_the_other_sitecustomize_are_shown_as_ever(
    bare: Interpreter, tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(code)
    # Not by way of `ctxfix run`, which is a Python too and would say the same.
    environment = cli.run_environment({"PYTHONPATH": str(tmp_path)}, None, False)
    done = bare.process("-c", WHO, **environment)
    assert (done.returncode, done.stdout.strip()) == (0, "ctxfix run")
    assert done.stderr.startswith("Error in sitecustomize") and message in done.stderr


def test_run_where_ctxfix_cannot_be_loaded(bare: Interpreter, tmp_path: Path) -> None:
    home = tmp_path / "lib"
    (home / "ctxfix" / "_bootstrap").mkdir(parents=True)
    (home / "ctxfix" / "__init__.py").write_text("raise SystemExit('too old')")
    bootstrap = home / "ctxfix" / "_bootstrap" / "sitecustomize.py"
    bootstrap.write_text((Path(cli.BOOTSTRAP) / "sitecustomize.py").read_text())
    (tmp_path / "sitecustomize.py").write_text("theirs = True")
    path = os.pathsep.join([str(bootstrap.parent), str(tmp_path)])
    done = bare.process("-c", "import sitecustomize; print(sitecustomize.theirs)", PYTHONPATH=path)
    assert (done.returncode, done.stdout.strip()) == (0, "True")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ctxfix: not active in") and line.endswith(": SystemExit: too old")


def test_bootstrap_is_read_by_any_python() -> None:
    source = (Path(cli.BOOTSTRAP) / "sitecustomize.py").read_text()
    compile(source, "sitecustomize.py", "exec")
    assert "f'" not in source and 'f"' not in source and "from __future__" not in source and source.isascii()


def test_run_reaches_no_python_that_is_too_old(bare: Interpreter) -> None:
    code = (
        f"import sys; sys.version_info = (3, 9); exec(open({os.path.join(cli.BOOTSTRAP, 'sitecustomize.py')!r}).read())"
    )
    done = bare.process("-c", f"__file__ = {cli.BOOTSTRAP + '/x'!r}; {code}; {WHO}")
    assert (done.returncode, done.stdout.strip()) == (0, "None")
    assert done.stderr.endswith("ImportError: it needs Python 3.10 or later\n") and done.stderr.count("\n") == 1


def test_run_passes_the_exit_status_through() -> None:
    assert ctxfix_run("--", "sh", "-c", "exit 7").returncode == 7
    assert ctxfix_run("sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_run_passes_options_of_the_command_through() -> None:
    assert ctxfix_run("--", "printf", "%s|", "--record", "--", "-x").stdout == "--record|--|-x|"


def test_run_of_a_missing_command() -> None:
    done = ctxfix_run("--", "no-such-command-anywhere")
    assert done.returncode == 127
    (line,) = done.stderr.splitlines()
    assert line.startswith("ctxfix run: no-such-command-anywhere: not found")


def test_run_of_a_file_that_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    done = ctxfix_run("--", str(tmp_path / "data"))
    assert done.returncode == 126
    assert "cannot be run" in done.stderr and "Permission denied" in done.stderr
    (tmp_path / "data").chmod(0o755)
    assert ctxfix_run("--", str(tmp_path / "data")).returncode == 126


def test_run_of_nothing() -> None:
    for arguments in ([], ["--"]):
        done = ctxfix_run(*arguments)
        assert done.returncode == 2 and "no command given" in done.stderr


def test_run_hands_its_options_on_as_variables(tmp_path: Path) -> None:
    code = "import os; print(os.environ['CTXFIX_RECORD'], os.environ['CTXFIX_STRICT'])"
    done = ctxfix_run("--record", "out", "--strict", "--", sys.executable, "-c", code, cwd=tmp_path)
    assert done.stdout.strip() == f"{tmp_path / 'out'} 1", done.stderr


@pytest.mark.parametrize("to", [">&-", "2>&-", ">&- 2>&- <&-", "2>/dev/full"])
@pytest.mark.parametrize("disable", ["0", "1"])
def test_run_starts_the_command_wherever_its_output_goes(to: str, disable: str, tmp_path: Path) -> None:
    command = [*CTXFIX, "run", "--", "/bin/sh", "-c", "echo on >mark; ls /proc/$$/fd >there; exit 7"]
    for given in (command, command[5:]):
        done = run(["/bin/sh", "-c", f'"$@" {to}', "sh", *given], cwd=tmp_path, CTXFIX_DISABLE=disable)
        assert (done.returncode, (tmp_path / "mark").read_text()) == (7, "on\n")
        (tmp_path / "mark").unlink()
        (tmp_path / "there").rename(tmp_path / given[0].rpartition("/")[2])
    # What was closed still is.
    assert (tmp_path / "sh").read_text() == (tmp_path / Path(sys.executable).name).read_text()


def test_run_gives_back_the_signals_that_python_ignores() -> None:
    command = ["sh", "-c", "grep SigIgn /proc/$$/status"]
    bare, ran = (run(given, CTXFIX_DISABLE="1").stdout for given in (command, [*CTXFIX, "run", "--", *command]))
    assert ran == bare != ""


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_folder_of_records_that_has_no_name_or_no_place_is_refused(command: str, tmp_path: Path) -> None:
    rest = ["--", "touch", str(tmp_path / "ran")] if command == "run" else []
    done = run([*CTXFIX, command, "--record", "", *rest])
    assert done.returncode == 2
    assert done.stderr.endswith("error: argument --record: the name of the folder is empty\n")
    (tmp_path / "gone").mkdir()
    code = f"cd {tmp_path}/gone; rmdir ../gone; "
    code += shlex.join(["exec", *CTXFIX, command, "--record", "rel", *rest])
    done = run(["/bin/sh", "-c", code])
    assert done.returncode == 2
    assert done.stderr.endswith("error: argument --record: rel: the current folder is no longer there\n")
    assert not (tmp_path / "ran").exists()


def test_run_while_switched_off(bare: Interpreter) -> None:
    done = ctxfix_run("--", str(bare.executable), "-c", WHO, CTXFIX_DISABLE="1")
    assert (done.returncode, done.stdout.strip()) == (0, "None")
    assert done.stderr == "ctxfix run: CTXFIX_DISABLE=1: the command runs without ctxfix\n"


@pytest.mark.parametrize("old", [None, "", "/a", "/a:/b"])
def test_python_path_gets_no_empty_entry(old: str | None) -> None:
    before = {} if old is None else {"PYTHONPATH": old}
    path = cli.run_environment(before, None, False)["PYTHONPATH"]
    assert path.split(os.pathsep) == [cli.BOOTSTRAP, *(old.split(os.pathsep) if old else [])]


def test_status_as_json() -> None:
    done = run([*CTXFIX, "status", "--json"])
    report = json.loads(done.stdout)
    assert list(report) == [
        "version",
        "location",
        "python",
        "active",
        "reason",
        "start_files",
        "started_by",
        "targets",
        "sglang_plugin",
        "threads",
        "native",
        "libraries",
        "settings",
        "counters",
        "failures",
    ]
    assert (done.returncode, report["version"], report["active"]) == (0, ctxfix.__version__, True)
    assert report["python"]["executable"] == sys.executable
    assert set(report["targets"]) == set(_startup.TARGETS)
    assert report["settings"]["problems"] == []


def test_status_names_each_stage_of_a_target(tmp_path: Path) -> None:
    assert status_in()["targets"]["nixl_rocm._api"]["state"] == "not installed"
    (tmp_path / "nixl_rocm").mkdir()
    (tmp_path / "nixl_rocm" / "_api.py").write_text("")
    metadata = tmp_path / "nixl_rocm-1.4.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: nixl-rocm\nVersion: 1.4.0\n")

    def target(code: str = "", **environment: str) -> dict:
        return status_in(code, cwd=tmp_path, CTXFIX_LOG="off", **environment)["targets"]["nixl_rocm._api"]

    assert target() == {"version": "1.4.0", "state": "pending", "reason": "patched when it is imported"}
    failed = target("import nixl_rocm._api")
    assert failed["state"] == "failed" and failed["reason"].startswith("PatchError: ")
    assert target("import nixl_rocm._api", CTXFIX_DISABLE="1")["state"] == "imported"
    assert target(CTXFIX_DISABLE="1") == {"version": "1.4.0", "state": "off", "reason": "CTXFIX_DISABLE=1"}
    assert target("ctxfix.unpatch_nixl()")["state"] == "off"
    fake = "import sys, types; sys.modules['ctxfix.patches.nixl'] = types.SimpleNamespace(apply=lambda module: None)"
    assert target(f"{fake}; import nixl_rocm._api")["state"] == "patched"
    metadata.unlink()
    assert target()["state"] == "pending"


def test_status_survives_metadata_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("wrapt", "nixl_rocm", "sglang"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_bytes(f"Metadata-Version: 2.1\nName: {name}\nAuthor: ".encode() + b"\xe9\n")
        (folder / "entry_points.txt").write_bytes(b"[console_scripts]\n# \xe9\n")
    (tmp_path / "sglang/srt").mkdir(parents=True)
    (tmp_path / "sglang/srt/plugins.py").touch()
    report = status_in(cwd=tmp_path)
    assert (report["libraries"]["wrapt"], report["targets"]["nixl_rocm._api"]["state"]) == (None, "not installed")
    assert report["sglang_plugin"]["state"] == "unknown"
    assert report["sglang_plugin"]["reason"].startswith("entry points cannot be read: UnicodeDecodeError")


def test_status_says_why_it_is_off() -> None:
    off = status_in(CTXFIX_DISABLE="perhaps")
    assert not off["active"] and off["reason"] == "CTXFIX_DISABLE='perhaps' is neither 0 nor 1: taken as 1"
    assert off["settings"]["problems"] == [off["reason"]]  # one wording
    assert "ctxfix.deactivate() was called" in status_in("ctxfix.deactivate()")["reason"]


def test_status_names_settings_that_mean_nothing() -> None:
    assert "CTXFIX_LOG" in " ".join(status_in(CTXFIX_LOG="shout")["settings"]["problems"])


def test_status_survives_settings_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctxfix.settings", None)
    assert "cannot be read" in ctxfix.status()["settings"]["problems"][0]


def test_status_loads_no_cuda_and_no_host() -> None:
    done = run([sys.executable, "-X", "importtime", "-c", "import ctxfix; ctxfix.status()"])
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ctxfix._status" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in ("cuda", "torch", "wrapt", "nixl_cu12", "nixl")}


def test_status_text_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    _startup.failures["patching nixl_cu12._api"] = "PatchError: no class [nixl_agent]"
    assert cli.main(["status"]) == 0
    text = capsys.readouterr().out
    report = ctxfix.status()
    for expected in (
        f"ctxfix {ctxfix.__version__}",
        report["reason"],
        sys.executable,
        *report["targets"],
        "SGLang plugin",
        "Python threads",
        "native part",
        "wrapt",
        "setting sync_memops",
        "patching nixl_cu12._api: PatchError: no class [nixl_agent]",
    ):
        assert expected in text


@pytest.mark.parametrize(("gil", "said"), [(False, ["off", "ctxfix and its native part need none"]), (True, ["on"])])
def test_status_says_whether_a_free_threaded_python_has_its_lock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gil: bool, said: list[str]
) -> None:
    assert ("GIL" in shown(capsys)) == bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil, raising=False)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
    line = next(line for line in shown(capsys).splitlines() if line.split()[:1] == ["GIL"])
    assert all(words in line for words in said)


@pytest.mark.parametrize("columns", ["80", "100", "0", None])
def test_status_shows_every_reason_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    """0 is no width; without any, what is no terminal is wide enough for a log."""
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    report = ctxfix.status()
    report["settings"]["record"] = "/records" * 600
    report["targets"]["nixl_cu12._api"] = {"version": "1.1.0", "state": "failed", "reason": "PatchError: no nixl_agent"}
    monkeypatch.setattr(ctxfix, "status", lambda: report)
    lines = shown(capsys).splitlines()
    width = int(columns or 0) or 500
    assert max(map(len, lines)) <= width
    start = next(line for line in lines if line.startswith("  activation")).index("activated by: ")
    reasons = "".join(line[start:].strip() for line in lines).replace(" ", "")
    for target in report["targets"].values():
        assert target["reason"].replace(" ", "") in reasons
    for value in (*report["settings"].values(), report["threads"]["reason"], sys.executable):
        assert isinstance(value, list) or str(value).replace(" ", "") in reasons
    assert width - start > 30


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["status"]) == 0
    return capsys.readouterr().out


# ---- output that goes nowhere ----------------------------------------------------------------------------------------

OUTPUTS = (["status"], ["status", "--json"], ["doctor"], ["doctor", "--json"], ["--help"], ["report", "records"],
           ["report", "records", "--json", "-"])  # fmt: skip


def redirected(arguments: list[str], to: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``ctxfix`` with an output that the shell redirects, in a folder with records that are proven."""
    write(perfect(), cwd / "records")
    return run(["/bin/sh", "-c", f'"$@" {to}', "sh", *CTXFIX, *arguments], cwd=cwd)


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
def test_output_that_nobody_reads_is_told_as_a_shell_tells_it(arguments: list[str], tmp_path: Path) -> None:
    write(perfect(), tmp_path / "records")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*CTXFIX, *arguments], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, env=clean_environment(), timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
def test_output_onto_a_full_disk_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    done = redirected(arguments, ">/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (2, "ctxfix: [Errno 28] No space left on device\n")
    assert redirected(arguments, ">/dev/full 2>&1", tmp_path).returncode == 2


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
def test_closed_output_changes_no_exit_code(arguments: list[str], tmp_path: Path) -> None:
    done = redirected(arguments, ">&-", tmp_path)
    assert (done.returncode, done.stderr) == (redirected(arguments, ">/dev/null", tmp_path).returncode, "")
    assert redirected(arguments, ">&- 2>&- <&-", tmp_path).returncode == done.returncode


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"ctxfix {ctxfix.__version__}\n")
