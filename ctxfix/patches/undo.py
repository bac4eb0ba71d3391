# SPDX-License-Identifier: Apache-2.0
"""What a patch has replaced, and how it is put back: only where ours still stands, naming where it does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from ctxfix.errors import PatchError


class Patch(NamedTuple):
    """An attribute of a class or a module that was set to ``ours``."""

    owner: Any
    name: str
    original: Any
    ours: Any

    @property
    def where(self) -> str:
        """As "Class.method", or the name alone for one of a module's own."""
        return f"{self.owner.__name__}.{self.name}" if isinstance(self.owner, type) else self.name

    @property
    def stands(self) -> bool:
        """Whether it is there, and nothing on top of it."""
        return vars(self.owner).get(self.name) is self.ours


_changing = threading.RLock()


def one_change() -> threading.RLock:
    """For a ``with`` block that looks whether a module is patched and patches it: two threads would do it twice."""
    return _changing


class Patches:
    """The patches of one host, by module.

    One that somebody had wrapped when it was to be put back stays on under the wrapper: it is tried again the next
    time, and meanwhile not put on a second time.
    """

    def __init__(self) -> None:
        self._on: dict[str, list[Patch]] = {}
        self._stuck: dict[str, list[Patch]] = {}

    def modules(self) -> list[str]:
        """The modules that have patches."""
        return list({**self._on, **self._stuck})

    def of(self, module: str) -> list[Patch]:
        """The patches that are on in a module."""
        return [*self._stuck.get(module, ()), *self._on.get(module, ())]

    def settle(self, module: str) -> None:
        """Put back what was stuck, where the wrapper is gone: before new patches of the module are made."""
        if module in self._stuck:
            self._stuck[module] = _put_back(self._stuck[module])

    def put_on(self, module: str, patches: Iterable[Patch]) -> None:
        """Set ``patches``. What the module had before it ran anew is kept, to be put back too."""
        stuck = {(id(patch.owner), patch.name) for patch in self._stuck.get(module, ())}
        kept = [patch for patch in self._on.get(module, ()) if patch.stands]
        news = [patch for patch in patches if (id(patch.owner), patch.name) not in stuck]
        for patch in news:
            setattr(patch.owner, patch.name, patch.ours)
        self._on[module] = kept + news

    def take_off(self, *modules: str) -> None:
        """Put the originals back, in all modules if none is named.

        Raises:
            PatchError: somebody wrapped a method after us; it stays, all others are undone.
        """
        stuck = []
        with one_change():
            for module in modules or self.modules():
                left = _put_back([*self._stuck.pop(module, ()), *self._on.pop(module, ())])
                if left:
                    self._stuck[module] = left
                    stuck += [f"{module}.{patch.where}" for patch in left]
        if stuck:
            raise PatchError(
                f"somebody wrapped {', '.join(stuck)} after ctxfix, so it cannot be taken out from under: remove the "
                "other wrapper first. Everything else is undone"
            )


def _put_back(patches: Iterable[Patch]) -> list[Patch]:
    """Put the originals of ``patches`` back; those that are not on top."""
    left = []
    for patch in patches:
        if patch.stands:
            setattr(patch.owner, patch.name, patch.original)
        elif vars(patch.owner).get(patch.name) is not patch.original:
            left.append(patch)
    return left


def _after_fork() -> None:
    global _changing
    _changing = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
