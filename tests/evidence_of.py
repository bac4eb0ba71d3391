# SPDX-License-Identifier: Apache-2.0
"""Records of runs that never were: a perfect one, to be spoilt by tests."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from ctxfix.evidence import merge, records

BYTES, DESCRIPTORS, POSTS = 1_000_000, 321, 4


def calls(device: int, **kinds: int) -> dict[str, Any]:
    """Native counts: get_handle=3, copy_dtod=(3, bytes)…"""
    rows = {}
    for kind, value in kinds.items():
        number, size = value if isinstance(value, tuple) else (value, 0)
        rows[kind] = {"calls": number, "failures": 0, "bytes": size, "rebinds": 0}
    return {"devices": {str(device): rows}, "fabric": {"answered": 1, "adopted": 0}}


def process(role: str, rank: int, world: int, *, host: str = "h", boot: str = "b") -> list[dict[str, Any]]:
    pid = 1000 + rank + (500 if role == "decode" else 0)
    return [
        {
            "kind": "process", "schema": records.SCHEMA, "host": host, "boot": boot, "pid": pid, "started": pid,
            "disabled": False, "efa": {"known": False, "reason": "no EFA", "counters": {}},
        },
        {
            "kind": "snapshot", "final": True,
            "identity": {"rank": rank, "world": world, "role": role, "source": "declared"},
            "agents": {f"{role}{rank}": {"backends": ["LIBFABRIC"], "registered": {str(rank): BYTES}}},
            "posts": [], "unknown_posts": 0, "observer_problems": {}, "lost": 0,
            "calls": calls(rank), "calls_reason": "", "native": {},
            "contexts": {"known": True, "active": [rank], "owners": [rank], "nvml": {"known": False, "reason": "-"}},
            "efa": {"known": False, "reason": "no EFA", "counters": {}},
        },
    ]  # fmt: skip


def post(role: str, rank: int, remote: str) -> dict[str, Any]:
    return {
        "agent": f"{role}{rank}", "remote": remote, "operation": "WRITE", "device": rank, "posts": POSTS,
        "descriptors": POSTS * DESCRIPTORS, "bytes": POSTS * BYTES, "done": POSTS, "done_bytes": POSTS * BYTES,
        "failed": 0, "ns": [POSTS, POSTS * 1_000_000, 900_000], "contexts": {"right": POSTS},
    }  # fmt: skip


def perfect(world: int = 2, both_ways: bool = False) -> dict[str, list[dict[str, Any]]]:
    """File name -> records of a run in which every rank's bytes went by CUDA IPC."""
    files: dict[str, list[dict[str, Any]]] = {}
    n, size = POSTS * DESCRIPTORS, POSTS * BYTES
    for rank in range(world):
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            rows = process(role, rank, world)
            counts = rows[-1]
            sends, gets = both_ways or role == "prefill", both_ways or role == "decode"
            kinds: dict[str, Any] = {}
            if sends:
                counts["posts"] = [post(role, rank, f"{other}{rank}")]
                kinds |= {"range": n, "get_handle": n}
            if gets:
                kinds |= {"open_handle": 1, "copy_dtod": (n, size)}
                rows.insert(1, {
                    "kind": "check", "sender": f"{other}{rank}", "receiver": f"{role}{rank}", "transfers": POSTS,
                    "bytes": size, "wrong": 0, "stale": 0,
                })  # fmt: skip
            counts["calls"] = calls(rank, **kinds)
            files[f"{role}{rank}"] = rows
    return copy.deepcopy(files)


def run_of(files: dict[str, list[dict[str, Any]]]) -> merge.Run:
    """As merge.read gives it."""
    return merge.Run([merge.process_of(records.File(name, rows)) for name, rows in files.items()])


def write(files: dict[str, list[dict[str, Any]]], folder: Path) -> Path:
    """The files of records themselves."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}{records.SUFFIX}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
