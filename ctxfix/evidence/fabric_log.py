# SPDX-License-Identifier: Apache-2.0
"""What libfabric (1.20 to 2.6), NIXL and UCX say about the path: from saved logs, or through libfabric's interface for
it.

Limits: libfabric says nothing at all unless FI_LOG_LEVEL is set, and FI_LOG_PROV=efa hides the lines of shm. It says
that it falls back to SAR once a process, however often it does; SAR that was chosen from the start is taken silently.
No line of a release says that CUDA IPC was used. So a log can show that a path went wrong, never that it went right.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctxfix.errors import EvidenceError

#: What a line means -> how it reads. The words are those of the sources; addresses and numbers around them vary.
_LIBFABRIC: dict[str, re.Pattern[str]] = {
    "sar": re.compile(r"unable to use IPC for msg, fallback to using SAR"),
    "range_failure": re.compile(r"Failed to perform cuMemGetAddressRange: (?P<error>\w+)"),
    "handle_failure": re.compile(r"Failed to perform cudaIpcGetMemHandle: (?P<error>\w+)"),
    "open_failure": re.compile(r"Failed to perform cudaIpcOpenMemHandle: (?P<error>\w+)"),
    "copy_failure": re.compile(r"Failed to perform cudaMemcpy: (?P<error>\w+)"),
    "shm_off": re.compile(r"EFA will not use SHM for intranode communication"),
    "shm_peer": re.compile(r"Successfully inserted .* to shm provider's av"),
    "peer_access": re.compile(r"Peer access from CUDA device \d+ -> CUDA device \d+ : No|cuDeviceCanAccessPeer failed"),
}
_OTHERS: dict[str, re.Pattern[str]] = {
    "nixl_multi_gpu": re.compile(r"Multi-GPU detected"),
    "nixl_context_failure": re.compile(
        r"[Ff]ailed to (?:set|get) CUDA context|cudaSetDevice failed|Failed to set CUDA"
    ),
    "ucx_path": re.compile(
        r"\|\s*(?P<error>\S*(?:cuda_ipc|cuda_copy|gdr_copy|rc_mlx5|rc_verbs|tcp|sysv|posix|cma)\S*)"
    ),
}
# libfabric:<pid>:<seconds>:<prefix>:<provider>:<subsystem>:<function>():<line><<level>> <message>
_HEAD = re.compile(
    r"libfabric:(?P<pid>\d{1,10}):(?P<time>\d+):(?P<prefix>[^:\n]*):(?P<provider>[\w;.-]*):(?P<subsystem>\w+):"
    r"(?P<function>\w+)\(\):\d+<(?P<level>\w+)> "
)
#: What tells of a copy through the host, or of none: said by the process that posts, and by its peer.
POSTER_FAILURES = ("range_failure", "handle_failure")
PEER_FAILURES = ("open_failure", "copy_failure")
_LONGEST_LINE = 64 << 10
_KEPT = 20


@dataclass
class Said:
    """What one process said, by what it means, with the first lines of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    providers: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, line: str) -> None:
        """Count one line."""
        self.counts[what] += 1
        kept = self.examples.setdefault(what, [])
        if len(kept) < _KEPT:
            kept.append(line[:400])

    def add(self, other: Said) -> None:
        """Add what ``other`` holds."""
        self.counts += other.counts
        self.providers += other.providers
        for what, lines in other.examples.items():
            kept = self.examples.setdefault(what, [])
            kept += lines[: _KEPT - len(kept)]

    def failures(self, kinds: tuple[str, ...] = POSTER_FAILURES + PEER_FAILURES) -> int:
        """Lines that tell of a CUDA call of libfabric's that failed."""
        return sum(self.counts[kind] for kind in kinds)


_import_reason: str | None = None


def listen() -> str:
    """Take over the log of the libfabric in this process, if nobody else reads it; why not, or "". Again is cheap."""
    global _import_reason
    if _import_reason is None:
        from ctxfix import native, whole_data

        if os.environ.get("FI_LOG_LEVEL"):
            _import_reason = (
                "FI_LOG_LEVEL is set, so libfabric's log is the user's: give the saved log to ctxfix report"
            )
        elif not native.available():
            _import_reason = f"it takes the native extension: {native.reason()}"
        elif (library := whole_data.loaded_libfabric()) is not None:
            _import_reason = native.import_log(library)
        else:
            return "libfabric is not loaded"
    return _import_reason


def heard() -> dict[str, Any]:
    """What was said to :func:`listen`, as it is recorded."""
    if _import_reason != "":
        return {"known": False, "reason": _import_reason or "libfabric is not loaded"}
    from ctxfix import native

    counts, examples = {}, {}
    for kind, (count, lines) in native.log_said().items():
        if count:
            counts[kind], examples[kind] = count, [line.rstrip() for line in lines]
    return {"known": True, "reason": "", "counts": counts, "examples": examples, "providers": {}}


def from_record(record: Mapping[str, Any]) -> Said:
    """What :func:`heard` gave, read back. Raises ValueError, TypeError or AttributeError if it is no such thing."""
    said = Said()
    if record.get("known"):
        for kind, count in record["counts"].items():
            said.counts[str(kind)] = int(count)
            said.examples[str(kind)] = [str(line) for line in record["examples"].get(kind, [])][:_KEPT]
    return said


def parse(lines: Iterable[bytes | str]) -> dict[int | None, Said]:
    """Sort out ``lines`` by the pid in them; None: lines of NIXL and UCX, which name none, and torn ones.

    Lines may be torn, glued together and laced with binary: several messages in one line are all found.
    """
    found: dict[int | None, Said] = {}
    for line in lines:
        for pid, provider, text in _messages(line):
            said = found.setdefault(pid, Said())
            if provider:
                said.providers[provider] += 1
            for what, pattern in (_LIBFABRIC if pid is not None else {**_LIBFABRIC, **_OTHERS}).items():
                match = pattern.search(text)
                if match:
                    said.note(what, text)
                    break
    return found


def _messages(line: bytes | str) -> Iterator[tuple[int | None, str, str]]:
    text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
    text = text[:_LONGEST_LINE].rstrip("\r\n")
    heads = list(_HEAD.finditer(text))
    before = text[: heads[0].start()] if heads else text
    if before.strip():
        yield None, "", before
    for head, following in zip(heads, [*heads[1:], None][: len(heads)], strict=True):
        end = following.start() if following else len(text)
        yield int(head["pid"]), head["provider"], text[head.start() : end]


def parse_file(path: str) -> dict[int | None, Said]:
    """:func:`parse` for a file, of any size.

    Raises:
        EvidenceError: it is no regular file; a device or a pipe may never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise EvidenceError(f"{path} is no regular file: save the log as one")
    with open(path, "rb") as file:
        return parse(iter(lambda: file.readline(_LONGEST_LINE), b""))
