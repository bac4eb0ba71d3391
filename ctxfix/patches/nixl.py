# SPDX-License-Identifier: Apache-2.0
"""NIXL: every nixl_agent method that may touch GPU memory on the caller's thread runs in the owner's context.

Read in nixl_cu12/_api.py of 1.1.0, 1.4.0 and 1.5.1. The hooks are set on the class, so every import style and
subclass is served. Methods called once per transfer or less are wrapped by wrapt; those called per post and per poll
are plain functions, because a wrapt call costs 0.6 to 0.8 µs, more than everything else the hook does. What makes
agents and registers memory is in ctxfix.patches.registration.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import wrapt

from ctxfix import affinity, counters, driver, footprint, guard, settings
from ctxfix.driver import Owner
from ctxfix.errors import CtxfixError, DriverError, PatchError
from ctxfix.methods import unbound
from ctxfix.native import agents
from ctxfix.patches import descriptors, registration
from ctxfix.patches.calls import (
    Hook,
    Noting,
    argument,
    context_at,
    context_of_agent,
    context_of_list,
    context_of_newcomer,
    in_context,
    unknown_owner,
)
from ctxfix.patches.undo import Patch, Patches, one_change
from ctxfix.registry import registry

_posts = counters.ticker("posts")


class _Memory:
    """The local GPU memory that a transfer reads or writes, by its first address, and who owns it (None: unknown).

    ``mixed``: other descriptors of the transfer belong to another context.
    """

    __slots__ = ("address", "context", "mixed", "owner")

    def __init__(self, address: int, owner: Owner | None, mixed: bool) -> None:
        self.address = address
        self.mixed = mixed
        self.owner = owner
        self.context = owner.context if owner is not None else 0


#: Transfer handle -> its local memory; None: host memory. The integer is NIXL's, and is reused after release.
_transfers: dict[int, _Memory | None] = {}
#: Prepared local list -> its addresses, see _addresses(); None: host memory.
_prepared: dict[int, Sequence[int] | None] = {}
_UNKNOWN: Any = object()

# ---- contexts of calls -----------------------------------------------------------------------------------------------


def _context_of_transfer(handle: int) -> int:
    """The context that owns the local memory of a transfer; 0: host memory, or unknown."""
    memory = _transfers.get(handle)
    return memory.context if memory is not None else 0


# These take the arguments of a call as they are, (agent, handle, …), and give the token for affinity.leave, or None:
# nothing to undo. They are called without a star, so that no signal is handled between their return and the caller's
# `try` (Python 3.11 on).


def _enter_transfer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Make the owner of the transfer's local memory current."""
    handle = args[1] if len(args) > 1 else kwargs["handle"]
    memory = _transfers.get(handle._handle, _UNKNOWN)
    if memory is None:
        return None  # host memory
    next(_posts)
    if memory is _UNKNOWN:  # made before ctxfix was active
        counters.count("unknown_owners")
        return affinity.enter(context_of_agent(args[0]) or context_of_newcomer())
    if not memory.context:
        unknown_owner(memory.address)
        return None
    if not registration.nixl_switches:
        return _enter_owner(memory)
    before = driver.current()
    try:
        _enter_owner(memory)
        # With descriptors of several devices NIXL's own cudaSetDevice for each is the best there is.
        agents.hold(not memory.mixed)
    except BaseException:
        _leave_transfer(before)
        raise
    return before


def _leave_transfer(token: int) -> None:
    try:
        if registration.nixl_switches:
            agents.hold(False)
    finally:
        affinity.leave(token)


def _enter_owner(memory: _Memory) -> int | None:
    # A thread that is there already stays; none is moved to where the memory is no longer: it may have been freed, and
    # allocated on another GPU, since the transfer was made.
    if driver.current() == memory.context:
        return None
    now = driver.context_at(memory.address)
    if now and now != memory.context:
        counters.count("stale_owners")
        memory.context, memory.owner = now, driver.owner_of(memory.address)
    return _enter(memory)


