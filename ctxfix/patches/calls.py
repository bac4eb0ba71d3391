# SPDX-License-Identifier: Apache-2.0
"""What a call of NIXL that sets something up is run in: the context of the memory that it names, else of its agent.

Not for posts and polls, which are too frequent for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from ctxfix import affinity, counters, driver, guard
from ctxfix.errors import CtxfixError
from ctxfix.patches import descriptors
from ctxfix.registry import registry

Hook = Callable[..., Any]  # a method of NIXL's, or what we put in its place


def in_context(
    where: str, choose: Callable[[], int], call: Hook, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """``call`` in the context of ``choose()``; afterwards the caller's, whoever changed it."""
    previous: int | None = None
    failure: Exception | None = None
    try:
        try:
            previous = driver.current()
            affinity.enter(choose())
        except CtxfixError as error:
            guard.failed(where, error)
        except Exception as error:
            if guard.interrupted(error):
                raise
            failure = error
        result = call(*args, **(kwargs or {}))  # if it raises too, the arguments were wrong, not we
    finally:
        if previous is not None:
            try:
                affinity.leave(previous)
            except BaseException:  # a signal, before it had begun: it comes once
                affinity.leave(previous)
                raise
    if failure is not None:
        guard.failed(where, failure)
    return result


class Noting:
    """A block that learns from a call that has succeeded: whatever fails in it, the call's result goes back."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            guard.failed(self._where, error)
            return True
        return False


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """The argument of a call that is the ``position``-th, or has its ``name``."""
    return args[position] if len(args) > position else kwargs.get(name)


def context_of_agent(agent: Any) -> int:
    """The context for a call that names no memory: of what the agent registered."""
    contexts = registry.contexts_of(id(agent))
    if len(contexts) == 1:
        return contexts[0]
    # Of an agent with several GPUs any of their contexts will do, so the thread's own stays if it is one.
    return 0 if not contexts or driver.current() in contexts else contexts[0]


def context_of_newcomer() -> int:
    """The context for a thread that has none and of whose memory nothing is known; else 0: leave it."""
    return 0 if driver.current() else affinity.preferred()


def context_at(address: int | None) -> int:
    """The context that owns ``address``; 0: unknown."""
    if address is None:
        return 0
    owner = affinity.owner_at(address)
    if owner is None:
        unknown_owner(address)
        return 0
    return owner.context


def context_of_list(memory: Any, mem_type: Any, vram: Any) -> int:
    """The context that owns the first descriptor of a list; 0: host memory, or unknown."""
    if memory is None or not descriptors.is_gpu(memory, mem_type, vram):
        return 0
    driver.attach()
    return context_at(next((row[0] for row in descriptors.rows(memory)), None))


def unknown_owner(address: int) -> None:
    """Count GPU memory whose owner nobody knows, and say so once."""
    counters.count("unknown_owners")
    reason = driver.why_unknown(address)
    guard.warn_once(
        "unknown_owner",
        f"ctxfix: NIXL was given GPU memory at {address:#x} whose owner is unknown ({reason}); the call goes through "
        "in whatever context the thread has. Check that the address is inside memory that is still allocated.",
    )
