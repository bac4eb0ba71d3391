# SPDX-License-Identifier: Apache-2.0
"""What an installed ctxfix adds to the start of an interpreter, in milliseconds of CPU time (user and system).

Two new virtual environments, one with ctxfix, run ``python -c pass`` in turn, so that whatever else the machine does
hits both alike. Reported are the medians and the median of the paired differences.

    python benchmarks/startup.py [--pairs N] [--wheel FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import write

ROOT = Path(__file__).resolve().parent.parent
TARGET_MS = 2.0


def build_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    return next(folder.glob("ctxfix-*.whl"))


def make_environment(folder: Path, wheel: Path | None) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    if wheel is not None:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python]
        subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return python


def cpu_ms(python: str) -> float:
    """CPU time of one start and stop of ``python``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CTXFIX_"))}
    child = os.posix_spawn(python, [python, "-c", "pass"], environment)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{python} -c pass ended with status {status}")
    return 1000 * (usage.ru_utime + usage.ru_stime)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--wheel", type=Path, help="a wheel of ctxfix; built from this checkout by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel or build_wheel(Path(folder))
        pythons = {
            "without": make_environment(Path(folder, "without"), None),
            "with": make_environment(Path(folder, "with"), wheel),
        }
        samples: dict[str, list[float]] = {"without": [], "with": []}
        for python in pythons.values():
            cpu_ms(python)
        for pair in range(options.pairs):
            # Neither always comes second.
            for name in sorted(samples, reverse=bool(pair % 2)):
                samples[name].append(cpu_ms(pythons[name]))
    differences = [after - before for before, after in zip(samples["without"], samples["with"], strict=True)]
    rows = {
        "start without ctxfix": statistics.median(samples["without"]),
        "start with ctxfix": statistics.median(samples["with"]),
        "added (median of pairs)": statistics.median(differences),
    }
    write("startup", "Interpreter start, CPU", "ms", rows, {"pairs": options.pairs, "target_ms": TARGET_MS})
    return int(rows["added (median of pairs)"] > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
