# SPDX-License-Identifier: Apache-2.0
"""The script of this folder, without EFA: on verdicts as `ctxfix verify` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import combinations


def row(rank: int, path: str) -> dict[str, Any]:
    good = path in ("CUDA_IPC", "NIC")
    return {
        "name": f"prefill rank {rank} → decode rank {rank}", "path": path, "good": good, "bytes": 254_803_968,
        "failures": 0, "mean_ms": 3.5, "stray": [0] if path == "SAR" else [], "peer_stray": None, "reasons": ["a | b"],
    }  # fmt: skip


def verdict_for(command: list[str], environ: dict[str, str]) -> int:
    """What the article measured."""
    without, shm = "--without" in command, environ["FI_EFA_ENABLE_SHM_TRANSFER"] == "1"
    path = "NIC" if not shm else "SAR" if without and "old" in command[0] else "CUDA_IPC"
    code = int(path == "SAR")
    rows = [row(0, "CUDA_IPC" if path == "SAR" else path), row(1, path)]
    Path(command[command.index("--json") + 1]).write_text(json.dumps({"code": code, "reason": "", "rows": rows}))
    return code


ARGUMENTS = ["--nixl", "1.1.0=old/python", "--nixl", "1.4.0=new/python"]


def test_six_combinations_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert combinations.main([*ARGUMENTS, "--out", str(tmp_path / "out"), "--", "--repeat", "2"], verdict_for) == 0
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert len(lines) == 2 + 12
    assert sum("| SAR |" in line for line in lines) == 1
    assert sum("| NIC |" in line for line in lines) == 4
    assert all(line.count(" | ") == lines[0].count(" | ") for line in (lines[2].replace("\\|", ""), lines[-1]))


def test_a_combination_that_could_not_run(tmp_path: Path) -> None:
    assert combinations.main([*ARGUMENTS, "--out", str(tmp_path / "out")], lambda *_: 2) == 2
    assert "not run" in (tmp_path / "out" / "table.md").read_text()


def test_one_that_is_not_proven_with_ctxfix(tmp_path: Path) -> None:
    def runner(command: list[str], environ: dict[str, str]) -> int:
        return verdict_for([command[0], *command[1:], "--without"], environ)

    assert combinations.main([*ARGUMENTS, "--out", str(tmp_path / "out")], runner) == 1


def test_settings_of_the_shell_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    one = combinations.combinations({"1.1.0": "p"})[1]
    environ = combinations.environment(one, {"CTXFIX_DISABLE": "1", "PATH": "/bin"})
    assert "CTXFIX_DISABLE" not in environ
    assert (environ["PATH"], environ["FI_EFA_ENABLE_SHM_TRANSFER"]) == ("/bin", "0")


def test_no_folder_is_reused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(SystemExit):
        combinations.main([*ARGUMENTS, "--out", str(tmp_path)], verdict_for)
