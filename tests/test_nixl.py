# SPDX-License-Identifier: Apache-2.0
"""The hooks around nixl_agent, on a stand-in with NIXL's own signatures that notes the context of every call.

Real NIXL under the same hooks is tested in integration/rig.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import threading
import time
import types
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_nixl import DRAM, METHODS, MIB, VRAM, Boom, DList, Nixl, boom, make_module, one

from ctxfix import counters, driver, settings
from ctxfix.errors import CtxfixError, DriverError, PatchError
from ctxfix.patches import nixl, registration
from ctxfix.patches.host import Hook, Host
from ctxfix.registry import registry

# ---- every method, in the owner's context, and the caller's own afterwards -------------------------------------------


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("caller", [None, 0, 1], ids=["no context", "wrong context", "right context"])
@pytest.mark.parametrize("method", METHODS)
def test_call_runs_in_the_owners_context(
    host: Nixl, cuda: FakeCuda, method: str, caller: int | None, raises: bool
) -> None:
    address = cuda.alloc(1)
    agent = host.agent()
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    cuda.make_current(caller)
    before = cuda.depth(), cuda.current()

    # What NIXL itself does to the thread is undone too: 1.4.0 sets a context and leaves it (libfabric_backend.cpp).
    host.on(method, boom if raises else lambda: None)
    try:
        METHODS[method](agent, address, handle)
    except Boom:
        assert raises
    else:
        assert not raises
    assert host.context_of(method) == cuda.contexts[1]
    assert (cuda.depth(), cuda.current()) == before
    assert host.counted_since("hook_failures") == host.counted_since("unknown_owners") == 0


@pytest.mark.parametrize("method", ["__init__", "create_backend"])
def test_making_runs_in_the_only_recorded_context_if_the_thread_has_none(
    host: Nixl, cuda: FakeCuda, method: str
) -> None:
    first = host.agent()
    first.register_memory([(cuda.alloc(1), MIB, 1, "")], "VRAM")
    make = host.agent if method == "__init__" else lambda: first.create_backend("LIBFABRIC")
    make()
    assert host.context_of(method) == cuda.contexts[1] and cuda.depth() == 0
    cuda.make_current(2)
    make()
    assert host.context_of(method) == cuda.contexts[2], "a context that the thread has is the application's choice"


def test_what_nixl_leaves_current_is_undone(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    host.on("register_memory", lambda: cuda.make_current(1))
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    assert cuda.depth() == 0


# ---- descriptors -----------------------------------------------------------------------------------------------------


def forms(address: int) -> dict[str, Any]:
    return {
        "tuples": [(address, 4096, 1, "")],
        "uint64 array": np.array([(address, 4096, 1)], dtype=np.uint64),
        "int64 array": np.array([(address, 4096, 1)], dtype=np.int64),
        "dlist": one(address),
    }


@pytest.mark.parametrize("form", ["tuples", "uint64 array", "int64 array", "dlist"])
def test_registration_is_learnt_from_every_form(host: Nixl, cuda: FakeCuda, form: str) -> None:
    address = cuda.alloc(1)
    agent = host.agent()
    descs = agent.register_memory(forms(address)[form], "VRAM")
    assert registry.contexts_of(id(agent)) == (cuda.contexts[1],) and len(registry) == 1
    agent.deregister_memory(descs)
    assert len(registry) == 0


def test_a_thousand_ranges_of_one_allocation_ask_the_driver_once(host: Nixl, cuda: FakeCuda) -> None:
    address = cuda.alloc(1, 4 * MIB)
    calls = cuda.calls("cuPointerGetAttribute")
    agent = host.agent()
    agent.register_memory([(address + 4096 * i, 4096, 1, "") for i in range(1000)], "VRAM")
    assert len(registry) == 1000 and cuda.calls("cuPointerGetAttribute") - calls < 20


@pytest.mark.parametrize("indices", [[3, 0], np.array([3, 0], dtype=np.int32)], ids=["list", "int32 array"])
def test_a_prepared_transfer_goes_by_the_first_selected_descriptor(host: Nixl, cuda: FakeCuda, indices: Any) -> None:
    gpu0, gpu1 = cuda.alloc(0), cuda.alloc(1)
    agent = host.agent()
    agent.register_memory([(gpu0, MIB, 0, ""), (gpu1, MIB, 1, "")], "VRAM")
    rows = [(gpu0, 64, 0), (gpu0 + 64, 64, 0), (gpu1, 64, 1), (gpu1 + 64, 64, 1)]
    side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", np.array(rows, dtype=np.uint64), "VRAM")
    handle = agent.make_prepped_xfer("WRITE", side, indices, None, indices)
    agent.transfer(handle)
    assert host.context_of("transfer") == cuda.contexts[1]
    assert host.counted_since("mixed_device_posts") == 1


def test_a_strided_list_is_read_by_block(host: Nixl, cuda: FakeCuda) -> None:
    gpu0, gpu1 = cuda.alloc(0), cuda.alloc(1)
    agent = host.agent()
    agent.register_memory([(gpu0, MIB, 0, ""), (gpu1, MIB, 1, "")], "VRAM")
    strided = np.array([(gpu0, 64, 0, 128, 5), (gpu1, 64, 1, 128, 5)], dtype=np.uint64)
    side = agent.prep_xfer_dlist("", strided, "VRAM")
    agent.transfer(agent.make_prepped_xfer("WRITE", side, [5], None, [0]))
    assert host.context_of("transfer") == cuda.contexts[1]


def test_a_prepared_list_of_a_whole_pool_is_not_read_through(host: Nixl, cuda: FakeCuda) -> None:
    """SGLang 0.5.23 prepares millions of descriptors at once: reading them in Python stalled it for 12 s."""
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")

    class Counting(DList):
        read = 0

        def __getitem__(self, i: int) -> tuple[int, int, int]:
            Counting.read += 1
            return super().__getitem__(i)

    pool = Counting(VRAM, [(address + i, 1, 1) for i in range(10_000)])
    side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pool)
    assert Counting.read <= 3
    for indices in ([9_999, 3], [], np.array([], dtype=np.int32)):
        agent.transfer(agent.make_prepped_xfer("WRITE", side, indices, None, indices))
        assert host.context_of("transfer") == cuda.contexts[1]
    assert host.counted_since("hook_failures") == 0


def test_the_remote_side_of_a_prepared_transfer_is_not_looked_at(host: Nixl, cuda: FakeCuda) -> None:
    host.agent().prep_xfer_dlist("peer", [(0xDEAD0000, 64, 3)], "VRAM")
    assert host.counted_since("unknown_owners") == 0 and nixl._prepared == {}


def test_two_gpus_each_post_goes_by_its_own_memory(host: Nixl, cuda: FakeCuda) -> None:
    agent, memory = host.agent(), {device: cuda.alloc(device) for device in (0, 1)}
    agent.register_memory([(memory[d], MIB, d, "") for d in (0, 1)], "VRAM")
    for device in (0, 1, 0):
        agent.transfer(agent.initialize_xfer("WRITE", one(memory[device], device), None, "peer"))
        assert host.context_of("transfer") == cuda.contexts[device]
    cuda.make_current(0)
    agent.get_new_notifs()
    assert host.context_of("get_new_notifs") == cuda.contexts[0], "one of the agent's: no need to change it"


def test_a_wrong_device_id_does_not_decide(host: Nixl, cuda: FakeCuda, caplog) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 3, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address, 3), None, "peer")
    cuda.make_current(1)
    host.on("transfer", lambda: cuda.make_current(3))  # as NIXL 1.4.0 then does, trusting the id
    agent.transfer(handle)
    assert host.context_of("transfer") == cuda.contexts[1] == cuda.current()
    assert host.counted_since("wrong_device_ids") == 1
    assert "device id 3" in caplog.text and "device 1" in caplog.text


def test_descriptors_of_two_gpus_in_one_post(host: Nixl, cuda: FakeCuda, caplog) -> None:
    gpu0, gpu1 = cuda.alloc(0), cuda.alloc(1)
    agent = host.agent()
    agent.register_memory([(gpu0, MIB, 0, ""), (gpu1, MIB, 1, "")], "VRAM")
    for _ in range(2):
        agent.transfer(agent.initialize_xfer("WRITE", DList(VRAM, [(gpu1, 64, 1), (gpu0, 64, 0)]), None, "peer"))
    assert host.context_of("transfer") == cuda.contexts[1], "the first decides"
    assert host.counted_since("mixed_device_posts") == 2
    assert sum("one transfer for each device" in r.message for r in caplog.records) == 1


def test_vmm_memory_is_bound_by_its_device(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc_vmm(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    agent.transfer(agent.initialize_xfer("WRITE", one(address), None, "peer"))
    assert host.context_of("transfer") == cuda.contexts[1]
    assert host.counted_since("device_fallbacks") == 1


def test_memory_that_can_never_take_ipc_is_told_once(host: Nixl, cuda: FakeCuda, caplog) -> None:
    agent = host.agent()
    agent.register_memory([(cuda.alloc(1), MIB, 1, "")], "VRAM")
    assert host.counted_since("ranges_without_ipc") == 0
    for _ in range(2):
        agent.register_memory([(cuda.alloc_vmm(1), MIB, 1, "")], "VRAM")
    assert host.counted_since("ranges_without_ipc") == 2
    assert sum("can never take CUDA IPC" in record.message for record in caplog.records) == 1


# ---- host memory pays nothing ----------------------------------------------------------------------------------------


def test_host_memory_touches_no_cuda(host: Nixl, cuda: FakeCuda) -> None:
    agent = host.agent()
    rows = [(0x10000, 4096, 0)]
    handles = []
    calls = cuda.calls("cuPointerGetAttribute"), cuda.calls("cuCtxSetCurrent")
    descs = agent.register_memory(rows, "DRAM")
    handles.append(agent.initialize_xfer("WRITE", DList(DRAM, rows), None, "peer"))
    side = agent.prep_xfer_dlist("", rows, "DRAM")
    handles.append(agent.make_prepped_xfer("WRITE", side, [0], None, [0]))
    for handle in handles:
        agent.transfer(handle)
        agent.check_xfer_state(handle)
        handle.release()
    agent.get_new_notifs()
    agent.deregister_memory(descs)
    assert (cuda.calls("cuPointerGetAttribute"), cuda.calls("cuCtxSetCurrent")) == calls
    assert host.counted_since("posts") == 0 and len(registry) == 0


# ---- handles ---------------------------------------------------------------------------------------------------------


def test_a_reused_handle_number_never_gets_the_old_answer(host: Nixl, cuda: FakeCuda) -> None:
    agent, gpu0, gpu1 = host.agent(), cuda.alloc(0), cuda.alloc(1)
    agent.register_memory([(gpu0, MIB, 0, ""), (gpu1, MIB, 1, "")], "VRAM")
    for drop in ("release", "del"):
        host.module.handles = iter([77, 77])
        handle = agent.initialize_xfer("WRITE", one(gpu0, 0), None, "peer")
        if drop == "release":
            handle.release()
        del handle
        gc.collect()
        assert 77 not in nixl._transfers
        # made past our hooks, as by a program that speaks to the binding itself
        stranger = host.module.nixl_xfer_handle(agent, 77)
        agent.transfer(stranger)
        assert host.context_of("transfer") in (cuda.contexts[0], cuda.contexts[1])
        assert host.counted_since("unknown_owners") == 1
        host.counted = counters.snapshot()
        stranger._released = True


def test_a_handle_that_nixl_refuses_to_release_is_still_known(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    host.on("release", boom)
    with pytest.raises(Boom):
        handle.release()
    agent.transfer(handle)
    assert host.context_of("transfer") == cuda.contexts[1]


def test_a_prepared_list_is_forgotten_with_its_handle(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    for drop in (lambda side: side.release(), lambda side: None):
        side = agent.prep_xfer_dlist("", one(address))
        assert len(nixl._prepared) == 1
        drop(side)
        del side
        gc.collect()
        assert nixl._prepared == {}


def test_after_a_transfer_of_gpu_memory_we_look_for_stray_contexts(host: Nixl, cuda: FakeCuda, monkeypatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(nixl.footprint, "check", lambda: looked.append(1))
    agent, address = host.agent(), cuda.alloc(1)
    agent.initialize_xfer("WRITE", DList(DRAM, [(0x10000, 64, 0)]), None, "peer").release()
    assert not looked
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    handle.release()
    handle.release()
    assert looked == [1]


def test_a_dead_agents_registrations_are_forgotten(host: Nixl, cuda: FakeCuda) -> None:
    agent = host.agent()
    agent.register_memory([(cuda.alloc(1), MIB, 1, "")], "VRAM")
    assert len(registry) == 1
    del agent
    gc.collect()
    assert len(registry) == 0 and registry.contexts() == () and registration._watched == {}


def test_a_handle_made_before_we_came_is_bound_by_what_is_known(host: Nixl, cuda: FakeCuda) -> None:
    agent = host.agent()
    agent.register_memory([(cuda.alloc(1), MIB, 1, "")], "VRAM")
    handle = host.module.nixl_xfer_handle(agent, 4711)
    agent.transfer(handle)
    agent.check_xfer_state(handle)
    assert host.context_of("transfer") == host.context_of("check_xfer_state") == cuda.contexts[1]
    assert host.counted_since("posts") == host.counted_since("unknown_owners") == 1


def test_a_forked_child_calls_through_and_touches_no_cuda(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    failures = host.counted_since("hook_failures")
    pid = os.fork()
    if pid == 0:
        cuda.current = lambda: 0  # the stand-in asks for the context itself
        calls = cuda.calls()
        fine = agent.transfer(handle) == "PROC" and agent.check_xfer_state(handle) == "DONE"
        fine = fine and agent.get_new_notifs() == {} and cuda.calls() == calls
        os._exit(0 if fine and counters.snapshot()["hook_failures"] == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert host.counted_since("hook_failures") == failures


def test_memory_registered_before_we_came_is_bound_by_what_the_driver_says(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    agent.transfer(agent.initialize_xfer("WRITE", one(address), None, "peer"))
    assert host.context_of("transfer") == cuda.contexts[1]


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_memory_freed_and_allocated_on_another_gpu_before_the_transfer_is_made(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    cuda.free(address)
    assert cuda.alloc(0) == address
    agent.transfer(agent.initialize_xfer("WRITE", one(address), None, "peer"))
    assert host.context_of("transfer") == cuda.contexts[0]
    cuda.free(address)


def test_an_address_of_nobody_goes_through_with_one_warning(host: Nixl, cuda: FakeCuda, caplog) -> None:
    agent = host.agent()
    for _ in range(2):
        assert agent.transfer(agent.initialize_xfer("WRITE", one(0xDEAD0000), None, "peer")) == "PROC"
    assert host.counted_since("unknown_owners") >= 2 and len(caplog.records) == 1
    assert "0xdead0000" in caplog.text and "(no allocation of this process holds it)" in caplog.text


def test_a_driver_that_does_not_tell_the_owner_is_not_taken_for_a_wrong_address(
    host: Nixl, cuda: FakeCuda, caplog
) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    cuda.fail("cuPointerGetAttribute", 700)
    assert agent.transfer(agent.initialize_xfer("WRITE", one(address), None, "peer")) == "PROC"
    assert "owner is unknown (cuPointerGetAttribute failed with CUDA_ERROR_ILLEGAL_ADDRESS (700))" in caplog.text


def test_a_destroyed_context_falls_back_to_the_device(host: Nixl, cuda: FakeCuda) -> None:
    context = cuda.create_context(1)
    agent, address = host.agent(), cuda.alloc(1, context=context)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    agent.transfer(handle)
    assert host.context_of("transfer") == context
    cuda.destroy_context(context)
    agent.transfer(handle)
    assert host.context_of("transfer") == cuda.contexts[1], "as cudaSetDevice would bind"
    assert host.counted_since("device_fallbacks") == 1 and cuda.depth() == 0


DRIVER_CALLS = ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuPointerGetAttribute", "cuCtxPushCurrent", "cuCtxGetDevice"]


@pytest.mark.parametrize("name", DRIVER_CALLS)
@pytest.mark.parametrize("method", METHODS)
def test_a_failing_driver_never_reaches_the_application(
    host: Nixl, cuda: FakeCuda, method: str, name: str, caplog
) -> None:
    address, agent = cuda.alloc(1), host.agent()
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    cuda.make_current(0)
    cuda.fail(name, 999)
    METHODS[method](agent, address, handle)
    cuda.heal()
    assert host.seen[-1][0] == method
    assert (cuda.depth(), cuda.current()) == (1, cuda.contexts[0]), "the caller's context is never lost"


def test_what_was_learnt_of_a_list_before_a_failure_is_kept(host: Nixl, cuda: FakeCuda, monkeypatch) -> None:
    first, second = cuda.alloc(1), cuda.alloc(2)
    apply = registration.whole_data.apply

    def breaks(address: int) -> None:
        if address == second:
            raise DriverError("breaks", 999)
        apply(address)

    monkeypatch.setattr(registration.whole_data, "apply", breaks)
    agent = host.agent()
    agent.register_memory([(first, 4096, 1, ""), (first + 4096, 4096, 1, ""), (second, 4096, 2, "")], "VRAM")
    assert len(registry) == host.counted_since("registered_ranges") == 2
    assert registry.find(second) is None and host.counted_since("hook_failures") == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_hook_that_breaks_lets_the_call_through_warns_once_and_counts(
    host: Nixl, cuda: FakeCuda, method: str, monkeypatch, caplog
) -> None:
    address, agent = cuda.alloc(1), host.agent()
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")

    def broken(*_: object) -> int:
        raise RuntimeError("injected")

    monkeypatch.setattr(nixl.affinity, "enter", broken)
    for _ in range(2):
        METHODS[method](agent, address, handle)
        handle._released = False
    assert host.seen[-1][0] == method
    assert host.counted_since("hook_failures") >= 2
    assert sum(f".{method} failed" in r.message for r in caplog.records) == 1


def test_strict_mode_raises_typed_errors(host: Nixl, cuda: FakeCuda, monkeypatch) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    monkeypatch.setattr(settings, "current", lambda: settings.Settings(strict=True))
    cuda.fail("cuCtxSetCurrent", 201)
    with pytest.raises(DriverError, match="201"):
        agent.transfer(handle)
    cuda.heal()
    monkeypatch.setattr(nixl.affinity, "enter", lambda context: 1 / 0)
    with pytest.raises(CtxfixError, match="ZeroDivisionError"):
        agent.transfer(handle)


def test_wrong_arguments_give_nixls_own_error(host: Nixl, cuda: FakeCuda) -> None:
    agent = host.agent()
    for call in (agent.transfer, agent.initialize_xfer, agent.register_memory, agent.make_prepped_xfer):
        with pytest.raises(TypeError, match="missing"):
            call()
    with pytest.raises(TypeError):
        agent.transfer(1, 2, 3, 4)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_the_applications_own_mistakes_are_not_ours(host: Nixl, cuda: FakeCuda, strict: bool, monkeypatch) -> None:
    monkeypatch.setattr(settings, "current", lambda: settings.Settings(strict=strict))
    agent = host.agent()
    host.on("transfer", boom)
    host.on("check_xfer_state", boom)
    host.on("deregister_memory", boom)
    for call in (
        lambda: agent.transfer(None),
        lambda: agent.transfer(),
        lambda: agent.check_xfer_state(None),
        lambda: agent.deregister_memory(5),
        lambda: agent.register_memory([], zork=1),
    ):
        with pytest.raises((Boom, TypeError)):
            call()
    assert host.counted_since("hook_failures") == 0


def test_one_registration_at_a_time(host: Nixl, cuda: FakeCuda) -> None:
    """NIXL crashes when two threads register or deregister with one agent at once."""
    agent, inside, worst = host.agent(), [], []

    def overlap() -> None:
        inside.append(1)
        worst.append(len(inside))
        time.sleep(0)  # lets the other threads run
        inside.pop()

    host.on("register_memory", overlap)
    host.on("deregister_memory", overlap)

    def work(address: int) -> None:
        for _ in range(50):
            agent.deregister_memory(agent.register_memory([(address, 64, 1, "")], "VRAM"))

    threads = [threading.Thread(target=work, args=(cuda.alloc(1),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(worst) == {1} and len(worst) == 400 and len(registry) == 0


def test_agents_do_not_wait_for_each_other(host: Nixl, cuda: FakeCuda) -> None:
    both_inside = threading.Barrier(2, timeout=30)
    host.on("register_memory", lambda: both_inside.wait() and None)
    agents = [host.agent(), host.agent()]
    threads = [
        threading.Thread(target=agent.register_memory, args=([(cuda.alloc(1), 64, 1, "")], "VRAM")) for agent in agents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry) == 2 and not both_inside.broken


@pytest.mark.parametrize("empty", [[], DList(VRAM, [])], ids=["list", "dlist"])
def test_empty_lists(host: Nixl, cuda: FakeCuda, empty: Any) -> None:
    agent = host.agent()
    agent.deregister_memory(agent.register_memory(empty, "VRAM"))
    agent.prep_xfer_dlist("", empty, "VRAM")
    assert agent.transfer(agent.initialize_xfer("WRITE", DList(VRAM, []), None, "peer")) == "PROC"
    assert host.counted_since("hook_failures") == 0


def test_a_half_initialised_agent(host: Nixl, cuda: FakeCuda) -> None:
    host.on("__init__", boom)
    with pytest.raises(Boom):
        host.agent()
    agent = host.module.nixl_agent.__new__(host.module.nixl_agent)
    assert agent.get_new_notifs() == {} and cuda.depth() == 0


def test_calls_by_keyword(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory(reg_list=[(address, MIB, 1, "")], mem_type="VRAM")
    handle = agent.initialize_xfer(
        operation="WRITE", local_descs=one(address), remote_descs=None, remote_agent="p", notif_msg=b""
    )
    agent.transfer(notif_msg=b"n", handle=handle)
    assert host.context_of("transfer") == cuda.contexts[1]
    assert host.counted_since("hook_failures") == 0


def test_many_threads_post_on_two_gpus(host: Nixl, cuda: FakeCuda) -> None:
    agent, memory = host.agent(), {device: cuda.alloc(device) for device in (0, 1)}
    agent.register_memory([(memory[d], MIB, d, "") for d in (0, 1)], "VRAM")
    wrong: list[object] = []
    local = threading.local()
    host.on("transfer", lambda: wrong.append(1) if cuda.current() != local.expected else None)

    def work(device: int, start_with: int | None) -> None:
        cuda.make_current(start_with)
        own = cuda.current()
        local.expected = cuda.contexts[device]
        for _ in range(200):
            handle = agent.initialize_xfer("WRITE", one(memory[device], device), None, "peer")
            agent.transfer(handle)
            handle.release()
            if cuda.current() != own:
                wrong.append("caller")

    threads = [threading.Thread(target=work, args=(i % 2, (None, 0, 1, 2)[i % 4])) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and nixl._transfers == {} and host.counted_since("posts") == 1600


# ---- on and off ------------------------------------------------------------------------------------------------------


def methods_of(module: types.ModuleType) -> dict[str, Any]:
    classes = (module.nixl_agent, module.nixl_xfer_handle, module.nixl_prepped_dlist_handle)
    return {f"{c.__name__}.{n}": f for c in classes for n, f in vars(c).items() if inspect.isroutine(f)}


def test_apply_twice_wraps_once_and_remove_gives_all_back(cuda: FakeCuda) -> None:
    module = make_module([], cuda)
    before = methods_of(module)
    nixl.apply(module)
    wrapped = methods_of(module)
    nixl.apply(module)
    assert methods_of(module) == wrapped
    assert set(nixl.status()["nixl_cu12._api"]["hooked"]) == {n for n in before if wrapped[n] is not before[n]}
    nixl.remove()
    nixl.remove()
    assert methods_of(module) == before and nixl.status() == {}


def test_every_method_of_the_stand_in_is_hooked(cuda: FakeCuda) -> None:
    module = make_module([], cuda)
    nixl.apply(module)
    unhooked = set(methods_of(module)) - set(nixl.status()["nixl_cu12._api"]["hooked"])
    nixl.remove()
    assert unhooked == {"nixl_xfer_handle.__init__"}


def test_signatures_and_names_stay(host: Nixl, cuda: FakeCuda) -> None:
    plain = make_module([], cuda)
    for name, function in methods_of(plain).items():
        hooked = methods_of(host.module)[name]
        assert inspect.signature(hooked) == inspect.signature(function) and hooked.__name__ == function.__name__


def test_a_wrapper_on_top_is_told_and_left(cuda: FakeCuda) -> None:
    module = make_module([], cuda)
    nixl.apply(module)
    ours = module.nixl_agent.transfer
    module.nixl_agent.transfer = lambda *args: ours(*args)
    for _ in range(2):
        with pytest.raises(PatchError, match=r"nixl_agent\.transfer"):
            nixl.remove()
        assert nixl.status() == {"nixl_cu12._api": {"hooked": ["nixl_agent.transfer"], "missing": []}}
    module.nixl_agent.transfer = ours
    nixl.remove()
    assert nixl.status() == {}


@pytest.mark.parametrize("what", ["NIXL", "a host"])
def test_two_threads_that_patch_at_once_patch_once(cuda: FakeCuda, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, both = make_module([], cuda), threading.Barrier(2)

    def meet(*_: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # one of them waits for the other, then
            both.wait(0.5)

    class Make:
        def __call__(self, original: Any) -> Any:
            meet()
            return lambda *args: ("ours", original(*args))

    host = Host("fake", [Hook("nixl_cu12._api", "nixl_agent.transfer", wrap=Make())])
    monkeypatch.setattr(nixl.agents, "install", meet)
    patch = nixl if what == "NIXL" else host
    original = vars(module.nixl_agent)["transfer"]
    workers = [threading.Thread(target=patch.apply, args=(module,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    counted = counters.snapshot()["posts"]
    agent = module.nixl_agent("me")
    answer = agent.transfer(module.nixl_xfer_handle(agent, 1))
    assert answer == ("PROC" if what == "NIXL" else ("ours", "PROC"))
    assert counters.snapshot()["posts"] - counted == (what == "NIXL")
    patch.remove()
    assert vars(module.nixl_agent)["transfer"] is original


@pytest.mark.parametrize("still", [True, False], ids=["the wrapper stays", "the wrapper goes"])
def test_on_again_after_a_wrapper_on_top(cuda: FakeCuda, still: bool) -> None:
    """What stayed on under it is not put on a second time: a post would count twice."""
    host = Nixl(cuda)
    before = methods_of(host.module)
    nixl.apply(host.module)
    ours = host.module.nixl_agent.transfer
    host.module.nixl_agent.transfer = on_top = lambda *args: ours(*args)
    with pytest.raises(PatchError):
        nixl.remove()
    if not still:
        host.module.nixl_agent.transfer = ours
    nixl.apply(host.module)
    assert (host.module.nixl_agent.transfer is on_top) is still
    agent, address = host.agent(), cuda.alloc(1)
    agent.register_memory([(address, MIB, 1, "")], "VRAM")
    agent.transfer(agent.initialize_xfer("WRITE", one(address), None, "peer"))
    assert host.context_of("register_memory") == host.context_of("transfer") == cuda.contexts[1]
    assert host.counted_since("posts") == 1
    if still:
        host.module.nixl_agent.transfer = ours
    nixl.remove()
    assert methods_of(host.module) == before


def test_a_module_that_ran_anew_is_hooked_anew_and_given_back_whole(cuda: FakeCuda) -> None:
    first, second = make_module([], cuda), make_module([], cuda)
    before = methods_of(first), methods_of(second)
    nixl.apply(first)
    nixl.apply(second)
    assert methods_of(second) != before[1]
    nixl.remove()
    assert (methods_of(first), methods_of(second)) == before


@pytest.mark.parametrize("lack", ["nixl_agent", "transfer", "nixlBind"])
def test_a_module_that_is_not_the_nixl_we_know_is_left_alone(cuda: FakeCuda, lack: str) -> None:
    module = make_module([], cuda)
    delattr(module.nixl_agent if lack == "transfer" else module, lack)
    before = dict(vars(module)), dict(vars(module.nixl_agent)) if lack != "nixl_agent" else None
    with pytest.raises(PatchError, match="not a NIXL that ctxfix knows"):
        nixl.apply(module)
    assert (dict(vars(module)), dict(vars(module.nixl_agent)) if lack != "nixl_agent" else None) == before


def test_a_version_that_lacks_lesser_methods_is_patched_as_far_as_it_goes(cuda: FakeCuda) -> None:
    module = make_module([], cuda)
    del module.nixl_agent.prep_mem_view
    nixl.apply(module)
    assert nixl.status()["nixl_cu12._api"]["missing"] == ["nixl_agent.prep_mem_view"]
    nixl.remove()


def test_deactivation_in_the_middle_of_a_call_still_restores(host: Nixl, cuda: FakeCuda) -> None:
    agent, address = host.agent(), cuda.alloc(1)
    handle = agent.initialize_xfer("WRITE", one(address), None, "peer")
    host.on("transfer", nixl.remove)
    agent.transfer(handle)
    assert cuda.depth() == 0
    agent.transfer(handle)
    assert host.context_of("transfer") == 0, "off"
    assert driver.current() == 0


def test_what_another_thread_has_learnt_meanwhile_is_not_lost(
    host: Nixl, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL goes by device ids that are wrong: whoever finds it out says so for good."""
    agent, contexts = host.agent(), registry.contexts

    def meanwhile() -> tuple[int, ...]:
        registration.nixl_switches = True
        return contexts()

    monkeypatch.setattr(registry, "contexts", meanwhile)
    agent.register_memory([(cuda.alloc(1), MIB, 1, "")], "VRAM")
    assert registration.nixl_switches


def test_an_agent_never_gets_the_thread_group_of_one_that_is_gone(host: Nixl, cuda: FakeCuda) -> None:
    """Python gives the id of an agent that never registered to another one."""
    from ctxfix.native import agents

    if not agents.enabled():
        pytest.skip("the extension is not built: there are no thread groups")
    cls = host.module.nixl_agent
    agent = cls.__new__(cls)
    agents._groups[id(agent)] = stale = 1 << 20  # as if one had lived there
    agent.__init__("new")
    assert agents._groups[id(agent)] != stale
    group = agents._groups[id(agent)]
    agent.create_backend("X")
    assert agents._groups[id(agent)] == group, "a backend made later is of the same agent"
