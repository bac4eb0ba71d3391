# SPDX-License-Identifier: Apache-2.0
"""Installed, upgraded and removed in every way, by pip and by uv, in real environments: it works, or says why it does
not, and what is removed is gone. Nothing is fetched: no package index is asked."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import ROOT, TIMEOUT, Interpreter, clean_environment, make_venv, pip, run
from test_packaging import FINDERS
from test_wheel import build
from uv import find_uv_bin

START_FILES = ("ctxfix-init.pth", "ctxfix-init.start")
WHO = "import sys; m = sys.modules.get('ctxfix._startup'); print(m.started_by if m and m.installed() else None)"
# What a build of ctxfix needs; an environment given these builds without an index.
BACKEND = ("editables", "hatchling", "packaging", "pathspec", "pluggy", "tomli", "trove_classifiers")


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables that show the build backend of this environment, and nothing else of it, to another one."""
    folder = tmp_path_factory.mktemp("backend")
    for name in BACKEND:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            (folder / name).symlink_to(Path(spec.origin).parent)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist") / "dist")


@pytest.fixture
def tree(sdist: Path, tmp_path: Path) -> Path:
    """A copy of the sources, to install in place."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "tree", filter="data")
    return next((tmp_path / "tree").iterdir())


@pytest.fixture
def venv(tmp_path: Path) -> Interpreter:
    """A virtual environment that holds another package, as all do."""
    python = make_venv(tmp_path / "venv")
    (python.site_packages / "other.py").write_text("")
    return python


def uv(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """Run uv without an index and without a cache of the user's."""
    settings = {"UV_OFFLINE": "1", "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_CACHE": "1"}
    outside = [name for name in os.environ if name.startswith("UV_") or name == "VIRTUAL_ENV"]
    command = ["env", *(f"--unset={name}" for name in outside), find_uv_bin(), *arguments]
    done = run(command, cwd=cwd or Path("/"), **settings, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def by_pip(python: Interpreter, *what: str, **environment: str) -> None:
    done = run([sys.executable, "-m", "pip", "--python", str(python.executable), "install", "--no-deps", "--no-index",
                "--no-build-isolation", *what], **environment)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def by_uv(python: Interpreter, *what: str, **environment: str) -> None:
    uv("pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--python", str(python.executable), *what,
       **environment)  # fmt: skip


def removed_by_pip(python: Interpreter) -> None:
    pip("--python", str(python.executable), "uninstall", "--yes", "ctxfix")


def removed_by_uv(python: Interpreter) -> None:
    uv("pip", "uninstall", "--python", str(python.executable), "ctxfix")


TOOLS = {"pip": (by_pip, removed_by_pip), "uv": (by_uv, removed_by_uv)}
Install = Callable[..., None]
Remove = Callable[[Interpreter], None]


def files(folder: Path) -> set[str]:
    """Every path in an environment, but for uv's own lock."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {".lock"}


def used(python: Interpreter) -> None:
    """Use an installation in all ways that leave bytecode."""
    script = python.executable.with_name("ctxfix")
    assert run([str(script), "--version"]).stdout.startswith("ctxfix ")
    assert json.loads(run([str(script), "status", "--json"]).stdout)["active"]
    assert run([str(script), "run", "--", str(python.executable), "-c", WHO]).stdout.strip() == "start-up file"
    python("import ctxfix.evidence.recorder, ctxfix.cli")


# ---- every form ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["wheel", "sdist", "editable"])
@pytest.mark.parametrize(("install", "remove"), TOOLS.values(), ids=TOOLS)
def test_installed_and_removed(
    venv: Interpreter, wheel: Path, sdist: Path, tree: Path, backend: dict[str, str], tmp_path: Path, form: str,
    install: Install, remove: Remove,
) -> None:  # fmt: skip
    before = files(tmp_path / "venv")
    what = {"wheel": [str(wheel)], "sdist": [str(sdist)], "editable": ["--editable", str(tree)]}[form]
    install(venv, *what, **(backend if form != "wheel" else {}))
    assert venv(WHO) == venv(WHO, "-I") == "start-up file"
    home = tree / "ctxfix" if form == "editable" else venv.site_packages / "ctxfix"
    status = json.loads(venv("import ctxfix, json; print(json.dumps(ctxfix.status()))"))
    assert status["location"] == str(home)
    if not wheel.name.endswith("-none-any.whl"):
        assert list((home / "native").glob("_native*.so"))
    used(venv)
    remove(venv)
    assert files(tmp_path / "venv") == before
    assert venv("import sys; print([name for name in sys.modules if 'ctxfix' in name])") == "[]"
    assert venv.process("-c", "import ctxfix").returncode == 1


def test_removed_by_pip_after_optimised_runs(venv: Interpreter, wheel: Path, tmp_path: Path) -> None:
    """pip leaves the bytecode of -O, of any package: nothing of it is ever loaded again."""
    before = files(tmp_path / "venv")
    by_pip(venv, str(wheel))
    venv("import ctxfix.cli", "-O")
    removed_by_pip(venv)
    left = {path for path in files(tmp_path / "venv") - before if not (tmp_path / "venv" / path).is_dir()}
    assert all(re.search(r"/ctxfix/(\w+/)*__pycache__/\w+\.[\w-]+\.opt-1\.pyc$", path) for path in left), left
    for options in ((), ("-O",)):
        assert venv("import sys; print([name for name in sys.modules if 'ctxfix' in name])", *options) == "[]"


def test_removed_by_uv_after_optimised_runs(venv: Interpreter, wheel: Path, tmp_path: Path) -> None:
    before = files(tmp_path / "venv")
    by_uv(venv, str(wheel))
    venv("import ctxfix.cli", "-O")
    removed_by_uv(venv)
    assert files(tmp_path / "venv") == before


def test_user_site(wheel: Path, tmp_path: Path) -> None:
    """`pip install --user`: the interpreter outside any virtual environment."""
    base = Interpreter(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    home = {"PYTHONUSERBASE": str(tmp_path / "user")}
    options = ["--user", "--no-deps", "--no-index", "--no-warn-script-location", "--break-system-packages"]
    pip_of_ours = [sys.executable, "-m", "pip", "--python", str(base.executable)]
    done = run([*pip_of_ours, "install", *options, str(wheel)], **home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert base(WHO, **home) == "start-up file"
    assert base(WHO, "-s", **home) == base(WHO, "-I", **home) == "None", "these ask for no user site"
    (file,) = json.loads(base("import ctxfix, json; print(json.dumps(ctxfix.status()['start_files']))", **home))
    assert file["runs"] and file["path"].startswith(str(tmp_path))
    done = run([*pip_of_ours, "uninstall", "--yes", "--break-system-packages", "ctxfix"], **home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [path for path in files(tmp_path / "user") if "ctxfix" in path]
    assert base(WHO, **home) == "None"


@pytest.mark.parametrize("option", ["--target", "--prefix"])
def test_outside_any_site_directory(bare: Interpreter, wheel: Path, tmp_path: Path, option: str) -> None:
    """Python reads no start-up file there: status and doctor say so, `ctxfix run` and `import ctxfix` work."""
    # By way of `bare`: with --prefix pip removes what the interpreter it runs for has installed.
    by_pip(bare, option, str(tmp_path / "t"), str(wheel))
    (package,) = (tmp_path / "t").rglob("ctxfix/__init__.py")
    place = {"PYTHONPATH": str(package.parent.parent)}
    assert bare(WHO, **place) == "None"
    status = json.loads(bare.process("-m", "ctxfix", "status", "--json", **place).stdout)
    (file,) = status["start_files"]
    assert not file["runs"] and "site directories only; use `ctxfix run`" in file["reason"]
    findings = json.loads(bare.process("-m", "ctxfix", "doctor", "--json", **place).stdout)["findings"]
    (finding,) = (finding for finding in findings if finding["check"] == "start-up file")
    assert finding["state"] == "bad" and "site directories only" in finding["what"] and "ctxfix run" in finding["cure"]
    (command,) = (tmp_path / "t").rglob("bin/ctxfix")
    for way in ([str(bare.executable), "-m", "ctxfix"], [str(command)]):
        done = run([*way, "run", "--", str(bare.executable), "-c", WHO], **place)
        assert (done.stdout.strip(), done.stderr) == ("ctxfix run", "")
    assert "No module named 'ctxfix'" in run([str(command), "status"]).stderr
    assert "`PYTHONPATH=tgt tgt/bin/ctxfix run …`" in (ROOT / "README.md").read_text()


def test_an_application_s_environment(bare: Interpreter, wheel: Path, tmp_path: Path) -> None:
    """As pipx does it: an environment of its own, its command linked into ~/bin. It serves other interpreters."""
    own = make_venv(tmp_path / "pipx" / "venvs" / "ctxfix")
    by_pip(own, str(wheel))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ctxfix"
    command.symlink_to(own.executable.with_name("ctxfix"))
    done = run([str(command), "run", "--", str(bare.executable), "-c", WHO])
    assert (done.stdout.strip(), done.stderr) == ("ctxfix run", "")


def test_uv_project(wheel: Path, tmp_path: Path) -> None:
    """`uv sync` and `uv run`, and `uv remove`. What ctxfix needs is overridden away, since there is no index."""
    project = tmp_path / "project"
    project.mkdir()
    needs = ("cuda-python", "nvidia-ml-py", "rich", "wrapt")
    overrides = [f"{name}; python_version < '0'" for name in needs]
    (project / "pyproject.toml").write_text(
        '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["ctxfix"]\n'
        f"[tool.uv]\noverride-dependencies = {json.dumps(overrides)}\n"
        f"[tool.uv.sources]\nctxfix = {{ path = {json.dumps(str(wheel))} }}\n"
    )
    here = {"cwd": project, "UV_PYTHON": sys.executable}
    uv("sync", **here)
    python = Interpreter(project / ".venv" / "bin" / "python")
    assert python(WHO) == "start-up file"
    assert uv("run", "python", "-c", WHO, **here).strip() == "start-up file"
    assert uv("run", "ctxfix", "--version", **here).startswith("ctxfix ")
    uv("remove", "ctxfix", **here)
    assert not [path for path in files(project / ".venv") if "ctxfix" in path]
    assert python(WHO) == "None"


def test_imported_from_a_zip_file(bare: Interpreter, wheel: Path, tmp_path: Path) -> None:
    """A wheel is a zip file, and so is a zipapp: all works but the extension, which status says."""
    place = {"PYTHONPATH": str(wheel)}
    status = json.loads(bare.process("-m", "ctxfix", "status", "--json", **place).stdout)
    assert status["active"] and status["location"] == str(wheel / "ctxfix")
    assert not status["native"]["available"] and "not bound" in status["native"]["reason"]
    done = bare.process("-m", "ctxfix", "run", "--", str(bare.executable), "-c", WHO, **place)
    assert (done.stdout.strip(), done.stderr) == ("ctxfix run", "")
    app = tmp_path / "app.pyz"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(app, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        target.writestr("__main__.py", "from ctxfix.cli import main; raise SystemExit(main())")
    done = bare.process(str(app), "run", "--", str(bare.executable), "-c", WHO)
    assert (done.stdout.strip(), done.stderr) == ("ctxfix run", "")


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def older(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of an older version, with a module that the new one has not."""
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "tree", filter="data")
    (source,) = (folder / "tree").iterdir()
    for file, old, new in (
        (source / "pyproject.toml", r'(?m)^version = ".*"', 'version = "0.0.1"'),
        (source / "ctxfix" / "__init__.py", r'(?m)^__version__ = ".*"', '__version__ = "0.0.1"'),
    ):
        file.write_text(re.sub(old, new, file.read_text()))
    (source / "ctxfix" / "gone.py").write_text("")
    return build("wheel", source, folder / "dist", BUILD_CTXFIX_NATIVE="off")


