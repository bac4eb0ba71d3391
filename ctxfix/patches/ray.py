# SPDX-License-Identifier: Apache-2.0
"""Ray: the threads of an actor receive tensors on the actor's own GPU.

Read in ray.experimental.rdt and ray._private.function_manager of 2.56 and 2.60. Ray's C++ core makes the threads of
concurrency groups (``_ray_system``, where the tensors of task arguments arrive) and of ``max_concurrency``, so no hook
of Python threads sees them start, and nothing in Ray chooses a device on them. ``NixlTensorTransport`` then allocates
its receive buffers with ``device="cuda"``, which is GPU 0 on such a thread. Where Ray shows an actor one GPU that is
right by luck; with several visible (``num_gpus=2``, RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES) it is not.

- Each method that runs on a thread of an actor without a context binds that thread to the actor's home, for good.
- The home is what the actor's main thread had current when its last method ended; else the GPU that Ray assigned, if it
  is one; else the only GPU with registered memory or with a context, if Ray did not assign others.
- ``fetch_multiple_tensors`` and the allocation for ``set_target_device_for_ref`` do the same for the length of a call:
  that is ``ray.get`` on a thread of the program's own, and in a driver.

A thread that has a context keeps it. If nobody has made a context on the assigned GPU yet, torch is told to allocate
there: it would make one anyway, on GPU 0.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ctxfix import affinity, counters, driver, guard, threads
from ctxfix.errors import DriverError
from ctxfix.patches.host import Hook, Host

EXECUTORS = "ray._private.function_manager"
TRANSPORT = "ray.experimental.rdt.nixl_tensor_transport"
UTIL = "ray.experimental.rdt.util"

# ---- the actor's home ------------------------------------------------------------------------------------------------

_main_context = 0  # what the main thread had current when its last actor method ended


def assigned() -> list[int]:
    """The GPUs that Ray assigned to this actor or task, as ordinals of this process; empty: none, or unknown."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:  # a driver is assigned none
        return []
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [name.strip() for name in shown.split(",")] if shown is not None else None
    ordinals = []
    for name in map(str, ray.get_gpu_ids()):
        if visible is not None and name in visible:
            ordinals.append(visible.index(name))
        elif visible is None and name.isdigit():
            ordinals.append(int(name))
    return ordinals


def home() -> int:
    """The context of the actor's own GPU; 0: unknown, or nobody has made one yet."""
    if _main_context and driver.device_of(_main_context) >= 0:
        return _main_context
    devices = assigned()
    if len(devices) == 1:
        return driver.primary_context(devices[0])
    context = affinity.preferred()
    return context if not devices or driver.device_of(context) in devices else 0


# ---- Ray's own threads -----------------------------------------------------------------------------------------------


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _remember_main(method: str) -> None:
    """Keep what a method that has run on the main thread left current. Never raises outside strict mode."""
    global _main_context
    try:
        # Looking for libcuda costs more than a task should, so it is looked for when it is likely to have come.
        if not driver.attached() and not ((method == "__init__" or _torch_is_on()) and driver.attach()):
            return
        _main_context = driver.current() or _main_context
    except Exception as error:  # noqa: BLE001 - the method has succeeded
        guard.failed("ray actor's main thread", error)


def _torch_is_on() -> bool:
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def _bind_this_thread() -> None:
    """Bind a thread that Ray made, if it has no context, to the actor's home, for good."""
    try:
        if not driver.attached() or driver.current() or threads.green():
            return
        context = home()
        if context:
            driver.set_current(context)
            counters.count("threads_bound")
    except DriverError as error:
        guard.warn_once("ray_thread", f"ctxfix: a thread of a Ray actor stays unbound: {error}")
        counters.count("hook_failures")
    except Exception as error:  # noqa: BLE001 - the method must run
        guard.failed("ray actor's thread", error)


def _making_executors(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_make_actor_method_executor(self, method_name, method)``, which makes what runs a method of an actor."""

    @functools.wraps(original)
    def make(self: Any, method_name: str, method: Any) -> Any:
        executor = original(self, method_name, method)

        @functools.wraps(executor)  # Ray reads the attributes `name` and `method` of an executor
        def execute(*args: Any, **kwargs: Any) -> Any:
            if not _on_main_thread():
                _bind_this_thread()
                return executor(*args, **kwargs)
            try:
                return executor(*args, **kwargs)
            finally:
                _remember_main(method_name)

        return execute

    return make


# ---- receiving -------------------------------------------------------------------------------------------------------


class _AtHome:
    """A block that allocates with ``device="cuda"``: on a thread without a context, on the actor's own GPU.

    Afterwards the thread has no context again, unless somebody chose or made one meanwhile.
    """

    def __init__(self) -> None:
        self._entered = 0  # the context that we made current
        self._before: int | None = None  # torch's device before, if torch was told instead

    def __enter__(self) -> None:
        try:
            if not driver.attach() or driver.current():
                return
            context = home()
            if context:
                affinity.enter(context)
                self._entered = context
            else:
                self._tell_torch()
        except Exception as error:  # noqa: BLE001 - the transfer must go on
            guard.failed("receiving an RDT object", error)

    def _tell_torch(self) -> None:
        # Neither this nor we make a context: torch keeps the number, and makes one when it allocates, as it would
        # anyway. torch.cuda.device() would make it at once.
        torch: Any = sys.modules.get("torch")
        exchange = getattr(getattr(torch, "cuda", None), "_maybe_exchange_device", None)
        devices = assigned()
        if exchange is not None and len(devices) == 1 and torch.cuda.is_available():
            self._before = exchange(devices[0])

    def __exit__(self, *_: object) -> None:
        try:
            if self._entered and driver.current() == self._entered:
                affinity.leave(0)
            # If torch has made a context meanwhile, the thread keeps it, as it would have kept that of GPU 0.
            if self._before is not None and not driver.current():
                sys.modules["torch"].cuda._maybe_exchange_device(self._before)
        except Exception as error:  # noqa: BLE001 - the tensors are there
            guard.failed("receiving an RDT object", error)


def _fetching(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fetch_multiple_tensors(self, obj_id, tensor_transport_metadata, …)``."""

    @functools.wraps(original)
    def fetch_multiple_tensors(self: Any, obj_id: str, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(metadata, "tensor_device", None) != "cuda":
            return original(self, obj_id, metadata, *args, **kwargs)
        with _AtHome():
            return original(self, obj_id, metadata, *args, **kwargs)

    return fetch_multiple_tensors


def _allocating(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``create_empty_tensors_from_metadata(tensor_transport_meta, device=None)``."""

    @functools.wraps(original)
    def create_empty_tensors_from_metadata(metadata: Any, *args: Any, **kwargs: Any) -> Any:
        device = args[0] if args else kwargs.get("device")  # not in 2.56
        # A device with an index says itself where the memory is to be.
        if str(device or getattr(metadata, "tensor_device", None)) != "cuda":
            return original(metadata, *args, **kwargs)
        with _AtHome():
            return original(metadata, *args, **kwargs)

    return create_empty_tensors_from_metadata


# ---- on and off ------------------------------------------------------------------------------------------------------

_host = Host(
    "Ray",
    [
        # Without it there is still what follows, for the receive buffers.
        Hook(EXECUTORS, "FunctionActorManager._make_actor_method_executor", wrap=_making_executors, optional=True),
        Hook(TRANSPORT, "NixlTensorTransport.fetch_multiple_tensors", wrap=_fetching),
        Hook(UTIL, "create_empty_tensors_from_metadata", wrap=_allocating, optional=True),
    ],
)
apply, remove, status = _host.apply, _host.remove, _host.status
