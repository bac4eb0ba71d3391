# SPDX-License-Identifier: Apache-2.0
"""What happens when a hook of ours fails: the host goes on, one warning is given, the failure is counted."""

from __future__ import annotations

import logging
import os
import threading

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
for _problem in settings.current().problems:
    logger.warning("ctxfix: %s", _problem)


def failed(where: str, error: Exception) -> None:
    """Note that the hook ``where`` failed with ``error``.

    Raises:
        CtxfixError: in strict mode (CTXFIX_STRICT=1) only, with ``error`` as its cause.
    """
    counters.count("hook_failures")
    text = (
        f"ctxfix: hook {where} failed in pid {os.getpid()}, thread {threading.current_thread().name!r}: "
        f"{type(error).__name__}: {error}"
    )
    if settings.current().strict:
        raise error if isinstance(error, CtxfixError) else CtxfixError(text) from error
    warn_once(
        f"{where}:{type(error).__name__}",
        f"{text}. The original call went through as if ctxfix were not there; further failures of this kind are only "
        "counted (ctxfix.stats()). CTXFIX_STRICT=1 makes them raise.",
    )


def warn_once(key: str, text: str) -> None:
    """Log ``text`` as a warning, once a process for each ``key``."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(text)
