# SPDX-License-Identifier: Apache-2.0
"""NIXL's agents and the memory they register: the hooks on what makes an agent or a backend, and on registration.

Here it is learnt who owns which memory (ctxfix.registry), and what follows from it: the native side follows an agent's
first registration, whole data is seen to, and a wrong device id, or memory that can never take CUDA IPC, is told.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from ctxfix import counters, driver, guard, whole_data
from ctxfix.driver import Owner
from ctxfix.native import agents
from ctxfix.patches import descriptors
from ctxfix.patches.calls import Hook, Noting, argument, context_of_list, context_of_newcomer, in_context, unknown_owner
from ctxfix.registry import Registration, registry

#: By agent: NIXL (1.1.0, 1.4.0) crashes when two threads register or deregister with one agent at once. The hooks
#: stretch these calls and must not make that likelier.
_registering: dict[int, threading.RLock] = {}

#: Whether a post may leave another context current than it found: NIXL 1.4.0 calls cudaSetDevice for each descriptor
#: once it has seen a second GPU or a device id that is not the owner's (libfabric_backend.cpp, cuda_addr_wa_).
nixl_switches = False


# ---- what is learnt --------------------------------------------------------------------------------------------------

_watched: dict[int, weakref.ref[Any]] = {}


def _watch(agent: Any) -> int:
    """The registry's key of ``agent``, whose registrations are forgotten when it dies."""
    key = id(agent)
    if key not in _watched:

        def forget(_: Any) -> None:
            _watched.pop(key, None)
            _registering.pop(key, None)
            registry.forget(key)
            agents.gone(key)

        _watched[key] = weakref.ref(agent, forget)
    return key


def _one_at_a_time(agent: Any) -> threading.RLock:
    lock = _registering.get(id(agent))
    return lock if lock is not None else _registering.setdefault(id(agent), threading.RLock())


def _note_registration(agent: Any, descs: Any) -> None:
    key = _watch(agent)
    start = end = buffer_id = 0
    ipc = True
    owner: Owner | None = None
    found: list[Registration] = []
    try:
        for address, length, device_id in descriptors.rows(descs):
            if not start <= address < end:  # a new allocation: thousands of ranges often share one
                owner = driver.owner_of(address)
                buffer_id = driver.buffer_id(address)
                start, end = driver.extent_of(address)
                if owner is not None:
                    whole_data.apply(address)
                    ipc = driver.takes_ipc(address)
            if owner is None:
                unknown_owner(address)
                continue
            if length > 0:
                found.append(Registration(address, address + length, owner, buffer_id))
            if not ipc:
                _no_ipc(address, owner)
            if not owner.recorded:
                counters.count("device_fallbacks")
            _check_device_id(address, device_id, owner)
    finally:
        # All at once: in no order, one by one takes five times as long. Also what came before a failure.
        registry.add_all(key, found)
        counters.count("registered_ranges", len(found))
    global nixl_switches
    if len(registry.contexts()) > 1:  # not `|=`: what another thread sets meanwhile would be lost
        nixl_switches = True


def _has_one_wrong_device_id(memory: Any) -> bool:
    """Whether the application gives all of a list one device id, and that is not the device of its memory."""
    address, _, device_id = next(descriptors.rows(memory))
    owner = driver.owner_of(address)
    if owner is None or owner.device == device_id:
        return False
    return all(row[2] == device_id for row in descriptors.rows(memory))


def _no_ipc(address: int, owner: Owner) -> None:
    counters.count("ranges_without_ipc")
    guard.warn_once(
        "no_ipc",
        f"ctxfix: memory at {address:#x} on device {owner.device} can never take CUDA IPC (it is VMM memory or from a "
        "memory pool), so transfers inside the node go through host memory. With PyTorch set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False.",
    )


def _check_device_id(address: int, device_id: int, owner: Owner) -> None:
    global nixl_switches
    if device_id == owner.device:
        return
    nixl_switches = True
    counters.count("wrong_device_ids")
    guard.warn_once(
        "wrong_device_id",
        f"ctxfix: the application gives device id {device_id} for memory at {address:#x}, which is on device "
        f"{owner.device} of this process. ctxfix goes by the address, but NIXL trusts the id: pass the ordinal of the "
        "device that owns the memory, not the TP rank.",
    )


# ---- hooks ----------------------------------------------------------------------------------------------------------


def hooks(vram: Any) -> dict[str, Hook]:
    """wrapt wrappers of nixl_agent's methods by name; ``vram`` is NIXL's VRAM_SEG."""

    def making(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The thread that makes an agent or a backend hands its context on to what NIXL starts.
        driver.attach()

        def make() -> Any:
            # An agent that is being made may have got the id of one that is gone.
            with agents.starting(id(agent), new=getattr(wrapped, "__name__", "") == "__init__"):
                return wrapped(*args, **kwargs)

        result = in_context("nixl_agent.create_backend", context_of_newcomer, make)
        driver.attach()  # NIXL's plugins load libcuda
        return result

    def register_memory(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory, mem_type = argument(args, kwargs, 0, "reg_list"), argument(args, kwargs, 1, "mem_type")

        def context() -> int:
            owner = context_of_list(memory, mem_type, vram)
            if owner:
                agents.follow(id(agent), owner)
                agents.hold(_has_one_wrong_device_id(memory))
            return owner

        try:
            with _one_at_a_time(agent):
                descs = in_context("nixl_agent.register_memory", context, wrapped, args, kwargs)
        finally:
            agents.hold(False)
        with Noting("nixl_agent.register_memory"):
            if descs is not None and descriptors.is_gpu(descs, None, vram):
                _note_registration(agent, descs)
        return descs

    def deregister_memory(wrapped: Hook, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = argument(args, kwargs, 0, "dereg_list")
        where = "nixl_agent.deregister_memory"
        with _one_at_a_time(agent):
            result = in_context(where, lambda: context_of_list(memory, None, vram), wrapped, args, kwargs)
        with Noting(where):
            if descriptors.is_gpu(memory, None, vram):
                registry.remove_all(id(agent), (row[:2] for row in descriptors.rows(memory)))
                agents.forget(id(agent))
        return result

    return {
        "__init__": making,
        "create_backend": making,
        "register_memory": register_memory,
        "deregister_memory": deregister_memory,
    }


def _after_fork() -> None:
    # The parent's GPU memory is not the child's: nothing that was learnt about it holds.
    global nixl_switches
    _registering.clear()  # another thread of the parent may have been inside
    _watched.clear()
    nixl_switches = False


os.register_at_fork(after_in_child=_after_fork)
