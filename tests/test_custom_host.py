# SPDX-License-Identifier: Apache-2.0
"""The worked example of integration/custom_host, on fake GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda

import ctxfix

FOLDER = Path(__file__).resolve().parents[1] / "integration" / "custom_host"


@pytest.mark.usefixtures("startup_state")
def test_the_example(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import acme_ctxfix  # noqa: F401
    import acme_engine

    seen: list[tuple[str, int]] = []

    def send(job: Any) -> None:
        seen.append((job, cuda.current()))

    engine = acme_engine.Engine(cuda.alloc(2), 2, send)
    engine.thread.start()
    engine.jobs.put("loop")
    engine.jobs.put(None)
    engine.thread.join(10)
    engine.flush("flush")
    assert seen == [("loop", cuda.contexts[2]), ("flush", cuda.contexts[2])]
    assert cuda.current() == 0
    assert ctxfix.unpatch_host("acme") == {"acme_engine": "not patched"}
    engine.flush("unpatched")
    assert seen[-1] == ("unpatched", 0)
    for name in ("acme_ctxfix", "acme_engine"):
        del sys.modules[name]
