# SPDX-License-Identifier: Apache-2.0
"""Settings: what each environment variable means, and that nonsense is named and harmless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfix.settings import Settings, parse

NAMES = [
    "CTXFIX_DISABLE",
    "CTXFIX_STRICT",
    "CTXFIX_LOG",
    "CTXFIX_RECORD",
    "CTXFIX_SYNC_MEMOPS",
    "CTXFIX_NATIVE_THREADS",
]


def test_defaults() -> None:
    assert parse({}) == Settings()
    assert parse(dict.fromkeys(NAMES, "")) == Settings()


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_switches_on(value: str) -> None:
    got = parse({"CTXFIX_DISABLE": value, "CTXFIX_STRICT": value})
    assert got.disable and got.strict and not got.problems


@pytest.mark.parametrize("value", ["0", "false", "No", "off", ""])
def test_switches_off(value: str) -> None:
    got = parse({"CTXFIX_DISABLE": value, "CTXFIX_STRICT": value})
    assert not got.disable and not got.strict and not got.problems


def test_nonsense_is_named_and_defaulted() -> None:
    got = parse({"CTXFIX_DISABLE": "maybe", "CTXFIX_STRICT": "maybe", "CTXFIX_LOG": "loud", "CTXFIX_SYNC_MEMOPS": "2"})
    assert got.disable, "who sets the off switch to anything wants it off"
    assert not got.strict and got.log == "warning" and got.sync_memops == "auto"
    assert len(got.problems) == 4
    assert all(any(name in p and "maybe" in p for p in got.problems) for name in ("CTXFIX_DISABLE", "CTXFIX_STRICT"))


def test_a_misspelt_variable_is_named() -> None:
    (problem,) = parse({"CTXFIX_SYNCMEMOPS": "always"}).problems
    assert "CTXFIX_SYNCMEMOPS" in problem


def test_choices_in_any_case() -> None:
    got = parse({"CTXFIX_LOG": "Debug", "CTXFIX_SYNC_MEMOPS": "ALWAYS", "CTXFIX_NATIVE_THREADS": "off"})
    assert (got.log, got.sync_memops, got.native_threads, got.problems) == ("debug", "always", "off", ())


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=20)))
def test_any_text_gives_settings(environ: dict[str, str]) -> None:
    got = parse(environ)
    assert got.log in ("debug", "info", "warning", "off") and got.sync_memops in ("auto", "always", "never")
