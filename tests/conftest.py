# SPDX-License-Identifier: Apache-2.0
"""Environments that tests share: real virtual environments around one build of the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_cuda import FakeCuda

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 60  # seconds, for each process that a test starts


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without anything that steers Python or ctxfix, and with ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CTXFIX_"))}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", **extra}


class Interpreter:
    """A Python to run code in."""

    def __init__(self, executable: Path) -> None:
        self.executable = executable

    def __call__(self, code: str, *options: str, cwd: Path | None = None, **environment: str) -> str:
        """Run ``code``; it must exit 0. Returns what it wrote on stdout; stderr must be empty."""
        done = self.process(*options, "-c", code, cwd=cwd, **environment)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.strip()

    def process(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with ``arguments``."""
        return run([str(self.executable), *arguments], cwd=cwd, **environment)

    @property
    def site_packages(self) -> Path:
        """Where its packages are installed."""
        return next(self.executable.parent.parent.glob("lib/python*/site-packages"))


def run(command: list[str], cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in a clean environment with ``environment`` added, and not in the checkout."""
    return subprocess.run(
        command,
        env=clean_environment(**environment),
        cwd=cwd or Path(command[0]).parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def pip(*arguments: str) -> None:
    done = run([sys.executable, "-m", "pip", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr


def make_venv(folder: Path) -> Interpreter:
    """A new virtual environment without pip."""
    done = run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    assert done.returncode == 0, done.stderr
    return Interpreter(folder / "bin" / "python")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("ctxfix-*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """A virtual environment with ctxfix installed, and nothing else."""
    python = make_venv(tmp_path_factory.mktemp("installed"))
    pip("--python", str(python.executable), "install", "--no-deps", "--no-index", str(wheel))
    return python


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """A virtual environment without ctxfix, but with a start-up file: Python 3.13 loads a codec to read any."""
    python = make_venv(tmp_path_factory.mktemp("bare"))
    (python.site_packages / "empty.pth").write_text("# nothing\n")
    return python


@pytest.fixture
def startup_state() -> Iterator[None]:
    """Put back what a test does to the import machinery of this process."""
    from ctxfix import _startup

    meta_path, targets, modules = sys.meta_path[:], dict(_startup.TARGETS), set(sys.modules)
    state = [(kept, kept.copy()) for kept in (_startup.outcomes, _startup.failures)]
    unwanted = set(_startup.unwanted)
    yield
    sys.meta_path[:] = meta_path
    for kept, before in [*state, (_startup.TARGETS, targets)]:
        kept.clear()
        kept.update(before)
    _startup.unwanted.clear()
    _startup.unwanted.update(unwanted)
    for name in set(sys.modules) - modules:
        if name.partition(".")[0].startswith("fake"):
            del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write modules of throw-away packages: ``package("fakehost.api", "code")``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> Path:
        *parents, last = name.split(".")
        folder = tmp_path.joinpath(*parents)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{last}.py"
        path.write_text(code)
        return path

    return write


# ---- the fake CUDA driver in this process ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fake_driver() -> FakeCuda:
    """The rig's fake driver, which stays loaded for the rest of the session."""
    from rig import MissingSystemPackage, Rig

    try:
        return FakeCuda(Rig.driver_only().libraries / "libcuda.so.1")
    except MissingSystemPackage as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def cuda(fake_driver: FakeCuda) -> Iterator[FakeCuda]:
    """Four fake GPUs, ctxfix attached to them, no context current, nothing registered, counters at hand."""
    from ctxfix import driver, guard
    from ctxfix.registry import registry

    assert driver.attach(), driver.problem()
    while fake_driver.depth():
        fake_driver.pop()
    registry._clear()
    guard._warned.clear()
    yield fake_driver
    fake_driver.heal()
    while fake_driver.depth():
        fake_driver.pop()
    registry._clear()
