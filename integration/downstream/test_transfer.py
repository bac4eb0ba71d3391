# SPDX-License-Identifier: Apache-2.0
"""A test of a project that moves GPU memory with NIXL: it asserts the path as well as the bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("transfer.py")
RANKS = 2


@pytest.mark.cuda_ipc(ranks=RANKS)
def test_kv_cache_goes_by_cuda_ipc() -> None:
    running = []
    for rank in range(RANKS):
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        running.append(subprocess.Popen([sys.executable, str(PROGRAM)], env=environ))
    assert [process.wait(timeout=120) for process in running] == [0] * RANKS


def test_ctxfix_leaves_no_trace(ctxfix_recorder) -> None:
    subprocess.run(
        [sys.executable, str(PROGRAM)], env={**ctxfix_recorder.environment(), "RANK": "1"}, check=True, timeout=120
    )
    ctxfix_recorder.assert_no_stray_contexts()
    ctxfix_recorder.assert_contexts_restored()
