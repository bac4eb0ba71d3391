# SPDX-License-Identifier: Apache-2.0
"""What happens when a hook of ours fails: the host goes on, one warning is given, the failure is counted."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from ctxfix import counters, settings
from ctxfix.errors import CtxfixError

logger = logging.getLogger("ctxfix")
_warned: set[str] = set()


def _set_up_logging(level: str) -> None:
    if level == "off":
        logger.disabled = True
        return
    logger.setLevel(level.upper())
    if level != "warning":
        # Python shows warnings without any set-up, but nothing below them.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(threadName)s %(name)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


_set_up_logging(settings.current().log)


def failed(where: str, error: Exception) -> None:
    """Note that the hook ``where`` failed with ``error``.

    Raises:
        CtxfixError: in strict mode (CTXFIX_STRICT=1) only, with ``error`` as its cause.
        Exception: ``error`` itself, if it is none of ours but interrupted the hook.
    """
    if interrupted(error):
        raise error
    counters.count("hook_failures")
    try:
        text = (
            f"ctxfix: hook {where} failed in pid {os.getpid()}, thread {threading.current_thread().name!r}: "
            f"{type(error).__name__}: {error}"
        )
    except Exception:  # noqa: BLE001 - no memory, or an error that cannot be printed
        text = f"ctxfix: hook {where} failed"
    if settings.current().strict:
        raise error if isinstance(error, CtxfixError) else CtxfixError(text) from error
    warn_once(
        f"{where}:{type(error).__name__}",
        f"{text}. The original call went through as if ctxfix were not there; further failures of this kind are only "
        "counted (ctxfix.stats()). CTXFIX_STRICT=1 makes them raise.",
    )


def interrupted(error: BaseException) -> bool:
    """Whether ``error`` came into our code from outside while it ran, and so belongs to the application.

    That is what a signal handler raises, and what another thread sets (PyThreadState_SetAsyncExc): typically the end of
    a time limit, which must never get lost in a hook. Of the latter nothing tells but its class, so a builtin one is
    taken for our own failure, TimeoutError excepted.
    """
    if isinstance(error, CtxfixError):
        return False
    if isinstance(error, TimeoutError):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace, innermost = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        innermost = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    ours = innermost.partition(".")[0] == "ctxfix"
    return ours and type(error).__module__.partition(".")[0] not in _RAISED_BY_OUR_CODE


_RAISED_BY_OUR_CODE = ("builtins", "ctypes", "_ctypes", "cuda")


def _code_of(handler: Any) -> object:
    """The code that runs first when a signal handler is called: a function, a method, a partial, an object."""
    handler = getattr(handler, "func", handler)
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__") and callable(handler):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


def warn_once(key: str, text: str) -> None:
    """Log ``text`` as a warning, once a process for each ``key``. Handlers and filters of the application may fail."""
    if key not in _warned:
        _warned.add(key)
        try:
            logger.warning(text)
        except Exception as error:  # noqa: BLE001 - its failure is none of the call's that we tell about
            if interrupted(error):
                raise
            counters.count("hook_failures")


for _problem in settings.current().problems:
    warn_once(f"setting: {_problem}", f"ctxfix: {_problem}")
