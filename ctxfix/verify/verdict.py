# SPDX-License-Identifier: Apache-2.0
"""From evidence to a verdict for each rank and direction. Pure functions: no file, no clock, no GPU.

A direction is one process that posts transfers and one whose memory they touch. Its path is CUDA_IPC only if everything
that makes up a copy by CUDA IPC was counted, and nothing else: handles made by the poster, opened by its peer, as many
device-to-device copies as handles, of exactly the bytes posted, no failure on either side, no byte through the host;
if the GPU's own account, where it gives one, names the same copies; and if the application compared every byte and read
none too early. What is merely not contradicted is UNPROVEN.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ctxfix.errors import EvidenceError
from ctxfix.evidence import efa, fabric_log
from ctxfix.evidence.fabric_calls import Calls
from ctxfix.evidence.merge import Check, Posted, Process, Run
from ctxfix.evidence.posts import HOST

#: How much more than the payload a network device may have counted: headers, handshakes, notifications.
_NIC_OVERHEAD = 0.01
_NIC_SLACK = 1 << 20


class Path(str, Enum):
    """The way a transfer's bytes took."""

    #: One copy from GPU to GPU, proven.
    CUDA_IPC = "CUDA_IPC"
    #: In pieces through host memory.
    SAR = "SAR"
    #: Through the network device, by its own counters.
    NIC = "NIC"
    #: Another way, as within one process, of host memory, or by another backend.
    OTHER = "OTHER"
    #: Nothing that is proven.
    UNPROVEN = "UNPROVEN"


#: Paths that a run may take and be called good.
GOOD = frozenset({Path.CUDA_IPC, Path.NIC})


@dataclass
class Row:
    """The verdict for one direction of one rank, with what it rests on."""

    #: Of the process that posts, as "prefill", "decode" or what it declared.
    role: str
    #: None where the process does not know.
    rank: int | None
    #: Who says so.
    rank_source: str
    #: Of the process whose memory is touched.
    peer_role: str
    peer_rank: int | None
    #: WRITE or READ.
    operation: str
    path: Path
    #: What the path rests on, or why nothing is proven.
    reasons: list[str]
    #: What to do about a bad verdict, the first thing first.
    advice: list[str] = field(default_factory=list)
    host: str = ""
    pid: int = 0
    #: Ordinal of the GPU whose memory was posted; None where there are several, or it is unknown.
    device: int | None = None
    bytes: int = 0
    #: Transfers posted, and the descriptors in them.
    posts: int = 0
    descriptors: int = 0
    #: libfabric's CUDA calls that failed on both ends, and transfers that NIXL reported as failed.
    failures: int = 0
    #: How many posts reached NIXL in which context ("right", "wrong", "none").
    contexts: dict[str, int] = field(default_factory=dict)
    #: GPUs on which the poster has a context and no memory; None where that is unknown.
    stray: list[int] | None = None
    #: The same of its peer.
    peer_stray: list[int] | None = None
    #: Milliseconds of a transfer, from its post until NIXL said DONE.
    mean_ms: float | None = None
    best_ms: float | None = None
    #: Bytes a second as a share of a plain copy within the same GPU.
    share: float | None = None
    #: Whether the application compared the bytes.
    compared: bool = False
    #: What else there is to say.
    notes: list[str] = field(default_factory=list)
    #: What the second witness, the GPU itself, has to say; empty if nobody asked.
    witness: str = ""
    #: The last of several ranks that share this row, from ``rank`` on: those that left no record.
    last_rank: int | None = None

    @property
    def good(self) -> bool:
        """Whether this direction is proven to have taken a good path."""
        return self.path in GOOD

    @property
    def name(self) -> str:
        """As it is called in tables."""
        return f"{_called(self.role, self.rank, self.last_rank)} → {_called(self.peer_role, self.peer_rank)}"


