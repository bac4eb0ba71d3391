# SPDX-License-Identifier: Apache-2.0
"""The door for hosts: which methods run in the context of which memory, as a table of one row a method.

Our own patches use it, and so can any project whose threads touch GPU memory (``ctxfix.patch_host``)::

    import ctxfix
    from ctxfix.patches.host import Device, Hook

    ctxfix.patch_host(
        "acme",
        Hook("acme.engine", "Engine.send_loop", lambda self: self.pool, thread=True),
        Hook("acme.engine", "Engine.flush", lambda self, *_: Device(self.gpu)),
    )

``memory`` is called with the arguments of the method and says where its memory is:

- a tensor (whatever has ``data_ptr``), an address, or a descriptor ``(address, length, …)``: the context that owns it;
- a :class:`Device` or a ``torch.device`` with an index: the primary context of that device, if somebody has made it;
- any other iterable of these, tried in turn until one of them tells;
- ``None``: nothing is known, the thread stays as it is.

A context is never created. The thread's own is back when the method ends, unless the host chose another meanwhile.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from types import ModuleType
from typing import Any, NamedTuple

from ctxfix import affinity, counters, driver, guard, threads
from ctxfix._status import version_of
from ctxfix.errors import DriverError, PatchError
from ctxfix.methods import unbound
from ctxfix.patches.undo import Patch, Patches, one_change


class Device(NamedTuple):
    """A GPU of this process by its CUDA ordinal: an int alone would be taken for an address."""

    ordinal: int


class Context(NamedTuple):
    """A CUDA context, for those who know it already; 0: none."""

    value: int


@dataclass(frozen=True)
class Hook:
    """One method of a host, and where its memory is.

    Args:
        module: the full name of the module.
        method: "Class.method", or "function" for one of the module's own.
        memory: called with the method's arguments; in which forms it may answer is in this module's text.
        thread: the method is the whole life of a thread.
        optional: not every supported version of the host has it.
        wrap: for what needs more than a context: makes the replacement from the original; ``memory`` is not asked.
    """

    module: str
    method: str
    memory: Callable[..., Any] = lambda *_, **__: None
    thread: bool = False
    optional: bool = False
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        """Refuse what could never be hooked, where it is written.

        Raises:
            PatchError: ``module`` or ``method`` is no name, or ``memory`` cannot be called.
        """
        for field in ("module", "method"):
            name = getattr(self, field)
            if not isinstance(name, str) or not all(name.split(".")):
                raise PatchError(f"Hook({self.module!r}, {self.method!r}, …): {field} must be a name, not {name!r}")
        if not callable(self.memory):
            raise PatchError(
                f"Hook({self.module!r}, {self.method!r}, …): memory must be a function of the method's arguments, not "
                f"{self.memory!r}"
            )


# ---- whose memory ----------------------------------------------------------------------------------------------------


def context_of(memory: Any) -> int:
    """The context for ``memory``, in the forms that the module's text lists; 0: unknown, leave the thread alone."""
    if memory is None or not driver.attach():
        return 0
    if isinstance(memory, Context):
        return memory.value
    if isinstance(memory, Device):
        return driver.primary_context(int(memory.ordinal))
    descriptor = isinstance(memory, tuple) and memory and isinstance(memory[0], Integral)
    if descriptor or isinstance(memory, Integral) or hasattr(memory, "data_ptr"):
        owner = affinity.owner_at(affinity.address_of(memory))
        return owner.context if owner is not None else 0
    if hasattr(memory, "type") and hasattr(memory, "index"):  # a torch.device
        of_gpu = memory.type == "cuda" and memory.index is not None
        return driver.primary_context(int(memory.index)) if of_gpu else 0
    if isinstance(memory, (str, bytes)):
        raise TypeError(f"{memory!r} is no memory: give a tensor, an address, a descriptor or a Device")
    return next((context for context in map(context_of, memory) if context), 0)


# ---- the hook --------------------------------------------------------------------------------------------------------


