# SPDX-License-Identifier: Apache-2.0
"""Real Python environments, and processes in them, for tests of what happens at interpreter start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
