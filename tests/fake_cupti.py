# SPDX-License-Identifier: Apache-2.0
"""A stand-in for cupti.cupti: gives the records it is told of to the buffer callback, as CUPTI does on a flush."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from dataclasses import dataclass


class ActivityKind(enum.IntEnum):
    MEMCPY = 1
    MEMCPY2 = 22


class ActivityMemcpyKind(enum.IntEnum):
    UNKNOWN = 0
    HTOD = 1
    DTOH = 2
    DTOD = 8
    PTOP = 10


@dataclass
class Record:
    copy_kind: int
    bytes: int
    device_id: int = 0
    kind: int = ActivityKind.MEMCPY


class FakeCupti:
    ActivityKind = ActivityKind
    ActivityMemcpyKind = ActivityMemcpyKind

    class ActivityAttribute(enum.IntEnum):
        ATTR_PER_THREAD_BUFFER = 9

    def __init__(self, fail: str = "", dropped: int = 0) -> None:
        self.fail, self.dropped = fail, dropped
        self.done: list[str] = []
        self.enabled: set[int] = set()
        self.per_thread = True
        self.records: list[object] = []

    def _does(self, what: str) -> None:
        self.done.append(what)
        if self.fail == what:
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    def activity_set_attribute(self, attribute: int, size: int, value: int) -> None:
        self._does("attribute")
        assert (attribute, ctypes.c_size_t.from_address(size).value) == (9, 1)
        self.per_thread = bool(ctypes.c_uint8.from_address(value).value)

    def activity_register_callbacks(self, requested: Callable[[], tuple[int, int]], completed: Callable) -> None:
        self._does("register")
        self._requested, self._completed = requested, completed

    def activity_enable(self, kind: int) -> None:
        self._does("enable2" if kind == ActivityKind.MEMCPY2 else "enable")
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self._does("disable")
        self.enabled.remove(kind)

    def copies(self, *records: object) -> None:
        if not self.records:
            size, limit = self._requested()
            assert size >= 1 << 20 and limit == 0
        self.records += records

    def activity_flush_all(self, flag: int) -> None:
        self._does("flush")
        assert flag == 1
        if self.records:
            self._completed(self.records)
            self.records = []

    def activity_get_num_dropped_records(self, context: int, stream: int, dropped: int) -> None:
        self._does("dropped")
        assert (context, stream) == (0, 0)
        ctypes.c_size_t.from_address(dropped).value, self.dropped = self.dropped, 0
