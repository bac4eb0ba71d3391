# SPDX-License-Identifier: Apache-2.0
"""Real Ray on the rig, in an environment made once for a test run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "rig")]

import host_environments  # noqa: E402
from missing import or_skip  # noqa: E402
from rig import Rig  # noqa: E402

RAY = "2.60.0"


@pytest.fixture(scope="session")
def rig() -> Rig:
    return or_skip(Rig.prepare)


@pytest.fixture(scope="session")
def environment() -> host_environments.Environment:
    # nixl is the package that Ray imports; its two modules point to the wheel that the rig has unpacked.
    return host_environments.prepare(
        f"ray-{RAY}", f"ray=={RAY}", host_environments.TORCH, without_dependencies=("nixl==1.1.0",)
    )
