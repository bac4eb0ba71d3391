# SPDX-License-Identifier: Apache-2.0
"""What applications hand to NIXL: transfers with their bytes, and the context in which each is posted.

Observers are put around the methods of NIXL's ``nixl_agent``, under ctxfix's own hooks, so that they see what NIXL
sees. They are there only while something is recorded (CTXFIX_RECORD): otherwise nothing is paid.

Limits: transfers made by NIXL's C++ or Rust users are not seen. "Done" is what NIXL says; it says nothing of the bytes.
"""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

from ctxfix import affinity, driver, guard
from ctxfix.errors import PatchError
from ctxfix.methods import unbound
from ctxfix.patches import descriptors
from ctxfix.patches.undo import Patch, Patches

Method = Callable[..., Any]
#: Devices that are none: host memory, and GPU memory (so NIXL was told) whose owner the driver does not name.
HOST, UNKNOWN = -1, -2
#: Bytes that one descriptor takes in NIXL's own serialisation: address, length, device id.
_SERIALIZED = 24


class Totals:
    """What one local agent posted to one remote agent, by operation, since the process started."""

    __slots__ = ("bytes", "contexts", "descriptors", "done", "done_bytes", "failed", "ns", "posts")

    def __init__(self) -> None:
        self.posts = self.descriptors = self.bytes = self.done = self.done_bytes = self.failed = 0
        self.ns: list[int] = [0, 0, 0]  # of transfers seen to their end: how many, all together, the shortest
        self.contexts: dict[str, int] = {}

    def as_record(self) -> dict[str, Any]:
        """As it is recorded."""
        return {name: getattr(self, name) for name in self.__slots__}


class _Handle(NamedTuple):
    key: tuple[str, str, str, int]  # local agent, remote agent, operation, device (or HOST, UNKNOWN)
    descriptors: int
    bytes: int
    address: int


