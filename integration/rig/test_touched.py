# SPDX-License-Identifier: Apache-2.0
"""What ctxfix adds to what a NIXL program touches: files read, written and listed, libraries loaded, programs started.

docs/security.md tells of it; what is not in these lists must not be there.
"""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

import pytest
from rig import Rig

import ctxfix

pytestmark = pytest.mark.rig

# Loaded by every Python of the program. Written by a child that is killed, too: one line an event, appended.
WATCH = """
import os, sys
told = os.open({told!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def watch(event, arguments):
    kind = event.partition(".")[0]
    if event in ("open", "ctypes.dlopen") or kind in ("os", "shutil", "socket", "subprocess", "tempfile"):
        what = str(arguments[0]) if arguments else ""
        if event == "open":
            writes = arguments[2] is not None and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            event = "write" if writes else "read"
        os.write(told, (event + " " + what + "\\n").encode())
sys.addaudithook(watch)
"""


def touched(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **environ: str) -> set[str]:
    """Every event of a transfer between two processes: "read /etc/hosts". Code of Python packages is left out."""
    guard = tmp_path / name
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(WATCH.format(told=str(guard / "told")))
    monkeypatch.setenv("PYTHONPATH", str(guard))
    outcome = rig.transfer("1.4.0", "thread", name=f"touched-{name}", **environ)
    assert outcome.done, outcome
    code = [sysconfig.get_path(place) for place in ("stdlib", "platstdlib", "purelib", "platlib")]
    code.append(os.path.dirname(ctxfix.__file__))
    events = set((guard / "told").read_text().splitlines())
    verbs = ("read", "os.listdir", "os.scandir")
    return {event for event in events if not event.startswith(tuple(f"{v} {c}" for v in verbs for c in code))}


def added(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **environ: str) -> set[str]:
    """What only happens with ctxfix. Of files that are opened as descriptors the number alone is known: pipes."""
    without = touched(rig, tmp_path, monkeypatch, "without", CTXFIX_DISABLE="1")
    events = touched(rig, tmp_path, monkeypatch, "with", **environ) - without
    return {event for event in events if not re.fullmatch(r"(read|write) \d+", event) and str(tmp_path) not in event}


def expected(rig: Rig) -> set[str]:
    return {
        "read /proc/self/maps",
        f"read {os.path.realpath(rig.libfabric / 'libfabric.so.1')}",  # as in /proc/self/maps
    }


def test_a_transfer(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = added(rig, tmp_path, monkeypatch)
    assert "read /proc/self/maps" in events
    assert events <= expected(rig)


def test_a_recorded_transfer(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "records"
    events = added(rig, tmp_path, monkeypatch, CTXFIX_RECORD=str(folder))
    files = [path.name for path in folder.iterdir()]
    assert len(files) == 2 and {f"write {name}" for name in files} <= events
    counters = {event for event in events if re.fullmatch(r"(read|os.listdir) /sys/class/infiniband(/.*)?", event)}
    assert events - counters <= expected(rig) | {
        *(f"write {name}" for name in files),
        "os.mkdir records",
        *(f"read {step}" for step in folder.parts),  # the way to the folder, step by step
        "read /proc/self/cmdline",
        "read /proc/self/stat",
        "read /proc/sys/kernel/random/boot_id",
        "socket.gethostname ",
        "ctypes.dlopen libnvidia-ml.so.1",
    }
