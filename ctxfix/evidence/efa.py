# SPDX-License-Identifier: Apache-2.0
"""What the network devices counted: /sys/class/infiniband/*/ports/*/hw_counters, before and after.

Limits: the counts are of the device, hence of the whole host, not of a process. The kernel asks a device at most every
10 ms or so. A container without the host's network may not show them. EFA itself splits and adds a little: 54,400 bytes
in 8.66 GB were seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

SYSFS = "/sys/class/infiniband"
#: Bytes that left this host by RDMA; the others tell of the far end and of reads.
SENT = "rdma_write_bytes"
READ = "rdma_read_bytes"


def read(root: str = SYSFS) -> dict[str, Any]:
    """Every counter of every device: {"known", "reason", "counters": {"rdmap0/1": {"rdma_write_bytes": …}}}."""
    counters: dict[str, dict[str, int]] = {}
    try:
        devices = sorted(os.listdir(root))
    except OSError as error:
        return {"known": False, "reason": f"no network device shows counters: {root}: {error.strerror}", "counters": {}}
    for device in devices:
        ports = os.path.join(root, device, "ports")
        for port in _list(ports):
            folder = os.path.join(ports, port, "hw_counters")
            values = {
                name: value for name in _list(folder) if (value := _value(os.path.join(folder, name))) is not None
            }
            if values:
                counters[f"{device}/{port}"] = values
    if not counters:
        reason = f"no device under {root} has hw_counters: no EFA here, or a container without the host's network"
        return {"known": False, "reason": reason, "counters": {}}
    return {"known": True, "reason": "", "counters": counters}


def added(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, int] | None, str]:
    """By counter, what all devices together added; None and the reason where that cannot be told."""
    if not before.get("known") or not after.get("known"):
        return None, str(before.get("reason") or after.get("reason") or "counters were not read")
    first, last = before["counters"], after["counters"]
    if set(first) - set(last):
        return None, f"device {min(set(first) - set(last))} vanished between the two readings"
    total: dict[str, int] = {}
    for device, values in last.items():
        for name, value in values.items():
            start = first.get(device, {}).get(name, 0)
            if value < start:
                return None, f"{name} of {device} ran backwards: the device was reset between the two readings"
            total[name] = total.get(name, 0) + value - start
    return total, ""


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _value(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None
