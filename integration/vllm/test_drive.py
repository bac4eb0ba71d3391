# SPDX-License-Identifier: Apache-2.0
"""vLLM's own classes with NIXL and Ray on fake GPUs: what their threads do without ctxfix, and with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from host_environments import Environment, ray_env
from rig import Post, Rig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
TIMEOUT = 300


def drive(
    rig: Rig, environment: Environment, vllm: Path, nixl: str, what: str, tmp_path: Path, **extra: str
) -> tuple[dict[str, Any], list[Post]]:
    env = ray_env(rig, nixl, **extra)
    env["PYTHONPATH"] += f"{os.pathsep}{vllm}"
    command = [str(environment.python), str(HERE / "drive.py"), what]
    run = rig.run(f"vllm-{what}-{nixl}", command, env, TIMEOUT, '{"driven"', cwd=tmp_path)
    assert run.said, run.log.read_text()[-5000:]
    assert "error" not in run.result, run.result["error"]
    return run.result, run.posts


@pytest.mark.parametrize(("nixl", "verdict"), [("1.1.0", "none"), ("1.4.0", "right")])
def test_push_without_ctxfix(
    rig: Rig, environment: Environment, vllm: Path, tmp_path: Path, nixl: str, verdict: str
) -> None:
    result, posts = drive(rig, environment, vllm, nixl, "push", tmp_path, CTXFIX_DISABLE="1")
    assert result["data_ok"], result
    # NIXL 1.4.0 binds its own post; every other CUDA call of the thread is on GPU 0 as before.
    assert {post.verdict for post in posts} == {verdict}
    assert set(result["devices"]) == {0}


@pytest.mark.parametrize("nixl", ["1.1.0", "1.4.0"])
def test_push_with_ctxfix(rig: Rig, environment: Environment, vllm: Path, tmp_path: Path, nixl: str) -> None:
    result, posts = drive(rig, environment, vllm, nixl, "push", tmp_path)
    assert result["data_ok"], result
    assert {(post.op, post.owner, post.verdict) for post in posts} == {("write", 1, "right")}
    assert set(result["devices"]) == {1}


def test_sharded_rdt_without_ctxfix(rig: Rig, environment: Environment, vllm: Path, tmp_path: Path) -> None:
    result, posts = drive(rig, environment, vllm, "1.1.0", "rdt", tmp_path, CTXFIX_DISABLE="1")
    assert result["worker"]["pulled"] == [[5], [6]]
    assert [server["warmup"] for server in result["servers"]] == [0, 0]
    assert all(0 in server["contexts"] for server in result["servers"])


def test_sharded_rdt_with_ctxfix(rig: Rig, environment: Environment, vllm: Path, tmp_path: Path) -> None:
    """Two producers and a consumer, each on a GPU of its own with all of them visible."""
    result, posts = drive(rig, environment, vllm, "1.1.0", "rdt", tmp_path)
    assert result["worker"]["pulled"] == [[5], [6]]
    assert [server["warmup"] for server in result["servers"]] == [1, 2]
    assert [server["contexts"] for server in result["servers"]] == [[1], [2]]
    assert result["worker"]["contexts"] == [3]
    assert [(post.op, post.owner, post.verdict) for post in posts] == [("read", 3, "right")] * 2
