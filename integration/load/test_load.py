# SPDX-License-Identifier: Apache-2.0
"""Many threads on few agents, at full speed: every post in the right context, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from missing import or_skip
from rig import Rig, read_posts

POSTS = int(os.environ.get("LOAD_POSTS", "3200"))  # 72,000: an hour of a server at 20 requests a second
pytestmark = pytest.mark.timeout(120 + POSTS // 50)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return or_skip(Rig.prepare)


def load(rig: Rig, nixl: str, tmp_path: Path, *options: str) -> tuple[dict[str, Any], Counter[tuple[str, str]]]:
    posts = tmp_path / "posts.jsonl"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("load.py")), "--posts", str(POSTS), *options],
        env=rig.env(nixl, posts=posts),
        capture_output=True,
        text=True,
        timeout=100 + POSTS // 50,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith('{"posts"')]
    assert said, (done.returncode, done.stderr[-3000:])
    return json.loads(said[-1]), Counter((post.op, post.verdict) for post in read_posts(posts) if post.rc == 0)


@pytest.mark.parametrize("nixl", ["1.1.0", "1.4.0"])
def test_sixteen_threads_on_four_agents(rig: Rig, nixl: str, tmp_path: Path) -> None:
    result, seen = load(rig, nixl, tmp_path)
    assert result["errors"] == []
    # Each post and each registration in its own memory's context, by threads that all sit on another GPU. The
    # completions of agents with memory of two GPUs say nothing.
    total = result["stats"]["posts"]
    assert total >= result["posts"] >= POSTS - 16
    assert {verdict for op, verdict in seen if op in ("write", "register")} == {"right"}
    assert seen["write", "right"] == total
    # All is given back; the peer still has its buffer registered.
    assert (result["ranges"], result["transfers"], result["prepared"]) == (1, 0, 0)
    assert result["stats"]["rebinds"] == result["stats"]["restores"] > total
    assert result["failures"] == {}
    for counter in ("unknown_owners", "stale_owners", "hook_failures"):
        assert result["stats"][counter] == 0, counter
    assert result["grown_objects"] < POSTS / 20
    assert result["grown_kib"] < 16 * 1024 + POSTS / 4, "malloc keeps some MiB for each thread that ever was"