@pytest.mark.parametrize(("install", "remove"), TOOLS.values(), ids=TOOLS)
def test_upgrade(venv: Interpreter, older: Path, wheel: Path, tmp_path: Path, install: Install, remove: Remove) -> None:
    before = files(tmp_path / "venv")
    install(venv, str(older))
    assert venv("import ctxfix, ctxfix.gone; print(ctxfix.__version__)") == "0.0.1"
    used(venv)
    install(venv, str(wheel))
    version = venv("import ctxfix; print(ctxfix.__version__)")
    assert version != "0.0.1" and wheel.name.startswith(f"ctxfix-{version}-")
    assert not [path for path in files(tmp_path / "venv") if "gone" in path or "0.0.1" in path]
    assert venv(FINDERS) == "1"
    used(venv)
    remove(venv)
    assert files(tmp_path / "venv") == before


def test_two_versions(venv: Interpreter, older: Path, wheel: Path, tmp_path: Path) -> None:
    """The first on the path is the only one; status says which. `ctxfix run` of another one leaves it its place."""
    by_pip(venv, str(wheel))
    folder = tmp_path / "older"
    with zipfile.ZipFile(older) as archive:
        archive.extractall(folder)
    where = "import ctxfix, json; s = ctxfix.status(); print(json.dumps([s['version'], s['location']]))"
    assert json.loads(venv(where, PYTHONPATH=str(folder))) == ["0.0.1", str(folder / "ctxfix")]
    assert venv(FINDERS, PYTHONPATH=str(folder)) == "1"
    bootstrap = str(folder / "ctxfix" / "_bootstrap")
    assert json.loads(venv(where, PYTHONPATH=bootstrap))[1] == str(venv.site_packages / "ctxfix")
    assert venv(FINDERS, PYTHONPATH=bootstrap) == "1"


