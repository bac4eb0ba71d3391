# SPDX-License-Identifier: Apache-2.0
"""Installed in every way, in real environments: the start-up file is there, runs, costs nothing and breaks nothing."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from environments import ROOT, Interpreter, make_venv, pip, run

from ctxfix import native

FINDERS = "import sys; print(sum(type(f).__module__ == 'ctxfix._startup' for f in sys.meta_path))"
# A multiprocessing child tells how many finders of ours it has; ctxfix is not named.
CHILD = f"""
import multiprocessing, sys
def report(queue):
    queue.put(sum(type(f).__module__ == {"ctxfix._startup"!r} for f in sys.meta_path))
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    child = context.Process(target=report, args=(queue,))
    child.start()
    print(queue.get())
    child.join()
"""


@pytest.fixture(scope="module")
def target_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def test_wheel_holds_both_start_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        line = archive.read("ctxfix-init.pth").decode()
        assert line.startswith("import ") and line.count("\n") == 1, "site runs single lines that begin with import"
        module, _, function = archive.read("ctxfix-init.start").decode().strip().partition(":")
    assert {"ctxfix-init.pth", "ctxfix-init.start", "ctxfix/py.typed", "ctxfix/_bootstrap/sitecustomize.py"} <= set(
        names
    )
    assert callable(getattr(sys.modules[module], function))


@pytest.mark.parametrize("options", [(), ("-I",), ("-E",), ("-s",), ("-O",)], ids=" ".join)
def test_start_file_installs_one_finder(installed: Interpreter, options: tuple[str, ...]) -> None:
    # Python reads start-up files twice in a virtual environment.
    assert installed(FINDERS, *options) == "1"
    assert installed("import sys; print(sys.modules['ctxfix._startup'].started_by)", *options) == "start-up file"


def test_finder_stands_in_front(installed: Interpreter) -> None:
    assert installed("import sys; print(type(sys.meta_path[0]).__module__)") == "ctxfix._startup"


def test_nothing_happens_without_site(installed: Interpreter) -> None:
    assert installed(FINDERS, "-S") == "0"


@pytest.mark.parametrize("options", [(), ("-I",)], ids=" ".join)
def test_start_loads_nothing_but_ctxfix(installed: Interpreter, bare: Interpreter, options: tuple[str, ...]) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    added = set(installed(code, *options).split()) - set(bare(code, *options).split())
    assert added == {"ctxfix", "ctxfix._startup"}


@pytest.mark.parametrize("options", [(), ("-E",), ("-I",)], ids=" ".join)
@pytest.mark.parametrize("value", ["1", "maybe"])
def test_off_switch_at_start(installed: Interpreter, value: str, options: tuple[str, ...]) -> None:
    assert installed(FINDERS, *options, CTXFIX_DISABLE=value) == "0"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FINDERS!r}], check=True)"
    assert installed(child, *options, CTXFIX_DISABLE=value) == "0"


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing_children(installed: Interpreter, tmp_path: Path, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(CHILD)
    done = installed.process(str(script), method)
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def test_target_is_patched_in_a_program_that_does_not_know_ctxfix(installed: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "_api.py").write_text("")
    # ctxfix is installed alone here, so its patch of NIXL cannot load: the import goes through, with one warning.
    done = installed.process(
        "-c", "import nixl_cu12._api, nixl_cu12._api as again; print(again.__name__)", cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (0, "nixl_cu12._api")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ctxfix: patching nixl_cu12._api: ModuleNotFoundError: No module named 'wrapt'")
    strict = installed.process("-c", "import nixl_cu12._api", cwd=tmp_path, CTXFIX_STRICT="1")
    assert strict.returncode == 1 and "ctxfix.errors.PatchError: patching nixl_cu12._api" in strict.stderr


def test_sitecustomize_of_the_program_is_untouched(installed: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("theirs = True")
    code = f"import sitecustomize; print(sitecustomize.theirs, sitecustomize.__file__); {FINDERS}"
    assert installed(code, PYTHONPATH=str(tmp_path)).split() == ["True", str(tmp_path / "sitecustomize.py"), "1"]


def test_editable_install(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv")
    # As `pip install --editable` does it, but with the build backend of the environment that runs the tests.
    build = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    built = run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT)
    assert built.returncode == 0, built.stderr
    wheel = next(tmp_path.glob("*.whl"))
    pip("--python", str(python.executable), "install", "--no-deps", "--no-index", str(wheel))
    start_files = [python.site_packages / name for name in ("ctxfix-init.pth", "ctxfix-init.start")]
    assert all(file.is_file() for file in start_files)
    assert python(FINDERS) == python(FINDERS, "-I") == "1"
    assert python("import ctxfix; print(ctxfix.__file__)") == str(ROOT / "ctxfix" / "__init__.py")
    pip("--python", str(python.executable), "uninstall", "--yes", "ctxfix")
    assert python(FINDERS) == "0" and not any(file.exists() for file in start_files)
    left = list((ROOT / "ctxfix" / "native").glob("_native*.so"))
    assert bool(left) is native.available(), "the extension is in the tree, where one was built"
    assert "*.so" in (ROOT / ".gitignore").read_text().split()


def test_target_install_waits_for_the_import_and_says_so(bare: Interpreter, target_folder: Path) -> None:
    assert (target_folder / "ctxfix-init.pth").is_file()
    assert bare(FINDERS, PYTHONPATH=str(target_folder)) == "0"
    code = "import ctxfix, json; s = ctxfix.status(); print(json.dumps([s['reason'], s['start_files']]))"
    reason, (file,) = json.loads(bare(code, PYTHONPATH=str(target_folder)))
    assert reason == "activated by: import ctxfix"
    assert file["path"] == os.path.realpath(target_folder / "ctxfix-init.pth")
    assert not file["runs"] and "ctxfix run" in file["reason"]
    who = "import sys; print(sys.modules['ctxfix._startup'].started_by)"
    done = bare.process("-m", "ctxfix", "run", "--", str(bare.executable), "-c", who, PYTHONPATH=str(target_folder))
    assert (done.stdout.strip(), done.stderr) == ("ctxfix run", "")


def test_a_start_file_that_outlives_the_package_is_silent(bare: Interpreter) -> None:
    """As after the checkout of an editable install was moved away."""
    left = bare.site_packages / "ctxfix-init.pth"
    left.write_text((ROOT / "ctxfix-init.pth").read_text())
    try:
        assert bare("print('host')") == "host"
    finally:
        left.unlink()


def test_a_wheel_is_built_beside_the_tree(wheel: Path, tmp_path: Path) -> None:
    """Others may be running on the extension in the tree: building a wheel without a compiler leaves it there."""
    built = sorted((ROOT / "ctxfix" / "native").glob("_native*.so"))
    before = [(path, path.stat().st_mtime_ns) for path in built]
    command = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = run([sys.executable, "-m", "pip", *command], CC="/bin/false")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("ctxfix-*-py3-none-any.whl")], "pure, without its extension"
    assert [(path, path.stat().st_mtime_ns) for path in built] == before
