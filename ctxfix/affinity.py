# SPDX-License-Identifier: Apache-2.0
"""Who sets the context, when, and how it is undone.

A call on memory runs in the context of that memory's owner: :func:`enter` makes it current and returns a token,
:func:`leave` gives the caller's own context back. A thread that starts is bound once, by :func:`bind_new_thread`, to
what :func:`preferred` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from ctxfix import counters, driver, guard
from ctxfix.driver import Owner
from ctxfix.errors import DriverError, UnknownOwnerError
from ctxfix.registry import registry

_rebinds = counters.ticker("rebinds")
_restores = counters.ticker("restores")
_threads_bound = counters.ticker("threads_bound")


def enter(context: int) -> int | None:
    """Make ``context`` current on this thread if it is not already.

    Returns the context that was current before (0: none), to be given to :func:`leave`; None if nothing was changed
    because ``context`` is 0 or already current.

    Raises:
        DriverError: the driver refused the context, e.g. because it was destroyed, or did not tell the present one.
    """
    previous = driver.current()
    if previous == context or not context:
        return None
    try:
        driver.set_current(context)
        next(_rebinds)
    except DriverError:
        raise
    except BaseException:  # a signal handler's: the caller gets no token to undo it with
        leave(previous)
        raise
    return previous


def leave(previous: int) -> None:
    """Undo :func:`enter`: make ``previous`` current again, if it is not. May be called twice.

    Raises:
        CtxfixError: in strict mode only: the driver refused.
    """
    try:
        _give_back(previous)
    except DriverError as error:
        guard.failed("affinity.leave", error)
    except BaseException as error:  # a signal handler's, another thread's, or no memory: it comes once
        _give_back(previous)
        if not isinstance(error, Exception):
            raise
        guard.failed("affinity.leave", error)


def _give_back(previous: int) -> None:
    try:
        if driver.current() == previous or driver.forked():
            return
    except DriverError:
        pass  # then it is set whatever it is now
    try:
        driver.set_current(previous)
    except DriverError:
        try:
            driver.set_current(previous)  # what an earlier call left behind is told by any other, once
        except DriverError:
            driver.set_current(0)  # destroyed meanwhile: better no context than a dead one, or ours
            raise
    next(_restores)


def preferred(parent: int = 0) -> int:
    """The context for a thread of whose memory nothing is known; 0: none, leave it alone.

    In this order: the only context that owns registered memory; else ``parent``, what was current where the thread
    was started; else the only primary context that exists in this process.
    """
    recorded = registry.contexts()
    if len(recorded) == 1:
        return recorded[0]
    if parent:
        return parent
    primaries = driver.primary_contexts()
    return primaries[0] if len(primaries) == 1 else 0


def current_context() -> int:
    """The context current on this thread; 0 if there is none, or no CUDA in the process. About 0.15 µs."""
    return driver.current()


def bind_new_thread(parent: int) -> None:
    """Bind the calling thread, which has just started, for good.

    ``parent`` is the context that was current on the thread that started it, or 0. Short, and silent: the thread is not
    registered with ``threading`` yet, so logging here would make a dummy thread appear.

    Raises:
        DriverError: the driver refused, typically because the context was destroyed since it was recorded.
    """
    if not driver.attached() or driver.current():
        return
    context = preferred(parent)
    if context:
        driver.set_current(context)
        next(_threads_bound)


def address_of(obj: Any) -> int:
    """The first address of a tensor, a descriptor ``(address, length, …)``, or an ``int``, also one of numpy's.

    Raises:
        TypeError: it is none of them.
    """
    data_ptr = getattr(obj, "data_ptr", None)
    if data_ptr is not None:
        return int(data_ptr())
    try:
        first = obj if isinstance(obj, Integral) else obj[0]
    except (TypeError, LookupError):
        first = None
    if not isinstance(first, Integral) or isinstance(obj, (bytes, bytearray)):
        raise TypeError(
            f"{obj!r:.60} is no memory: give a tensor (with data_ptr), a descriptor (address, length, …) or an address"
        )
    return int(first)


def owner_at(address: int) -> Owner | None:
    """Whose GPU memory ``address`` is: as registered, if that is still true, else as the driver says now."""
    registration = registry.find(address)
    if registration is not None:
        if driver.buffer_id(registration.start) == registration.buffer_id:
            return registration.owner
        counters.count("stale_owners")
    return driver.owner_of(address)


@contextmanager
def bound(obj: Any) -> Iterator[int]:
    """Run a ``with`` block in the context of the owner of ``obj``.

    The caller's context is back afterwards, whatever the block did to it. No context is made.

    Args:
        obj: a CUDA tensor, a descriptor ``(address, length, …)`` or an address.

    Yields:
        The context, a ``CUcontext`` as an integer.

    Raises:
        TypeError: ``obj`` is none of these.
        UnknownOwnerError: ``obj`` is no GPU memory of this process.
        DriverError: the driver refused the owner's context.
    """
    driver.attach()
    address = address_of(obj)
    owner = owner_at(address)
    if owner is None:
        why = driver.why_unknown(address)
        raise UnknownOwnerError(
            f"{address:#x} is no GPU memory of this process, as far as can be told ({why}): pass a CUDA tensor, or an "
            "address in memory that is still allocated"
        )
    before = driver.current()
    try:
        enter(owner.context)
        yield owner.context
    finally:
        try:
            leave(before)
        except BaseException:  # a signal, before it had begun: it comes once
            leave(before)
            raise
