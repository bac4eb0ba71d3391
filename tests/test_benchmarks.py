# SPDX-License-Identifier: Apache-2.0
"""Each benchmark that needs no GPU runs, and writes what it says; times are not judged. path.py: integration/rig."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from environments import ROOT
from missing import or_skip
from rig import Rig

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def rig() -> Rig:
    return or_skip(Rig.prepare)


def run(script: str, *options: str, folder: Path) -> str:
    """Its output. It may end with 1: a target was missed, by so few calls on whatever machine this is."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        env={**os.environ, "BENCHMARK_RESULTS": str(folder)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def recorded(name: str, script: str, *options: str, folder: Path, unit: str) -> dict[str, float]:
    """Run it; its rows, from the file that it wrote."""
    run(script, *options, folder=folder)
    record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert record["command"] == " ".join(["python", f"benchmarks/{script}", *options])
    assert record["unit"] == unit and record["versions"]["ctxfix"] and record["machine"]["processor"]
    assert all(isinstance(value, float) for value in record["results"].values())
    return dict(record["results"])


def test_post(tmp_path: Path) -> None:
    rows = recorded("post", "post.py", "--quick", folder=tmp_path, unit="ns")
    assert {"post, context already right", "post, context set and given back", "post of host memory"} <= set(rows)


def test_growth(tmp_path: Path) -> None:
    rows = recorded("growth", "growth.py", "--quick", folder=tmp_path, unit="ns")
    for end in ("1 ranges", "100,000 ranges", "1 agents", "64 agents"):
        assert {f"post, {end}", f"poll for notifications, {end}", f"start of a thread, {end}"} <= set(rows)
    for end in ("1 threads", "256 threads"):
        assert {
            f"{what}, {end}" for what in ("post at once", "poll for notifications at once", "start of a thread")
        } <= set(rows)
    assert "registration of a range in no order, 100,000 ranges" in rows
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'ctxfix[bench]'")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_threads(tmp_path: Path) -> None:
    rows = recorded("threads", "threads.py", "--rounds", "2", "--starts", "5", folder=tmp_path, unit="µs")
    assert rows["start without the hook"] > 0 and "added, null affinity" in rows


def test_startup(tmp_path: Path, wheel: Path) -> None:
    options = ("--pairs", "2", "--wheel", str(wheel))
    rows = recorded("startup", "startup.py", *options, folder=tmp_path, unit="ms")
    assert rows["start without ctxfix"] > 0 and "added (median of pairs)" in rows


def test_recording(tmp_path: Path) -> None:
    rows = recorded("recording", "recording.py", "--calls", "2", folder=tmp_path, unit="µs")
    assert set(rows) == {"NIXL 1.1.0", "NIXL 1.4.0"}


def test_memory(tmp_path: Path) -> None:
    rows = recorded("memory", "memory.py", "--rounds", "1", folder=tmp_path, unit="MiB")
    for stage in ("an interpreter", "NIXL imported", "1,000 ranges registered", "100,000 ranges registered"):
        for kind in ("private", "in all"):
            assert f"{stage}, {kind}: added" in rows
    assert rows["100,000 ranges registered, private: added"] > rows["1,000 ranges registered, private: added"]


def test_memory_of_gpus_is_measured_or_not_with_a_reason(tmp_path: Path) -> None:
    said = run("memory.py", "--gpu", folder=tmp_path)
    assert (tmp_path / "memory-gpu.json").exists() or said.startswith("memory of GPUs was not measured: ")


# ---- who is the best peer, on made-up times --------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def path() -> ModuleType:
    return load("path")


def row(*ms: float, whole: bool = True) -> dict[str, Any]:
    return {"ms": list(ms), "whole": whole, "right": True}


def test_who_says_done_too_early_is_no_peer(path: ModuleType) -> None:
    rows = {
        "plain copy": row(1.0),
        "N ctxfix": row(1.1, 1.05),
        "N as shipped": row(0.9, whole=False),  # its bytes were not there
        "N UCX": row(1.5, 2.0),
        "N UCX ctxfix": {"ms": []},  # failed
    }
    assert path.early(rows) == ["N as shipped"]
    assert path.best(rows, True) == ("N ctxfix", 1.05) and path.best(rows, False) == ("N UCX", 1.5)
    assert path.slower(rows) == pytest.approx(1.05 / 1.5 - 1)
    assert path.slower({name: rows[name] for name in ("N ctxfix", "N as shipped")}) is None


def test_the_target_is_judged(path: ModuleType) -> None:
    results = {
        "8/1": {"N ctxfix": row(1.0), "N as shipped": row(0.9, whole=False), "N UCX": row(1.2)},
        "8/2": {"N ctxfix": row(2.0), "N UCX": row(1.95)},
        "8/4": {"N ctxfix": row(3.0), "N UCX": row(2.0)},
        "8/8": {"N ctxfix": row(3.0)},
    }
    *cells, judged = path.table("1:1", results)
    assert len(cells) == 5 and "too early: N as shipped" in cells[1] and "+50.0 %" in cells[3]
    assert "2 of 3 cells; worst +50.0 % at 8/4" in judged


def test_the_order_of_cells(path: ModuleType) -> None:
    assert path.cells(4096, 65536, 16, [1, 4, 16]) == [(65536, 4), (65536, 16), (4096, 1), (65536, 1)]


@pytest.fixture(scope="module")
def end() -> ModuleType:
    return load("path_end")


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("late", [False, True])
def test_the_pieces_cover_all_the_bytes(end: ModuleType, count: int, late: bool) -> None:
    size = 1 << 20
    pieces = end.pieces(size // count * count, count, late)
    assert len(pieces) == count
    at = 0
    for start, length in sorted(set(pieces)):
        assert start == at and length > 0
        at += length
    assert at == size // count * count
    if late and count > 1:
        assert sum(start + length == at for start, length in pieces) == 1, "the end is in the last piece only"