@dataclass
class Judgement:
    """The verdict on a run."""

    #: One for each direction of each rank, and for each rank, or range of ranks, that should be there and is not.
    rows: list[Row]
    #: What is wrong with the records as a whole.
    problems: list[str]
    #: 0 every rank is proven, 1 one is not, 2 there was nothing to judge.
    code: int
    #: Why that code.
    reason: str
    #: For each direction and shape of a verification the time of every transfer, from its post until NIXL said DONE.
    times: list[dict[str, Any]] = field(default_factory=list)
    #: What NVLink carried during a verification, of whomever; empty where the driver does not count it.
    nvlink: str = ""


@dataclass
class _Direction:
    poster: Process
    peer: Process | None
    operation: str
    posted: list[Posted] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.posted)

    @property
    def descriptors(self) -> int:
        return sum(row.descriptors for row in self.posted)

    @property
    def on_gpu(self) -> bool:
        return all(row.device != HOST for row in self.posted)


def judge(run: Run, ranks: int | None = None, compared: bool = True) -> Judgement:
    """The verdict on a run.

    Args:
        run: the evidence.
        ranks: how many ranks must have posted; None: as many as the processes say (their world size).
        compared: whether CUDA_IPC and NIC need the bytes to have been compared by the application.

    Raises:
        EvidenceError: ``ranks`` is less than 1.
    """
    if ranks is not None and ranks < 1:
        raise EvidenceError(f"{ranks} ranks were asked for: at least one must be there")
    problems = list(run.problems)
    for process in run.processes:
        _credit_ended(process)
    directions = _directions(run, problems)
    if not directions:
        seen = len(run.processes)
        reason = f"{seen} processes recorded, and none of them posted a transfer through NIXL's Python API"
        problems += [f"{process.file}: {why}" for process in run.processes for why in process.damage]
        return Judgement([], problems, 2, reason)
    related = _Related(directions)
    rows = [_row(direction, related, compared) for direction in directions]
    _claimed_twice(rows, directions)
    unranked = _unranked(rows, directions, ranks)
    rows += _missing(rows, run, ranks, unranked, problems)
    _rank_zero_alone(rows)
    for row in rows:
        row.advice = advice(row)
    rows.sort(key=lambda r: (r.role, r.rank is None, r.rank or 0, r.peer_role, r.peer_rank or 0, r.operation))
    bad = [row for row in rows if not row.good]
    if not bad and ranks is None and not any(p.identity.world for p in run.processes):
        reason = "no process says how many ranks there are, so one may be missing: give --ranks N"
        return Judgement(rows, problems, 1, reason)
    if not bad:
        return Judgement(rows, problems, 0, f"every rank is proven: {_count_paths(rows)}")
    return Judgement(
        rows, problems, 1, f"{len(bad)} of {len(rows)} directions are not proven to be good: {_count_paths(rows)}"
    )


def _count_paths(rows: list[Row]) -> str:
    return ", ".join(f"{number} {path.value}" for path, number in Counter(row.path for row in rows).items())


# ---- who sent to whom ------------------------------------------------------------------------------------------------


def _directions(run: Run, problems: list[str]) -> list[_Direction]:
    homes: defaultdict[str, list[Process]] = defaultdict(list)
    for process in run.processes:
        for agent in process.agents:
            homes[agent].append(process)
    for agent, owners in homes.items():
        if len(owners) > 1:
            problems.append(f"agent {agent!r} is in {len(owners)} processes: records of several runs are in one folder")
    found: dict[tuple[str, str, str, bool], _Direction] = {}
    for process in run.processes:
        for row in process.posted:
            owners = homes.get(row.remote, [])
            peer = owners[0] if len(owners) == 1 else None
            key = (process.file, peer.file if peer else f"agent {row.remote}", row.operation, row.device != HOST)
            found.setdefault(key, _Direction(process, peer, row.operation)).posted.append(row)
    # Servers send some host memory beside the KV cache. It is none of our business, unless there is nothing else.
    from_gpu = {key[0] for key in found if key[3]}
    return [direction for key, direction in found.items() if key[3] or key[0] not in from_gpu]


