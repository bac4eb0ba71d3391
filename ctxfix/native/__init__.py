# SPDX-License-Identifier: Apache-2.0
"""Native threads that inherit a context, and libfabric's CUDA calls bound to the memory they touch and counted.

The work is done by a small C extension, ``_native``. It is optional: ask :func:`available` first; without it
every other function raises :class:`~ctxfix.errors.CtxfixError` with the :func:`reason`. It never creates a context,
never initialises CUDA, loads no library, and in a forked child it is off until the child arms.

Contexts are ``CUcontext`` values as integers, 0 for none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ctxfix.errors import CtxfixError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "LATE_OBJECTS",
    "Armed",
    "CallCounts",
    "Counters",
    "GroupInfo",
    "RemoveReport",
    "arm",
    "armed",
    "available",
    "bind_group",
    "copy_mode",
    "counters",
    "disarm",
    "group_info",
    "hold",
    "import_log",
    "install",
    "log_said",
    "new_group",
    "observe",
    "present",
    "reason",
    "remove",
    "set_home",
    "status",
]

LATE_OBJECTS: tuple[str, ...] = ("libplugin_", "libfabric", "libuc", "mooncake", "engine")
"""Words in the file names of the libraries whose threads look for a late context as they lock, sleep or poll."""

_extension: ModuleType | None = None
_reason: str | None = None
_installed = False


def _load() -> None:
    global _extension, _reason
    try:
        from ctxfix.native import _native  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        # A missing file is the ordinary case (no compiler at installation); anything else is worth its own words.
        missing = "cannot import name '_native'" in str(error)
        _reason = "the extension was not built" if missing else f"the extension could not be loaded: {error}"
        return
    if _native.SUPPORTED:
        _extension = _native
    else:
        _reason = "this platform is not supported (Linux with glibc on x86_64 or aarch64 is)"


_load()


class Armed(NamedTuple):
    """What a thread was armed with; give it to :func:`disarm`."""

    on: bool
    context: int
    group: int


class GroupInfo(NamedTuple):
    """A thread group: its context, threads started in it, bindings made and refused on them."""

    context: int
    threads: int
    bound: int
    failed: int


class RemoveReport(NamedTuple):
    """What :func:`remove` did: slots put back, and slots that somebody else had taken over and that were left."""

    restored: int
    left: int


class CallCounts(TypedDict):
    """Calls of one kind on one GPU. ``rebinds`` are those made on a thread that had another context, or none."""

    calls: int
    failures: int
    bytes: int
    rebinds: int


class Counters(TypedDict):
    """All counts since the process started, or was forked.

    ``calls`` is by device ordinal (-1: none or unknown), then by kind.

    Kinds: range (cuMemGetAddressRange), get_handle, open_handle, close_handle (cudaIpc*), copy_dtod, copy_htod,
    copy_dtoh, copy_other (cudaMemcpy, by what the two addresses are), copy_async (started, not ended), dmabuf,
    set_attribute, runtime (host registration, allocation, synchronisation).
    """

    threads: dict[str, int]
    slots: dict[str, int]
    fabric: dict[str, int]
    calls: dict[int, dict[str, CallCounts]]


def available() -> bool:
    """Whether the extension is there."""
    return _extension is not None


def reason() -> str | None:
    """Why the extension is not there; None if it is."""
    return _reason


def _native_module() -> Any:
    if _extension is None:
        raise CtxfixError(f"native threads are not covered: {_reason}")
    return _extension


def install(late_objects: tuple[str, ...] = LATE_OBJECTS) -> None:
    """Hook the import slots of all loaded objects; call it again, cheaply, whenever libraries may have come.

    Call it before libfabric is used for the first time (when NIXL's Python module is imported is early enough). A
    libfabric that was in use already is adopted: the calls it had found are exchanged in its own table, and counted as
    ``adopted``.
    """
    global _installed
    native = _native_module()
    if not _installed:
        native.set_late(tuple(late_objects))
        if "CTXFIX_TEST_COPY_MODE" in os.environ:  # for measuring; see copy_mode
            native.copy_mode(int(os.environ["CTXFIX_TEST_COPY_MODE"]))
    native.scan()
    _installed = True


def remove() -> RemoveReport:
    """Put every slot back that still holds a hook of ours, and turn off what libfabric was answered with."""
    global _installed
    restored, left = _native_module().undo()
    _installed = False
    return RemoveReport(restored, left)


def new_group() -> int:
    """Make a thread group: one for each agent. Groups are never reused."""
    number: int = _native_module().new_group()
    return number


def bind_group(group: int, context: int) -> None:
    """Give a group its context: new threads start in it, running ones take it at the next lock, sleep or CUDA call.

    Call it before the registration that told the owner is passed on. 0 forgets the context: running threads keep what
    they have, new ones get none. Threads that cannot take it (it was destroyed) are left as they are and counted.
    """
    _native_module().bind_group(group, context)


def group_info(group: int) -> GroupInfo:
    """How many threads a group has started and what became of their bindings."""
    return GroupInfo(*_native_module().group_info(group))


def arm(context: int, group: int = 0) -> Armed:
    """From now on, native threads that this thread starts begin in ``context`` and belong to ``group``.

    With context 0 they wait for :func:`bind_group`. Returns what was armed before. Threads which those threads start
    belong to the group too.
    """
    return Armed(*_native_module().arm(True, context, group))


def present() -> Armed:
    """What this thread is armed with."""
    return Armed(*_native_module().present())


def disarm(previous: Armed | None = None) -> None:
    """End :func:`arm` on this thread, or go back to ``previous``."""
    before = previous or Armed(False, 0, 0)
    _native_module().arm(before.on, before.context, before.group)


@contextlib.contextmanager
def armed(context: int, group: int = 0) -> Iterator[None]:
    """:func:`arm` for the length of a ``with`` block."""
    previous = present()
    try:
        arm(context, group)
        yield
    finally:
        try:
            disarm(previous)
        except BaseException:  # a signal, before it had begun: it comes once
            disarm(previous)
            raise


def set_home(context: int) -> None:
    """Where libfabric's calls without any memory at hand are made, and IPC handles opened, if the thread has no group.

    The owner of the memory registered last; 0 when nothing is registered any more.
    """
    _native_module().set_home(context)


def hold(on: bool) -> bool:
    """Keep this thread's context against NIXL's own changes (cudaSetDevice, cuCtxSetCurrent in its libfabric plugin).

    For the length of a call whose right context was made current. Returns the value before.
    """
    before: bool = _native_module().hold(on)
    return before


def copy_mode(mode: int) -> int:
    """How libfabric's device-to-device cudaMemcpy is made; returns the mode before.

    0: as libfabric does (it returns before the copy has ended). 1: on a stream of its own, synchronised. 2: the same,
    polled instead of synchronised. 1 is the default.
    """
    before: int = _native_module().copy_mode(mode)
    return before


def observe(on: bool) -> bool:
    """Count libfabric's CUDA calls and change nothing about them: the path as it is without ctxfix.

    Returns the value before. No context is bound, no copy made whole, no handle opened again.
    """
    before: bool = _native_module().observe(on)
    return before


def import_log(path: str) -> str:
    """Take over the log of the loaded libfabric at ``path``, which is silent from then on; why not, or "".

    libfabric knows one importer and no way back. Lines are sorted and counted without Python's lock.
    """
    error: int = _native_module().log_import(path)
    if error == 1:
        return f"{path} has no interface for its log (1.16 and newer have)"
    return f"{path} did not give its log: error {error}" if error else ""


def log_said() -> dict[str, tuple[int, list[str]]]:
    """What libfabric said since :func:`import_log`: by kind (as in fabric_log), how often, and the first lines."""
    said: dict[str, tuple[int, list[str]]] = _native_module().log_said()
    return said


def counters() -> Counters:
    """Every count, by what it counts."""
    counts: Counters = _native_module().counters()
    return counts


def status() -> dict[str, Any]:
    """What is on, and what could not be done, in a form that can be printed as JSON."""
    if _extension is None:
        return {"available": False, "reason": _reason}
    counts = counters()
    slots, fabric = counts["slots"], counts["fabric"]
    problems = []
    if slots["write_failures"]:
        problems.append(f"{slots['write_failures']} import slots could not be written (errno {slots['errno']})")
    if slots["protect_failures"]:
        problems.append(f"{slots['protect_failures']} pages could not be made read-only again")
    if slots["foreign"]:
        problems.append(f"{slots['foreign']} import slots belong to somebody else's hook and were left alone")
    if fabric["conflicts"]:
        problems.append("libfabric uses a second CUDA runtime, whose calls are neither bound nor counted")
    if fabric["unknown_async"]:
        problems.append("libfabric uses stream calls unknown to ctxfix: its asynchronous copies are not bound")
    if fabric["adopted"]:
        problems.append("too late for libfabric's first use: the calls it had found were exchanged in its table")
    return {
        "available": True,
        "installed": _installed,
        "libfabric_calls": fabric["answered"] + fabric["adopted"],
        "problems": problems,
        "counters": counts,
    }
