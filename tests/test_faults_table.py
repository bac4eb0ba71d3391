# SPDX-License-Identifier: Apache-2.0
"""The table of faults in docs/faults.md names tests that exist, and all that there are."""

from __future__ import annotations

import re

import pytest
from environments import ROOT

from ctxfix import counters

TABLE = (ROOT / "docs" / "faults.md").read_text()
NODE = re.compile(r"`(test_\w+\.py)::(test_\w+)(?:\[([\w ]+)\])?`")
NAMED = set(NODE.findall(TABLE))


def names_in(module: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / "tests" / module).read_text(), re.MULTILINE))


def test_every_test_that_is_named_exists() -> None:
    missing = {(module, name) for module, name, _ in NAMED if name not in names_in(module)}
    assert NAMED and not missing
    assert all(f'("{case}"' in (ROOT / "tests" / module).read_text() for module, _, case in NAMED if case)


@pytest.mark.parametrize(
    "module", ["test_faults.py", "test_faults_native.py", "test_properties.py", "test_fuzz.py"], ids=str
)
def test_every_fault_that_is_tested_is_named(module: str) -> None:
    assert names_in(module) - {name for named, name, _ in NAMED if named == module} == set()


def test_every_counter_of_a_fault_is_named() -> None:
    """What ``ctxfix.stats()`` counts beside the ordinary course is a fault of somebody's."""
    ordinary = {"posts", "rebinds", "restores", "registered_ranges", "threads_bound"}
    assert {name for name in set(counters.NAMES) - ordinary if f"`{name}`" not in TABLE} == set()


def test_every_row_names_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("|") and not re.match(r"\|( Fault |---)", line)]
    assert len(rows) > 40 and all(NODE.search(row) for row in rows)