def _claimed_twice(rows: list[Row], directions: list[_Direction]) -> None:
    """One rank is one process: two that say they are the same are of two runs, or one is mistaken."""
    claims: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for direction in directions:
        who = direction.poster.identity
        if who.rank is not None:
            claims[who.role, who.rank].add(direction.poster.file)
    for row in rows:
        if row.rank is not None and len(files := claims[row.role, row.rank]) > 1:
            _doubt(row, f"rank {row.rank} is claimed by {len(files)} processes ({', '.join(sorted(files))}): two runs?")


def _missing(rows: list[Row], run: Run, ranks: int | None, unranked: set[str], problems: list[str]) -> list[Row]:
    """A row for each rank that must be there and posted nothing, and one for all in a row of whom there is no record.

    ``ranks`` must have posted; if the processes speak of more, these must have left a record. Not in roles of which a
    process may be any rank.
    """
    result = []
    # In a run whose roles all post (both directions), each role must have all its ranks.
    for role in sorted({row.role for row in rows}):
        seen = {row.rank for row in rows if row.role == role and row.rank is not None}
        worlds = {p.identity.world for p in run.processes if p.identity.role == role and p.identity.world}
        world = max(worlds, default=max(seen, default=-1) + 1)
        posting = world if ranks is None else ranks
        if world > posting:
            problems.append(f"the processes{f' of {role}' * bool(role)} speak of {world} ranks, asked for: {posting}")
        if role in unranked:
            continue
        number = max({posting, *worlds})
        there = {p.identity.rank for p in run.processes if p.identity.role == role and p.identity.rank is not None}
        silent = [rank for rank in there - seen if rank < posting]
        result += [_expected(role, rank, rank, f"rank {rank} of {number}: it posted no transfer") for rank in silent]
        known = sorted(rank for rank in there if rank < number)
        for before, after in zip([-1, *known], [*known, number], strict=True):
            first, last = before + 1, after - 1
            if first <= last:
                why = f"{_numbered(first, last)} of {number}: there is no record of it"
                result.append(_expected(role, first, last, why))
        if len(worlds) > 1:
            for row in rows:
                if row.role == role:
                    _doubt(row, f"the processes disagree about the number of ranks: {sorted(worlds)}")
    return result


def _expected(role: str, first: int, last: int, why: str) -> Row:
    return Row(role, first, "expected", "", None, "", Path.UNPROVEN, [why], last_rank=last if last > first else None)


def _unranked(rows: list[Row], directions: list[_Direction], ranks: int | None) -> set[str]:
    """The roles of processes that do not know their rank.

    These are taken for the ranks that are not seen, if all together are as many as were asked for.
    """
    files: defaultdict[str, set[str]] = defaultdict(set)
    for direction in directions:
        if direction.poster.identity.rank is None:
            files[direction.poster.identity.role].add(direction.poster.file)
    for role, unknown in files.items():
        seen = {row.rank for row in rows if row.role == role and row.rank is not None and row.rank < (ranks or 0)}
        posters = len(seen) + len(unknown)
        if posters == ranks:
            continue
        because = (
            "nobody can say that all ranks were seen" if ranks is None else f"{posters} processes posted, not {ranks}"
        )
        for row in rows:
            if row.role == role and row.rank is None:
                _doubt(row, f"this process does not know its rank, and {because}")
    return set(files)


def _rank_zero_alone(rows: list[Row]) -> None:
    if any(row.rank != 0 for row in rows if row.posts):
        return
    for row in rows:
        if row.good:
            _doubt(
                row,
                "rank 0 alone proves nothing: a thread without a context lands on GPU 0, which is its own; the bug "
                "shows from rank 1 on",
            )


def _doubt(row: Row, why: str) -> None:
    if row.path is not Path.SAR:
        row.path = Path.UNPROVEN
    row.reasons.insert(0, why)


# ---- one direction ---------------------------------------------------------------------------------------------------


