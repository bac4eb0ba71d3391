# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV managers under the patch, on a stand-in of their shape; real SGLang is run in integration/sglang.

The generic hooks of threads and of NIXL are off here, so what is seen is the patch's own doing.
"""

from __future__ import annotations

import concurrent.futures
import enum
import queue
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from environments import Interpreter
from fake_cuda import FakeCuda

import ctxfix
from ctxfix import _startup, counters, settings, threads
from ctxfix.errors import PatchError
from ctxfix.evidence import identity
from ctxfix.patches import sglang
from ctxfix.patches.host import context_of
from ctxfix.patches.sglang import MOONCAKE, MORI, NIXL

AXES = ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")


def kv_args(*addresses: int, gpu_id: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_data_ptrs=list(addresses), state_data_ptrs=[], gpu_id=gpu_id, **more)


class Mode(enum.Enum):
    """As SGLang's DisaggregationMode."""

    PREFILL = "prefill"
    DECODE = "decode"


#: What a KV manager of SGLang knows of its place, here that of one process on its own.
ALONE = {f"{axis}_{of}": int(of == "size") for axis in AXES for of in ("rank", "size")}


class Host:
    """A module with a KV manager in it: its constructor starts a worker, a listener, and an executor's thread."""

    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.seen: dict[str, int] = {}  # where -> the context current there
        host, workers = self, [hook.method for hook in sglang._host.hooks if hook.module == name and hook.thread]
        manager, worker_name = workers[0].split(".")

        class Manager:
            def __init__(self, args: Any, mode: Mode = Mode.PREFILL) -> None:
                host.seen["constructor"] = cuda.current()
                if host.in_constructor is not None:
                    host.in_constructor()
                self.kv_args = args
                vars(self).update(host.parallel, disaggregation_mode=mode)
                self.queue: queue.Queue[Callable[[], None]] = queue.Queue()
                self.executor = concurrent.futures.ThreadPoolExecutor(1)
                self.thread = threading.Thread(target=getattr(self, worker_name), args=(self.queue,), daemon=True)
                self.thread.start()

            def stop(self) -> None:
                self.queue.put(lambda: None)
                self.thread.join(20)
                self.executor.shutdown()

        def worker(self: Any, queue: Any) -> None:
            host.seen["worker"] = cuda.current()
            queue.get(timeout=20)()
            self.executor.submit(lambda: host.seen.update(executor=cuda.current())).result(20)

        worker.__name__ = worker_name
        setattr(Manager, worker_name, worker)
        Manager.__name__ = manager
        self.in_constructor: Callable[[], None] | None = None
        self.parallel = dict(ALONE)
        self.manager: Any = Manager
        self.module = types.ModuleType(name)
        setattr(self.module, manager, Manager)

    def run(self, args: Any) -> dict[str, int]:
        self.seen.clear()
        self.manager(args).stop()
        return self.seen


