# SPDX-License-Identifier: Apache-2.0
"""The native threads of NIXL agents: each agent's start in, and follow, the context of that agent's memory.

An agent has a thread group. While the agent or a backend of it is being made, threads that NIXL starts join the group;
they begin in the context that :func:`ctxfix.affinity.preferred` names, or wait if there is none yet. The agent's first
registration of GPU memory gives the group its context, and running threads take it at the next turn of their loop. An
agent with memory of several GPUs keeps the first: its progress thread can be in one context only, and libfabric's calls
are bound one by one anyway.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ctxfix import affinity, counters, driver, guard, native, settings
from ctxfix.registry import registry

_groups: dict[int, int] = {}  # id of an agent -> its thread group


def enabled() -> bool:
    """Whether native threads are covered: see :func:`off_reason`."""
    return not off_reason()


def off_reason() -> str:
    """Why native threads are not covered, or "": no extension, CTXFIX_NATIVE_THREADS, a child in which CUDA is dead."""
    if not native.available():
        return native.reason() or ""
    if settings.current().native_threads == "off":
        return "CTXFIX_NATIVE_THREADS=off"
    return (driver.problem() or "") if driver.forked() else ""


def _harmless(work: Callable[..., None]) -> Callable[..., None]:
    """``work``, whose failure is told and counted, and raised in strict mode only."""

    @functools.wraps(work)
    def harmless(*args: object) -> None:
        try:
            work(*args)
        except Exception as error:
            guard.failed(f"native.{work.__name__}", error)

    return harmless


@_harmless
def install() -> None:
    """Hook what is loaded, before libfabric is used for the first time."""
    if enabled():
        native.install()


@_harmless
def _disarm(before: native.Armed) -> None:
    native.disarm(before)


@contextmanager
def starting(agent: int, new: bool = False) -> Iterator[None]:
    """For the length of a ``with`` block, threads that the calling thread starts are of ``agent`` (its ``id()``).

    ``new``: whatever is known of that id is of an agent that is gone.
    """
    if not enabled():
        yield
        return
    before: native.Armed | None = None
    try:
        try:
            native.install()
            if new:
                _groups.pop(agent, None)
            group = _groups.get(agent) or _groups.setdefault(agent, native.new_group())
            before = native.present()
            native.arm(affinity.preferred(driver.current()), group)
        except Exception as error:
            guard.failed("native.arm", error)
        yield
    finally:
        if before is not None:
            try:
                native.disarm(before)
            except BaseException as error:  # a signal handler's, another thread's, or no memory: it comes once
                _disarm(before)
                if not isinstance(error, Exception):
                    raise
                guard.failed("native.disarm", error)


@_harmless
def follow(agent: int, context: int) -> None:
    """``agent`` is about to register memory owned by ``context``: its threads go there."""
    if not enabled():
        return
    native.set_home(context)
    group = _groups.get(agent)
    if group is None:  # made before ctxfix was active: its threads are not ours to tell apart
        return
    present = native.group_info(group).context
    if present == context:
        return
    if present and present in registry.contexts_of(agent):
        counters.count("several_gpu_agents")
        guard.warn_once(
            "several_gpu_agents",
            "ctxfix: one NIXL agent has memory of several GPUs. Its progress thread stays in the context of the first; "
            "libfabric's copies are bound one by one. Use one agent for each GPU.",
        )
        return
    native.bind_group(group, context)


@_harmless
def forget(agent: int) -> None:
    """``agent`` is gone, or has deregistered something: what follows from it."""
    if not enabled():
        return
    contexts = registry.contexts()
    native.set_home(contexts[-1] if contexts else 0)


def gone(agent: int) -> None:
    """``agent`` is destroyed, and its threads with it."""
    _groups.pop(agent, None)
    forget(agent)


@_harmless
def hold(on: bool) -> None:
    """Keep the calling thread's context against NIXL's own changes of it, or no longer (see :func:`native.hold`)."""
    if enabled():
        native.hold(on)


def calls_are_whole() -> bool:
    """Whether libfabric's device-to-device copies are made by the extension, which waits for their end."""
    try:
        return enabled() and native.status().get("libfabric_calls", 0) > 0
    except Exception as error:
        guard.failed("native.status", error)
        return False


def objects_loaded() -> int | None:
    """A number that changes whenever a library is loaded that starts threads or asks for symbols; None: unknown."""
    if not enabled():
        return None
    install()  # looks, if the loader has loaded anything
    return native.counters()["slots"]["objects"]


@contextmanager
def native_threads(memory: Any = None) -> Iterator[None]:
    """For the length of a ``with`` block, native threads that this thread starts begin in the right context.

    For engines that bring their own threads: make them inside. Threads which those threads start inherit the context
    too. Without the C extension nothing happens, and one warning says so.

    Args:
        memory: a CUDA tensor, a descriptor ``(address, length, …)`` or an address: the context is its owner's. None:
            the only context that owns registered memory, else what is current here, else the only primary one.

    Raises:
        DriverError: the driver refused the owner's context.
        UnknownOwnerError: ``memory`` is no GPU memory of this process.
    """
    if memory is None:
        driver.attach()
        context = affinity.preferred(driver.current())
    else:
        with affinity.bound(memory) as context:
            pass
    reason = off_reason()
    if reason:
        guard.warn_once("native_threads", f"ctxfix: native threads are not bound: {reason}")
        yield
        return
    native.install()
    with native.armed(context):
        yield


os.register_at_fork(after_in_child=_groups.clear)