def _row(direction: _Direction, related: _Related, compared: bool) -> Row:
    poster, peer = direction.poster, direction.peer
    contexts: Counter[str] = Counter()
    for posted in direction.posted:
        contexts.update(posted.contexts)
    timed = sum(posted.timed for posted in direction.posted)
    total = sum(posted.total_ns for posted in direction.posted)
    best = min((posted.best_ns for posted in direction.posted if posted.best_ns > 0), default=0)
    devices = {posted.device for posted in direction.posted}
    row = Row(
        role=poster.identity.role,
        rank=poster.identity.rank,
        rank_source=poster.identity.source,
        peer_role=peer.identity.role if peer else "",
        peer_rank=peer.identity.rank if peer else None,
        operation=direction.operation,
        path=Path.UNPROVEN,
        reasons=[],
        host=poster.host,
        pid=poster.pid,
        device=next(iter(devices)) if len(devices) == 1 and min(devices) >= 0 else None,
        bytes=direction.bytes,
        posts=sum(posted.posts for posted in direction.posted),
        descriptors=direction.descriptors,
        failures=_failures(poster, peer) + sum(posted.failed for posted in direction.posted),
        contexts=dict(contexts),
        stray=poster.stray,
        peer_stray=peer.stray if peer else None,
        mean_ms=total / timed / 1e6 if timed else None,
        best_ms=best / 1e6 if best else None,
    )
    limit = (peer or poster).limits.get(row.device if row.device is not None else -1) or next(
        iter((peer or poster).limits.values()), None
    )
    if limit and total > 0 and row.bytes:
        row.share = row.bytes / (total / 1e9) / limit
    row.path, row.reasons = _path(direction, related)
    row.witness = _witness(poster, peer)
    for process in filter(None, (poster, peer)):
        for why in _disagreements(process) if row.path in GOOD else ():
            _doubt(row, why)
    for process in filter(None, (poster, peer)):
        if process.stray and process.memory:
            held = ", ".join(f"{size >> 20} MiB of {gpu}" for gpu, size in sorted(process.memory.items()))
            row.notes.append(f"{process.file} (pid {process.pid}) holds {held}, says NVML")
    checks = _checks(direction)
    if checks is None:
        if compared and row.path in GOOD:
            _doubt(
                row,
                f"{row.path.value} by all counts, but nobody compared the bytes (--unchecked takes that for granted)",
            )
        elif row.path in GOOD:
            row.notes.append("the bytes were not compared by anybody")
    else:
        row.compared = True
        for why in _wrong(checks, direction):
            _doubt(row, why)
    return row


def _witness(poster: Process, peer: Process | None) -> str:
    """What the second witness says of both ends."""
    asked = [process for process in (poster, peer) if process is not None and process.witness is not None]
    if not asked:
        return ""
    against = [why for process in asked for why in _disagreements(process)]
    if against:
        return "the second witness disagrees: " + "; ".join(against)
    absent = [process for process in asked if process.witness and process.witness.reason]
    silent = [process for process in asked if process.calls_ever is None]
    if absent:
        whys = {process.witness.reason for process in absent if process.witness}
        where = "" if len(absent) == 2 else f" on one end ({absent[0].file})"
        return f"no second witness{where}: {'; '.join(sorted(whys))}"
    if silent or len(asked) < 2:
        return "the second witness has no first one to agree with on one end"
    told = [f"{p.witness.copies} copies of {p.witness.copied_bytes:,} bytes" for p in asked if p.witness]
    return f"second witness: the GPUs themselves report {' and '.join(told)} between GPUs, as libfabric's calls say"


def _credit_ended(process: Process) -> None:
    """Copies that libfabric started are copies made, where the GPU itself reports them all: it tells of ended ones."""
    seen, calls, ever = process.witness, process.calls, process.calls_ever
    if seen is None or seen.reason or calls is None or ever is None or not ever.unended:
        return
    if (seen.copies, seen.copied_bytes) == (ever.ended().copies, ever.ended().copied_bytes):
        process.calls, process.calls_ever = calls.ended(), ever.ended()


