# SPDX-License-Identifier: Apache-2.0
"""Python threads start in a CUDA context, if it is clear in which.

Two methods of ``threading.Thread`` are replaced by plain guarded functions. ``start`` notes what is current
where the thread is started; ``_bootstrap_inner``, the first code of every Python thread, binds. Between them
they see Thread targets, overrides of ``run``, Timer, executors with their initializers, ThreadPool and
``asyncio.to_thread``. Wrapping ``run`` would miss subclasses and Timer. Threads made by
``_thread.start_new_thread`` alone are left to the call hooks.

Until a host is patched ``ctxfix.affinity`` is not imported, and neither function does anything.
"""

import os
import sys
import threading
from functools import wraps
from types import BuiltinFunctionType
from typing import Any

from ctxfix import _startup
from ctxfix.errors import CtxfixError, PatchError

_METHODS = ("start", "_bootstrap_inner")
# What `Thread.start` calls to get a thread from the operating system (3.13 renamed it).
_STARTER = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"

_lock = threading.Lock()
_replaced: dict[str, Any] = {}  # method name -> what we found there
_ours: dict[str, Any] = {}  # method name -> what we put there
# id(thread) -> the context current where it is being started. `start` waits until the thread has begun, so an
# entry lives no longer than the call: no attribute on the thread, no reference to it, no id that is used
# again.
_parents: dict[int, int] = {}
_in_fork_child = False
_unannounced: list[str] = []  # failures in threads that had just begun, to be logged by whoever started them


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


def _current_context() -> int:
    """Return the caller's CUDA context as an integer, 0 if there is none. Never raises."""
    affinity = sys.modules.get("ctxfix.affinity")
    current_context = getattr(affinity, "current_context", None)  # None: half imported
    if current_context is None:
        return 0
    try:
        context: int = current_context()
    except Exception as error:
        _startup.note_failure("reading the context in Thread.start", error)
        return 0
    return context


def _bind(thread: threading.Thread) -> None:
    """Bind the calling thread, which has just begun as ``thread``. Never raises, logs or waits."""
    # Nothing may escape, of any kind: `Thread.start` would wait for ever for the thread to report. Logging
    # waits until `start` has returned, because it would ask for the current thread, which is not registered
    # yet.
    try:
        bind = getattr(sys.modules.get("ctxfix.affinity"), "bind_new_thread", None)
        if bind is not None and not _in_fork_child and not green():
            bind(_parents.get(id(thread), 0))
    except BaseException as error:
        try:
            place = "binding a new thread"
            if _startup.remember_failure(place, error):
                _unannounced.append(f"{place}: {_startup.failures[place]}")
        except BaseException:
            pass


def _wrap_start(original: Any) -> Any:
    @wraps(original)
    def start(self: threading.Thread) -> None:
        global _in_fork_child
        context = _current_context()
        if not context:
            original(self)
        else:
            _in_fork_child = False  # the child has CUDA of its own
            _parents[id(self)] = context
            try:
                original(self)
            finally:
                _parents.pop(id(self), None)
        if _unannounced:
            _announce()

    return start


def _wrap_bootstrap_inner(original: Any) -> Any:
    @wraps(original)
    def _bootstrap_inner(self: threading.Thread) -> None:
        _bind(self)
        original(self)

    return _bootstrap_inner


def _announce() -> None:
    """Log what went wrong in a new thread, from the one that started it. In strict mode raises CtxfixError."""
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
    _parents.clear()
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
            _ours[name] = wrappers[name](method)
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
