# SPDX-License-Identifier: Apache-2.0
"""The records of all processes of a run, read back and put together.

Nothing is trusted: what cannot be read or makes no sense is named, and the process it belongs to is damaged, which the
judge holds against it. Clocks of different processes are never compared.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ctxfix.errors import EvidenceError
from ctxfix.evidence import cupti, fabric_calls, fabric_log, records, shapes
from ctxfix.evidence.fabric_calls import Calls
from ctxfix.evidence.fabric_log import Said
from ctxfix.evidence.identity import Identity

LOG_SUFFIX = ".log"


@dataclass
class Posted:
    """What one agent posted to another, by operation and device (see posts.HOST, UNKNOWN)."""

    agent: str
    remote: str
    operation: str
    device: int
    posts: int = 0
    descriptors: int = 0
    bytes: int = 0
    done: int = 0
    failed: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    timed: int = 0
    total_ns: int = 0
    best_ns: int = 0


@dataclass(frozen=True)
class Check:
    """What the application found when it compared the bytes that ``sender`` wrote to ``receiver`` (agents)."""

    sender: str
    receiver: str
    transfers: int
    bytes: int
    wrong: int
    stale: int


@dataclass
class Process:
    """All that is known of one process."""

    file: str
    host: str = "?"
    boot: str = "?"
    pid: int = 0
    started: int | None = None
    identity: Identity = field(default_factory=Identity)
    disabled: bool = False
    agents: dict[str, list[str]] = field(default_factory=dict)  # name -> backends
    posted: list[Posted] = field(default_factory=list)
    calls: Calls | None = None
    calls_ever: Calls | None = None
    calls_reason: str = "no counts were recorded"
    witness: cupti.Seen | None = None  # None: nobody asked for a second witness
    said: Said = field(default_factory=Said)
    heard: Said = field(default_factory=Said)
    checks: list[Check] = field(default_factory=list)
    limits: dict[int, float] = field(default_factory=dict)
    active: list[int] | None = None  # devices with a primary context; None: unknown
    owners: list[int] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # GPU (UUID) -> bytes held there, says NVML
    memory_reason: str = ""
    efa_before: dict[str, Any] = field(default_factory=dict)
    efa_after: dict[str, Any] = field(default_factory=dict)
    native: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)  # ctxfix's own (ctxfix.stats)
    final: bool = False
    damage: list[str] = field(default_factory=list)

    @property
    def stray(self) -> list[int] | None:
        """Devices on which this process has a context and no memory; None: unknown."""
        return None if self.active is None else sorted(set(self.active) - set(self.owners))


@dataclass
class Run:
    """All processes of a run, and what is wrong with the records as a whole."""

    processes: list[Process] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(folder: str, logs: list[str] | None = None) -> Run:
    """Read every record in ``folder``, and the saved ``logs`` (all files NAME.log in it if None is given).

    Raises:
        EvidenceError: the folder cannot be read or holds no record, or a log is no regular file.
    """
    files, problems = records.read_folder(folder)
    if not files:
        raise EvidenceError(
            f"{folder} holds no record of ctxfix (files NAME{records.SUFFIX}). Run the program with "
            f"CTXFIX_RECORD={os.path.abspath(folder)}, or under: ctxfix run --record DIR -- CMD"
            + "".join(f"\n{problem}" for problem in problems)
        )
    run = Run([process_of(file) for file in files], problems)
    _add_logs(run, _logs_in(folder) if logs is None else logs)
    return run


def process_of(file: records.File) -> Process:
    """Put the records of one process together."""
    process = Process(file.name)
    if file.torn:
        process.damage.append("its last record is torn: it was killed while writing, or is still at work")
    if file.junk:
        process.damage.append(f"{file.junk} lines of its file are no records")
    snapshots: dict[str, dict[str, Any]] = {}
    after_last = 0
    headers = 0
    for number, record in enumerate(file.records, 1):
        kind = record["kind"]
        try:
            if kind in shapes.KINDS:
                shapes.check(record, shapes.KINDS[kind], kind)
            if kind == "process":
                headers += 1
                _header(process, record)
            elif kind in ("snapshot", "baseline"):
                snapshots[kind] = record
                after_last = 0
                _latest(process, record)
            elif kind == "check":
                process.checks.append(_check(record))
            elif kind == "limit":
                process.limits[int(record["device"])] = float(record["bytes_per_second"])
            elif kind == "witness":
                process.witness = cupti.from_record(record)
            elif kind == "post":
                after_last += 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            process.damage.append(f"record {number} ({kind}) makes no sense: {type(error).__name__}: {error}")
    if headers != 1:
        process.damage.append(
            "its header is missing" if not headers else f"it has {headers} headers: files were joined"
        )
    process.said.add(process.heard)
    last, before = snapshots.get("snapshot"), snapshots.get("baseline")
    if last is None:
        process.damage.append("it recorded no counts: it was killed within its first second, or its disk was full")
    else:
        try:
            _count(process, last, before or {})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            process.damage.append(f"its counts make no sense: {type(error).__name__}: {error}")
    if after_last:
        process.damage.append(f"{after_last} transfers were posted after its last counts: it was killed in between")
    return process


def _header(process: Process, record: dict[str, Any]) -> None:
    if record["schema"] != records.SCHEMA:
        process.damage.append(f"its records are of format {record['schema']!r}; this ctxfix reads {records.SCHEMA}")
    process.host, process.boot, process.pid = str(record["host"]), str(record["boot"]), int(record["pid"])
    process.started = record["started"]
    process.disabled = bool(record["disabled"])
    process.efa_before = dict(record["efa"])


def _latest(process: Process, record: dict[str, Any]) -> None:
    """Take what counts by its last word only."""
    process.identity = Identity(**record["identity"])
    process.agents = {str(name): [str(b) for b in about["backends"]] for name, about in record["agents"].items()}
    process.native = dict(record.get("native") or {})
    process.heard = fabric_log.from_record(record.get("log") or {})
    process.counters = {str(name): int(value) for name, value in (record.get("counters") or {}).items()}
    process.final = bool(record.get("final"))
    if record["kind"] == "baseline":
        process.efa_before = dict(record["efa"])
    elif "efa" in record:
        process.efa_after = dict(record["efa"])
    contexts = record.get("contexts")
    if contexts is not None and contexts["known"]:
        process.active, process.owners = list(contexts["active"]), list(contexts["owners"])
        nvml = contexts["nvml"]
        process.memory = {str(gpu): int(size or 0) for gpu, size in nvml.get("used", {}).items()}
        process.memory_reason = str(nvml.get("reason", ""))


def _check(record: dict[str, Any]) -> Check:
    numbers = [int(record[name]) for name in ("transfers", "bytes", "wrong", "stale")]
    if min(numbers) < 0:
        raise ValueError("a negative count")
    return Check(str(record["sender"]), str(record["receiver"]), *numbers)


def _count(process: Process, last: dict[str, Any], before: dict[str, Any]) -> None:
    """Take the counts of the last snapshot, less those of the baseline."""
    earlier = {_key(row): row for row in before.get("posts", [])}
    for row in last["posts"]:
        process.posted.append(_posted(row, earlier.pop(_key(row), None)))
    if earlier:
        raise ValueError("counts vanished")
    process.posted = [row for row in process.posted if row.posts or row.failed]
    strangers = {row.agent for row in process.posted} - set(process.agents)
    if strangers:
        raise ValueError(f"transfers by an agent that it does not have ({min(strangers)})")
    if last["unknown_posts"] - before.get("unknown_posts", 0):
        process.damage.append(f"{last['unknown_posts']} transfers were posted that nobody saw being made")
    for problem, times in last["observer_problems"].items():
        process.damage.append(f"ctxfix could not follow NIXL {times} times ({problem})")
    if last["lost"]:
        process.damage.append(f"{last['lost']} records were lost: the disk or the file was full")
    process.calls_reason = str(last["calls_reason"])
    if last["calls"] is not None:
        process.calls_ever = fabric_calls.total(last["calls"])
        earlier_calls = before.get("calls")
        process.calls = process.calls_ever.minus(fabric_calls.total(earlier_calls) if earlier_calls else Calls())
        if min(vars(process.calls).values()) < 0:
            raise ValueError("counts ran backwards")


def _key(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row["agent"], row["remote"], row["operation"], row["device"]


def _posted(row: dict[str, Any], before: dict[str, Any] | None) -> Posted:
    counted, total, best = row["ns"]
    result = Posted(*_key(row), contexts=dict(row["contexts"]), timed=counted, total_ns=total, best_ns=best)
    for name in ("posts", "descriptors", "bytes", "done", "failed"):
        value = int(row[name]) - int(before[name] if before else 0)
        if value < 0:
            raise ValueError(f"{name} ran backwards")
        setattr(result, name, value)
    if before:
        result.timed -= before["ns"][0]
        result.total_ns -= before["ns"][1]
        for verdict, number in before["contexts"].items():
            result.contexts[verdict] = result.contexts.get(verdict, 0) - number
    result.contexts = {verdict: number for verdict, number in result.contexts.items() if number}
    return result


# ---- saved logs ------------------------------------------------------------------------------------------------------


def _logs_in(folder: str) -> list[str]:
    entries = [entry for entry in os.scandir(folder) if entry.name.endswith(LOG_SUFFIX)]
    return sorted(entry.path for entry in entries if entry.is_file(follow_symlinks=False))


def _add_logs(run: Run, paths: list[str]) -> None:
    """Give each process what the logs say of it: a line of libfabric names its pid."""
    by_pid: defaultdict[int, list[Process]] = defaultdict(list)
    for process in run.processes:
        by_pid[process.pid].append(process)
    for path in paths:
        try:
            found = fabric_log.parse_file(path)
        except OSError as error:
            run.problems.append(f"{path} cannot be read: {error.strerror or error}")
            continue
        strangers = []
        for pid, said in found.items():
            if pid is None:
                continue
            owners = by_pid.get(pid, [])
            if len(owners) == 1:
                owners[0].said.add(said)
            elif not owners:
                strangers.append(pid)
            elif said.failures() or said.counts["sar"]:
                run.problems.append(
                    f"{path} speaks of pid {pid}, which two recorded processes have (two hosts?): not used"
                )
        if strangers:
            run.problems.append(
                f"{path} speaks of {len(strangers)} processes that recorded nothing (pid {strangers[0]}, …): the log "
                "of another run, or their lines say nothing here"
            )