def _enter(memory: _Memory) -> int | None:
    try:
        return affinity.enter(memory.context)
    except DriverError:
        # The recorded context cannot be used (destroyed, device reset). Who owns the memory now? If nobody knows,
        # the primary context of its device stands in, as after cudaSetDevice.
        owner = driver.owner_of(memory.address)
        context = owner.context if owner else driver.primary_context(memory.owner.device if memory.owner else -1)
        if not context or context == memory.context:
            raise
        counters.count("device_fallbacks")
        return affinity.enter(context)


def _enter_poll_of_transfer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    handle = args[1] if len(args) > 1 else kwargs["handle"]
    memory = _transfers.get(handle._handle, _UNKNOWN)
    if memory is _UNKNOWN:
        return _enter_poll(args, kwargs)
    return _enter(memory) if memory is not None else None


def _enter_poll(args: tuple[Any, ...], _: dict[str, Any]) -> int | None:
    return affinity.enter(context_of_agent(args[0]))


def _addresses(memory: Any) -> Sequence[int]:
    """The addresses of a prepared list by index; one that stands for all, where one context owns all registered memory.

    Such lists cover whole KV pools: millions of descriptors, which NIXL reads in C++ and Python would read for seconds.
    """
    if len(registry.contexts()) > 1:
        return descriptors.addresses(memory)
    return tuple(address for address, _, _ in itertools.islice(descriptors.rows(memory), 1))


def _note_transfer(handle: int, selected: Iterable[int]) -> None:
    """Remember whose memory transfer ``handle`` moves; ``selected`` are its local addresses, the first decides."""
    remaining = iter(selected)
    first = next(remaining, None)
    if first is None:
        return
    owner = affinity.owner_at(first)
    mixed = owner is not None and len(registry.contexts()) > 1 and _is_mixed(first, remaining, owner)
    _transfers[handle] = _Memory(first, owner, mixed)


def _is_mixed(first: int, others: Iterable[int], owner: Owner) -> bool:
    start = end = 0
    for address in others:
        if start <= address < end:
            continue
        registration = registry.find(address)
        if registration is None:
            continue
        if registration.owner.context != owner.context:
            counters.count("mixed_device_posts")
            guard.warn_once(
                "mixed_device_post",
                f"ctxfix: one transfer has local memory of device {owner.device} ({first:#x}) and of device "
                f"{registration.owner.device} ({address:#x}). The first decides the context; the rest may fall back to "
                "host memory. Make one transfer for each device.",
            )
            return True
        start, end = registration.start, registration.end
    return False


# ---- hooks: set-up calls ---------------------------------------------------------------------------------------------


