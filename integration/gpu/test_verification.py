# SPDX-License-Identifier: Apache-2.0
"""`ctxfix verify` on real GPUs: part of `make test-gpu`, with the settings of test_gpu.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from run import Bench
from test_gpu import bench, why_not  # noqa: F401 - a fixture
from verification import verify

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.timeout(600)]


def test_every_rank_is_proven(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    code, verdict = verify(bench, tmp_path)
    assert code == 0, verdict
    assert {row["path"] for row in verdict["rows"]} == {"CUDA_IPC"}
    assert len(verdict["rows"]) == 4
    for row in verdict["rows"]:
        assert (row["failures"], row["stray"], row["peer_stray"]) == (0, [], []), row
        assert set(row["contexts"]) == {"right"}, row
        if importlib.util.find_spec("cupti"):
            assert "as libfabric's calls say" in row["witness"], row
    # What was recorded says the same to whoever judges it later.
    command = [sys.executable, "-m", "ctxfix", "report", str(tmp_path / "records"), "--json", "-"]
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, len(json.loads(again.stdout)["rows"])) == (0, 4)


def test_without_ctxfix_it_is_not(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    code, verdict = verify(bench, tmp_path, "--without", "--repeat", "2", "--size", str(256 << 20))
    assert code == 1, verdict
    if "1.1.0" in bench.name:
        assert {row["path"] for row in verdict["rows"] if row["rank"] == 1} == {"SAR"}


def test_decode_on_the_other_gpu(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    code, verdict = verify(bench, tmp_path, "--cross", "--repeat", "2", "--size", str(256 << 20))
    assert code == 0, verdict
