# SPDX-License-Identifier: Apache-2.0
"""Files of records: JSON lines, one file a process, in a folder that is private to the user.

A line is handed to the kernel in one write, so a process that is killed leaves whole lines and at most one torn one. A
file stops growing at a stated size; what is said after that is only the essential.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ctxfix.errors import EvidenceError

SCHEMA = 1
SUFFIX = ".ctxfix.jsonl"
#: Ordinary records end here; one "truncated" record follows.
CAP = 64 << 20
#: Essential records (the counts, from which verdicts are made) may use this much more.
RESERVE = 16 << 20
#: A longer line is none of ours.
LONGEST_LINE = 4 << 20

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_LINKS = 40  # on one path, as in Linux


def open_folder(path: str) -> int:
    """Open ``path``, made if it is not there, as a folder to write records in; a file descriptor.

    Each folder on the way is opened from within the last, so nobody can put another in its place meanwhile. What is
    made is private. A link on the way is followed if it is root's or one's own; at the end none is.

    Raises:
        EvidenceError: it is a link, somebody else's, open to others' writing, or cannot be made.
    """
    try:
        folder = _walk(path)
    except OSError as error:
        raise EvidenceError(f"no records can be written into {path}: {error.strerror or error}") from error
    info = os.fstat(folder)
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(folder)
        raise EvidenceError(
            f"no records are written into {path}: it belongs to another user or others may write to it. Use a "
            "folder of your own, made by: install -d -m 700 DIR"
        )
    return folder


def _walk(path: str) -> int:
    """Go to the folder ``path`` step by step, and make what is missing."""
    left = _names(path)
    here = os.open("/" if path.startswith("/") else ".", _FOLDER)
    links = 0
    try:
        while left:
            name = left.pop(0)
            step = _enter(name, here)
            kind = os.fstat(step)
            if stat.S_ISLNK(kind.st_mode):
                target = os.readlink("", dir_fd=step)
                os.close(step)
                links += 1
                if not left or links > _MOST_LINKS or kind.st_uid not in (0, os.geteuid()):
                    raise OSError(
                        errno.ELOOP,
                        f"{name} is a link, at the end of the path or another user's: give the folder itself",
                    )
                left[:0] = _names(target)
                step = os.open("/" if target.startswith("/") else ".", _FOLDER, dir_fd=here)
            elif not stat.S_ISDIR(kind.st_mode):
                os.close(step)
                raise OSError(errno.ENOTDIR, f"{name} is no folder")
            os.close(here)
            here = step
    except BaseException:
        os.close(here)
        raise
    return here


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _enter(name: str, here: int) -> int:
    """Open the folder ``name``, made if it is not there; a link, and what may not be read, as itself."""
    flags = _FOLDER | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=here)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another rank was faster
            os.mkdir(name, 0o700, dir_fd=here)
        return os.open(name, flags, dir_fd=here)
    except OSError:
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)


class Writer:
    """One file of records. Its methods never raise: what could not be written is counted."""

    def __init__(self, folder: str, name: str, cap: int = CAP) -> None:
        """Create the file; raises EvidenceError if that fails. A file of that name is never overwritten."""
        self.lost = 0
        self.problem: str | None = None
        self._cap, self._written, self._truncated, self._torn = cap, 0, False, False
        directory = open_folder(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            for attempt in range(100):
                self.name = f"{name}{f'.{attempt}' if attempt else ''}{SUFFIX}"
                try:
                    self._file = os.open(self.name, flags, 0o600, dir_fd=directory)
                    break
                except FileExistsError:
                    continue
            else:
                raise EvidenceError(f"{folder} holds a hundred files of this process already")
        except OSError as error:
            raise EvidenceError(f"no records can be written into {folder}: {error.strerror or error}") from error
        finally:
            os.close(directory)

    def write(self, record: Mapping[str, Any], essential: bool = False) -> bool:
        """Write one record; whether it is in the file."""
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        if self._written + len(line) > self._cap + (RESERVE if essential else 0):
            self.lost += 1
            if not self._truncated:
                self._truncated = True
                self._put(b'{"kind":"truncated","cap":%d}\n' % self._cap)
            return False
        return self._put(line)

    def _put(self, line: bytes) -> bool:
        if self._torn:
            line = b"\n" + line
        try:
            done = os.write(self._file, line)
        except OSError as error:
            self.lost += 1
            self.problem = f"{error.strerror or error}"
            return False
        self._written += done
        self._torn = done < len(line)
        if self._torn:
            self.lost += 1
            self.problem = "the disk took half a record only"
        return not self._torn

    def close(self) -> None:
        """Close the file. What is said afterwards is lost, and counted: its number may be another file's by then."""
        opened, self._file = self._file, -1
        if opened >= 0:
            os.close(opened)


@dataclass
class File:
    """The records of one process as they were read, and what was wrong with the file."""

    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    #: The last line is not whole: the process was killed, or is still at work.
    torn: bool = False
    #: Lines that are no records.
    junk: int = 0
    truncated: bool = False


def read_folder(path: str) -> tuple[list[File], list[str]]:
    """All files of records in ``path`` and its sub-folders' first level (one a host), and what could not be read.

    Raises:
        EvidenceError: there is no such folder, or it cannot be read at all.
    """
    problems: list[str] = []
    files: list[File] = []
    for folder in _folders(path, problems):
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if not entry.name.endswith(SUFFIX):
                continue
            name = os.path.relpath(entry.path, path)
            if not entry.is_file(follow_symlinks=False):
                problems.append(f"{name} is a link or no ordinary file: not read")
                continue
            try:
                files.append(_read(entry.path, name))
            except OSError as error:
                problems.append(f"{name} cannot be read: {error.strerror or error}")
    return files, problems


def _folders(path: str, problems: list[str]) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(path), key=lambda e: e.name)
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror or error}") from error
    yield path
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            try:
                os.scandir(entry.path).close()
            except OSError as error:
                problems.append(f"{entry.name} cannot be read: {error.strerror or error}")
                continue
            yield entry.path


def _read(path: str, name: str) -> File:
    result = File(name)
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(opened, "rb") as stream:
        while line := stream.readline(LONGEST_LINE):
            if not line.endswith(b"\n"):
                if stream.peek(1):  # too long to be ours
                    result.junk += 1
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(LONGEST_LINE)
                    continue
                result.torn = True
            record = _parse(line)
            if record is None:
                if line.strip() and not result.torn:
                    result.junk += 1
            elif record["kind"] == "truncated":
                result.truncated = True
            else:
                result.records.append(record)
    return result


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None
