# SPDX-License-Identifier: Apache-2.0
"""What tests do on a machine that lacks a system package: they are skipped; in continuous integration they fail.

Where NIXL itself is not to be had, for a Python without a GIL, they are skipped everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest
from rig import MissingSystemPackage, NoNixl

T = TypeVar("T")


def or_skip(prepare: Callable[[], T]) -> T:
    """What `prepare` returns. Continuous integration must not skip: it would test nothing."""
    try:
        return prepare()
    except NoNixl as reason:
        pytest.skip(str(reason))
    except MissingSystemPackage as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(str(reason), pytrace=False)
        pytest.skip(str(reason))
