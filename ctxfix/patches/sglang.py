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

A manager that is made also tells which rank of prefill or decode its process is, for what is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ctxfix import _startup, guard
from ctxfix.evidence import identity
from ctxfix.patches.host import Device, Hook, Host, in_context

NIXL = "sglang.srt.disaggregation.nixl.conn"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
MORI = "sglang.srt.disaggregation.mori.conn"
SOURCE = "SGLang's KV manager"  # who says which rank a process is


def _buffers(kv_args: Any) -> Iterator[Any]:
    """The first address of each KV buffer, of which some may be host memory, then of each state buffer.

    Models without attention have only those.
    """
    yield from getattr(kv_args, "kv_data_ptrs", None) or ()
    for pointers in getattr(kv_args, "state_data_ptrs", None) or ():
        yield from pointers if isinstance(pointers, (list, tuple)) else (pointers,)
    gpu_id = getattr(kv_args, "gpu_id", None)
    if gpu_id is not None:
        yield Device(gpu_id)


def _of_args(_: Any, args: Any = None, *__: Any, **___: Any) -> Iterator[Any]:
    """For ``__init__(self, args, …)``."""
    return _buffers(args)


def _of_manager(manager: Any, *_: Any, **__: Any) -> Iterator[Any]:
    return _buffers(manager.kv_args)


def _declare(manager: Any) -> None:
    """Say which rank of how many this process is. TP ranks are laid out so in SGLang's layers/dp_attention.py.

    ``kv_args.engine_rank`` would not do: in decode it is the rank within attention's TP group.
    """
    if identity.current().source == "declared":  # the program itself has said so
        return
    world = manager.attn_dp_size * manager.attn_cp_size * manager.attn_tp_size
    rank = manager.attn_dp_rank * manager.attn_cp_size + manager.attn_cp_rank
    rank = rank * manager.attn_tp_size + manager.attn_tp_rank
    rank += manager.pp_rank * world
    world *= manager.pp_size
    if manager.attn_dp_size == 1:  # else these are the same data-parallel ranks
        rank += manager.system_dp_rank * world
        world *= manager.system_dp_size
    identity.declare(rank, world, manager.disaggregation_mode.value, SOURCE)


def _declaring(original: Callable[..., None]) -> Callable[..., None]:
    """A constructor that tells the rank when it is through."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            _declare(self)
        except Exception as error:  # noqa: BLE001 - the manager is made
            guard.failed("the rank of SGLang's KV manager", error)

    return __init__


def _constructor(module: str, method: str) -> Hook:
    in_owner = Hook(module, method, _of_args)
    return Hook(module, method, wrap=lambda original: in_context(_declaring(original), in_owner))


_host = Host(
    "SGLang",
    [
        _constructor(NIXL, "NixlKVManager.__init__"),
        Hook(NIXL, "NixlKVManager.transfer_worker", _of_manager, thread=True),
        # Ascend's manager is a subclass of Mooncake's and meets no CUDA.
        _constructor(MOONCAKE, "MooncakeKVManager.__init__"),
        Hook(MOONCAKE, "MooncakeKVManager.transfer_worker", _of_manager, thread=True),
        # Before its workers came, mori posted on the scheduler's thread, which has the right context.
        _constructor(MORI, "MoriKVManager.__init__"),
        Hook(MORI, "MoriKVManager._transfer_worker", _of_manager, thread=True, optional=True),
        Hook(MORI, "MoriKVManager._drain_worker", _of_manager, thread=True, optional=True),
    ],
)
apply, remove, status = _host.apply, _host.remove, _host.status


# ---- SGLang's plugin group -------------------------------------------------------------------------------------------


def plugin() -> None:
    """Activate ctxfix, as SGLang's plugin: it calls this early in each of its processes. CTXFIX_DISABLE wins."""
    _startup.install()
    if _startup.installed() and _startup.started_by == "import ctxfix":  # SGLang's loader has just imported us
        _startup.started_by = "SGLang plugin"
