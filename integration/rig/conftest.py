# SPDX-License-Identifier: Apache-2.0
"""Fixtures that prepare the rig, once for a test run."""

from __future__ import annotations

import pytest
from missing import or_skip
from rig import Rig


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rig: runs real NIXL wheels on the fake CUDA driver")


@pytest.fixture(scope="session")
def rig() -> Rig:
    """The whole rig: driver, fabric, NIXL."""
    return or_skip(Rig.prepare)


@pytest.fixture(scope="session")
def fake_driver() -> Rig:
    """Only the fake driver and runtime."""
    return or_skip(Rig.driver_only)