class Observer:
    """Counts what passes through NIXL in this process; ``tell`` is given one record a transfer."""

    def __init__(self, tell: Callable[[dict[str, Any]], object] = lambda record: None) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._handles: dict[int, _Handle] = {}
        self._lengths: dict[int, array[int] | None] = {}
        self._prepared: dict[int, tuple[int, int]] = {}  # -> first address, device
        self._remotes: dict[int, str] = {}  # prepared list of a remote side -> its agent
        self._started: dict[int, int] = {}
        self._forgotten: dict[int, list[tuple[dict[int, Any], Any]]] = {}
        self._names: dict[int, str] = {}
        self.totals: dict[tuple[str, str, str, int], Totals] = {}
        self.agents: dict[str, dict[str, Any]] = {}
        self.vram: Any = None  # NIXL's VRAM_SEG
        self.libraries_came: Callable[[], object] = lambda: None
        self.unknown_posts = 0
        self.problems: dict[str, int] = {}

    def forked(self, tell: Callable[[dict[str, Any]], object]) -> None:
        """In a forked child: nothing was seen yet, and ``tell`` is given what is; whom it watches stays."""
        vram, libraries_came = self.vram, self.libraries_came
        self.__init__(tell)  # type: ignore[misc]
        self.vram, self.libraries_came = vram, libraries_came

    def snapshot(self) -> dict[str, Any]:
        """All counts up to now."""
        with self._lock:
            rows = [
                {"agent": key[0], "remote": key[1], "operation": key[2], "device": key[3], **totals.as_record()}
                for key, totals in self.totals.items()
            ]
        return {
            "agents": {name: dict(about) for name, about in list(self.agents.items())},
            "posts": rows,
            "unknown_posts": self.unknown_posts,
            "observer_problems": dict(self.problems),
        }

    def devices(self) -> set[int]:
        """The devices of which memory was registered, up to now."""
        return {int(device) for about in list(self.agents.values()) for device in about["registered"]} - {HOST, UNKNOWN}

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def agent(self, agent: Any, name: str, backends: Iterable[str]) -> None:
        """An agent was made, and libraries with it."""
        self.libraries_came()
        self._names[id(agent)] = name
        self.agents[name] = {"backends": list(backends), "registered": {}}
        self._tell({"kind": "agent", "agent": name, "backends": list(backends)})

    def backend(self, agent: Any, backend: str) -> None:
        """A backend was made for an agent, and libraries loaded."""
        self.libraries_came()
        about = self.agents.get(self._name(agent))
        if about is not None and backend not in about["backends"]:
            about["backends"].append(backend)

    def registered(self, agent: Any, descs: Any) -> None:
        """Memory was registered."""
        driver.attach()
        _, size, first = measure(descs)
        device = self._device(first, descs, None)
        about = self.agents.setdefault(self._name(agent), {"backends": [], "registered": {}})
        registered = about["registered"]
        registered[str(device)] = registered.get(str(device), 0) + size

    def prepared(self, handle: int, descs: Any, mem_type: Any = None) -> None:
        """A list was prepared, whose elements transfers will select."""
        self._lengths[handle] = lengths(descs)
        _, _, first = measure(descs)
        self._prepared[handle] = first, self._device(first, descs, mem_type)

    def prepared_remote(self, handle: int, agent: str) -> None:
        """A list of the memory of ``agent``, another one, was prepared."""
        self._remotes[handle] = agent

    def selected(self, agent: Any, handle: int, operation: str, side: int, indices: Any, remote_side: int) -> None:
        """A transfer was made of elements of prepared lists."""
        remote = self._remotes.get(remote_side, "?")
        known = self._lengths.get(side)
        first, device = self._prepared.get(side, (0, UNKNOWN))
        size = sum(map(known.__getitem__, indices)) if known is not None else 0
        self._handles[handle] = _Handle((self._name(agent), remote, operation, device), len(indices), size, first)

    def made(self, agent: Any, handle: int, operation: str, descs: Any, remote: str) -> None:
        """A transfer was made of a list of descriptors."""
        count, size, first = measure(descs)
        self._handles[handle] = _Handle(
            (self._name(agent), remote, operation, self._device(first, descs, None)), count, size, first
        )

    def forget(self, handle: int) -> None:
        """A handle is about to be released; NIXL may use its integer again at once."""
        tables: tuple[dict[int, Any], ...] = (
            self._handles, self._started, self._lengths, self._prepared, self._remotes
        )  # fmt: skip
        self._forgotten[handle] = [(table, table.pop(handle)) for table in tables if handle in table]

    def released(self, handle: int, refused: bool) -> None:
        """It was released, or the release was ``refused`` (still active), and it is as it was."""
        for table, known in self._forgotten.pop(handle, ()):
            if refused:
                table[handle] = known

    def posted(self, handle: int, state: str, context: int, started: int) -> None:
        """A transfer was posted in ``context``."""
        known = self._handles.get(handle)
        if known is None:
            self.unknown_posts += 1
            return
        verdict = _verdict(known, context)
        with self._lock:
            totals = self.totals.setdefault(known.key, Totals())
            totals.posts += 1
            totals.descriptors += known.descriptors
            totals.bytes += known.bytes
            totals.contexts[verdict] = totals.contexts.get(verdict, 0) + 1
        agent, remote, operation, device = known.key
        now = time.perf_counter_ns()
        record = {"kind": "post", "handle": handle, "agent": agent, "remote": remote, "operation": operation}
        record |= {"device": device, "descriptors": known.descriptors, "bytes": known.bytes}
        record |= {"context": verdict, "ns": now - started, "state": state, "t": time.time()}
        self._tell(record)
        self._started[handle] = started
        if state != "PROC":
            self.ended(handle, state)

    def polled(self, handle: int, state: str) -> None:
        """NIXL told the state of a transfer."""
        if state != "PROC" and handle in self._started:
            self.ended(handle, state)

    def ended(self, handle: int, state: str) -> None:
        """A transfer came to its end, good or bad."""
        started, known = self._started.pop(handle, None), self._handles.get(handle)
        if started is None or known is None:
            return
        took = time.perf_counter_ns() - started
        with self._lock:
            totals = self.totals[known.key]
            if state == "DONE":
                totals.done += 1
                totals.done_bytes += known.bytes
                number, all_ns, best = totals.ns
                totals.ns = [number + 1, all_ns + took, min(best, took) if number else took]
            else:
                totals.failed += 1
        self._tell({"kind": "end", "handle": handle, "state": state, "ns": took})

    def failed(self, handle: int, error: BaseException) -> None:
        """A post was refused with an exception."""
        known = self._handles.get(handle)
        if known is not None:
            with self._lock:
                self.totals.setdefault(known.key, Totals()).failed += 1
            self._tell({"kind": "end", "handle": handle, "state": f"{type(error).__name__}: {error}"[:200]})

    def problem(self, where: str, error: Exception) -> None:
        """Something of ours failed: what is counted may be too little, and the judge is told."""
        key = f"{where}: {type(error).__name__}: {error}"[:200]
        self.problems[key] = self.problems.get(key, 0) + 1

    def _device(self, address: int, descs: Any, mem_type: Any) -> int:
        owner = affinity.owner_at(address) if address else None
        if owner is not None:
            return owner.device
        on_gpu = self.vram is not None and len_of(descs) and descriptors.is_gpu(descs, mem_type, self.vram)
        return UNKNOWN if on_gpu else HOST

    def _name(self, agent: Any) -> str:
        return self._names.get(id(agent)) or str(getattr(agent, "name", "") or "?")