def _disagreements(process: Process) -> list[str]:
    """Where the GPU's own account differs from libfabric's calls: both since before libfabric was first used."""
    seen, calls = process.witness, process.calls_ever
    if seen is None or seen.reason or calls is None:
        return []
    result = []
    calls = calls.ended()  # as many as were started, at least
    if (seen.copies, seen.copied_bytes) != (calls.copies, calls.copied_bytes):
        result.append(
            f"{process.file}: the GPU (CUPTI) reports {seen.copies} copies of {seen.copied_bytes:,} bytes between "
            f"GPUs, libfabric's calls are {calls.copies} of {calls.copied_bytes:,}"
        )
    for what, theirs, ours in (
        ("to the host", seen.to_host_bytes, calls.to_host_bytes),
        ("from the host", seen.from_host_bytes, calls.from_host_bytes),
    ):
        if theirs != ours:
            result.append(
                f"{process.file}: the GPU (CUPTI) reports {theirs:,} bytes {what}, libfabric's calls are of {ours:,}"
            )
    if seen.unclear:
        result.append(f"{process.file}: the GPU (CUPTI) reports {seen.unclear} copies without saying from where")
    return result


def _failures(poster: Process, peer: Process | None) -> int:
    """CUDA calls of libfabric's that failed on the way. Counts and logs tell of the same failures."""
    said = poster.said.failures(fabric_log.POSTER_FAILURES)
    result = max(poster.calls.poster_failures if poster.calls else 0, said)
    if peer is not None:
        said = peer.said.failures(fabric_log.PEER_FAILURES)
        result += max(peer.calls.peer_failures if peer.calls else 0, said)
    return result


def _checks(direction: _Direction) -> Check | None:
    """What the application found when it compared this direction's bytes; None: it did not."""
    peer = direction.peer
    if peer is None:
        return None
    ours, theirs = set(direction.poster.agents), set(peer.agents)
    if direction.operation != "WRITE":
        ours, theirs = theirs, ours
    found = [c for p in (direction.poster, peer) for c in p.checks if c.sender in ours and c.receiver in theirs]
    if not found:
        return None
    return Check("", "", *(sum(getattr(c, name) for c in found) for name in ("transfers", "bytes", "wrong", "stale")))


def _wrong(checks: Check, direction: _Direction) -> list[str]:
    result = []
    if checks.wrong:
        result.append(f"{checks.wrong} of {checks.transfers} transfers brought WRONG bytes, although NIXL said DONE")
    if checks.stale:
        result.append(f"{checks.stale} of {checks.transfers} transfers were announced before their bytes had landed")
    if checks.transfers < max(checks.wrong, checks.stale, 1):
        result.append(f"of {checks.transfers} transfers the bytes were compared: the record contradicts itself")
    if checks.bytes != direction.bytes and direction.on_gpu:
        result.append(f"{checks.bytes:,} bytes were compared, {direction.bytes:,} were posted")
    return result


def _path(direction: _Direction, related: _Related) -> tuple[Path, list[str]]:
    """The path by what was counted; the first witness that knows decides."""
    poster, peer = direction.poster, direction.peer
    sar = _sar(poster, peer)
    if sar and direction.on_gpu:
        return Path.SAR, sar
    if peer is poster:
        return Path.OTHER, ["both ends are in one process"]
    if not direction.on_gpu:
        return Path.OTHER, ["host memory: no GPU is involved on this side"]
    damage = _damage(direction)
    if damage:
        return Path.UNPROVEN, damage
    assert peer is not None  # else it is damage
    backends = {backend for posted in direction.posted for backend in poster.agents.get(posted.agent, [])}
    if backends and "LIBFABRIC" not in backends:
        said = ", ".join(sorted(line for line in poster.said.examples.get("ucx_path", [])))
        return Path.OTHER, [
            f"backend {', '.join(sorted(backends))}: its copies are counted by none of our witnesses. {said}"
        ]
    nic = _nic(direction, related)
    if nic is not None:
        return nic
    return _ipc(direction, related)


