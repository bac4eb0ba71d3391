# SPDX-License-Identifier: Apache-2.0
"""libfabric's own CUDA calls, as the native extension counts them: the best witness of the path.

A transfer by CUDA IPC is, on the process that posts it, a handle made for each descriptor, and on the other one a
handle opened (once for each allocation; libfabric keeps it) and a device-to-device copy of each descriptor. A transfer
through host memory (SAR) is a copy to the host and one from it.

Limits: the counts are of the process, not of a transfer or a peer, and start when libfabric was first used under the
extension. A copy that libfabric starts asynchronously is counted as started; where the GPU itself reports as many
copies of as many bytes (cupti), it has ended. Calls of UCX and of NCCL are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Calls:
    """Counts of one process, all GPUs together."""

    handles: int = 0
    handle_failures: int = 0
    opens: int = 0
    open_failures: int = 0
    range_failures: int = 0
    copies: int = 0
    copied_bytes: int = 0
    copy_failures: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0
    #: Copies that were started and whose end nobody saw, as libfabric's development head makes them.
    unended: int = 0
    unended_bytes: int = 0

    def ended(self) -> Calls:
        """The same where somebody else saw them end: they are copies as any."""
        return replace(
            self,
            copies=self.copies + self.unended,
            copied_bytes=self.copied_bytes + self.unended_bytes,
            unended=0,
            unended_bytes=0,
        )

    def minus(self, before: Calls) -> Calls:
        """What was added since ``before``."""
        return Calls(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def poster_failures(self) -> int:
        """Failures of the calls that the process which posts makes."""
        return self.handle_failures + self.range_failures

    @property
    def peer_failures(self) -> int:
        """Failures of the calls that its peer makes."""
        return self.open_failures + self.copy_failures


def read() -> tuple[dict[str, Any] | None, str]:
    """The counts by GPU and kind, as plain data; None and the reason where nobody counts."""
    from ctxfix import native

    if not native.available():
        return None, f"libfabric's CUDA calls are not counted: {native.reason()}"
    counters = native.counters()
    state = native.status()
    if not state.get("installed"):
        return None, "libfabric's CUDA calls are not counted: ctxfix's native hooks are off in this process"
    fabric = counters["fabric"]
    if not fabric["answered"] + fabric["adopted"]:
        return None, "libfabric's CUDA calls are not counted: it has no CUDA support, or was not used"
    return {"devices": {str(device): kinds for device, kinds in counters["calls"].items()}, "fabric": fabric}, ""


def total(recorded: Mapping[str, Any]) -> Calls:
    """Add up what :func:`read` gave.

    Raises:
        ValueError: it is no such thing.
    """

    devices = recorded.get("devices")
    if not isinstance(devices, Mapping):
        raise ValueError("counts without devices")
    rows = list(devices.values())

    def of(kind: str, what: str) -> int:
        return sum(_count(kinds, kind, what) for kinds in rows)

    return Calls(
        handles=of("get_handle", "calls") - of("get_handle", "failures"),
        handle_failures=of("get_handle", "failures"),
        opens=of("open_handle", "calls") - of("open_handle", "failures"),
        open_failures=of("open_handle", "failures"),
        range_failures=of("range", "failures"),
        copies=of("copy_dtod", "calls") - of("copy_dtod", "failures"),
        copied_bytes=of("copy_dtod", "bytes"),
        copy_failures=of("copy_dtod", "failures") + of("copy_async", "failures"),
        to_host_bytes=of("copy_dtoh", "bytes"),
        from_host_bytes=of("copy_htod", "bytes"),
        unended=of("copy_async", "calls") - of("copy_async", "failures"),
        unended_bytes=of("copy_async", "bytes"),
    )


def _count(kinds: Any, kind: str, what: str) -> int:
    if not isinstance(kinds, Mapping):
        raise ValueError("counts of a GPU that are none")
    row = kinds.get(kind, {"calls": 0, "failures": 0, "bytes": 0})
    value = row.get(what) if isinstance(row, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{kind}.{what} is {value!r}")
    return int(value)