def _verdict(handle: _Handle, context: int) -> str:
    """What NIXL finds current for memory of ``handle``: right, wrong, none, host, unknown."""
    owner = affinity.owner_at(handle.address) if handle.address else None
    if owner is None:
        return "host" if handle.key[3] == HOST else "unknown"
    return "right" if context == owner.context else "wrong" if context else "none"


def len_of(descs: Any) -> int:
    """How many descriptors a list of any form has."""
    return int(descs.descCount()) if hasattr(descs, "descCount") else 1 if hasattr(descs, "data_ptr") else len(descs)


def measure(descs: Any) -> tuple[int, int, int]:
    """How many descriptors, how many bytes, and the first address."""
    sizes = lengths(descs)
    first = next((row[0] for row in descriptors.rows(descs)), 0)
    return len(sizes), sum(sizes), first


def lengths(descs: Any) -> array[int]:
    """The length of each descriptor, by index."""
    if hasattr(descs, "descCount") and (fast := _serialized_lengths(descs)) is not None:
        return fast
    if getattr(descs, "ndim", 0) == 2:
        sizes = descs[:, 1]
        if descs.shape[1] == 5:  # address, length, device id, stride, count
            sizes = sizes.repeat(descs[:, 4].astype(int))
        return array("Q", sizes.tolist())
    return array("Q", (row[1] for row in descriptors.rows(descs)))


def _serialized_lengths(descs: Any) -> array[int] | None:
    """The lengths out of NIXL's serialisation, seven times faster than index by index; None if it is another one."""
    count = descs.descCount()
    if not count:
        return array("Q")
    try:
        state = descs.__getstate__()
    except Exception:  # noqa: BLE001 - a version that does not serialise this kind of list
        return None
    if not isinstance(state, bytes):
        return None
    size = count * _SERIALIZED
    for end in (len(state), len(state) - 1):  # a separator may follow
        words = array("Q", state[max(end - size, 0) : end]) if end >= size else array("Q")
        if len(words) == 3 * count and _same(words[:3], descs[0]) and _same(words[-3:], descs[count - 1]):
            return words[1::3]
    return None


def _same(words: array[int], row: Any) -> bool:
    return words[0] == int(row[0]) and words[1] == int(row[1])


# ---- observers -------------------------------------------------------------------------------------------------------


