# SPDX-License-Identifier: Apache-2.0
"""What a patch has replaced, and how it is put back: only where ours still stands, naming where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def put_back(applied: Mapping[str, Iterable[Patch]]) -> None:
    """Put the originals back, by module.

    Raises:
        PatchError: somebody wrapped a method after us; it stays, all others are undone.
    """
    stuck = []
    for module, patches in applied.items():
        for patch in patches:
            if vars(patch.owner).get(patch.name) is patch.ours:
                setattr(patch.owner, patch.name, patch.original)
            else:
                stuck.append(f"{module}.{patch.where}")
    if stuck:
        raise PatchError(
            f"somebody wrapped {', '.join(stuck)} after ctxfix, so it cannot be taken out from under: remove the other "
            "wrapper first. Everything else is undone"
        )
