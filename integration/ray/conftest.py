# SPDX-License-Identifier: Apache-2.0
"""Real Ray on the rig, in an environment made once for a test run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "rig")]

import host_environments  # noqa: E402
from rig import MissingSystemPackage, Rig  # noqa: E402

RAY = "2.60.0"


@pytest.fixture(scope="session")
def rig() -> Rig:
    try:
        return Rig.prepare()
    except MissingSystemPackage as reason:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def environment() -> host_environments.Environment:
    # nixl is the package that Ray imports; its two modules point to the wheel that the rig has unpacked.
    return host_environments.prepare(
        f"ray-{RAY}", f"ray=={RAY}", host_environments.TORCH, without_dependencies=("nixl==1.1.0",)
    )
