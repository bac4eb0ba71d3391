# SPDX-License-Identifier: Apache-2.0
"""The door for hosts: a table of methods and their memory, on fake GPUs."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda

import ctxfix
from ctxfix import _startup, counters, settings
from ctxfix.errors import CtxfixError, PatchError
from ctxfix.patches.host import Context, Device, Hook, Host, context_of


class Tensor:
    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class TorchDevice:
    def __init__(self, type: str, index: int | None) -> None:
        self.type, self.index = type, index


CODE = """
seen = []

class Engine:
    def __init__(self, note, memory=None):
        self.note, self.memory = note, memory

    def send(self, *args, **kwargs):
        '''Sends.'''
        seen.append(self.note())
        return args, kwargs

    def loop(self):
        seen.append(self.note())

    @staticmethod
    def static(note):
        seen.append(note())

    @classmethod
    def of_class(cls, note):
        seen.append(note())

    async def later(self):
        pass

def function(note):
    seen.append(note())
"""


@pytest.fixture
def module() -> types.ModuleType:
    made = types.ModuleType("fakehost")
    exec(CODE, made.__dict__)
    return made


@pytest.fixture
def host(module: types.ModuleType) -> Iterator[Callable[..., Host]]:
    hosts = []

    def make(*hooks: Hook) -> Host:
        hosts.append(Host("Fake", hooks))
        hosts[-1].apply(module)
        return hosts[-1]

    yield make
    for made in hosts:
        made.remove()


# ---- whose memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["address", "tensor", "descriptor", "list", "generator", "device", "torch device"])
def test_memory_may_be_given_in_many_forms(cuda: FakeCuda, form: str) -> None:
    address = cuda.alloc(2)
    memory = {
        "address": address,
        "tensor": Tensor(address),
        "descriptor": (address, 16, 0),
        "list": [None, Tensor(0), [Tensor(address)]],
        "generator": (one for one in (TorchDevice("cpu", None), address)),
        "device": Device(2),
        "torch device": TorchDevice("cuda", 2),
    }[form]
    assert context_of(memory) == cuda.contexts[2]


@pytest.mark.parametrize(
    "memory", [None, 0, 12345, [], (), Tensor(0), Device(99), TorchDevice("cuda", None), TorchDevice("cpu", 1)]
)
def test_what_tells_nothing_changes_nothing(cuda: FakeCuda, memory: Any) -> None:
    assert context_of(memory) == 0


def test_a_device_number_alone_is_no_device(cuda: FakeCuda) -> None:
    assert context_of(1) == 0  # an address, and nobody's
    with pytest.raises(TypeError, match="'cuda:1' is no memory"):
        context_of("cuda:1")


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, 0, 1])
def test_the_method_runs_in_the_context_of_its_memory(
    cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host], before: int | None
) -> None:
    host(Hook("fakehost", "Engine.send", lambda self, *_, **__: self.memory))
    cuda.make_current(before)
    was = cuda.current()
    assert module.Engine(cuda.current, cuda.alloc(1)).send(1, key=2) == ((1,), {"key": 2})
    assert module.seen == [cuda.contexts[1]]
    assert cuda.current() == was
    assert module.Engine.send.__doc__ == "Sends."


def test_functions_static_and_class_methods(
    cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host]
) -> None:
    def one(*_: Any) -> Device:
        return Device(1)

    originals = dict(vars(module.Engine)), module.function
    made = host(*(Hook("fakehost", name, one) for name in ("function", "Engine.static", "Engine.of_class")))
    module.function(cuda.current)
    module.Engine.static(cuda.current)
    module.Engine.of_class(cuda.current)
    assert module.seen == [cuda.contexts[1]] * 3
    made.remove()
    assert (dict(vars(module.Engine)), module.function) == originals


def test_a_device_that_the_host_chose_stays(
    cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host]
) -> None:
    host(Hook("fakehost", "Engine.loop", lambda _: Device(1)))
    module.Engine(lambda: cuda.make_current(2)).loop()
    assert cuda.current() == cuda.contexts[2]


def test_a_method_that_is_a_threads_life_is_counted(
    cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host]
) -> None:
    host(Hook("fakehost", "Engine.loop", lambda _: Device(3), thread=True))
    before = counters.snapshot()["threads_bound"]
    thread = threading.Thread(target=module.Engine(cuda.current).loop)
    thread.start()
    thread.join(10)
    assert module.seen == [cuda.contexts[3]]
    assert counters.snapshot()["threads_bound"] == before + 1


def test_a_table_that_fails_lets_the_call_through(
    cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    host(Hook("fakehost", "Engine.send", lambda self, *_: self.nowhere))
    before = counters.snapshot()["hook_failures"]
    engine = module.Engine(cuda.current)
    assert engine.send() == engine.send() == ((), {})
    assert counters.snapshot()["hook_failures"] == before + 2
    (record,) = caplog.records  # one warning
    assert "hook fakehost.Engine.send failed" in record.message


def test_a_table_that_fails_raises_in_strict_mode(
    cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(Hook("fakehost", "Engine.send", lambda self, *_: self.nowhere))
    monkeypatch.setattr(settings, "current", lambda: settings.Settings(strict=True))
    with pytest.raises(CtxfixError, match="nowhere"):
        module.Engine(cuda.current).send()


def test_the_hosts_own_error_reaches_its_caller(
    cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host]
) -> None:
    host(Hook("fakehost", "Engine.loop", lambda _: Device(1)))

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        module.Engine(fail).loop()
    assert cuda.current() == 0


def test_a_driver_that_fails_is_survived(cuda: FakeCuda, module: types.ModuleType, host: Callable[..., Host]) -> None:
    host(Hook("fakehost", "Engine.loop", lambda _: Device(1)))
    cuda.fail("cuCtxSetCurrent", 999)
    module.Engine(cuda.current).loop()
    cuda.heal()
    assert module.seen == [0]


def test_a_context_already_known(cuda: FakeCuda) -> None:
    assert context_of(Context(cuda.contexts[3])) == cuda.contexts[3]


# ---- on and off ------------------------------------------------------------------------------------------------------


def test_applied_once_and_undone(module: types.ModuleType, host: Callable[..., Host]) -> None:
    original = module.Engine.send
    made = host(Hook("fakehost", "Engine.send"), Hook("fakehost", "Engine.gone", optional=True))
    ours = module.Engine.send
    made.apply(module)
    assert module.Engine.send is ours is not original
    assert made.status() == {"fakehost": {"hooked": ["Engine.send"], "missing": ["Engine.gone"]}}
    made.remove()
    made.remove()
    assert module.Engine.send is original
    assert made.status() == {}


@pytest.mark.parametrize("method", ["Engine.gone", "Gone.send", "gone", "Engine.note"])
def test_a_host_that_has_changed_is_left_alone(module: types.ModuleType, method: str) -> None:
    before = dict(vars(module.Engine))
    with pytest.raises(PatchError, match=rf"^Fake of unknown version has no {method} in fakehost\. It works as it is"):
        Host("Fake", [Hook("fakehost", "Engine.send"), Hook("fakehost", method)]).apply(module)
    assert dict(vars(module.Engine)) == before


def test_coroutines_are_refused(module: types.ModuleType) -> None:
    with pytest.raises(PatchError, match="is a coroutine or a generator"):
        Host("Fake", [Hook("fakehost", "Engine.later")]).apply(module)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (("", "flush"), "module must be a name, not ''"),
        ((None, "flush"), "module must be a name, not None"),
        (("acme..engine", "flush"), "module must be a name, not 'acme..engine'"),
        (("acme", ""), "method must be a name, not ''"),
        (("acme", "Engine."), "method must be a name, not 'Engine.'"),
        (("acme", len), "method must be a name, not <built-in function len>"),
        (("acme", "flush", 0x1000), "memory must be a function of the method's arguments, not 4096"),
    ],
)
def test_a_row_that_could_never_be_hooked_is_refused(row: tuple[Any, ...], told: str) -> None:
    with pytest.raises(PatchError, match=f"{re.escape(told)}$"):
        Hook(*row)


def test_a_class_is_refused(module: types.ModuleType) -> None:
    original = module.Engine
    with pytest.raises(PatchError, match=r"fakehost\.Engine is a class: name a method, such as Engine\.__init__$"):
        Host("Fake", [Hook("fakehost", "Engine")]).apply(module)
    assert module.Engine is original


def test_somebody_on_top_is_told_and_the_rest_undone(module: types.ModuleType, host: Callable[..., Host]) -> None:
    original = module.Engine.send, module.Engine.loop
    made = host(Hook("fakehost", "Engine.send"), Hook("fakehost", "Engine.loop"))
    ours = module.Engine.send
    module.Engine.send = on_top = lambda self: ours(self)
    with pytest.raises(PatchError, match=r"somebody wrapped fakehost\.Engine\.send after ctxfix"):
        made.remove()
    assert module.Engine.send is on_top
    assert module.Engine.loop is original[1]
    with pytest.raises(PatchError, match="somebody wrapped"):
        made.remove()
    module.Engine.send = ours
    made.remove()
    assert (module.Engine.send, module.Engine.loop) == original


# ---- other projects' hosts -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("startup_state")
@pytest.mark.parametrize("first", ["patch", "import"])
def test_patch_host_before_or_after_the_import(cuda: FakeCuda, package: Callable[[str, str], Path], first: str) -> None:
    package("fakeacme.engine", CODE)
    hooks = (Hook("fakeacme.engine", "Engine.loop", lambda self: self.memory),)
    if first == "patch":
        assert ctxfix.patch_host("acme", *hooks) == {"fakeacme.engine": "pending"}
    from fakeacme import engine

    assert ctxfix.patch_host("acme", *hooks) == {"fakeacme.engine": "patched"}
    assert ctxfix.status()["targets"]["fakeacme.engine"]["state"] == "patched"
    engine.Engine(cuda.current, cuda.alloc(2)).loop()
    assert ctxfix.unpatch_host("acme") == {"fakeacme.engine": "not patched"}
    assert ctxfix.unpatch_host("acme") == {}
    engine.Engine(cuda.current, cuda.alloc(2)).loop()
    assert engine.seen == [cuda.contexts[2], 0]
    assert "fakeacme.engine" not in _startup.TARGETS


@pytest.mark.usefixtures("startup_state")
def test_a_host_that_is_reloaded_is_hooked_again(cuda: FakeCuda, package: Callable[[str, str], Path]) -> None:
    package("fakeecho", CODE + "\n\ndef flush(memory, ask):\n    return ask()\n")
    import fakeecho

    hooks = (Hook("fakeecho", "Engine.loop", lambda self: self.memory), Hook("fakeecho", "flush", lambda m, _: m))
    assert ctxfix.patch_host("echo", *hooks) == {"fakeecho": "patched"}
    old = fakeecho.Engine
    importlib.reload(fakeecho)
    memory = cuda.alloc(2)
    fakeecho.Engine(cuda.current, memory).loop()
    assert fakeecho.flush(memory, cuda.current) == cuda.contexts[2]
    ctxfix.unpatch_host("echo")
    for engine in (old, fakeecho.Engine):
        engine(cuda.current, memory).loop()
    assert fakeecho.flush(memory, cuda.current) == 0
    assert fakeecho.seen == [cuda.contexts[2], 0, 0]


@pytest.mark.usefixtures("startup_state")
def test_a_host_that_is_added_while_another_one_is_hooked(package: Callable[[str, str], Path]) -> None:
    """As by another thread, which imports the package that does it, or by the module itself that is imported."""
    for name in ("fakeone", "faketwo", "fakethree"):
        package(name, CODE)
    import fakeone  # noqa: F401
    import fakethree  # noqa: F401
    import faketwo  # noqa: F401

    def adding(original: Callable[..., Any]) -> Callable[..., Any]:
        added.append(ctxfix.patch_host("two", Hook("faketwo", "Engine.loop")))
        return lambda *args: original(*args)

    added: list[dict[str, str]] = []
    assert ctxfix.patch_host("one", Hook("fakeone", "Engine.loop", wrap=adding)) == {"fakeone": "patched"}
    assert added == [{"faketwo": "patched"}]
    assert ctxfix.patch_host("three", Hook("fakethree", "Engine.loop")) == {"fakethree": "patched"}
    assert _startup.failures == {}
    for name in ("one", "two", "three"):
        ctxfix.unpatch_host(name)


@pytest.mark.usefixtures("startup_state")
def test_unpatch_host_can_be_tried_again(package: Callable[[str, str], Path]) -> None:
    package("fakefoxtrot", CODE)
    import fakefoxtrot

    original, hook = fakefoxtrot.Engine.loop, Hook("fakefoxtrot", "Engine.loop")
    ctxfix.patch_host("foxtrot", hook)
    ours = fakefoxtrot.Engine.loop
    fakefoxtrot.Engine.loop = lambda self: ours(self)
    for _ in range(2):
        with pytest.raises(PatchError, match="somebody wrapped"):
            ctxfix.unpatch_host("foxtrot")
        assert "fakefoxtrot" not in _startup.TARGETS and "fakefoxtrot" not in _startup.outcomes
    assert ctxfix.patch_host("foxtrot", hook) == {"fakefoxtrot": "patched"}
    fakefoxtrot.Engine.loop = ours
    assert ctxfix.unpatch_host("foxtrot") == {"fakefoxtrot": "not patched"}
    assert fakefoxtrot.Engine.loop is original and ctxfix.unpatch_host("foxtrot") == {}


@pytest.mark.usefixtures("startup_state")
def test_patch_host_goes_with_activation(package: Callable[[str, str], Path]) -> None:
    package("fakebravo.engine", CODE)
    from fakebravo import engine

    original = engine.Engine.loop
    ctxfix.patch_host("bravo", Hook("fakebravo.engine", "Engine.loop"))
    ours = engine.Engine.loop
    ctxfix.deactivate()
    assert engine.Engine.loop is original is not ours
    ctxfix.activate()
    assert engine.Engine.loop is not original
    ctxfix.unpatch_host("bravo")
    ctxfix.deactivate()


@pytest.mark.usefixtures("startup_state")
def test_patch_host_says_in_status_what_has_moved(package: Callable[[str, str], Path]) -> None:
    package("fakecharlie", CODE)
    import fakecharlie  # noqa: F401

    hook = Hook("fakecharlie", "Engine.moved")
    assert ctxfix.patch_host("charlie", hook)["fakecharlie"].startswith("failed: PatchError: charlie of unknown")
    target = ctxfix.status()["targets"]["fakecharlie"]
    assert target["state"] == "failed" and "has no Engine.moved in fakecharlie" in target["reason"]
    ctxfix.unpatch_host("charlie")


@pytest.mark.usefixtures("startup_state")
def test_patch_host_refuses_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PatchError, match=r"cannot hook nixl_cu12\._api: ctxfix itself hooks it already"):
        ctxfix.patch_host("mine", Hook("nixl_cu12._api", "nixl_agent.transfer"))
    with pytest.raises(PatchError, match="has no hooks"):
        ctxfix.patch_host("mine")
    ctxfix.patch_host("mine", Hook("fakedelta", "f"))
    with pytest.raises(PatchError, match="has other hooks already"):
        ctxfix.patch_host("mine", Hook("fakedelta", "g"))
    with pytest.raises(PatchError, match="host 'yours' cannot hook fakedelta: 'mine' hooks it already"):
        ctxfix.patch_host("yours", Hook("fakedelta", "g"))
    for row in ([], Hook, "fakedelta"):
        with pytest.raises(PatchError, match="is no ctxfix.patches.host.Hook"):
            ctxfix.patch_host("theirs", row)
    ctxfix.unpatch_host("mine")
    monkeypatch.setenv("CTXFIX_DISABLE", "1")
    assert ctxfix.patch_host("mine", Hook("fakedelta", "f")) == {"fakedelta": "off: CTXFIX_DISABLE=1"}
    assert "fakedelta" not in sys.modules
