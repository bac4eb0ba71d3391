# SPDX-License-Identifier: Apache-2.0
"""Both ends on real GPUs: `make test-gpu`. Skips with the reason where something is missing.

CTXFIX_TEST_PAIRS      NIXL:LIBFABRIC folders, separated by spaces (see run.py)
CTXFIX_TEST_LIBRARIES  further folders of libraries, separated by colons
CTXFIX_TEST_ROUNDS     transfers of each stale-read test, default 200
CTXFIX_TEST_LAUNCHER   put before each program, if ctxfix is not installed in this environment: "ctxfix run --"
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from run import Bench, grown

PAIRS = os.environ.get("CTXFIX_TEST_PAIRS", "").split()
ROUNDS = os.environ.get("CTXFIX_TEST_ROUNDS", "200")


def why_not() -> str | None:
    if not PAIRS:
        return "CTXFIX_TEST_PAIRS names no NIXL and libfabric"
    try:
        import pynvml
        import torch
    except ImportError as error:
        return str(error)
    if torch.cuda.device_count() < 2:
        return "two NVIDIA GPUs are needed"
    if not torch.cuda.can_device_access_peer(0, 1):
        return "the GPUs cannot reach each other's memory"
    pynvml.nvmlInit()
    return None


pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.timeout(600)]


@pytest.fixture(
    scope="module", params=PAIRS or ["none"], ids=lambda pair: "+".join(Path(p).name for p in pair.split(":"))
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    options = argparse.Namespace(
        libraries=[f for f in os.environ.get("CTXFIX_TEST_LIBRARIES", "").split(":") if f],
        launcher=os.environ.get("CTXFIX_TEST_LAUNCHER", ""),
        stderr=4000,
    )
    return Bench(request.param, options, tmp_path_factory.mktemp("gpu"))


def cases(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = result.get("sender", {}).get("cases")
    assert found, result
    for case in found:
        for row in case["transfers"]:
            assert (row["state"], row["bytes_right"]) == ("DONE", True), result
    return list(found)


def test_rank_1_on_its_own_gpu(bench: Bench) -> None:
    """G1, G4, G6: both ends work on GPU 1 only, and GPU 0 does not notice."""
    result = bench.run("path.py", True, "--src", "1", "--dst", "1", limit_s=150)
    cases(result)
    assert set(result["fabric"]["completions"]) == {"1"}, result["fabric"]
    assert set(result["fabric"]["posts"]) == {"1"}, result["fabric"]
    growth = grown(result)
    assert growth is not None and growth < 8


def test_rank_1_without_ctxfix(bench: Bench) -> None:
    """The same program unguarded does not use GPU 1 alone: otherwise the tests above prove nothing."""
    result = bench.run("path.py", False, "--src", "1", "--dst", "1", "--rounds", "2", limit_s=150)
    assert set(result["fabric"]["completions"]) != {"1"}, result["fabric"]


def test_between_gpus(bench: Bench) -> None:
    result = bench.run("path.py", True, "--src", "1", "--dst", "0", limit_s=150)
    cases(result)
    assert set(result["fabric"]["completions"]) == {"0", "1"}, result["fabric"]
    assert set(result["fabric"]["posts"]) == {"1"}, result["fabric"]


@pytest.mark.parametrize("route", ["1:1", "1:0", "0:0"])
def test_no_stale_reads(bench: Bench, route: str) -> None:
    """G5, for the receiver's reader and for the sender's reuse of its buffer."""
    src, dst = route.split(":")
    result = bench.run("stale.py", True, "--src", src, "--dst", dst, "--rounds", ROUNDS, limit_s=400)
    assert result["receiver"] == {"stale": 0, "torn": 0, "rounds": int(ROUNDS)}, result


@pytest.mark.parametrize("route", ["1:1", "1:0"])
def test_no_stale_reads_behind_pieces_that_fill_the_queue(bench: Bench, route: str) -> None:
    """libfabric's head waits for its copies otherwise, and as shipped is stale here too."""
    src, dst = route.split(":")
    many = ["--small", "1500", "--cases", f"{1 << 30}/1", "--rounds", "40"]
    result = bench.run("stale.py", True, "--src", src, "--dst", dst, *many, limit_s=200)
    assert result["receiver"] == {"stale": 0, "torn": 0, "rounds": 40}, result


def test_no_stale_reads_without_the_extension(bench: Bench) -> None:
    """Registered memory is marked for synchronous operations instead."""
    off = {"CTXFIX_NATIVE_THREADS": "off"}
    result = bench.run("stale.py", True, "--rounds", "50", limit_s=200, variables=off)
    assert result["receiver"]["stale"] == 0, result


@pytest.mark.parametrize("whose", ["sender", "receiver", "both"])
@pytest.mark.parametrize("route", ["1:1", "1:0"])
def test_expandable_segments(bench: Bench, route: str, whose: str) -> None:
    """Memory that no CUDA IPC can export: the bytes are right all the same, and each such process says so once."""
    src, dst = route.split(":")
    ends = ["--src", src, "--dst", dst, "--expandable", whose]
    result = bench.run("path.py", True, *ends, "--rounds", "2", "--cases", "67108864/8", "8388608/64", limit_s=150)
    cases(result)
    assert result["stderr"].count("can never take CUDA IPC") == (2 if whose == "both" else 1), result["stderr"]
