# SPDX-License-Identifier: Apache-2.0
"""The path benchmark on the rig: every contender is measured in every cell, and drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rig import HERE, Rig

BENCHMARKS = HERE.parents[1] / "benchmarks"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "path.py"), *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_contender_in_every_cell(rig: Rig, tmp_path: Path) -> None:
    out = tmp_path / "path.json"
    pair = f"{rig.nixl['1.4.0']}:{rig.libfabric}"
    said = run(
        *("--pair", pair, "--libraries", str(rig.libraries), "--preload", str(rig.libraries / "libloopback-fabric.so")),
        *("--memory", "rig", "--ucx", "0", "--routes", "1:0", "--smallest", "4096", "--largest", "65536"),
        *("--step", "16"),
        *("--pieces", "1", "4", "--rounds", "2", "--limit", "60", "--out", str(out)),
        HWLOC_XMLFILE=str(rig.libraries / "topo.xml"),
        PYTHONPATH=str(HERE / "torch_stub"),
    )
    record = json.loads(out.read_text())
    # UCX finds nothing to use on the fake driver: the others go on without it, and each failure has its own words.
    failures = record["failures"]["1:0"]
    assert set(failures) == {"NIXL 1.4.0 UCX", "NIXL 1.4.0 UCX ctxfix"}
    for name, words in failures.items():
        assert "NIXL_ERR_BACKEND" in words and ("in_context" in words) is name.endswith("ctxfix"), words
    cells = record["routes"]["1:0"]
    assert list(cells) == ["65536/4", "4096/1", "65536/1"]
    for cell, rows in cells.items():
        assert set(rows) == {f"NIXL 1.4.0 {way}" for way in ("as shipped", "ctxfix", "set_device")}, cell
        for row in rows.values():
            assert 1 <= row["rounds"] <= 4 and row["right"] is True and row["best"] == min(row["ms"]), row
    for cell in cells:
        assert f"1:0   {cell:>16} " in said

    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'ctxfix[bench]'")
    run("--draw", str(out))
    assert (tmp_path / "path-1-0.png").stat().st_size > 10_000
    assert (tmp_path / "path-1-0.svg").read_text().count("NIXL 1.4.0 ctxfix") == 1
