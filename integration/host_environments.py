# SPDX-License-Identifier: Apache-2.0
"""Python environments with real hosts in them, made once in .rig/ of the checkout.

Two for a host: one with the host and what it needs, and on top of it one in which ctxfix is installed as a wheel, so
that its start-up file serves every process. Packages that a host needs are pinned, so that a run today is one tomorrow.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration" / "rig"))

from rig import Rig, RigError, _cached, _one_at_a_time  # noqa: E402

TORCH = "torch==2.13.0"
CTXFIX_NEEDS = ("wrapt>=2.4", "cuda-python>=12.9,<14", "rich>=13", "numpy")
INSTALL_TIMEOUT = 900


@dataclass(frozen=True)
class Environment:
    """The interpreters of a host: ``bare`` without ctxfix, ``python`` with it."""

    bare: Path
    python: Path


def prepare(name: str, *requirements: str, without_dependencies: tuple[str, ...] = ()) -> Environment:
    """The environment ``name`` with ``requirements``, and ``without_dependencies`` as they are, made if missing.

    Other requirements make another one; what was made before stays. ctxfix is installed anew each time: it changes.
    """
    wanted = repr((requirements, CTXFIX_NEEDS, without_dependencies))
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"
    root = ROOT / ".rig"
    root.mkdir(exist_ok=True)
    with _one_at_a_time(root):
        folder = _cached(root / f"env-{name}-{tag}", lambda to: _install(to, requirements, without_dependencies))
        on_top = root / f"env-{name}-{tag}-ctxfix"
        shutil.rmtree(on_top, ignore_errors=True)
        _install_ctxfix(on_top, folder)
    return Environment(folder / "bin" / "python", on_top / "bin" / "python")


def ray_env(rig: Rig, nixl: str, **extra: str) -> dict[str, str]:
    """The variables for a program on the rig that starts Ray's actors."""
    env = rig.env(nixl, torch_stub=False, RAY_USAGE_STATS_ENABLED="0", **extra)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # each actor would compile torch and Ray anew
    return env


def unpack(requirement: str, *patterns: str) -> Path:
    """The files of a wheel whose names match one of ``patterns``, unpacked once; the wheel itself is not kept."""
    name = requirement.replace("==", "-")

    def fill(to: Path) -> None:
        with tempfile.TemporaryDirectory(dir=to.parent) as wheels:
            options = ["-q", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
            _run(sys.executable, "-m", "pip", "download", *options, "-d", wheels, requirement)
            with zipfile.ZipFile(next(Path(wheels).glob("*.whl"))) as archive:
                members = [m for m in archive.namelist() if any(fnmatch.fnmatch(m, pattern) for pattern in patterns)]
                archive.extractall(to, members)

    root = ROOT / ".rig"
    root.mkdir(exist_ok=True)
    with _one_at_a_time(root):
        return _cached(root / f"files-{name}", fill)


def _install(to: Path, requirements: tuple[str, ...], without_dependencies: tuple[str, ...]) -> None:
    # _cached renames the folder at the end. The interpreter does not mind; the scripts in bin/ would, and are not used.
    _run(sys.executable, "-m", "venv", "--without-pip", str(to))
    _pip(to, "install", *requirements, *CTXFIX_NEEDS)
    if without_dependencies:
        _pip(to, "install", "--no-deps", *without_dependencies)


def _install_ctxfix(to: Path, below: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", str(to))
    _site(to).joinpath("below.pth").write_text(f"{_site(below)}\n")
    with tempfile.TemporaryDirectory() as wheels:
        # Built by this interpreter, which has the build backend.
        _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, str(ROOT))
        _pip(to, "install", "--no-deps", "--no-index", str(next(Path(wheels).glob("*.whl"))))


def _site(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def _pip(folder: Path, *arguments: str) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile", "--root-user-action=ignore"]
    _run(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *arguments, *options)


def _run(*command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)
    if done.returncode:
        raise RigError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
