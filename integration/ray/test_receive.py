# SPDX-License-Identifier: Apache-2.0
"""Where an RDT transfer lands: real Ray, its NixlTensorTransport and real NIXL, on fake GPUs.

The stand-in for CUDA tensors is described in standin.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from host_environments import ROOT, Environment, ray_env
from rig import Rig, Run

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


def receive(
    rig: Rig, python: Path, nixl: str, scenarios: list[str], tmp_path: Path, size: int = 1 << 20, **extra: str
) -> Run:
    """What the receivers said, scenario by scenario, and what the fabric saw."""
    command = [str(python), str(HERE / "receive.py"), *scenarios, "--size", str(size)]
    env = ray_env(rig, nixl, **extra)
    run = rig.run(f"ray-{nixl}", command, env, TIMEOUT, '{"scenario"', cwd=tmp_path)
    assert [report["scenario"] for report in run.said] == scenarios, run.log.read_text()[-5000:]
    for report in run.said:
        assert "error" not in report, (report["scenario"], report["error"])
        assert report["data_ok"], report
    return run


@NIXL
def test_without_ctxfix_tensors_land_on_gpu_0(
    rig: Rig, environment: Environment, nixl: str, bare: list[str], sound: list[str], tmp_path: Path
) -> None:
    run = receive(rig, environment.python, nixl, [*bare, *sound], tmp_path, CTXFIX_DISABLE="1")
    for report in run.said:
        scenario = report["scenario"]
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
    for report in run.said:
        scenario = report["scenario"]
        assert report["started_by"] == "start-up file"
        assert report["device"] == report["own"], scenario
        assert report["contexts"] == [report["own"]], (scenario, "GPU 0 is untouched")
        assert report["failures"] == {}
        assert report["stats"]["posts"] > 0
    assert len(run.posts) == len(run.said)
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
    for report in run.said:
        assert report["started_by"] == {"setup hook": "import ctxfix", "ctxfix run": "ctxfix run"}[how]
        assert report["device"] == report["own"]
        assert report["contexts"] == [report["own"]]
