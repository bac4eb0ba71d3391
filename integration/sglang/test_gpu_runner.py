# SPDX-License-Identifier: Apache-2.0
"""The runner for real GPUs, on the rig: requests that arrive and requests in a row, the article's line, its table."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu
import pytest
from conftest import HERE
from environment import Environment
from rig import read_posts


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [gpu.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert gpu.percentile([7.0], 0.99) == 7.0
    assert gpu.summary([3.0, 1.0, 2.0]) == {"requests": 3, "mean": 2.0, "p50": 2.0, "p99": 3.0}


def test_the_articles_line_puts_the_posts_right(environment: Callable[[str], Environment], tmp_path: Path) -> None:
    prepared = environment("0.5.12.post1")
    rig = prepared.rig
    posts = tmp_path / "posts.jsonl"
    # The runner sets the paths by itself, from what it is told.
    env = {**os.environ, "HWLOC_XMLFILE": str(rig.libraries / "topo.xml"), "RIG_POSTS": str(posts)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(HERE / "gpu.py"), "--pair", f"{rig.nixl[prepared.nixl]}:{rig.libfabric}"]
    command += ["--sglang", os.pathsep.join(map(str, prepared.modules)), "--libraries", str(rig.libraries)]
    command += ["--preload", str(rig.libraries / "libloopback-fabric.so"), "--memory", "rig", "--columns", "set_device"]
    command += ["--layers", "2", "--tokens", "48", "--runs", "3", "--rate", "3", "--seconds", "1", "--requests", "2"]
    command += ["--start-method", "forkserver", "--limit", "90", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    rows = [line for line in done.stdout.splitlines() if "prefill-" in line or "decode-" in line]
    assert len(rows) == 4 and all("early 0  wrong 0" in row for row in rows), done.stdout + done.stderr
    verdicts = {post.verdict for post in read_posts(posts) if post.is_post}
    assert verdicts == {"right", "host"}


@pytest.mark.parametrize("column", gpu.COLUMNS)
def test_a_run_that_failed_says_so(column: str) -> None:
    result = {"nixl": "1.4.0", "column": column, "error": "prefill-1: Traceback\nRuntimeError: no GPU", "ranks": {}}
    assert gpu.lines(result)[0].endswith("FAILED: RuntimeError: no GPU")
