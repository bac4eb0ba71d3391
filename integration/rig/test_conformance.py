# SPDX-License-Identifier: Apache-2.0
"""The fake driver, and a real one where there is one, behave as driver_checks.PINNED says.

A real driver is looked for in the plain environment; CTXFIX_TEST_DRIVER=real insists on there being one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver_checks import CHECKS, PINNED
from rig import Rig

SCRIPT = Path(__file__).with_name("driver_checks.py")


def driver_checks(env: dict[str, str], *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def on_fake(fake_driver: Rig) -> dict[str, Any]:
    return driver_checks(fake_driver.env())


@pytest.fixture(scope="module")
def on_real() -> dict[str, Any]:
    found = driver_checks(dict(os.environ), "--describe")
    if "error" not in found and not found["fake"]:
        return driver_checks(dict(os.environ))
    reason = f"no real CUDA driver here: {found.get('error', 'only the fake one')}"
    if os.environ.get("CTXFIX_TEST_DRIVER") == "real":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def assert_as_pinned(report: dict[str, Any], check: str) -> None:
    entry = report["checks"][check]
    if "skipped" in entry["facts"]:
        pytest.skip(entry["facts"]["skipped"])
    assert not entry.get("differs"), entry
    assert "error" not in entry, entry


@pytest.mark.parametrize("check", PINNED)
def test_fake_driver(on_fake: dict[str, Any], check: str) -> None:
    assert on_fake["fake"]
    assert_as_pinned(on_fake, check)


@pytest.mark.parametrize("check", sorted(CHECKS.keys() - PINNED.keys()))
def test_fake_driver_survives_what_is_not_pinned(on_fake: dict[str, Any], check: str) -> None:
    assert "error" not in on_fake["checks"][check]


@pytest.mark.timeout(1800)  # a real context takes a second to make, and each check makes its own
@pytest.mark.parametrize("check", PINNED)
def test_real_driver(on_real: dict[str, Any], check: str) -> None:
    assert_as_pinned(on_real, check)
