# SPDX-License-Identifier: Apache-2.0
"""Ray's patch on fake GPUs, with modules shaped like Ray's. Real Ray under it: integration/ray."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_cuda import FakeCuda

from ctxfix import counters, driver
from ctxfix.errors import PatchError
from ctxfix.patches import ray as patch
from ctxfix.registry import registry

CUDA = types.SimpleNamespace(tensor_device="cuda")


@pytest.fixture(autouse=True)
def own_main_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "_main_context", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This process is an actor to which Ray assigned GPUs, or a driver."""

    def be(*gpus: object, mode: int = 1) -> None:
        context = types.SimpleNamespace(worker=types.SimpleNamespace(mode=mode))
        ray = types.SimpleNamespace(
            WORKER_MODE=1,
            is_initialized=lambda: True,
            get_gpu_ids=lambda: list(gpus),
            get_runtime_context=lambda: context,
        )
        monkeypatch.setitem(sys.modules, "ray", ray)

    return be


@pytest.fixture
def modules(cuda: FakeCuda) -> Iterator[types.SimpleNamespace]:
    """Ray's three modules, patched; ``seen`` gets the context of what ran."""
    seen: list[int] = []

    class FunctionActorManager:
        def _make_actor_method_executor(self, method_name: str, method: Any) -> Any:
            def executor(actor: Any, *args: Any) -> Any:
                return method(actor, *args)

            executor.name, executor.method = method_name, method
            return executor

    class NixlTensorTransport:
        def fetch_multiple_tensors(
            self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
        ) -> str:
            seen.append(cuda.current())
            return obj_id

    def create_empty_tensors_from_metadata(tensor_transport_meta: Any, device: Any = None) -> Any:
        seen.append(cuda.current())
        return device

    made = []
    for name, content in (
        (patch.EXECUTORS, {"FunctionActorManager": FunctionActorManager}),
        (patch.TRANSPORT, {"NixlTensorTransport": NixlTensorTransport}),
        (patch.UTIL, {"create_empty_tensors_from_metadata": create_empty_tensors_from_metadata}),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        patch.apply(module)
        made.append(module)
    executors, transport, util = made
    yield types.SimpleNamespace(
        seen=seen,
        fetch=transport.NixlTensorTransport().fetch_multiple_tensors,
        allocate=lambda *args: util.create_empty_tensors_from_metadata(*args),
        executor=executors.FunctionActorManager()._make_actor_method_executor,
        all=made,
    )
    patch.remove()


def elsewhere(work: Callable[[], Any]) -> Any:
    """``work`` on a bare thread, as Ray's are: _thread's, which no hook of Python threads sees."""
    import _thread

    done, result = threading.Event(), []

    def run() -> None:
        try:
            result.append(work())
        finally:
            done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(10)
    return result[0]


# ---- the actor's home ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "visible", "ordinals"),
    [
        ([1], None, [1]),
        (["1", "3"], "1,3", [0, 1]),
        ([3], "1, 3", [1]),
        (["GPU-b"], "GPU-a,GPU-b", [1]),
        (["GPU-b"], None, []),
        ([0], "", []),
        ([], "0", []),
    ],
)
def test_assigned_gpus_as_ordinals(
    actor: Callable[..., None], monkeypatch: pytest.MonkeyPatch, ids: list, visible: str | None, ordinals: list
) -> None:
    actor(*ids)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert patch.assigned() == ordinals


def test_a_driver_is_assigned_nothing(actor: Callable[..., None]) -> None:
    actor(1, mode=0)
    assert patch.assigned() == []


def test_without_ray_nothing_is_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert patch.assigned() == []


def test_home_is_the_assigned_gpu(cuda: FakeCuda, actor: Callable[..., None]) -> None:
    actor(2)
    assert patch.home() == cuda.contexts[2]


