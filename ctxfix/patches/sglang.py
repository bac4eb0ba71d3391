# SPDX-License-Identifier: Apache-2.0
"""SGLang: the KV managers of prefill and decode work in the context of the memory that holds their KV cache.

Read in sglang.srt.disaggregation of 0.5.12.post1 to 0.5.23. No transfer thread of SGLang chooses a device, whatever
its backend. The generic hooks do most of what that needs:

- every call of nixl_agent, on whatever thread, runs in the context of the memory at hand (ctxfix.patches.nixl). That is
  what the posts of ``transfer_worker`` need, the peers that ``bootstrap_thread``, ``bootstrap_thread_guarded`` and
  ``_reload_invalidated_peers`` prepare, the backend that 0.5.23 makes on a thread of its own, the notifications that
  decode polls for, and HiCache's NIXL storage (whose memory is the host's);
- every new Python thread starts in the only context that owns registered memory, else in its starter's
  (ctxfix.threads): the threads that listen, check heartbeats and scatter, and the executors of Mooncake's workers.

Both go by what NIXL was told. This patch goes by what SGLang knows: ``kv_args`` names the KV buffers, and their
address names the owner (``gpu_id`` is asked only where an address does not tell). So it adds, for each backend:

- the constructor runs in the owner's context: all that it starts before the first registration, or where NIXL is not
  used at all, has the right parent;
- the threads that move data are bound to the owner when they start. That serves the CUDA calls which are not NIXL's:
  the copies through staging buffers, Mooncake's and mori's engines, and a process that owns several GPUs, where no
  single context is recorded and the starter's may be another manager's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

from ctxfix import _startup, affinity, counters, driver, guard, threads
from ctxfix.errors import PatchError
from ctxfix.patches.host import give_back

Hook = Callable[..., Any]


class _Manager(NamedTuple):
    """A KV manager's class, and those of its methods that are the whole life of a thread which moves data."""

    name: str
    workers: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # workers that not every supported version has


#: Where SGLang keeps them. Ascend's manager is a subclass of Mooncake's and meets no CUDA.
MANAGERS: dict[str, _Manager] = {
    "sglang.srt.disaggregation.nixl.conn": _Manager("NixlKVManager", ("transfer_worker",)),
    "sglang.srt.disaggregation.mooncake.conn": _Manager("MooncakeKVManager", ("transfer_worker",)),
    # Before its workers came, mori posted on the scheduler's thread, which has the right context.
    "sglang.srt.disaggregation.mori.conn": _Manager("MoriKVManager", (), ("_transfer_worker", "_drain_worker")),
}


# ---- whose memory it is ----------------------------------------------------------------------------------------------


def _addresses(kv_args: Any) -> Iterator[int]:
    """The first address of each KV buffer, then of each state buffer: models without attention have only those."""
    yield from getattr(kv_args, "kv_data_ptrs", None) or ()
    for pointers in getattr(kv_args, "state_data_ptrs", None) or ():
        yield from pointers if isinstance(pointers, (list, tuple)) else (pointers,)


def context_of(kv_args: Any) -> int:
    """The context that owns a manager's KV buffers, of which some may be host memory; 0: unknown, leave it alone.

    Where no address tells, it is the primary context of ``gpu_id``, if somebody has made it.
    """
    if not driver.attach():
        return 0
    for address in _addresses(kv_args):
        owner = affinity.owner_at(int(address))
        if owner is not None:
            return owner.context
    gpu_id = getattr(kv_args, "gpu_id", None)
    return driver.primary_context(int(gpu_id)) if gpu_id is not None else 0


# ---- hooks -----------------------------------------------------------------------------------------------------------


