# SPDX-License-Identifier: Apache-2.0
"""Python threads start in a CUDA context, if it is clear in which.

Two methods of ``threading.Thread`` are replaced by plain guarded functions. ``start`` looks at what is current where a
thread is started; ``_bootstrap_inner``, the first code of every Python thread, binds. Between them they see Thread
targets, overrides of ``run``, Timer, executors with their initializers, ThreadPool and ``asyncio.to_thread``. Wrapping
``run`` would miss subclasses and Timer. Threads made by ``_thread.start_new_thread`` alone are left to the call hooks.

Until a host is patched ``ctxfix.affinity`` is not imported, and neither function does anything.
"""

import os
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import BuiltinFunctionType
from typing import Any

from ctxfix import _startup
from ctxfix.errors import CtxfixError, PatchError
from ctxfix.methods import unbound

_METHODS = ("start", "_bootstrap_inner")
# What `Thread.start` calls to get a thread from the operating system (3.13 renamed it).
_STARTER = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"

_lock = threading.Lock()
_replaced: dict[str, Any] = {}  # method name -> what we found there
_ours: dict[str, Any] = {}  # method name -> what we put there
# id(thread) -> what binds it, while it is being started. `start` waits until the thread has begun, so an entry lives no
# longer than that call: no attribute on the thread, no reference to it, no id that is used again.
_bindings: dict[int, Callable[[], None]] = {}
_in_fork_child = False
_unannounced: list[str] = []  # failures that `start` is to tell of, once the thread has begun


def green() -> str:
    """Name the library whose greenlets ``threading.Thread`` starts ("gevent", "eventlet"), or return "".

    Those are all one thread of the operating system, so binding one of them would bind them all. Looked at
    anew for each thread: a program may monkey-patch at any time. Imports nothing.
    """
    starter = getattr(threading, _STARTER, None)
    if type(starter) is BuiltinFunctionType:
        return ""
    for library, module, question in (
        ("gevent", "gevent.monkey", "is_module_patched"),
        ("eventlet", "eventlet.patcher", "is_monkey_patched"),
    ):
        if (getattr(starter, "__module__", None) or "").partition(".")[0] == library:
            return library
        # A debugger may have wrapped the starter on top, so the library is asked as well.
        asked = getattr(sys.modules.get(module), question, None)
        if asked is not None and (asked("threading") or asked("thread")):
            return library
    return ""


def _plan() -> Callable[[], None] | None:
    """Return what binds a thread that the caller is about to start; None if it is to be left alone.

    Raises nothing but what a signal handler does meanwhile.
    """
    global _in_fork_child
    affinity = sys.modules.get("ctxfix.affinity")
    if affinity is None:
        return None
    try:
        bind = getattr(affinity, "bind_new_thread", None)
        if bind is None:  # half imported
            return None
        context = affinity.current_context()
        if context:
            _in_fork_child = False  # the child has CUDA of its own
        if _in_fork_child or green():
            return None
        return partial(bind, context)
    except Exception as error:
        if sys.modules["ctxfix.guard"].interrupted(error):
            raise
        _keep("starting a thread", error)
        return None


def _wrap_start(original: Any) -> Any:
    @wraps(original)
    def start(self: threading.Thread) -> None:
        binding = _plan()
        if binding is None:
            original(self)
        else:
            _bindings[id(self)] = binding
            try:
                original(self)
            finally:
                _bindings.pop(id(self), None)
        if _unannounced:
            _announce()

    return start


def _wrap_bootstrap_inner(original: Any) -> Any:
    @wraps(original)
    def _bootstrap_inner(self: threading.Thread) -> None:
        # Nothing may escape, of any kind: `Thread.start` would wait for ever for the thread to report. Nothing is
        # logged here: that would ask for the current thread, which is not registered yet. And little is done here: in
        # a new thread, with cold caches, an attribute look-up costs half a microsecond, ten times what it does in
        # `start`.
        try:
            binding = _bindings.get(id(self))
            if binding is not None:
                binding()
        except BaseException as error:
            _keep("binding a new thread", error)
        original(self)

    return _bootstrap_inner


def _keep(place: str, error: BaseException) -> None:
    """Remember a failure for ``start`` to tell of. Never raises."""
    try:
        if _startup.remember_failure(place, error):
            _unannounced.append(f"{place}: {_startup.failures[place]}")
    except BaseException:
        pass


def _announce() -> None:
    """Log what went wrong with a thread, once it has begun. In strict mode raises CtxfixError."""
    try:
        message = _unannounced.pop()
    except IndexError:  # another thread was quicker
        return
    _startup.warn(message)
    if _startup.strict():
        raise CtxfixError(message)


def _after_fork_in_child() -> None:
    # CUDA does not survive a fork. Until a thread of the child has a context, made by itself, new ones get
    # none.
    global _in_fork_child, _lock
    _in_fork_child = True
    _bindings.clear()
    _unannounced.clear()
    _lock = threading.Lock()  # another thread may have held it


def apply() -> bool:
    """Replace the two methods. Idempotent. Returns whether they are ours now: not under gevent."""
    with _lock:
        if _ours:
            return True
        if green():
            return False
        wrappers = {"start": _wrap_start, "_bootstrap_inner": _wrap_bootstrap_inner}
        found = {name: threading.Thread.__dict__.get(name) for name in _METHODS}
        missing = [name for name, method in found.items() if not callable(method)]
        if missing:
            raise PatchError(
                f"threading.Thread of Python {sys.version.split()[0]} has no method {missing[0]}: new threads are "
                "not bound to a CUDA context by ctxfix; bind them yourself"
            )
        for name, method in found.items():
            _replaced[name] = method
            _ours[name] = wrappers[name](unbound(method))
            setattr(threading.Thread, name, _ours[name])
        return True


def remove() -> None:
    """Put the originals back. Idempotent. Raises PatchError, and changes nothing, if one is wrapped on top."""
    with _lock:
        for name, ours in _ours.items():
            present = threading.Thread.__dict__.get(name)
            if present is not ours and present is not _replaced[name]:
                raise PatchError(
                    f"threading.Thread.{name} was wrapped after ctxfix by {_origin(present)}: "
                    "undo that first, then call ctxfix.deactivate()"
                )
        for name in _ours:
            setattr(threading.Thread, name, _replaced[name])
        _ours.clear()
        _replaced.clear()


def _origin(function: Any) -> str:
    """Say where a function is written. Its name would not do: ``functools.wraps`` copies the wrapped one's."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def status() -> dict[str, Any]:
    """Tell whether new threads are bound, and why not: keys ``installed`` (bool) and ``reason`` (str)."""
    library = green()
    if library:
        return {"installed": bool(_ours), "reason": f"threads are greenlets of {library}: left alone"}
    if not _ours:
        return {
            "installed": False,
            "reason": "installed when the first host is patched, or by ctxfix.activate()",
        }
    replaced = [name for name in _METHODS if threading.Thread.__dict__.get(name) is not _ours[name]]
    if replaced:
        return {"installed": True, "reason": f"threading.Thread.{replaced[0]} was replaced on top of ctxfix"}
    return {"installed": True, "reason": ""}


os.register_at_fork(after_in_child=_after_fork_in_child)
