# SPDX-License-Identifier: Apache-2.0
"""What records look like. One that does not is damage: it is named, and nothing in it is used.

A shape is a function that raises ValueError, a list of one shape, or a dict of shapes by key; keys it does not know of
are left alone: later versions may write more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_LARGEST = 2**63  # no count of bytes is more


def check(value: Any, shape: Any, where: str) -> None:
    """Raise ValueError, which names the place, if ``value`` is not of this ``shape``."""
    if isinstance(shape, dict):
        _mapping(value, where)
        for key, inner in shape.items():
            name, optional = (key[:-1], True) if key.endswith("?") else (key, False)
            if name in value:
                check(value[name], inner, f"{where}.{name}")
            elif not optional:
                raise ValueError(f"{where}.{name} is missing")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        for inner in value:
            check(inner, shape[0], f"an entry of {where}")
    else:
        shape(value, where)


def _mapping(value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no mapping")


def _number(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{where} is no count")


def _device(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not -2 <= value < 4096:
        raise ValueError(f"{where} is no device")


def _rate(value: Any, where: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise ValueError(f"{where} is no rate")


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where} is no text")


def _flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{where} is neither true nor false")


def _maybe(shape: Any) -> Callable[[Any, str], None]:
    def maybe(value: Any, where: str) -> None:
        if value is not None:
            check(value, shape, where)

    return maybe


def _each(shape: Any) -> Callable[[Any, str], None]:
    def each(value: Any, where: str) -> None:
        _mapping(value, where)
        for key, inner in value.items():
            check(inner, shape, f"{where}.{key}")

    return each


_EFA = {"known": _flag, "reason": _text, "counters": _each(_each(_number))}
_NVML = {"known": _flag, "reason?": _text, "used?": _each(_maybe(_number))}
_POSTED = {
    **dict.fromkeys(("agent", "remote", "operation"), _text),
    "device": _device,
    **dict.fromkeys(("posts", "descriptors", "bytes", "done", "failed"), _number),
    "ns": [_number],
    "contexts": _each(_number),
}
_SNAPSHOT = {
    "identity": {"rank": _maybe(_number), "world": _maybe(_number), "role": _text, "source": _text},
    "agents": _each({"backends": [_text]}),
    "posts": [_POSTED],
    "unknown_posts": _number,
    "observer_problems": _each(_number),
    "lost": _number,
    "calls": _maybe({"devices": _each(_each(_each(_number)))}),
    "calls_reason": _text,
    "native?": _maybe({"threads?": _each(_number)}),
    "log?": _maybe({"known": _flag, "counts?": _each(_number), "examples?": _each([_text])}),
    "counters?": _maybe(_each(_number)),
    "final?": _flag,
    "contexts?": _maybe({"known": _flag, "active?": [_device], "owners?": [_device], "nvml?": _NVML}),
    "efa?": _EFA,
}

#: By kind of record; others are for the reader's own eyes.
KINDS: dict[str, Any] = {
    "process": {"host": _text, "boot": _maybe(_text), "pid": _number, "started": _maybe(_number), "disabled": _flag}
    | {"efa": _EFA},
    "snapshot": _SNAPSHOT,
    "baseline": _SNAPSHOT,
    "check": {"sender": _text, "receiver": _text} | dict.fromkeys(("transfers", "bytes", "wrong", "stale"), _number),
    "limit": {"device": _device, "bytes_per_second": _rate},
}
