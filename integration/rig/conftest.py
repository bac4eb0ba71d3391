# SPDX-License-Identifier: Apache-2.0
"""Fixtures that prepare the rig, once for a test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

import pytest
from rig import MissingSystemPackage, Rig


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rig: runs real NIXL wheels on the fake CUDA driver")


def _unavailable(reason: MissingSystemPackage) -> NoReturn:
    """A machine may lack a system package; continuous integration may not, or it would test nothing."""
    if os.environ.get("CI") == "true":
        pytest.fail(str(reason), pytrace=False)
    pytest.skip(str(reason))


def _prepared(prepare: Callable[[], Rig]) -> Rig:
    try:
        return prepare()
    except MissingSystemPackage as reason:
        _unavailable(reason)


@pytest.fixture(scope="session")
def rig() -> Rig:
    """The whole rig: driver, fabric, NIXL."""
    return _prepared(Rig.prepare)


@pytest.fixture(scope="session")
def fake_driver() -> Rig:
    """Only the fake driver and runtime."""
    return _prepared(Rig.driver_only)
