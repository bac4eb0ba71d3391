# SPDX-License-Identifier: Apache-2.0
"""Engines that bring their own native threads, on the fake driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "rig")]

from missing import or_skip  # noqa: E402
from rig import Rig  # noqa: E402

from ctxfix import native  # noqa: E402


@pytest.fixture(scope="session")
def rig() -> Rig:
    if not native.available() and os.environ.get("CI") != "true":
        pytest.skip(f"the C extension is not there: {native.reason()}")
    return or_skip(Rig.driver_only)