def _damage(direction: _Direction) -> list[str]:
    """Why the evidence of this direction is not whole."""
    result = []
    poster, peer = direction.poster, direction.peer
    if peer is None:
        remotes = ", ".join(sorted({posted.remote for posted in direction.posted}))
        result.append(f"the process of remote agent {remotes} left no record, or more than one: only one end is known")
    for process in (poster, peer):
        if process is None:
            continue
        result += [f"{process.file}: {why}" for why in process.damage]
        who = process.identity
        if who.rank is not None and who.world is not None and not 0 <= who.rank < who.world:
            result.append(f"{process.file}: it says that it is rank {who.rank} of {who.world} ({who.source})")
    failed = sum(posted.failed for posted in direction.posted)
    if failed:
        result.append(f"NIXL reported {failed} failed transfers")
    posts, done = sum(p.posts for p in direction.posted), sum(p.done for p in direction.posted)
    if done + failed != posts:
        result.append(f"{posts} transfers were posted and {done + failed} seen to end")
    if not direction.bytes:
        result.append("no byte was posted")
    return result


def _sar(poster: Process, peer: Process | None) -> list[str]:
    """Proof that bytes went through host memory; empty: there is none, which proves nothing."""
    result = []
    if poster.said.counts["sar"]:
        result.append(f"libfabric said so: {_example(poster, 'sar')}")
    for what, name in (("range_failure", "cuMemGetAddressRange"), ("handle_failure", "cudaIpcGetMemHandle")):
        if poster.said.counts[what]:
            result.append(f"{name} failed {poster.said.counts[what]} times on the poster: {_example(poster, what)}")
    calls, theirs = poster.calls, peer.calls if peer else None
    if calls:
        if calls.range_failures or calls.handle_failures:
            failures = f"{calls.range_failures} cuMemGetAddressRange and {calls.handle_failures} cudaIpcGetMemHandle"
            result.append(f"{failures} failed on the poster")
        if calls.to_host_bytes:
            result.append(f"libfabric copied {calls.to_host_bytes:,} bytes of the poster's GPU memory to the host")
    if theirs and theirs.from_host_bytes:
        result.append(f"libfabric copied {theirs.from_host_bytes:,} bytes from the host into the peer's GPU memory")
    return result


def _example(process: Process, what: str) -> str:
    lines = process.said.examples.get(what)
    return lines[0] if lines else ""


def _nic(direction: _Direction, related: _Related) -> tuple[Path, list[str]] | None:
    """The network's verdict; None: the network is not where to look."""
    poster, peer = direction.poster, direction.peer
    assert peer is not None
    apart = poster.boot != peer.boot
    if not apart and not _untouched(direction):
        return None
    candidates = related.network(direction)
    expected = sum(d.bytes for d in candidates)
    here = {id(p): p for d in candidates for p in (d.poster, d.peer) if p is not None and p.boot == poster.boot}
    before = next((p.efa_before for p in here.values() if p.efa_before), {})
    after = next((p.efa_after for p in here.values() if p.efa_after), {})
    counter = efa.SENT if direction.operation == "WRITE" else efa.READ
    added, why = efa.added(before, after)
    where = f"to another host ({peer.host})" if apart else "no CUDA call of libfabric touched it"
    if added is None:
        return (Path.UNPROVEN, [f"{where}, and the network's counters are unknown: {why}"]) if apart else None
    seen = added.get(counter, 0)
    if expected <= seen <= expected * (1 + _NIC_OVERHEAD) + _NIC_SLACK:
        others = f" of {len(candidates)} directions" if len(candidates) > 1 else ""
        return Path.NIC, [f"{where}; {counter} rose by {seen:,}, the bytes{others} are {expected:,}"]
    if not apart and seen < expected:
        return None
    return Path.UNPROVEN, [f"{where}, but {counter} rose by {seen:,} where {expected:,} bytes were posted"]


def _untouched(direction: _Direction) -> bool:
    """Whether libfabric's CUDA calls were counted on both ends, and none moved a byte."""
    ends = (direction.poster.calls, direction.peer.calls if direction.peer else None)
    return all(c is not None and not (c.handles or c.copies or c.to_host_bytes or c.from_host_bytes) for c in ends)