def _constructor(original: Hook, where: str) -> Hook:
    """``__init__(self, args, …)`` in the context of the owner of ``args``' buffers."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        context, before = 0, None
        try:
            try:
                context = context_of(args[0] if args else kwargs.get("args"))
                before = affinity.enter(context)
            except Exception as error:  # noqa: BLE001 - SGLang must go on
                guard.failed(where, error)
            original(self, *args, **kwargs)
        finally:
            # If SGLang itself chose a device meanwhile, as for its staging buffers, its choice stays.
            if before is not None:
                try:
                    give_back(before, context)
                except BaseException:  # a signal, before it had begun: it comes once
                    give_back(before, context)
                    raise

    return __init__


def _worker(original: Hook, where: str) -> Hook:
    """The main method of a thread, which is bound to the owner of its manager's buffers until it ends."""

    @functools.wraps(original)
    def worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = None
        try:
            try:
                # Greenlets share one thread: binding one of them would bind them all.
                if not threads.green():
                    before = affinity.enter(context_of(self.kv_args))
                    if before is not None:
                        counters.count("threads_bound")
            except Exception as error:  # noqa: BLE001 - SGLang must go on
                guard.failed(where, error)
            return original(self, *args, **kwargs)
        finally:
            if before is not None:
                affinity.leave(before)

    return worker


# ---- on and off ------------------------------------------------------------------------------------------------------


class _Patch(NamedTuple):
    owner: type
    name: str
    original: Hook
    ours: Hook


_applied: dict[str, list[_Patch]] = {}


def apply(module: ModuleType) -> None:
    """Hook the KV manager of ``module``, one of :data:`MANAGERS`. Idempotent.

    Raises:
        PatchError: the class or a method of it is not where it was; nothing was changed.
    """
    manager = MANAGERS[module.__name__]
    owner = getattr(module, manager.name, None)
    done = _applied.get(module.__name__)
    if done is not None and done[0].owner is owner:
        return
    if not isinstance(owner, type):
        raise PatchError(_moved(module, manager.name))
    hooks: list[tuple[str, Callable[[Hook, str], Hook]]] = [("__init__", _constructor)]
    hooks += [(name, _worker) for name in manager.workers]
    hooks += [(name, _worker) for name in manager.optional if name in owner.__dict__]
    patches = []
    for name, make in hooks:
        original = owner.__dict__.get(name)
        if not callable(original):
            raise PatchError(_moved(module, f"{manager.name}.{name}"))
        patches.append(_Patch(owner, name, original, make(original, f"{manager.name}.{name}")))
    for patch in patches:
        setattr(patch.owner, patch.name, patch.ours)
    _applied[module.__name__] = patches


def _moved(module: ModuleType, what: str) -> str:
    return (
        f"SGLang {_version() or 'of unknown version'} has no {what} in {module.__name__}. SGLang works as it is; its "
        "threads are bound by the hooks on nixl_agent and on new threads alone. Please report this version to ctxfix"
    )


def remove() -> None:
    """Undo :func:`apply` everywhere. Idempotent. Threads that run already stay bound.

    Raises:
        PatchError: somebody wrapped a method after us; it stays, all others are undone.
    """
    stuck = []
    for name, patches in list(_applied.items()):
        for patch in patches:
            if patch.owner.__dict__.get(patch.name) is patch.ours:
                setattr(patch.owner, patch.name, patch.original)
            else:
                stuck.append(f"{name}.{patch.owner.__name__}.{patch.name}")
        del _applied[name]
    if stuck:
        raise PatchError(
            f"somebody wrapped {', '.join(stuck)} after ctxfix, so it cannot be taken out from under: remove the other "
            "wrapper first. Everything else is undone"
        )


def status() -> dict[str, list[str]]:
    """By patched module: the methods hooked."""
    return {name: [f"{p.owner.__name__}.{p.name}" for p in patches] for name, patches in _applied.items()}


# ---- SGLang's plugin group -------------------------------------------------------------------------------------------


def plugin() -> None:
    """Activate ctxfix, as SGLang's plugin: it calls this early in each of its processes. CTXFIX_DISABLE wins."""
    _startup.install()
    if _startup.installed() and _startup.started_by == "import ctxfix":  # SGLang's loader has just imported us
        _startup.started_by = "SGLang plugin"


def _version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None