def _set_up_hooks(vram: Any) -> dict[str, Hook]:
    """wrapt wrappers of nixl_agent's methods by name; ``vram`` is NIXL's VRAM_SEG."""

    def prep_xfer_dlist(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if argument(args, kwargs, 0, "agent_name") not in ("", "NIXL_INIT_AGENT"):
            return wrapped(*args, **kwargs)  # the remote side: its addresses are another process's
        memory, mem_type = argument(args, kwargs, 1, "xfer_list"), argument(args, kwargs, 2, "mem_type")
        where = "nixl_agent.prep_xfer_dlist"
        handle = in_context(where, lambda: context_of_list(memory, mem_type, vram), wrapped, args, kwargs)
        with Noting(where):
            gpu = descriptors.is_gpu(memory, mem_type, vram)
            _prepared[handle._handle] = _addresses(memory) if gpu else None
        return handle

    def make_prepped_xfer(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        side, indices = (
            argument(args, kwargs, 1, "local_xfer_side"),
            argument(args, kwargs, 2, "local_indices"),
        )
        addresses = _prepared.get(getattr(side, "_handle", 0), ())

        def selected() -> Iterator[int]:
            if not addresses or not len(indices):
                return iter(())
            return iter(addresses) if len(addresses) == 1 else (addresses[int(i)] for i in indices)

        where = "nixl_agent.make_prepped_xfer"
        handle = in_context(where, lambda: context_at(next(selected(), None)), wrapped, args, kwargs)
        with Noting(where):
            if addresses is None:
                _transfers[handle._handle] = None
            else:
                _note_transfer(handle._handle, selected())
        return handle

    def initialize_xfer(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = argument(args, kwargs, 1, "local_descs")
        where = "nixl_agent.initialize_xfer"
        handle = in_context(where, lambda: context_of_list(memory, None, vram), wrapped, args, kwargs)
        with Noting(where):
            if descriptors.is_gpu(memory, None, vram):
                _note_transfer(handle._handle, (row[0] for row in descriptors.rows(memory)))
            else:
                _transfers[handle._handle] = None
        return handle

    def on_agent(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = f"nixl_agent.{wrapped.__name__}"
        return in_context(where, lambda: context_of_agent(agent), wrapped, args, kwargs)

    def prep_mem_view(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = argument(args, kwargs, 0, "dlist")

        def context() -> int:
            remote = "Remote" in type(memory).__name__  # nixlRemoteDList: another process's addresses
            return context_of_agent(agent) if remote else context_of_list(memory, None, vram)

        return in_context("nixl_agent.prep_mem_view", context, wrapped, args, kwargs)

    def estimate_xfer_cost(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle = argument(args, kwargs, 0, "req_handle")
        where = "nixl_agent.estimate_xfer_cost"
        return in_context(where, lambda: _context_of_transfer(handle._handle), wrapped, args, kwargs)

    return {
        **registration.hooks(vram),
        "prep_xfer_dlist": prep_xfer_dlist,
        "make_prepped_xfer": make_prepped_xfer,
        "initialize_xfer": initialize_xfer,
        "estimate_xfer_cost": estimate_xfer_cost,
        "prep_mem_view": prep_mem_view,
        "release_mem_view": on_agent,
        "make_connection": on_agent,
        "add_remote_agent": on_agent,
        "remove_remote_agent": on_agent,
        "send_notif": on_agent,
    }


# ---- hooks: posts and polls ------------------------------------------------------------------------------------------


def _hot(
    original: Hook,
    where: str,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], int | None],
    leave: Callable[[int], None] = affinity.leave,
) -> Hook:
    """``original`` between ``enter`` and ``leave``, at the least cost that Python allows."""
    original = unbound(original)

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        try:
            token = enter(args, kwargs)
        except CtxfixError as error:
            guard.failed(where, error)
            token = None
        except Exception as error:
            if guard.interrupted(error):
                raise
            result = original(*args, **kwargs)  # if it raises, the arguments were wrong, not we
            guard.failed(where, error)
            return result
        if token is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                leave(token)
            except BaseException:  # a signal, before it had begun: it comes once
                leave(token)
                raise

    return hook


# ---- hooks: handles --------------------------------------------------------------------------------------------------


def _releasing(where: str, known: dict[int, Any], context_of: Callable[[int], int]) -> Hook:
    """For ``release()`` of a handle: forgets it first, since NIXL may give its integer to another one at once."""

    def release(wrapped: Hook, handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = handle._handle
        memory = _UNKNOWN

        def forget_and_release() -> Any:
            nonlocal memory
            memory = _UNKNOWN if handle._released else known.pop(key, _UNKNOWN)
            try:
                return wrapped(*args, **kwargs)
            except BaseException:
                if memory is not _UNKNOWN:  # still active: NIXL keeps the handle
                    known[key] = memory
                raise

        result = in_context(where, lambda: context_of(key), forget_and_release)
        with Noting(where):
            if isinstance(memory, _Memory):  # a transfer of GPU memory is through: what did it leave behind?
                footprint.check()
        return result

    return release


def _finalizing(original: Hook, known: dict[int, Any]) -> Hook:
    """For ``__del__`` of a handle that the application dropped without releasing it."""
    original = unbound(original)

    @functools.wraps(original)
    def finalize(self: Any) -> None:
        if not getattr(self, "_released", True):
            known.pop(self._handle, None)
        original(self)

    return finalize


# ---- on and off ------------------------------------------------------------------------------------------------------


_patches = Patches()
_agents: dict[str, type] = {}  # by patched module, the class whose methods are hooked
_missing: dict[str, list[str]] = {}

#: Without these nothing can be guaranteed: a NIXL that lacks one is left alone.
_REQUIRED = frozenset({"register_memory", "initialize_xfer", "transfer"})


def apply(module: ModuleType) -> None:
    """Hook ``nixl_agent`` and the handle classes of ``module`` (``nixl_cu12._api`` or another build of it). Idempotent.

    Raises:
        PatchError: the module has no such class, or lacks a method without which the hooks make no sense.
    """
    agent = getattr(module, "nixl_agent", None)
    vram = getattr(getattr(module, "nixlBind", None), "VRAM_SEG", None)
    lacking = sorted(name for name in _REQUIRED if not hasattr(agent, name))
    if agent is None or vram is None or lacking:
        raise PatchError(
            f"{module.__name__} is not a NIXL that ctxfix knows (1.1.0 to 1.5.1): it lacks "
            f"{', '.join(lacking) or 'nixlBind.VRAM_SEG'}. Its calls stay as they are"
        )
    with one_change():
        if _agents.get(module.__name__) is not agent:
            _apply(module, agent, vram)


def _apply(module: ModuleType, agent: type, vram: Any) -> None:
    _patches.settle(module.__name__)
    driver.attach()
    agents.install()
    if settings.current().record is not None or "ctxfix.evidence.recorder" in sys.modules:
        # Under our own hooks, so that what is recorded is what NIXL finds.
        try:
            import_module("ctxfix.evidence.recorder").attach(module)
        except Exception as error:
            guard.failed("recording", error)
    hooks: list[tuple[type, str, Callable[[Hook], Hook]]] = [
        (agent, name, functools.partial(_wrapt, hook)) for name, hook in _set_up_hooks(vram).items()
    ]
    transfer = functools.partial(_hot, where="nixl_agent.transfer", enter=_enter_transfer, leave=_leave_transfer)
    hooks.append((agent, "transfer", transfer))
    for name, enter in {
        "check_xfer_state": _enter_poll_of_transfer,
        "get_new_notifs": _enter_poll,
        "update_notifs": _enter_poll,
        "check_remote_xfer_done": _enter_poll,
    }.items():
        hooks.append((agent, name, functools.partial(_hot, where=f"nixl_agent.{name}", enter=enter)))
    for name, known, context_of in (
        ("nixl_xfer_handle", _transfers, _context_of_transfer),
        ("nixl_prepped_dlist_handle", _prepared, lambda _: 0),
    ):
        handle = getattr(module, name, type(None))
        release = _releasing(f"{name}.release", known, context_of)
        hooks.append((handle, "release", functools.partial(_wrapt, release)))
        hooks.append((handle, "__del__", functools.partial(_finalizing, known=known)))

    patches, missing = [], []
    for owner, name, make in hooks:
        original = owner.__dict__.get(name)
        if original is None:  # not in this version
            missing.append(f"{owner.__name__}.{name}")
        else:
            patches.append(Patch(owner, name, original, make(original)))
    _patches.put_on(module.__name__, patches)
    _agents[module.__name__], _missing[module.__name__] = agent, missing


def _wrapt(hook: Hook, original: Hook) -> Hook:
    wrapper: Hook = wrapt.FunctionWrapper(original, hook)
    return wrapper


def remove() -> None:
    """Undo :func:`apply` everywhere. Idempotent.

    Raises:
        PatchError: somebody wrapped a method after us; it stays, all others are undone.
    """
    with one_change():
        modules = _patches.modules()
        _agents.clear()
        _missing.clear()
        _transfers.clear()
        _prepared.clear()
        try:
            _patches.take_off()
        finally:
            if "ctxfix.evidence.posts" in sys.modules:  # its observers lie under our hooks
                for name in modules:
                    sys.modules["ctxfix.evidence.posts"].unwatch(name)


def _after_fork() -> None:
    # The parent's GPU memory is not the child's: nothing that was learnt about it holds.
    _transfers.clear()
    _prepared.clear()


os.register_at_fork(after_in_child=_after_fork)


def status() -> dict[str, dict[str, list[str]]]:
    """By patched module: the methods hooked, and those that this version of NIXL lacks."""
    return {
        name: {
            "hooked": list(dict.fromkeys(patch.where for patch in _patches.of(name))),
            "missing": list(_missing.get(name, ())),
        }
        for name in _patches.modules()
    }