def _ipc(direction: _Direction, related: _Related) -> tuple[Path, list[str]]:
    """CUDA_IPC, if every count says so to the unit; the counts of a process cannot be split by peer, so all directions
    that share a process with this one are judged together."""
    group = related.group(direction)
    posters = {id(d.poster): d.poster for d in group}
    peers = {id(d.peer): d.peer for d in group if d.peer is not None}
    against: list[str] = []
    for process in {**posters, **peers}.values():
        against += [f"{process.file}: {why}" for why in process.damage]
        if process.calls is None or process.calls_ever is None:
            against.append(f"{process.file}: {process.calls_reason}")
        against += _disagreements(process)
    for poster in posters.values():
        calls, said = poster.calls or Calls(), poster.said.failures(fabric_log.POSTER_FAILURES)
        if calls.poster_failures or said:
            against.append(f"{poster.file}: {max(calls.poster_failures, said)} of its calls for IPC handles failed")
        if calls.to_host_bytes:
            against.append(f"{poster.file}: libfabric also copied {calls.to_host_bytes:,} bytes to the host")
    for peer in peers.values():
        calls, said = peer.calls or Calls(), peer.said.failures(fabric_log.PEER_FAILURES)
        if calls.peer_failures or said:
            against.append(f"{peer.file}: {max(calls.peer_failures, said)} openings or copies of IPC memory failed")
        if calls.from_host_bytes:
            against.append(f"{peer.file}: libfabric also copied {calls.from_host_bytes:,} bytes from the host")
        if calls.unended:
            against.append(
                f"{peer.file}: {calls.unended} copies were started and not seen to end: cupti-python sees it"
            )
    if any(d.peer is None for d in group):
        against.append("one of these processes also sends to one that left no record")
    if against:
        return Path.UNPROVEN, against
    handles = {key: p.calls.handles for key, p in posters.items() if p.calls}
    # Not as many as descriptors: NIXL joins neighbouring ones (1.4.0), and stripes large ones over several EFA devices.
    against += [f"{poster.file}: no IPC handle was made" for key, poster in posters.items() if not handles[key]]
    copies = sum(p.calls.copies for p in peers.values() if p.calls)
    for peer in peers.values():
        expected = sum(d.bytes for d in group if d.peer is peer)
        assert peer.calls is not None and peer.calls_ever is not None
        if not peer.calls_ever.opens:
            against.append(f"{peer.file}: no IPC handle was opened")
        if peer.calls.copied_bytes != expected:
            against.append(
                f"{peer.file}: {peer.calls.copied_bytes:,} bytes were copied from GPU to GPU, {expected:,} posted to it"
            )
    if copies != sum(handles.values()):
        against.append(f"{sum(handles.values())} handles were made and {copies} copies")
    if against:
        return Path.UNPROVEN, against
    peer_calls = direction.peer.calls_ever if direction.peer else None
    return Path.CUDA_IPC, [
        f"{handles[id(direction.poster)]} handles made, {peer_calls.opens if peer_calls else 0} opened, {copies} "
        f"copies from GPU to GPU{f' in {len(group)} directions' if len(group) > 1 else ''}, of exactly the bytes "
        "posted; no failure, nothing through the host"
    ]


class _Related:
    """Which directions have to be judged together, worked out once for all of them."""

    def __init__(self, directions: list[_Direction]) -> None:
        self._leader: dict[tuple[str, int], tuple[str, int]] = {}
        gpu = [d for d in directions if d.on_gpu]
        for d in gpu:
            if d.peer is not None:
                self._leader[self._find(("in", id(d.peer)))] = self._find(("out", id(d.poster)))
        self._groups: defaultdict[tuple[str, int], list[_Direction]] = defaultdict(list)
        self._network: defaultdict[tuple[str, str], list[_Direction]] = defaultdict(list)
        for d in gpu:
            self._groups[self._find(("out", id(d.poster)))].append(d)
            if d.peer is not None and (d.peer.boot != d.poster.boot or _untouched(d)):
                self._network[d.poster.boot, d.operation].append(d)

    def _find(self, node: tuple[str, int]) -> tuple[str, int]:
        while (leader := self._leader.setdefault(node, node)) != node:
            node = leader
        return node

    def group(self, direction: _Direction) -> list[_Direction]:
        """All GPU directions that share a poster's handles or a peer's copies with this one."""
        return self._groups[self._find(("out", id(direction.poster)))]

    def network(self, direction: _Direction) -> list[_Direction]:
        """All directions whose bytes the same network devices may have counted."""
        return self._network[direction.poster.boot, direction.operation]