def in_context(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """``original`` in the context of the memory that ``hook`` names."""
    where = f"{hook.module}.{hook.method}"

    @functools.wraps(original)
    def bound(*args: Any, **kwargs: Any) -> Any:
        context, before = 0, None
        try:
            try:
                # Greenlets share one thread: binding one of them would bind them all.
                if not (hook.thread and threads.green()):
                    context = context_of(hook.memory(*args, **kwargs))
                    before = affinity.enter(context)
                    if before is not None and hook.thread:
                        counters.count("threads_bound")
            except Exception as error:  # noqa: BLE001 - the host must go on
                guard.failed(where, error)
            return original(*args, **kwargs)
        finally:
            if before is not None:
                try:
                    give_back(before, context)
                except BaseException:  # a signal, before it had begun: it comes once
                    give_back(before, context)
                    raise

    return bound


def give_back(before: int, ours: int) -> None:
    """Give the thread its context back. A device that the host chose meanwhile stays."""
    try:
        if driver.current() != ours:
            return
    except DriverError:
        pass  # nobody can tell: then its own is the safer
    affinity.leave(before)


# ---- on and off ------------------------------------------------------------------------------------------------------


class Host:
    """A host and its hooks, put on and taken off module by module."""

    def __init__(self, name: str, hooks: Iterable[Hook]) -> None:
        self.name = name
        self.hooks = tuple(hooks)
        self._patches = Patches()
        self._applied: dict[str, tuple[ModuleType, Any]] = {}  # the module and its spec, a new one when it runs anew
        self._missing: dict[str, list[str]] = {}
        self._applying: set[tuple[str, int]] = set()  # on which thread: what makes a hook may lead here again

    @property
    def modules(self) -> list[str]:
        """The modules that have hooks."""
        return list(dict.fromkeys(hook.module for hook in self.hooks))

    def apply(self, module: ModuleType) -> None:
        """Hook ``module``, which is imported. Idempotent.

        Raises:
            PatchError: a method that is not optional is not where it was; nothing was changed.
        """
        applying = module.__name__, threading.get_ident()
        if self._is_on(module) or applying in self._applying:
            return
        self._applying.add(applying)
        try:
            with one_change():
                self._patches.settle(module.__name__)
            patches, missing = self._find_all(module)
            with one_change():
                if not self._is_on(module):
                    self._patches.put_on(module.__name__, patches)
                    self._applied[module.__name__] = module, getattr(module, "__spec__", None)
                    self._missing[module.__name__] = missing
        finally:
            self._applying.discard(applying)
        driver.attach()

    def _is_on(self, module: ModuleType) -> bool:
        there, spec = self._applied.get(module.__name__, (None, None))
        return there is module and spec is getattr(module, "__spec__", None)

    def _find_all(self, module: ModuleType) -> tuple[list[Patch], list[str]]:
        patches, missing = [], []
        for hook in self.hooks:
            if hook.module != module.__name__:
                continue
            patch = self._find(module, hook)
            if patch is not None:
                patches.append(patch)
            elif hook.optional:
                missing.append(hook.method)
            else:
                raise PatchError(self._moved(module, hook))
        return patches, missing

    @staticmethod
    def _find(module: ModuleType, hook: Hook) -> Patch | None:
        class_name, _, name = hook.method.rpartition(".")
        owner = getattr(module, class_name, None) if class_name else module
        original = vars(owner).get(name) if isinstance(owner, (type, ModuleType)) else None
        kind = type(original) if isinstance(original, (staticmethod, classmethod)) else None
        function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
        if not callable(function):
            return None
        if not hook.wrap and isinstance(function, type):
            raise PatchError(f"{hook.module}.{hook.method} is a class: name a method, such as {hook.method}.__init__")
        make = hook.wrap or functools.partial(in_context, hook=hook)
        if not hook.wrap and (inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function)):
            raise PatchError(
                f"{hook.module}.{hook.method} is a coroutine or a generator: it shares its thread with others, so no "
                "context can be held for it. Hook the functions that it calls"
            )
        ours = make(unbound(function) if isinstance(owner, type) and kind is None else function)
        return Patch(owner, name, original, kind(ours) if kind is not None else ours)

    def _moved(self, module: ModuleType, hook: Hook) -> str:
        version = version_of(module.__name__.partition(".")[0]) or "of unknown version"
        return (
            f"{self.name} {version} has no {hook.method} in {module.__name__}. It works as it is; its threads are "
            "bound by the hooks on nixl_agent and on new threads alone. Please report this version to ctxfix"
        )

    def remove(self) -> None:
        """Undo :meth:`apply` everywhere. Idempotent. What runs already stays bound.

        Raises:
            PatchError: somebody wrapped a method after us; it stays, all others are undone.
        """
        with one_change():
            self._applied.clear()
            self._missing.clear()
            self._patches.take_off()

    def status(self) -> dict[str, dict[str, list[str]]]:
        """By patched module: the methods hooked, and the optional ones that this version lacks."""
        return {
            name: {
                "hooked": list(dict.fromkeys(patch.where for patch in self._patches.of(name))),
                "missing": list(self._missing.get(name, ())),
            }
            for name in self._patches.modules()
        }
