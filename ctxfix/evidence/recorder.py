# SPDX-License-Identifier: Apache-2.0
"""The recorder of this process: one file of records in the folder CTXFIX_RECORD names.

It starts when NIXL is patched, and writes a header, one record a transfer, and all counts together: every second in
which they changed, and at the end. A process that is killed thus loses a second at most. A forked child gets a file of
its own when it makes an agent.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ctxfix import counters, guard, settings
from ctxfix.errors import EvidenceError
from ctxfix.evidence import contexts, efa, fabric_calls, fabric_log, identity, posts, records

_INTERVAL = 1.0  # seconds between looks at the counts
_MANY = 600  # after so many snapshots one in ten is enough


class Recorder:
    """What this process records, and where."""

    def __init__(self, folder: str, cap: int = records.CAP, efa_root: str = efa.SYSFS) -> None:
        """Open the file and write the header. Raises EvidenceError if there can be none."""
        self.folder = folder
        self._efa_root = efa_root
        self._lock = threading.Lock()
        self._last: dict[str, Any] = {}
        self._taken = 0
        self._ended = threading.Event()
        self.observer = posts.Observer(lambda record: self.write(record))
        self.observer.libraries_came = count_calls
        who = identity.process()
        self.writer = records.Writer(folder, f"{who['host']}.{who['pid']}.{who['started'] or 0}", cap)
        self.write({"kind": "process", "schema": records.SCHEMA, **who, **self._about()}, essential=True)
        self._thread = threading.Thread(target=self._run, name="ctxfix-recorder", daemon=True)

    def start(self) -> None:
        """Take snapshots from now on."""
        self._thread.start()
        atexit.register(self.finish)
        # Before 3.13 multiprocessing's children run no atexit functions unless they were spawned.
        children = sys.modules.get("multiprocessing.util")
        if children is not None:
            children.Finalize(None, self.finish, exitpriority=-100)

    def _about(self) -> dict[str, Any]:
        import ctxfix

        return {
            "ctxfix": ctxfix.__version__,
            "disabled": settings.current().disable,
            "python": platform.python_version(),
            "command": sys.argv[:1] or [sys.executable],
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "t": time.time(),
            "monotonic": time.monotonic(),
            "efa": efa.read(self._efa_root),
        }

    def write(self, record: Mapping[str, Any], essential: bool = False) -> None:
        """Write a record. Never raises."""
        self.writer.write(record, essential)

    def check(self, **about: Any) -> None:
        """Record what the application found when it compared the bytes of transfers (see ctxfix.verify)."""
        self.write({"kind": "check", **about}, essential=True)

    def limit(self, device: int, bytes_per_second: float) -> None:
        """Record how fast this GPU copies within itself: the limit that transfers are measured against."""
        self.write({"kind": "limit", "device": device, "bytes_per_second": bytes_per_second}, essential=True)

    def witness(self, seen: Mapping[str, Any]) -> None:
        """Record what the GPU reported (see evidence.cupti); the last word counts."""
        self.write({"kind": "witness", **seen}, essential=True)

    def counts(self) -> dict[str, Any]:
        """All counts of this process, now."""
        calls, why = fabric_calls.read()
        return {
            "identity": identity.current().as_record(),
            **self.observer.snapshot(),
            "calls": calls,
            "calls_reason": why,
            "counters": counters.snapshot(),
            "native": _native_state(),
            "log": fabric_log.heard(),
        }

    def baseline(self) -> None:
        """From here on it counts: what libfabric did before (connections, trials) is not held against the transfers."""
        self.snapshot("baseline")

    def snapshot(self, kind: str = "snapshot", final: bool = False) -> None:
        """Write all counts, if they changed. Never raises."""
        try:
            with self._lock:
                counts = self.counts()
                if kind == "snapshot" and not final and counts == self._last:
                    return
                self._last = counts
                self._taken += 1
                record = {"kind": kind, "n": self._taken, "final": final, "t": time.time(), **counts}
                if final or kind == "baseline":
                    record |= {"contexts": contexts.read(self.observer.devices()), "efa": efa.read(self._efa_root)}
                elif self._taken % 10 == 1:
                    record["contexts"] = contexts.read(self.observer.devices())
                record["lost"] = self.writer.lost
                self.writer.write(record, essential=True)
        except Exception as error:  # noqa: BLE001 - the application's process is ending, or in full flight
            guard.warn_once("recorder", f"ctxfix: the counts could not be recorded: {type(error).__name__}: {error}")

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL * (10 if self._taken > _MANY else 1)):
            self.snapshot()

    def finish(self) -> None:
        """Write the last counts. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self.snapshot(final=True)


def _native_state() -> dict[str, Any]:
    from ctxfix import native

    if not native.available():
        return {"available": False, "reason": native.reason()}
    return {"available": True, "threads": native.counters()["threads"]}


_recorder: Recorder | None = None
_starting = threading.Lock()


def current() -> Recorder | None:
    """This process's recorder, if something is recorded."""
    return _recorder


def start(folder: str) -> Recorder | None:
    """Begin to record into ``folder``; None, after one warning, if that cannot be. Idempotent."""
    global _recorder
    with _starting:
        if _recorder is None:
            try:
                recorder = Recorder(folder)
            except EvidenceError as error:
                if settings.current().strict:
                    raise
                guard.warn_once("recorder", f"ctxfix: nothing is recorded: {error}")
                return None
            recorder.start()
            _recorder = recorder
    return _recorder


def attach(module: ModuleType) -> None:
    """Record what passes through NIXL's ``module``, if that is wanted."""
    folder = settings.current().record
    recorder = _recorder or (start(folder) if folder is not None else None)
    if recorder is not None:
        count_calls()
        posts.watch(module, recorder.observer)


@contextmanager
def recording(folder: str) -> Iterator[Recorder]:
    """Record this process into ``folder`` for the length of a ``with`` block: for tests.

    NIXL's hooks are taken off and put on again at both ends, so that the observers come to lie under them.

    Raises:
        EvidenceError: the folder cannot be used, or this process is being recorded already.
    """
    global _recorder
    from ctxfix import activation

    with _starting:
        if _recorder is not None:
            raise EvidenceError(f"this process is being recorded already, into {_recorder.folder}")
        recorder = _recorder = Recorder(folder)
    try:
        activation.unpatch_nixl()
        activation.patch_nixl()
        recorder.start()
        yield recorder
    finally:
        recorder.finish()
        atexit.unregister(recorder.finish)
        _recorder = None
        recorder.writer.close()
        try:
            activation.unpatch_nixl()
        finally:
            activation.patch_nixl()


def count_calls() -> None:
    """Have libfabric's CUDA calls counted where the native extension is there; called again when libraries came."""
    from ctxfix.native import agents

    agents.install()
    fabric_log.listen()


def _after_fork() -> None:
    # The child's records must not appear in the parent's file. The observers stay where they are and write nothing
    # until the child has a file of its own.
    global _recorder, _starting
    before, _recorder, _starting = _recorder, None, threading.Lock()
    if before is None:
        return
    before._ended = threading.Event()  # the recorder's thread may have been asking the other one
    before._ended.set()
    before.observer.forked(lambda record: _in_child(before, record))


def _in_child(before: Recorder, record: dict[str, Any]) -> None:
    global _recorder
    with _starting:
        if _recorder is None:
            try:
                child = Recorder(before.folder)
            except EvidenceError:
                return
            child.observer = before.observer
            child.start()
            _recorder = child
    _recorder.write(record)


os.register_at_fork(after_in_child=_after_fork)
