# SPDX-License-Identifier: Apache-2.0
"""What the GPU itself reports of copies, through CUPTI (the package cupti-python): a second witness of the path.

libfabric's calls are counted where they are made (fabric_calls); CUPTI tells which copies the GPU carried out, whoever
asked for them. Both must name the same copies and bytes.

The process's own copies (it fills buffers and reads them back) are told to :meth:`Witness.own` and taken off, byte by
byte. That needs no clock and no flush between transfers, which would change what is measured; it sees copies that come
late, as windows in time would not; and it shows whether records are missing: a GPU that reports less than what we
copied ourselves is no witness. Not told apart are copies of others in this process; in a worker of ``ctxfix verify``
nobody else copies.

Limits: handles made and opened are not seen, nor copies made before it began. It is no witness once a record was
dropped. Cost, while it is on: CUPTI keeps some MB of each GPU in use and 32 MiB of host memory, times every copy on the
GPU (a microsecond or so each) and may order copies that would have run side by side; the report is read once, at the
end. So it is for verifications, not for servers.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

#: Enough for a quarter of a million copies. CUPTI asks for another one from whatever thread makes the next copy, which
#: then waits for the interpreter; with one buffer, taken at the first copy of our own, that does not come to pass.
_BUFFER = 32 << 20
_FORCED = 1
_ENDING = 1.0  # seconds that buffers may take to arrive after the flush
_PER_THREAD = ("ATTR_PER_THREAD_BUFFER", "ATTR_PER_THREAD_ACTIVITY_BUFFER", "PER_THREAD_ACTIVITY_BUFFER")
#: CUpti_ActivityMemcpyKind -> how it is counted here.
_KINDS = {"HTOD": "htod", "HTOA": "htod", "DTOH": "dtoh", "ATOH": "dtoh", "DTOD": "dtod", "PTOP": "ptop",
          "HTOH": "htoh"}  # fmt: skip
KINDS = ("dtod", "ptop", "dtoh", "htod", "htoh", "other")
NOT_INSTALLED = "cupti-python is not installed"
UNFINISHED = "it began and never reported: the process ended before"


class Witness:
    """Counts the copies that the GPU reports for this process. Nothing of it ever raises."""

    def __init__(self, load: Callable[[], Any] = lambda: import_module("cupti.cupti")) -> None:
        self._load = load
        self._cupti: Any = None
        self._lock = threading.Lock()
        self._devices: dict[str, dict[str, list[int]]] = {}
        self._own: dict[str, list[int]] = {}
        self._buffers = [0, 0]  # asked for, returned
        self._begun = self._ended = 0.0
        self.reason = "it was not begun"

    def begin(self) -> str:
        """Count from now on; why not, or "". CUDA must have been initialised by the application: CUPTI could do it."""
        started = time.perf_counter()
        try:
            cupti = self._load()
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            self.reason = NOT_INSTALLED if missing == "cupti" else _failed("cupti-python cannot be loaded", error)
            return self.reason
        except Exception as error:  # noqa: BLE001 - its libraries are absent or of another CUDA
            self.reason = _failed("cupti-python cannot be loaded", error)
            return self.reason
        try:
            self._memcpy2 = int(cupti.ActivityKind.MEMCPY2)
            self._activities = [cupti.ActivityKind.MEMCPY, cupti.ActivityKind.MEMCPY2]
            self._names = {int(kind): _KINDS.get(kind.name, "other") for kind in cupti.ActivityMemcpyKind}
            _one_buffer_for_all_threads(cupti)
            cupti.activity_register_callbacks(self._requested, self._completed)
            self.reason, self._cupti = "", cupti
            for activity in self._activities:
                cupti.activity_enable(activity)
            atexit.register(self._stop)
        except Exception as error:  # noqa: BLE001 - no permission, another profiler, another driver
            self.reason = _failed("CUPTI could not begin", error)
            self._stop()
        self._begun = time.perf_counter() - started
        return self.reason

    def own(self, kind: str, size: int) -> None:
        """Say that this process itself copied ``size`` bytes: "htod", "dtoh" or "dtod"."""
        with self._lock:
            _add(self._own, kind, size)

    def report(self) -> dict[str, Any]:
        """Stop, and give what was counted as plain data. Transfers must have ended."""
        if self._cupti is not None:
            started = time.perf_counter()
            dropped = 0
            try:
                self._cupti.activity_flush_all(_FORCED)
                deadline = started + _ENDING
                while self._buffers[1] < self._buffers[0] and time.perf_counter() < deadline:
                    time.sleep(0.01)  # lets CUPTI's thread have the interpreter
                number = ctypes.c_size_t(0)
                self._cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(number))
                dropped = number.value
            except Exception as error:  # noqa: BLE001
                self.reason = self.reason or _failed("CUPTI could not report", error)
            self._stop()
            self._ended = time.perf_counter() - started
            if dropped:
                self.reason = self.reason or f"CUPTI dropped {dropped} records"
        with self._lock:
            return {
                "reason": self.reason,
                "devices": {name: {k: list(v) for k, v in kinds.items()} for name, kinds in self._devices.items()},
                "own": {kind: list(row) for kind, row in self._own.items()},
                "seconds": [round(self._begun, 6), round(self._ended, 6)],
            }

    def _stop(self) -> None:
        """Disable it; also at the process's end, when CUPTI must no longer call into the interpreter."""
        cupti, self._cupti = self._cupti, None
        if cupti is None:
            return
        for activity in self._activities:
            try:
                cupti.activity_disable(activity)
            except Exception:  # noqa: BLE001, S110 - it was not enabled
                pass

    def _requested(self) -> tuple[int, int]:
        self._buffers[0] += 1
        return _BUFFER, 0  # as many records as it holds

    def _completed(self, records: list[Any]) -> None:
        try:
            with self._lock:
                for record in records:
                    name = "ptop" if record.kind == self._memcpy2 else self._names.get(record.copy_kind, "other")
                    _add(self._devices.setdefault(str(record.device_id), {}), name, int(record.bytes))
        except Exception as error:  # noqa: BLE001 - we are called by CUPTI, from C
            self.reason = self.reason or _failed("a record of CUPTI's makes no sense", error)
        finally:
            self._buffers[1] += 1


