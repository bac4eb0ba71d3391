# SPDX-License-Identifier: Apache-2.0
"""How benchmarks tell what they measured: a table to read, and a JSON file to compare with."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

#: The tests of the benchmarks write elsewhere.
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).resolve().parent / "results")


def write(name: str, title: str, unit: str, rows: dict[str, float], details: dict[str, object]) -> None:
    """Print ``rows`` (in ``unit``) and write them, with the command and the machine, to ``results/<name>.json``."""
    table = Table(title=title)
    table.add_column("what")
    table.add_column(unit, justify="right")
    for what, value in rows.items():
        table.add_row(what, f"{value:.3f}")
    Console().print(table)
    record = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **versions("ctxfix", "cuda-bindings", "wrapt")},
        "unit": unit,
        "results": {what: round(value, 4) for what, value in rows.items()},
        **details,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions(*names: str) -> dict[str, str]:
    """The versions installed of distributions, of those that are."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