@pytest.fixture(params=[NIXL, MOONCAKE, MORI])
def host(request: pytest.FixtureRequest, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host(request.param, cuda)
    sglang.apply(host.module)
    monkeypatch.setattr(identity, "_declared", None)
    yield host
    sglang.remove()
    threads.remove()


def test_constructor_and_worker_run_in_the_owner_of_the_buffers(host: Host, cuda: FakeCuda) -> None:
    """Removing the patch makes this fail: without it all of it runs in GPU 0's context, or in none."""
    cuda.make_current(0)
    seen = host.run(kv_args(cuda.alloc(1), gpu_id=0))  # the address decides, not gpu_id
    assert (seen["constructor"], seen["worker"]) == (cuda.contexts[1], cuda.contexts[1])
    assert cuda.current() == cuda.contexts[0]


def test_without_the_patch_the_worker_has_no_context(host: Host, cuda: FakeCuda) -> None:
    sglang.remove()
    cuda.make_current(0)
    seen = host.run(kv_args(cuda.alloc(1), gpu_id=1))
    assert (seen["constructor"], seen["worker"]) == (cuda.contexts[0], 0)


def test_managers_of_several_gpus_in_one_process(host: Host, cuda: FakeCuda) -> None:
    cuda.make_current(3)
    for device in (2, 1, 0):
        assert host.run(kv_args(cuda.alloc(device), gpu_id=device))["worker"] == cuda.contexts[device]


def test_executors_of_a_worker_inherit_its_context(host: Host, cuda: FakeCuda) -> None:
    """Mooncake copies on them. The hook of new threads serves them: nothing is registered with NIXL there."""
    assert threads.apply()
    cuda.make_current(0)
    assert host.run(kv_args(cuda.alloc(1), gpu_id=1))["executor"] == cuda.contexts[1]


def test_a_bound_thread_is_counted_once(host: Host, cuda: FakeCuda) -> None:
    before = counters.snapshot()["threads_bound"]
    host.run(kv_args(cuda.alloc(1)))
    assert counters.snapshot()["threads_bound"] == before + 1


@pytest.mark.parametrize("current", [None, 0, 1])
def test_the_schedulers_own_context_is_back(host: Host, cuda: FakeCuda, current: int | None) -> None:
    cuda.make_current(current)
    before = cuda.current()
    host.run(kv_args(cuda.alloc(1)))
    assert cuda.current() == before


def test_a_device_that_the_constructor_chooses_stays(host: Host, cuda: FakeCuda) -> None:
    cuda.make_current(0)
    host.in_constructor = lambda: cuda.make_current(2)
    host.run(kv_args(cuda.alloc(1)))
    assert cuda.current() == cuda.contexts[2]


def test_a_constructor_that_fails_gives_the_context_back(host: Host, cuda: FakeCuda) -> None:
    def fail() -> None:
        raise ValueError("no such backend")

    cuda.make_current(0)
    host.in_constructor = fail
    with pytest.raises(ValueError, match="no such backend"):
        host.manager(args=kv_args(cuda.alloc(1)))  # SGLang names the argument in some versions
    assert cuda.current() == cuda.contexts[0]


# ---- whose memory it is ----------------------------------------------------------------------------------------------


def owner(args: Any) -> int:
    return context_of(sglang._buffers(args))


def test_owner_is_found_behind_buffers_in_host_memory(cuda: FakeCuda) -> None:
    host_memory = bytearray(64)
    address = id(host_memory)
    assert owner(kv_args(address, cuda.alloc(2))) == cuda.contexts[2]


def test_owner_of_a_model_with_state_but_no_kv(cuda: FakeCuda) -> None:
    args = kv_args(gpu_id=0)
    args.state_data_ptrs = [[cuda.alloc(1)], []]
    assert owner(args) == cuda.contexts[1]
    args.state_data_ptrs = [cuda.alloc(2)]  # flat, before components came
    assert owner(args) == cuda.contexts[2]


def test_memory_without_a_context_belongs_to_its_device(cuda: FakeCuda) -> None:
    assert owner(kv_args(cuda.alloc_vmm(1), gpu_id=0)) == cuda.contexts[1]


def test_gpu_id_decides_where_no_address_tells(cuda: FakeCuda) -> None:
    assert owner(kv_args(gpu_id=1)) == cuda.contexts[1]
    assert owner(kv_args(gpu_id=99)) == 0
    assert owner(SimpleNamespace()) == 0
    assert owner(None) == 0


# ---- which rank it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("place", "rank", "world"),
    [
        ({}, 0, 1),
        ({"attn_tp": (1, 4)}, 1, 4),
        ({"attn_tp": (1, 2), "attn_cp": (1, 2)}, 3, 4),
        # Attention's data parallelism splits the TP ranks; SGLang gives the same numbers as system_dp.
        ({"attn_tp": (1, 2), "attn_dp": (3, 4), "system_dp": (3, 4)}, 7, 8),
        ({"attn_tp": (1, 2), "attn_cp": (0, 2), "attn_dp": (1, 2), "system_dp": (1, 1)}, 5, 8),
        ({"attn_tp": (1, 2), "pp": (2, 3)}, 5, 6),
        ({"attn_tp": (1, 2), "pp": (1, 2), "system_dp": (1, 2)}, 7, 8),
    ],
)
def test_the_manager_tells_the_rank(
    host: Host, cuda: FakeCuda, mode: Mode, place: dict[str, tuple[int, int]], rank: int, world: int
) -> None:
    for axis, (own, size) in place.items():
        host.parallel |= {f"{axis}_rank": own, f"{axis}_size": size}
    host.manager(kv_args(cuda.alloc(1)), mode).stop()
    assert identity.current() == identity.Identity(rank, world, mode.value, sglang.SOURCE)