def _one_buffer_for_all_threads(cupti: Any) -> None:
    """Else each thread asks for a buffer of its own, NIXL's progress thread too, and waits for the interpreter: a
    deadlock, should NIXL be called meanwhile by a thread that keeps the interpreter and wants the same lock."""
    attribute = next(
        value for name in _PER_THREAD if (value := getattr(cupti.ActivityAttribute, name, None)) is not None
    )
    off, size = ctypes.c_uint8(0), ctypes.c_size_t(1)
    cupti.activity_set_attribute(attribute, ctypes.addressof(size), ctypes.addressof(off))


def _add(rows: dict[str, list[int]], kind: str, size: int) -> None:
    row = rows.setdefault(kind, [0, 0])
    row[0] += 1
    row[1] += size


def _failed(what: str, error: BaseException) -> str:
    return f"{what} ({type(error).__name__}: {error})"


# ---- read back -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """The copies of others than the process itself, as the GPU reported them; ``reason``: why there is no witness."""

    reason: str = ""
    copies: int = 0
    copied_bytes: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0
    #: Copies of a kind that says nothing about where the bytes were.
    unclear: int = 0


def from_record(record: Mapping[str, Any]) -> Seen:
    """What :meth:`Witness.report` gave.

    Raises:
        ValueError: it is no such thing.
    """
    if record["reason"]:
        return Seen(str(record["reason"]))
    total: dict[str, tuple[int, int]] = dict.fromkeys(KINDS, (0, 0))
    for kinds in record["devices"].values():
        for kind, row in kinds.items():
            number, size = _pair(kind, row)
            total[kind] = total[kind][0] + number, total[kind][1] + size
    own = {kind: _pair(kind, row) for kind, row in record["own"].items()}
    if not own:
        return Seen("this process made no copy of its own to try CUPTI by")
    for kind, (number, size) in own.items():
        # A copy of the driver's is one or several copies of the GPU's, and its bytes are its bytes.
        if total[kind][0] < number or total[kind][1] < size:
            return Seen(
                f"the GPU reported {total[kind][0]} copies {kind} of {total[kind][1]:,} bytes, and {number} of "
                f"{size:,} were this process's own: records are missing"
            )
        total[kind] = total[kind][0] - number, total[kind][1] - size
    return Seen(
        copies=total["dtod"][0] + total["ptop"][0],
        copied_bytes=total["dtod"][1] + total["ptop"][1],
        to_host_bytes=total["dtoh"][1],
        from_host_bytes=total["htod"][1],
        unclear=total["other"][0],
    )


def _pair(kind: str, row: Any) -> tuple[int, int]:
    number, size = row
    if kind not in KINDS or not all(type(value) is int and value >= 0 for value in (number, size)):
        raise ValueError(f"copies {kind} are {row!r}")
    return number, size