# ---- what to do ------------------------------------------------------------------------------------------------------


def advice(row: Row) -> list[str]:
    """What to do about a bad verdict, the first thing first."""
    if row.good:
        result = []
        if row.stray or row.peer_stray:
            result.append(
                "A context is on a GPU where the process has no memory: about 0.5 GB of it, per process. Let ctxfix be "
                "active before CUDA is first used (`ctxfix status`), with its native part built."
            )
        return result
    text = " ".join(row.reasons)
    result = []
    if row.path is Path.SAR:
        if row.contexts.get("none") or row.contexts.get("wrong") or "NOT_FOUND" in text or "INVALID_CONTEXT" in text:
            result.append(
                "The thread that posted had no context, or another GPU's. Activate ctxfix in the poster: pip install "
                "ctxfix, then `ctxfix status` must say that nixl is patched."
            )
        else:
            result.append(
                "Run `ctxfix doctor`: peer access, expandable segments and namespaces decide whether IPC can be had."
            )
    if "no CUDA support" in text:
        result.append(
            "Use a libfabric with CUDA support, such as AWS's EFA installer's: without it there is no CUDA IPC."
        )
    elif "not counted" in text:
        result.append(
            "Build ctxfix's native part (a C compiler at installation), without which the path cannot be proven."
        )
    if "no record" in text and "left" in text:
        result.append(
            "Record both ends into one folder: CTXFIX_RECORD=DIR (the same, or copied together) for every process."
        )
    if "compared" in text:
        result.append(
            "Use `ctxfix verify`, or declare your own comparison, or judge by counts alone: ctxfix report --unchecked."
        )
    if "(CUPTI)" in text:
        result.append(
            "Two witnesses disagree: something else copied in this process, or one of them is mistaken. Keep the "
            "records (--record DIR) and report it; --without-cupti judges by libfabric's calls alone."
        )
    if "WRONG bytes" in text:
        result.append(
            "Do not use this configuration. With expandable_segments memory, switch them off (see ctxfix doctor)."
        )
    if "before their bytes" in text:
        result.append(
            "Set CTXFIX_SYNC_MEMOPS=always on the receiver: libfabric up to 2.6.0 announces copies too early."
        )
    if "rank 0 alone" in text or "there is no record of it" in text:
        result.append("Run at least two ranks, and record all of them.")
    if "does not know its rank, and nobody" in text:
        result.append("Give --ranks N, or set RANK and WORLD_SIZE in each process as torchrun does.")
    elif "does not know its rank" in text:
        result.append(
            "Record all ranks of one run and nothing else, or set RANK and WORLD_SIZE in each process as torchrun does."
        )
    if "claimed by" in text or "several runs" in text:
        result.append("Use an empty folder for each run.")
    return result or ["See the reasons above; `ctxfix doctor` names what in this machine decides the path."]


def as_json(judgement: Judgement) -> dict[str, Any]:
    """The judgement as plain data with stable keys."""
    rows = [
        {
            **{name: value for name, value in vars(row).items()},
            "path": row.path.value,
            "good": row.good,
            "name": row.name,
        }
        for row in judgement.rows
    ]
    return {
        "code": judgement.code,
        "reason": judgement.reason,
        "rows": rows,
        "problems": judgement.problems,
        "times": judgement.times,
        "nvlink": judgement.nvlink,
    }


def _called(role: str, rank: int | None, last: int | None = None) -> str:
    return f"{role} {_numbered(rank, last)}".strip()


def _numbered(rank: int | None, last: int | None = None) -> str:
    if rank is None:
        return "rank ?"
    return f"rank {rank}" if last is None or last == rank else f"ranks {rank} to {last}"