# ---- removed in between ----------------------------------------------------------------------------------------------


def test_removed_while_a_process_runs(venv: Interpreter, wheel: Path, tmp_path: Path) -> None:
    """The process goes on; NIXL, imported afterwards, is as shipped, and one line says so."""
    by_pip(venv, str(wheel))
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "_api.py").write_text("value = 1")
    code = (
        "import ctxfix.native, sys; print('up', flush=True); sys.stdin.readline()\n"
        "import nixl_cu12._api as api, threading\n"
        "t = threading.Thread(target=print, args=('value', api.value)); t.start(); t.join()"
    )
    process = subprocess.Popen(
        [str(venv.executable), "-c", code],
        env=clean_environment(PYTHONPATH=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    removed_by_pip(venv)
    out, err = process.communicate("go\n", timeout=TIMEOUT)
    assert (process.returncode, out) == (0, "value 1\n")
    (line,) = err.splitlines()
    assert line.startswith("ctxfix: patching nixl_cu12._api: ModuleNotFoundError: No module named 'ctxfix")


LEFT = {
    "nothing": lambda package: None,
    "an empty folder": lambda package: package.mkdir(),
    "bytecode": lambda package: shutil.copytree(
        ROOT / "ctxfix", package, ignore=lambda folder, names: [n for n in names if n.endswith((".py", ".so"))]
    ),
    "__init__.py": lambda package: (package.mkdir(), shutil.copy(ROOT / "ctxfix" / "__init__.py", package)),
    "an empty __init__.py": lambda package: (package.mkdir(), (package / "__init__.py").touch()),
    "an empty _startup.py": lambda package: (package.mkdir(), (package / "_startup.py").touch()),
    "half of _startup.py": lambda package: (
        package.mkdir(),
        (package / "_startup.py").write_text((ROOT / "ctxfix" / "_startup.py").read_text()[:4000]),
    ),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_start_file_that_outlives_its_package(venv: Interpreter, left: str) -> None:
    """Half an uninstall, or a start in the middle of an upgrade: the interpreter starts, and says at most a line."""
    (venv.site_packages / START_FILES[0]).write_text((ROOT / START_FILES[0]).read_text())
    LEFT[left](venv.site_packages / "ctxfix")
    done = venv.process("-c", "print('host')")
    assert (done.returncode, done.stdout) == (0, "host\n")
    lines = done.stderr.splitlines()
    if "_startup.py" in left:
        # Python reads start-up files twice in a virtual environment.
        assert len(set(lines)) == 1 and lines[0].startswith(f"ctxfix: not active in {venv.executable}: ")
    else:
        assert lines == []
    silent = run(["/bin/sh", "-c", 'exec "$0" -c "" 2>&-', str(venv.executable)])
    assert (silent.returncode, silent.stdout) == (0, ""), "with no stderr to write to"


def test_a_package_that_may_not_be_read(venv: Interpreter, wheel: Path) -> None:
    """As after `umask 077; sudo pip install`: other users' interpreters start, without ctxfix."""
    by_pip(venv, str(wheel))
    # Root reads everything, but for this.
    plain_user = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if plain_user and run(["/usr/bin/env", *plain_user, "true"]).returncode:
        pytest.skip("root may not give up its right to read everything here")
    package = venv.site_packages / "ctxfix"
    for closed, words in (([package], ""), ([*package.rglob("_startup.*")], "PermissionError: [Errno 13]")):
        for path in closed:
            path.chmod(0)
        command = [*plain_user, str(venv.executable), "-c", WHO]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT)
        for path in closed:
            path.chmod(0o755)
        assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
        assert all(f"ctxfix: not active in {venv.executable}: {words}" in line for line in done.stderr.splitlines())
        assert bool(words) == bool(done.stderr)