def test_home_is_first_what_the_main_thread_chose(
    cuda: FakeCuda, actor: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor(1, 2, 3)
    monkeypatch.setattr(patch, "_main_context", cuda.contexts[3])
    assert patch.home() == cuda.contexts[3]


def test_a_main_context_that_was_destroyed_is_no_home(
    cuda: FakeCuda, actor: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor(1)
    dead = cuda.create_context(2)
    cuda.destroy_context(dead)
    monkeypatch.setattr(patch, "_main_context", dead)
    assert patch.home() == cuda.contexts[1]


def test_home_among_several_is_where_memory_is_registered(cuda: FakeCuda, actor: Callable[..., None]) -> None:
    actor(1, 2)
    assert patch.home() == 0  # four GPUs have contexts: nothing tells
    address = cuda.alloc(2)
    registry.add(1, address, 1, driver.owner_of(address))
    assert patch.home() == cuda.contexts[2]


def test_home_is_never_a_gpu_that_ray_did_not_assign(cuda: FakeCuda, actor: Callable[..., None]) -> None:
    actor(1, 2)
    address = cuda.alloc(0)
    registry.add(1, address, 1, driver.owner_of(address))
    assert patch.home() == 0


# ---- Ray's own threads -----------------------------------------------------------------------------------------------


def test_a_method_binds_the_thread_it_runs_on(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(1)
    execute = modules.executor("take", lambda self, x: (x, cuda.current()))
    before = counters.snapshot()["threads_bound"]
    assert elsewhere(lambda: (execute(None, 5), cuda.current())) == ((5, cuda.contexts[1]), cuda.contexts[1])
    assert counters.snapshot()["threads_bound"] == before + 1


def test_a_thread_that_has_a_context_keeps_it(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(1)
    execute = modules.executor("take", lambda self: cuda.current())
    assert elsewhere(lambda: (cuda.make_current(3), execute(None))[1]) == cuda.contexts[3]


def test_the_main_threads_choice_is_remembered(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(1, 2)
    modules.executor("__init__", lambda self: cuda.make_current(2))(None)
    assert cuda.current() == cuda.contexts[2]
    cuda.make_current(None)
    assert elsewhere(lambda: modules.executor("take", lambda self: cuda.current())(None)) == cuda.contexts[2]
    modules.executor("take", lambda self: None)(None)  # a main thread that has none now tells nothing new
    assert patch.home() == cuda.contexts[2]


def test_the_main_thread_itself_is_not_bound(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(1)
    assert modules.executor("take", lambda self: cuda.current())(None) == 0


def test_executors_keep_what_ray_reads_and_what_they_raise(modules: types.SimpleNamespace) -> None:
    def method(self: Any) -> None:
        raise KeyError("mine")

    execute = modules.executor("fail", method)
    assert (execute.name, execute.method) == ("fail", method)
    with pytest.raises(KeyError, match="mine"):
        execute(None)


def test_a_driver_that_refuses_leaves_the_thread_alone(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(1)
    cuda.fail("cuCtxSetCurrent", 999)
    assert elsewhere(lambda: modules.executor("take", lambda self: 7)(None)) == 7
    assert elsewhere(lambda: modules.fetch("id", CUDA, None)) == "id"


# ---- receiving -------------------------------------------------------------------------------------------------------


def test_a_bare_thread_receives_at_home_and_is_bare_afterwards(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(2)
    assert elsewhere(lambda: (modules.fetch("id", CUDA, None), cuda.current())) == ("id", 0)
    assert elsewhere(lambda: (modules.allocate(CUDA), cuda.current())) == (None, 0)
    assert elsewhere(lambda: modules.allocate(types.SimpleNamespace(tensor_device="cpu"), "cuda")) == "cuda"
    assert modules.seen == [cuda.contexts[2]] * 3


def test_whoever_has_a_context_receives_in_it(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(2)
    cuda.make_current(1)
    modules.fetch("id", CUDA, None)
    modules.allocate(CUDA)
    assert modules.seen == [cuda.contexts[1]] * 2
    assert cuda.current() == cuda.contexts[1]


def test_host_memory_and_devices_with_an_index_are_left_alone(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace
) -> None:
    actor(2)
    modules.fetch("id", types.SimpleNamespace(tensor_device="cpu"), None)
    modules.allocate(CUDA, "cuda:1")
    modules.allocate(CUDA, "cpu")
    assert modules.seen == [0] * 3


def test_where_nobody_has_made_a_context_torch_is_told(
    cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor(1)
    monkeypatch.setattr(driver, "primary_context", lambda device: 0)
    told = [0]

    def exchange(device: int) -> int:
        told.append(device)
        return told[-2]

    torch_cuda = types.SimpleNamespace(is_available=lambda: True, _maybe_exchange_device=exchange)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=torch_cuda))
    modules.fetch("id", CUDA, None)
    assert told == [0, 1, 0]
    assert cuda.current() == 0


def test_the_context_that_torch_makes_stays(
    cuda: FakeCuda, actor: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch told to go back to a GPU without a context would say 0 from then on, whatever is current."""
    actor(1)
    told = []
    torch_cuda = types.SimpleNamespace(is_available=lambda: True, _maybe_exchange_device=lambda d: told.append(d) or 0)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=torch_cuda))
    monkeypatch.setattr(driver, "primary_context", lambda device: 0)
    with patch._AtHome():
        cuda.make_current(1)
    assert told == [1]
    assert cuda.current() == cuda.contexts[1]


# ---- on and off ------------------------------------------------------------------------------------------------------


def test_taken_off(cuda: FakeCuda, actor: Callable[..., None], modules: types.SimpleNamespace) -> None:
    actor(1)
    assert sum(len(methods["hooked"]) for methods in patch.status().values()) == 3
    patch.remove()
    patch.remove()
    assert patch.status() == {}
    modules.fetch = modules.all[1].NixlTensorTransport().fetch_multiple_tensors
    modules.fetch("id", CUDA, None)
    assert modules.seen == [0]


def test_a_ray_without_the_transports_method_is_named(cuda: FakeCuda) -> None:
    module = types.ModuleType(patch.TRANSPORT)
    with pytest.raises(PatchError, match="has no NixlTensorTransport.fetch_multiple_tensors in ray.experimental.rdt"):
        patch.apply(module)