def test_what_the_program_declared_stays(host: Host, cuda: FakeCuda) -> None:
    identity.declare(5, 8)
    host.run(kv_args(cuda.alloc(1)))
    assert identity.current() == identity.Identity(5, 8, "", "declared")


def test_a_manager_that_does_not_know_its_place_works(host: Host, cuda: FakeCuda, caplog: Any) -> None:
    del host.parallel["attn_dp_size"]
    assert host.run(kv_args(cuda.alloc(1)))["worker"] == cuda.contexts[1]
    assert "the rank of SGLang's KV manager failed" in caplog.text and identity.current().source == "nobody says"


# ---- nothing of ours reaches SGLang ----------------------------------------------------------------------------------


def test_a_manager_of_another_shape_works_as_it_is(host: Host, cuda: FakeCuda, caplog: Any) -> None:
    cuda.make_current(0)
    seen = host.run(kv_args("not an address"))
    assert seen["worker"] == 0 and cuda.current() == cuda.contexts[0]
    assert "__init__ failed" in caplog.text and "The original call went through" in caplog.text


def test_a_driver_that_refuses_changes_nothing(host: Host, cuda: FakeCuda) -> None:
    args = kv_args(cuda.alloc(1))
    cuda.make_current(0)
    cuda.fail("cuCtxSetCurrent", 999)
    assert host.run(args)["constructor"] == cuda.contexts[0]


def test_strict_mode_raises(host: Host, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "current", lambda: settings.Settings(strict=True))
    with pytest.raises(ctxfix.CtxfixError, match="KVManager.__init__"):
        host.manager(kv_args("not an address"))


def test_greenlets_are_left_alone(host: Host, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "green", lambda: "gevent")
    assert host.run(kv_args(cuda.alloc(1)))["worker"] == 0


# ---- on and off ------------------------------------------------------------------------------------------------------


def test_apply_is_idempotent_and_undone(cuda: FakeCuda) -> None:
    host = Host(NIXL, cuda)
    original = dict(vars(host.manager))
    sglang.apply(host.module)
    once = dict(vars(host.manager))
    sglang.apply(host.module)
    assert dict(vars(host.manager)) == once != original
    hooked = ["NixlKVManager.__init__", "NixlKVManager.transfer_worker"]
    assert sglang.status() == {NIXL: {"hooked": hooked, "missing": []}}
    sglang.remove()
    sglang.remove()
    assert dict(vars(host.manager)) == original and sglang.status() == {}


def test_removal_tells_of_a_wrapper_on_top(cuda: FakeCuda) -> None:
    host = Host(NIXL, cuda)
    sglang.apply(host.module)
    ours = host.manager.transfer_worker
    host.manager.transfer_worker = lambda self, queue: ours(self, queue)
    with pytest.raises(PatchError, match=r"NixlKVManager\.transfer_worker after ctxfix"):
        sglang.remove()
    assert not hasattr(host.manager.__init__, "__wrapped__")
    host.manager.transfer_worker = ours
    sglang.remove()
    assert sglang.status() == {}


@pytest.mark.parametrize(("name", "worker"), [(NIXL, "transfer_worker"), (MOONCAKE, "transfer_worker")])
def test_a_worker_that_moved_changes_nothing(name: str, worker: str, cuda: FakeCuda) -> None:
    host = Host(name, cuda)
    delattr(host.manager, worker)
    before = dict(vars(host.manager))
    with pytest.raises(PatchError, match=f"no .*KVManager.{worker} in {name}. It works as it is"):
        sglang.apply(host.module)
    assert dict(vars(host.manager)) == before


def test_mori_of_a_release_without_workers(cuda: FakeCuda) -> None:
    host = Host(MORI, cuda)
    del host.manager._transfer_worker
    sglang.apply(host.module)
    missing = ["MoriKVManager._transfer_worker", "MoriKVManager._drain_worker"]
    assert sglang.status() == {MORI: {"hooked": ["MoriKVManager.__init__"], "missing": missing}}
    sglang.remove()


