# SPDX-License-Identifier: Apache-2.0
"""Fixtures that prepare SGLang's environments, once for a test run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "rig")]

from environment import Environment  # noqa: E402
from missing import or_skip  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(900))  # any may be the first, and install all that is needed


@pytest.fixture(scope="session")
def environment() -> Callable[[str], Environment]:
    """The environment of one SGLang, by its version."""
    made: dict[str, Environment] = {}

    def prepared(sglang: str) -> Environment:
        if sglang not in made:
            made[sglang] = or_skip(lambda: Environment.prepare(sglang))
        return made[sglang]

    return prepared