def _after(original: Method, note: Callable[..., Any], observer: Observer) -> Method:
    """``original``, then ``note(result, *its arguments)``, which cannot harm it."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            note(result, *args, **kwargs)
        except Exception as error:
            if guard.interrupted(error):
                raise
            observer.problem(original.__name__, error)
        return result

    return method


def _methods(observer: Observer) -> dict[str, Callable[[Method], Method]]:
    """By name, what makes the observing method out of the original one."""

    def made_agent(_: Any, agent: Any, agent_name: str, nixl_conf: Any = None, *__: Any, **___: Any) -> None:
        observer.agent(agent, agent_name, getattr(nixl_conf, "backends", None) or [])

    def made_backend(_: Any, agent: Any, backend: str, *__: Any, **___: Any) -> None:
        observer.backend(agent, backend)

    def registered(result: Any, agent: Any, *_: Any, **__: Any) -> None:
        if result is not None:
            observer.registered(agent, result)

    def prepared(
        result: Any, agent: Any, agent_name: str, xfer_list: Any, mem_type: Any = None, *_: Any, **__: Any
    ) -> None:
        if agent_name in ("", "NIXL_INIT_AGENT"):
            observer.prepared(result._handle, xfer_list, mem_type)
        else:
            observer.prepared_remote(result._handle, agent_name)

    def selected(result: Any, agent: Any, operation: str, local_xfer_side: Any, local_indices: Any,
                 remote_xfer_side: Any, *_: Any, **__: Any) -> None:  # fmt: skip
        sides = local_xfer_side._handle, remote_xfer_side._handle
        observer.selected(agent, result._handle, operation, sides[0], local_indices, sides[1])

    def made(result: Any, agent: Any, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str,
             *_: Any, **__: Any) -> None:  # fmt: skip
        observer.made(agent, result._handle, operation, local_descs, remote_agent)

    def polled(state: Any, agent: Any, handle: Any, *_: Any, **__: Any) -> None:
        observer.polled(handle._handle, str(state))

    def transfer(original: Method) -> Method:
        @functools.wraps(original)
        def method(agent: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            context = _current()
            try:
                state = original(agent, handle, *args, **kwargs)
            except BaseException as error:
                try:
                    observer.failed(handle._handle, error)
                except Exception as ours:  # noqa: BLE001 - no handle, maybe: that is what NIXL says
                    observer.problem("transfer", ours)
                raise
            try:
                observer.posted(handle._handle, str(state), context, started)
            except Exception as error:
                if guard.interrupted(error):
                    raise
                observer.problem("transfer", error)
            return state

        return method

    after: dict[str, Callable[..., Any]] = {
        "__init__": made_agent,
        "create_backend": made_backend,
        "register_memory": registered,
        "prep_xfer_dlist": prepared,
        "make_prepped_xfer": selected,
        "initialize_xfer": made,
        "check_xfer_state": polled,
    }
    result: dict[str, Callable[[Method], Method]] = {
        name: functools.partial(_after, note=note, observer=observer) for name, note in after.items()
    }
    result["transfer"] = transfer
    return result


def _current() -> int:
    try:
        return driver.current()
    except Exception as error:  # the driver did not say
        if guard.interrupted(error):
            raise
        return 0


_watched: dict[str, Patches] = {}


def watch(module: ModuleType, observer: Observer) -> None:
    """Observe the ``nixl_agent`` of ``module`` (nixl_cu12._api or another build of it). Idempotent."""
    patches = _watched.setdefault(module.__name__, Patches())
    if any(patch.owner is module.nixl_agent for patch in patches.of(module.__name__)):
        return
    driver.attach()
    observer.vram = getattr(getattr(module, "nixlBind", None), "VRAM_SEG", None)
    hooks = [(module.nixl_agent, name, make) for name, make in _methods(observer).items()]

    def release(original: Method) -> Method:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            key, released = self._handle, self._released
            if not released:
                observer.forget(key)
            try:
                return original(self, *args, **kwargs)
            finally:
                if not released:
                    observer.released(key, refused=not self._released)

        return method

    def finalize(original: Method) -> Method:
        @functools.wraps(original)
        def method(self: Any) -> None:
            if not getattr(self, "_released", True):
                observer.forget(self._handle)
                observer.released(self._handle, refused=False)
            original(self)

        return method

    for name in ("nixl_xfer_handle", "nixl_prepped_dlist_handle"):
        if hasattr(module, name):
            hooks += [(getattr(module, name), "release", release), (getattr(module, name), "__del__", finalize)]
    found = [(owner, name, vars(owner).get(name), make) for owner, name, make in hooks]
    patches.put_on(
        module.__name__,
        [Patch(owner, name, it, make(unbound(it))) for owner, name, it, make in found if it is not None],
    )


def unwatch(module: str) -> None:
    """Undo :func:`watch`, where nobody has wrapped on top. Idempotent."""
    with suppress(PatchError):
        _watched.pop(module, Patches()).take_off()