def test_import_of_a_fake_sglang_patches_it(fake_sglang: Callable[..., str]) -> None:
    code = f"import ctxfix, {NIXL} as c; print(hasattr(c.NixlKVManager.transfer_worker, '__wrapped__'))"
    assert fake_sglang(code) == "True"
    assert fake_sglang(code, CTXFIX_DISABLE="1") == "False"
    assert fake_sglang(code.replace(";", "; ctxfix.unpatch_sglang();", 1)) == "False"
    late = f"import {NIXL} as c, ctxfix; ctxfix.unpatch_sglang(); print(ctxfix.patch_sglang()[{NIXL!r}])"
    assert fake_sglang(late) == "patched"


def test_status_tells_of_a_moved_class(fake_sglang: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "sglang/srt/disaggregation/nixl/conn.py").write_text("class NixlManager: ...\n")
    state = f"import ctxfix, {NIXL}; t = ctxfix.status()['targets'][{NIXL!r}]; print(t['state'], t['reason'])"
    told = fake_sglang(state, CTXFIX_LOG="off")
    assert told.startswith("failed PatchError: SGLang 9.9 has no NixlKVManager.__init__ in ")
    assert "It works as it is" in told


def test_status_tells_of_a_moved_module(fake_sglang: Callable[..., str]) -> None:
    state = f"import ctxfix; t = ctxfix.status()['targets'][{MOONCAKE!r}]; print(t['state'], t['reason'])"
    assert fake_sglang(state).startswith(f"absent sglang 9.9 has no module {MOONCAKE}; ")


# ---- SGLang's plugin group -------------------------------------------------------------------------------------------


def plugin_state(run: Callable[..., str], **environment: str) -> str:
    return run(
        "import ctxfix; p = ctxfix.status()['sglang_plugin']; print(p['state'], '|', p['reason'])", **environment
    )


def test_status_of_the_plugin(fake_sglang: Callable[..., str], tmp_path: Path) -> None:
    assert plugin_state(fake_sglang).startswith("off | SGLang 9.9 loads no plugins")
    (tmp_path / "sglang/srt/plugins").mkdir()
    (tmp_path / "sglang/srt/plugins/__init__.py").write_text("")
    assert plugin_state(fake_sglang) == "on | SGLang 9.9 loads ctxfix in each of its processes"
    assert plugin_state(fake_sglang, SGLANG_PLUGINS="other, ctxfix").startswith("on")
    left_out = plugin_state(fake_sglang, SGLANG_PLUGINS="other,")
    assert left_out.startswith("left out | SGLANG_PLUGINS=other, does not name ctxfix")
    assert left_out.endswith("set SGLANG_PLUGINS=other,ctxfix")


def test_status_without_sglang(installed: Interpreter) -> None:
    assert plugin_state(installed) == "not installed |"


def test_the_plugin_activates_unless_off(startup_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_startup, "started_by", "import ctxfix")
    _startup.uninstall()
    monkeypatch.setenv("CTXFIX_DISABLE", "1")
    sglang.plugin()
    assert not _startup.installed()
    monkeypatch.delenv("CTXFIX_DISABLE")
    sglang.plugin()
    sglang.plugin()
    assert _startup.installed() and _startup.started_by == "SGLang plugin"


@pytest.fixture
def fake_sglang(installed: Interpreter, tmp_path: Path) -> Callable[..., str]:
    """Run code where ctxfix is installed, with a package that has SGLang's name and a NIXL manager of its shape."""
    folder = tmp_path / "sglang" / "srt" / "disaggregation" / "nixl"
    folder.mkdir(parents=True)
    for package in (folder, *list(folder.parents)[:3]):
        (package / "__init__.py").write_text("")
    (folder / "conn.py").write_text(
        "class NixlKVManager:\n    def __init__(self, args): ...\n    def transfer_worker(self, queue): ...\n"
    )
    metadata = tmp_path / "sglang-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")

    def run(code: str, **environment: str) -> str:
        return installed(code, PYTHONPATH=str(tmp_path), **environment)

    return run
