# SPDX-License-Identifier: Apache-2.0
"""Where an RDT transfer lands: real Ray, its NixlTensorTransport and real NIXL, on fake GPUs.

The stand-in for CUDA tensors is described in standin.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from host_environments import ROOT, Environment
from rig import Post, Rig, read_posts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
TIMEOUT = 300

# What the receiver does on a thread that has no context. The order matters: the scenarios of one place that follow one
# another share an actor, and each place's first one finds an actor that has not received yet.
BARE = [
    "untouched:get_on_target",
    "two:argument",
    "two:get_on_thread",
    "untouched:argument",
    "untouched:argument",  # again: what the first one left of torch's device and of contexts must not matter
    "noset:argument",
    "noset:get_on_thread",
    "noset:get_on_target",
    "pool:argument",
    "pool:get_on_main",
]
SOUND = ["one:argument", "one:get_on_thread", "noset:get_on_main"]
# Where NIXL posts in the owner's context by itself (1.4.0) the buffers land as before: a few of the scenarios tell.
NIXL = pytest.mark.parametrize(("nixl", "bare", "sound"), [("1.1.0", BARE, SOUND), ("1.4.0", BARE[1:4], SOUND[:1])])


@dataclass
class Run:
    """What the receivers said, scenario by scenario, and what the fabric saw."""

    reports: list[tuple[str, dict[str, Any]]]
    posts: list[Post]


def receive(
    rig: Rig, python: Path, nixl: str, scenarios: list[str], tmp_path: Path, size: int = 1 << 20, **extra: str
) -> Run:
    posts, log = tmp_path / "posts.jsonl", tmp_path / "log"
    command = [str(python), str(HERE / "receive.py"), *scenarios, "--size", str(size)]
    env = rig.env(nixl, posts=posts, torch_stub=False, RAY_USAGE_STATS_ENABLED="0", **extra)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # each actor would compile torch and Ray anew
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=env, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(TIMEOUT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"scenario"')]
    reports = [(report.pop("scenario"), report) for report in said]
    assert [scenario for scenario, _ in reports] == scenarios, log.read_text()[-5000:]
    for scenario, report in reports:
        assert "error" not in report, (scenario, report["error"])
        assert report["data_ok"], (scenario, report)
    return Run(reports, [post for post in read_posts(posts) if post.is_post])


@NIXL
def test_without_ctxfix_tensors_land_on_gpu_0(
    rig: Rig, environment: Environment, nixl: str, bare: list[str], sound: list[str], tmp_path: Path
) -> None:
    run = receive(rig, environment.python, nixl, [*bare, *sound], tmp_path, CTXFIX_DISABLE="1")
    for scenario, report in run.reports:
        if scenario in sound:
            assert report["device"] == report["own"], scenario
            continue
        assert report["own"] != 0
        assert report["device"] == 0, scenario
        assert 0 in report["contexts"], "a stray context"


@NIXL
def test_with_ctxfix_they_land_on_the_actors_gpu(
    rig: Rig, environment: Environment, nixl: str, bare: list[str], sound: list[str], tmp_path: Path
) -> None:
    run = receive(rig, environment.python, nixl, [*bare, *sound], tmp_path)
    for scenario, report in run.reports:
        assert report["started_by"] == "start-up file"
        assert report["device"] == report["own"], scenario
        assert report["contexts"] == [report["own"]], (scenario, "GPU 0 is untouched")
        assert report["failures"] == {}
        assert report["stats"]["posts"] > 0
    assert len(run.posts) == len(run.reports)
    assert {(post.op, post.verdict) for post in run.posts} == {("read", "right")}


@pytest.mark.parametrize("how", ["setup hook", "ctxfix run"])
def test_environments_without_the_start_up_file(rig: Rig, environment: Environment, how: str, tmp_path: Path) -> None:
    """As a runtime_env may bring: ctxfix can be imported there, but no start-up file is read."""
    extra = {"setup hook": {"RDT_SETUP_HOOK": "ctxfix.activate"}, "ctxfix run": {}}[how]
    paths = [str(ROOT)] if how == "setup hook" else [str(ROOT / "ctxfix" / "_bootstrap"), str(ROOT)]
    scenarios = ["two:argument", "untouched:argument"]
    wrapped = rig.env("1.1.0")["PYTHONPATH"].split(os.pathsep)
    extra["PYTHONPATH"] = os.pathsep.join([*paths, *(path for path in wrapped if "torch_stub" not in path)])
    run = receive(rig, environment.bare, "1.1.0", scenarios, tmp_path, **extra)
    for _, report in run.reports:
        assert report["started_by"] == {"setup hook": "import ctxfix", "ctxfix run": "ctxfix run"}[how]
        assert report["device"] == report["own"]
        assert report["contexts"] == [report["own"]]
