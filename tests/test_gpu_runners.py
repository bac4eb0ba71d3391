# SPDX-License-Identifier: Apache-2.0
"""What the runners for real GPUs work out of their results; the runs themselves need GPUs (integration/gpu)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration" / "gpu"))

import verification


def test_how_even_the_ranks_are() -> None:
    def row(role: str, rank: int, shape: str, *ms: float) -> dict[str, object]:
        return {"direction": f"{role} rank {rank} → other rank {rank}", "shape": shape, "ms": list(ms)}

    times = [row("prefill", 0, "kv", 4, 2, 3), row("prefill", 1, "kv", 9, 3.3, 3), row("prefill", 2, "kv", 3, 3, 3)]
    times += [row("decode", 0, "large", 2.0), row("decode", 1, "large", 1.0)]
    assert verification.evenness(times) == {"prefill": {"kv": 1.1}, "decode": {"large": 1.0}}
