# SPDX-License-Identifier: Apache-2.0
"""Which rank of which job this process is, and who says so.

Limits: an environment variable is the word of the launcher, not of the application; programs that run ranks as threads
of one process have no rank here.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Where ranks come from, the most trusted first: source -> (rank, world).
_VARIABLES: dict[str, tuple[str, str]] = {
    "torch environment": ("RANK", "WORLD_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
}
# SGLang names its processes so (scheduler.py, run_scheduler_process): sglang::scheduler_DP0_TP1
_SGLANG_TITLE = re.compile(r"sglang::scheduler\S*?_TP(\d+)")


@dataclass(frozen=True)
class Identity:
    """A process's place in its job; ``rank`` and ``world`` are None where nobody says."""

    rank: int | None = None
    world: int | None = None
    role: str = ""
    source: str = "nobody says"

    def as_record(self) -> dict[str, Any]:
        """As it is recorded."""
        return asdict(self)


_declared: Identity | None = None


def declare(rank: int, world: int | None = None, role: str = "", source: str = "declared") -> None:
    """Say which rank this process is: what the application itself says wins over all else."""
    global _declared
    _declared = Identity(rank, world, role, source)


def current() -> Identity:
    """This process's place, as far as it can be told now."""
    return _declared or find(os.environ, _title(), "ray" if _in_ray() else "")


def find(environ: Mapping[str, str], title: str = "", inside: str = "") -> Identity:
    """The place that ``environ`` and the process's ``title`` tell of."""
    match = _SGLANG_TITLE.search(title)
    if match:
        return Identity(int(match[1]), None, "", "SGLang's process title")
    for source, (rank, world) in _VARIABLES.items():
        number = _number(environ.get(rank))
        if number is not None:
            where = f"{source}, set inside Ray" if inside else source
            return Identity(number, _number(environ.get(world)), "", where)
    return Identity()


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _title() -> str:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return file.read(4096).replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _in_ray() -> bool:
    return "RAY_JOB_ID" in os.environ or "RAY_RAYLET_PID" in os.environ


def process() -> dict[str, Any]:
    """What tells this process from all others, on any host, before and after."""
    return {
        "host": socket.gethostname(),
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid": os.getpid(),
        "started": _start_time(),
        "pid_namespace": _link("/proc/self/ns/pid"),
        "ipc_namespace": _link("/proc/self/ns/ipc"),
    }


def _first_line(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _start_time() -> int | None:
    """When this process started, in clock ticks since boot: pids are used again."""
    line = _first_line("/proc/self/stat")
    fields = line.rpartition(")")[2].split() if line else []
    return int(fields[19]) if len(fields) > 19 else None
