# SPDX-License-Identifier: Apache-2.0
"""All that runs at interpreter start: the off switch and one import finder.

Every interpreter of an environment pays for this file. It imports ``sys`` and ``os``, which ``site`` has
loaded before us, and nothing else: not ``typing``, not even ``__future__``. What it remembers is plain text
in dictionaries, so that ``status()`` can tell of it and no exception keeps frames alive.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The modules that are patched when they are imported, and the module whose `apply(module)` does it. They are
# the real homes of `nixl_agent`: `nixl._api` is an alias in sys.modules, no finder is ever asked for it.
TARGETS = {
    "nixl_cu12._api": "ctxfix.patches.nixl",
    "nixl_cu13._api": "ctxfix.patches.nixl",
    "nixl_rocm._api": "ctxfix.patches.nixl",
    "sglang.srt.disaggregation.mooncake.conn": "ctxfix.patches.sglang",
    "sglang.srt.disaggregation.mori.conn": "ctxfix.patches.sglang",
    "sglang.srt.disaggregation.nixl.conn": "ctxfix.patches.sglang",
    "ray._private.function_manager": "ctxfix.patches.ray",
    "ray.experimental.rdt.nixl_tensor_transport": "ctxfix.patches.ray",
    "ray.experimental.rdt.util": "ctxfix.patches.ray",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker": "ctxfix.patches.vllm",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector": "ctxfix.patches.vllm",
    "vllm.distributed.weight_transfer.sharded_rdt_engine": "ctxfix.patches.vllm",
    "vllm.distributed.weight_transfer.sharded_rdt_trainer": "ctxfix.patches.vllm",
}

YES = ("1", "true", "yes", "on")
NO = ("", "0", "false", "no", "off")

# What loaded us: "import ctxfix", "start-up file" (ctxfix-init.pth or .start) or "ctxfix run".
started_by = "import ctxfix"
# Target -> "patched" or "failed: …"; a target that was not imported yet is absent.
outcomes: "dict[str, str]" = {}
# Where something of ours failed -> what it was. The first failure of each place is kept, and logged.
failures: "dict[str, str]" = {}
# Patch modules that the user took off; the finder passes them by.
unwanted: "set[str]" = set()


def off_reason() -> str:
    """Say why ctxfix is switched off, or "" when it is on. Reads CTXFIX_DISABLE anew on each call."""
    value = os.environ.get("CTXFIX_DISABLE", "")
    word = value.strip().lower()
    if word in NO:
        return ""
    if word in YES:
        return f"CTXFIX_DISABLE={value}"
    return f"CTXFIX_DISABLE={value!r} is neither 0 nor 1: taken as 1"  # as in ctxfix.settings


def strict() -> bool:
    """Whether failures of ours are raised into the application (CTXFIX_STRICT)."""
    return os.environ.get("CTXFIX_STRICT", "").strip().lower() in YES


def note_failure(where: str, error: BaseException) -> None:
    """Keep the first failure of a place for ``status()`` and log it, once. Never raises."""
    if remember_failure(where, error):
        warn(f"{where}: {failures[where]}")


def remember_failure(where: str, error: BaseException) -> bool:
    """Count a failure, and keep the first of each place for ``status()``; whether this was it.

    Logs nothing, imports nothing, never raises.
    """
    counters = sys.modules.get("ctxfix.counters")
    try:
        if counters is not None:
            counters.count("hook_failures")
    except Exception as uncounted:
        failures.setdefault("counting a failure", f"{type(uncounted).__name__}: {uncounted}")
    if where in failures:
        return False
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__} (its message cannot be printed)"
    if isinstance(error, ModuleNotFoundError):
        text += f"; install it for {sys.executable}"
    failures[where] = text
    return True


def warn(message: str) -> None:
    """Log a warning as ``ctxfix``, if the application lets us. Never raises."""
    try:
        if os.environ.get("CTXFIX_LOG", "").strip().lower() != "off":
            import logging

            logging.getLogger("ctxfix").warning("ctxfix: %s", message)
    except Exception as error:
        failures.setdefault("logging", f"{type(error).__name__} while logging {message!r}")


class _Loader:
    """Stands in for a target's loader until the module has run, then patches it.

    The original loader is back in ``__loader__`` and ``__spec__.loader`` before the module's own code runs.
    Until then all else that is asked of a loader (``get_code``, ``get_resource_reader``, …) comes from the
    original.
    """

    def __init__(self, name: str, original: "Any") -> None:
        self._name = name
        self._original = original

    def __getattr__(self, name: str) -> "Any":
        if name == "_original":  # not set yet: copy and pickle ask an empty instance
            raise AttributeError(name)
        return getattr(self._original, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Create the module as the original loader does."""
        create = getattr(self._original, "create_module", None)
        module: ModuleType | None = create(spec) if create is not None else None
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module as the original loader does, then patch it."""
        name = self._name
        try:
            if getattr(module.__spec__, "loader", None) is self:
                module.__spec__.loader = self._original  # type: ignore[union-attr]
            if getattr(module, "__loader__", None) is self:
                module.__loader__ = self._original
        except Exception as error:
            note_failure(f"restoring the loader of {name}", error)
        registered = sys.modules.get(name) is module
        self._original.exec_module(module)
        if registered:  # a module may put another object in its own place
            module = sys.modules.get(name, module)
        raise_if_strict(name, _patch(name, module))


class _Finder:
    """A ``sys.meta_path`` finder that finds nothing itself: it has the later ones find our targets."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the spec of a target as the later finders find it, with our loader around its own."""
        if fullname not in TARGETS:
            return None
        spec = self._find_later(fullname, path, target)
        try:
            if spec is None or spec.loader is None or not wanted(fullname):
                return spec
            if not hasattr(spec.loader, "exec_module"):
                raise ImportError(f"its loader {spec.loader!r} has no exec_module, so it cannot be followed")
            if not isinstance(spec.loader, _Loader):
                spec.loader = _Loader(fullname, spec.loader)  # type: ignore[assignment]
        except Exception as error:
            raise_if_strict(fullname, _failed(fullname, error))
        return spec

    def _find_later(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        """Ask the finders behind us. Those before us were asked already, or are asking us now."""
        finders = list(sys.meta_path)
        if self in finders:
            del finders[: finders.index(self) + 1]
        for finder in finders:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None


_finder = _Finder()


def wanted(name: str) -> bool:
    """Whether a target is to be patched now: ctxfix is on, and the user has not taken this patch off."""
    return TARGETS.get(name) not in unwanted and not off_reason()


def _patch(name: str, module: "ModuleType") -> "BaseException | None":
    """Patch a target that has just run. Returns what went wrong, which is noted already."""
    home = TARGETS.get(name)
    if home is None or not wanted(name):
        return None
    try:
        __import__(home, fromlist=("apply",)).apply(module)
    except (Exception, SystemExit) as error:
        if _interrupted(error):
            raise
        return _failed(name, error)
    outcomes[name] = "patched"
    failures.pop(f"patching {name}", None)
    try:
        # With the first host comes the hook of Python threads: before, `threading` may not even be loaded.
        __import__("ctxfix.threads", fromlist=("apply",)).apply()
    except (Exception, SystemExit) as error:
        if _interrupted(error):
            raise
        note_failure("hooking Python threads", error)
        return error
    return None


def _interrupted(error: BaseException) -> bool:
    """Whether ``error`` came from outside, and is the application's: see ``ctxfix.guard.interrupted``."""
    try:
        return bool(__import__("ctxfix.guard", fromlist=("interrupted",)).interrupted(error))
    except Exception:
        return False  # what cannot even be loaded has not been interrupted


def _failed(name: str, error: BaseException) -> BaseException:
    """Note that a target could not be patched."""
    place = f"patching {name}"
    note_failure(place, error)
    outcomes[name] = f"failed: {failures[place]}"
    return error


def raise_if_strict(name: str, error: "BaseException | None") -> None:
    """In strict mode raise what went wrong with a target, as an error of ours."""
    if error is not None and strict():
        from ctxfix.errors import CtxfixError, PatchError

        if isinstance(error, CtxfixError):
            raise error
        raise PatchError(f"patching {name}: {type(error).__name__}: {error}") from error


def patch_present(name: str) -> "BaseException | None":
    """Patch a target that is imported already. Returns what went wrong, which is noted."""
    module = sys.modules.get(name)
    if module is None or outcomes.get(name) == "patched":
        return None
    if _initializing(module):
        # Another thread is importing it: wait on the module's own lock. If we were called from the target's
        # own code that lock is ours, and the module is as half made after as before.
        __import__(name)
        module = sys.modules.get(name)
        if module is None:  # that thread's import has failed, which is its own to tell
            return None
        if _initializing(module):
            late = RuntimeError("it was half imported when ctxfix came; call ctxfix.activate() when it is whole")
            return _failed(name, late)
    return _patch(name, module)


def _initializing(module: "ModuleType") -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def installed() -> bool:
    """Whether our finder is in ``sys.meta_path``."""
    return _finder in sys.meta_path


def install() -> None:
    """Put the finder in front and patch what is imported already, unless ctxfix is off.

    Raises nothing but what a signal handler does meanwhile.
    """
    try:
        if off_reason():
            return
        if not installed():
            sys.meta_path.insert(0, _finder)
    except (Exception, SystemExit) as error:
        note_failure("installing the import finder", error)
        return
    for name in list(TARGETS):  # a patch may add a host, and so may another thread
        try:
            patch_present(name)
        except (Exception, SystemExit) as error:
            if _interrupted(error):
                raise
            _failed(name, error)


def uninstall() -> None:
    """Take the finder out. What is patched stays patched."""
    while installed():
        sys.meta_path.remove(_finder)
    outcomes.clear()


def at_start() -> None:
    """Run from the start-up file of an environment: twice in a virtual environment. Never raises."""
    global started_by
    started_by = "start-up file"
    install()
