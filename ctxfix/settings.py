# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of ctxfix, read once; a value that means nothing is named and defaulted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ctxfix._startup import NO, YES

#: Variables with a fixed choice of values; the first is the default.
_CHOICES: dict[str, tuple[str, ...]] = {
    "CTXFIX_LOG": ("warning", "debug", "info", "off"),
    "CTXFIX_SYNC_MEMOPS": ("auto", "always", "never"),
    "CTXFIX_NATIVE_THREADS": ("auto", "off"),
}
_SWITCHES = ("CTXFIX_DISABLE", "CTXFIX_STRICT")
_PATHS = ("CTXFIX_RECORD",)


@dataclass(frozen=True)
class Settings:
    """What the environment asks of ctxfix.

    ``problems`` holds one sentence for each variable whose value was not understood, and for each variable
    that starts with ``CTXFIX_`` and is none of ours.
    """

    disable: bool = False
    strict: bool = False
    log: str = "warning"
    record: str | None = None
    sync_memops: str = "auto"
    native_threads: str = "auto"
    problems: tuple[str, ...] = ()


def parse(environ: Mapping[str, str]) -> Settings:
    """Read the settings from ``environ``. Never raises."""
    problems: list[str] = []

    def switch(name: str, doubtful: bool) -> bool:
        value = environ.get(name, "").strip().lower()
        if value in NO:
            return False
        if value not in YES:
            problems.append(f"{name}={environ[name]!r} is neither 0 nor 1: taken as {int(doubtful)}")
            return doubtful
        return True

    def choice(name: str) -> str:
        allowed = _CHOICES[name]
        value = environ.get(name, "").strip().lower() or allowed[0]
        if value not in allowed:
            problems.append(f"{name}={environ[name]!r} is none of {', '.join(allowed)}: taken as {allowed[0]}")
            return allowed[0]
        return value

    known = {*_CHOICES, *_SWITCHES, *_PATHS}
    problems += [
        f"{name} is no variable of ctxfix: it has no effect"
        for name in sorted(environ)
        if name.startswith("CTXFIX_") and name not in known and not name.startswith("CTXFIX_TEST_")
    ]
    return Settings(
        # Who sets the off switch to anything at all wants it off.
        disable=switch("CTXFIX_DISABLE", True),
        strict=switch("CTXFIX_STRICT", False),
        log=choice("CTXFIX_LOG"),
        record=environ.get("CTXFIX_RECORD") or None,
        sync_memops=choice("CTXFIX_SYNC_MEMOPS"),
        native_threads=choice("CTXFIX_NATIVE_THREADS"),
        problems=tuple(problems),
    )


@lru_cache(maxsize=1)
def current() -> Settings:
    """The settings of this process, read at the first call."""
    return parse(os.environ)
