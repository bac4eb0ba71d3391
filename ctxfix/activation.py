# SPDX-License-Identifier: Apache-2.0
"""Switching ctxfix on and off by hand. Importing the package switches on all that most programs need."""

import sys
from importlib import import_module

from ctxfix import _startup
from ctxfix.errors import PatchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctxfix.patches.host import Hook

_NIXL = "ctxfix.patches.nixl"
_SGLANG = "ctxfix.patches.sglang"
_RAY = "ctxfix.patches.ray"
_VLLM = "ctxfix.patches.vllm"


def activate() -> bool:
    """Switch everything on, also what would wait for a host: patches, and the hook of Python threads.

    Idempotent; undoes ``deactivate()`` and ``unpatch_*()``, and tries again what failed.

    Returns:
        Whether ctxfix is on now; CTXFIX_DISABLE wins.

    Raises:
        PatchError: in strict mode only, if an imported host or Python's threads cannot be patched.
    """
    if _startup.off_reason():
        return False
    _startup.unwanted.clear()
    _startup.install()
    for name, outcome in dict(_startup.outcomes).items():
        if outcome != "patched":
            _startup.raise_if_strict(name, _startup.patch_present(name))
    try:
        import_module("ctxfix.affinity")  # the thread hook does nothing without it
        import_module("ctxfix.threads").apply()
    except Exception as error:
        _startup.note_failure("hooking Python threads", error)
        _startup.raise_if_strict("threading", error)
    return True


def deactivate() -> None:
    """Take the import finder, the thread hook, every patch and the hooks of the C extension away. Idempotent.

    Threads that are bound already stay so.

    Raises:
        PatchError: somebody wrapped a patch of ours; that one stays, all else is undone.
    """
    _startup.uninstall()
    problems = []
    for name in (*sorted(set(list(_startup.TARGETS.values()))), "ctxfix.threads"):
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            module.remove()
        except PatchError as error:
            problems.append(str(error))
    native = sys.modules.get("ctxfix.native")
    if native is not None and native.available():
        native.remove()
    if problems:
        raise PatchError("ctxfix is not wholly off. " + " ".join(problems))


def patch_nixl() -> dict[str, str]:
    """Patch NIXL wherever it is imported, now or later. Idempotent.

    Returns:
        For each of NIXL's modules ``patched``, ``pending`` (not imported yet), ``failed: …`` or ``off: …``.

    Raises:
        PatchError: in strict mode only, if a module that is imported cannot be patched.
    """
    return _patch(_NIXL)


def unpatch_nixl() -> dict[str, str]:
    """Take NIXL's patches off and leave later imports of it alone. Idempotent.

    The C extension keeps binding libfabric's calls and NIXL's threads: :func:`deactivate` takes it off, too.

    Returns:
        For each of NIXL's modules ``not patched``.

    Raises:
        PatchError: somebody wrapped a method after us; it stays, all others are undone.
    """
    return _unpatch(_NIXL)


def patch_sglang() -> dict[str, str]:
    """Patch SGLang's KV managers wherever they are imported, now or later. Idempotent.

    NIXL's hooks are apart: :func:`patch_nixl`. Returns and raises as :func:`patch_nixl` does, for SGLang's modules.
    """
    return _patch(_SGLANG)


def unpatch_sglang() -> dict[str, str]:
    """Take the patches of SGLang's KV managers off and leave later imports alone. Idempotent.

    Threads that run already stay bound. Returns and raises as :func:`unpatch_nixl` does, for SGLang's modules.
    """
    return _unpatch(_SGLANG)


def patch_ray() -> dict[str, str]:
    """Have Ray's actors receive tensors on their own GPU, wherever Ray is imported, now or later. Idempotent.

    NIXL's hooks are apart: :func:`patch_nixl`. Returns and raises as :func:`patch_nixl` does, for Ray's modules.
    """
    return _patch(_RAY)


def unpatch_ray() -> dict[str, str]:
    """Take Ray's patches off and leave later imports alone. Idempotent.

    Threads that are bound already stay so. Returns and raises as :func:`unpatch_nixl` does, for Ray's modules.
    """
    return _unpatch(_RAY)


def patch_vllm() -> dict[str, str]:
    """Patch vLLM's NIXL connector and sharded weight transfer wherever they are imported, now or later. Idempotent.

    NIXL's hooks and Ray's are apart. Returns and raises as :func:`patch_nixl` does, for vLLM's modules.
    """
    return _patch(_VLLM)


def unpatch_vllm() -> dict[str, str]:
    """Take vLLM's patches off and leave later imports alone. Idempotent.

    Threads that run already stay bound. Returns and raises as :func:`unpatch_nixl` does, for vLLM's modules.
    """
    return _unpatch(_VLLM)


def patch_host(name: str, *hooks: "Hook") -> dict[str, str]:
    """Have the methods of a host that ctxfix does not know run in the context of their memory. Idempotent.

    Call it in every process, most simply in your package's ``__init__``.

    Args:
        name: the host's, for messages and for :func:`unpatch_host`.
        hooks: a row for each method.

    Returns:
        For each module of ``hooks`` what :func:`patch_nixl` returns for NIXL's.

    Raises:
        PatchError: ``name`` has other hooks already, there are none, one is no ``Hook``, or a module is hooked by
            another host; in strict mode also if a method is not where it should be.
    """
    for hook in hooks:
        if not isinstance(hook, import_module("ctxfix.patches.host").Hook):
            raise PatchError(f"host {name!r}: {hook!r} is no ctxfix.patches.host.Hook; give one a method")
    reason = _startup.off_reason()
    if reason:
        return {hook.module: f"off: {reason}" for hook in hooks}
    modules = import_module("ctxfix.patches.custom").add(name, hooks).modules
    return _patch_modules("ctxfix.patches.custom", modules)


def unpatch_host(name: str) -> dict[str, str]:
    """Take the hooks of ``patch_host(name, …)`` off and forget them. Idempotent.

    Returns:
        For each of its modules ``not patched``.

    Raises:
        PatchError: somebody wrapped a method after us; it stays, all others are undone.
    """
    custom = sys.modules.get("ctxfix.patches.custom")
    return dict.fromkeys(custom.discard(name) if custom is not None else (), "not patched")


def _patch(patch: str) -> dict[str, str]:
    reason = _startup.off_reason()
    names = _targets_of(patch)
    if reason:
        return {name: f"off: {reason}" for name in names}
    return _patch_modules(patch, names)


def _patch_modules(patch: str, names: list[str]) -> dict[str, str]:
    _startup.unwanted.discard(patch)
    _startup.install()
    for name in names:
        _startup.raise_if_strict(name, _startup.patch_present(name))
    return {name: _startup.outcomes.get(name, "pending") for name in names}


def _unpatch(patch: str) -> dict[str, str]:
    _startup.unwanted.add(patch)
    for name in _targets_of(patch):
        _startup.outcomes.pop(name, None)
    module = sys.modules.get(patch)
    if module is not None:
        module.remove()
    return {name: "not patched" for name in _targets_of(patch)}


def _targets_of(patch: str) -> list[str]:
    return [name for name, home in list(_startup.TARGETS.items()) if home == patch]
