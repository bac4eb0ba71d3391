# SPDX-License-Identifier: Apache-2.0
"""How every benchmark shows and keeps its figures: a table, and JSON with the command, the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """What decides a figure, as far as Python can tell."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": cpu, "cpus": os.cpu_count(), "system": platform.platform(), "python": sys.version.split()[0]}


def versions(*names: str) -> dict[str, str]:
    """Installed versions of ctxfix, of what it needs, and of ``names``."""
    found = {}
    for name in ("ctxfix", "cuda-bindings", "wrapt", *names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def show_and_keep(
    title: str, rows: Sequence[tuple[str, ...]], figures: dict[str, Any], keep: Path | None, on: str = ""
) -> None:
    """Print ``rows`` (name, value, …) as a table; write ``figures`` to the file ``keep``, if there is one."""
    command = " ".join(["python", *sys.argv])
    table = Table(
        title=title, caption=f"{machine()['cpu']}, Python {machine()['python']}{', ' if on else ''}{on}: {command}"
    )
    for i in range(len(rows[0])):
        table.add_column(justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if keep is not None:
        record = {
            "command": command,
            "when": time.strftime("%Y-%m-%d"),
            "on": on,
            "machine": machine(),
            "versions": versions(),
            "figures": figures,
        }
        keep.write_text(json.dumps(record, indent=2) + "\n")
