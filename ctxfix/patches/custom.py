# SPDX-License-Identifier: Apache-2.0
"""The hosts that other projects add with ``ctxfix.patch_host``: which module belongs to which of them."""

from __future__ import annotations

from types import ModuleType

from ctxfix import _startup
from ctxfix.errors import PatchError
from ctxfix.patches.host import Hook, Host

_hosts: dict[str, Host] = {}


def add(name: str, hooks: tuple[Hook, ...]) -> Host:
    """Have the modules of ``hooks`` hooked when they are imported. Idempotent for the same hooks.

    Raises:
        PatchError: there are no hooks, the name has other ones already, or a module belongs to another host.
    """
    known = _hosts.get(name)
    if known is not None and known.hooks == hooks:
        _startup.TARGETS.update(dict.fromkeys(known.modules, __name__))  # discard() may have failed
        return known
    if known is not None or not hooks:
        why = "has other hooks already: call ctxfix.unpatch_host first" if known else "has no hooks"
        raise PatchError(f"host {name!r} {why}")
    host = Host(name, hooks)
    for module in host.modules:
        if module in _startup.TARGETS:
            other = next(
                (repr(known.name) for known in list(_hosts.values()) if module in known.modules), "ctxfix itself"
            )
            raise PatchError(
                f"host {name!r} cannot hook {module}: {other} hooks it already. A module has one host: give all its "
                "hooks in one patch_host"
            )
    _hosts[name] = host
    _startup.TARGETS.update(dict.fromkeys(host.modules, __name__))
    return host


def discard(name: str) -> list[str]:
    """Take the hooks of a host off and forget it; the modules it had hooks in."""
    host = _hosts.get(name)
    if host is None:
        return []
    for module in host.modules:
        _startup.TARGETS.pop(module, None)
        _startup.outcomes.pop(module, None)
    host.remove()  # if it fails the host stays known, for the next try
    _hosts.pop(name, None)
    return host.modules


def apply(module: ModuleType) -> None:
    """Hook ``module`` for the host that it belongs to."""
    for host in list(_hosts.values()):
        if module.__name__ in host.modules:
            host.apply(module)


def remove() -> None:
    """Take all hooks off; the hosts stay known.

    Raises:
        PatchError: somebody wrapped a method after us; all others are undone.
    """
    problems = []
    for host in list(_hosts.values()):
        try:
            host.remove()
        except PatchError as error:
            problems.append(str(error))
    if problems:
        raise PatchError(" ".join(problems))


def status() -> dict[str, dict[str, list[str]]]:
    """By patched module: the methods hooked, and the optional ones that are missing."""
    return {module: methods for host in list(_hosts.values()) for module, methods in host.status().items()}
