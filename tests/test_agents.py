# SPDX-License-Identifier: Apache-2.0
"""native/agents.py: which context the native threads of an agent are told to follow."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from environments import clean_environment
from fake_cuda import FakeCuda

import ctxfix
from ctxfix import counters, native, settings
from ctxfix.driver import Owner
from ctxfix.errors import CtxfixError, UnknownOwnerError
from ctxfix.native import agents
from ctxfix.registry import registry

AGENT = 4711

needs_extension = pytest.mark.skipif(not native.available(), reason=f"ctxfix.native: {native.reason()}")


@pytest.fixture(autouse=True)
def clean(cuda: FakeCuda) -> Iterator[None]:
    agents._groups.clear()
    yield
    agents._groups.clear()
    if native.available():
        native.set_home(0)
        native.disarm()


def group_context(agent: int = AGENT) -> int:
    return native.group_info(agents._groups[agent]).context


@needs_extension
def test_threads_started_with_an_agent_are_of_its_group(cuda: FakeCuda) -> None:
    cuda.make_current(2)
    with agents.starting(AGENT):
        now = native.present()
        with agents.starting(AGENT):  # create_backend inside __init__
            assert native.present() == now
        assert native.present() == now
    assert now == (True, cuda.contexts[2], agents._groups[AGENT])
    assert not native.present().on


@needs_extension
def test_without_a_clear_context_they_wait(cuda: FakeCuda) -> None:
    with agents.starting(AGENT):
        assert native.present()[:2] == (True, 0)


@needs_extension
def test_the_first_registration_gives_the_group_its_context(cuda: FakeCuda) -> None:
    with agents.starting(AGENT):
        pass
    agents.follow(AGENT, cuda.contexts[1])
    assert group_context() == cuda.contexts[1]


@needs_extension
def test_two_agents_have_their_own(cuda: FakeCuda) -> None:
    for agent, device in ((1, 1), (2, 2)):
        with agents.starting(agent):
            pass
        agents.follow(agent, cuda.contexts[device])
    assert (group_context(1), group_context(2)) == (cuda.contexts[1], cuda.contexts[2])


@needs_extension
def test_an_agent_with_several_gpus_keeps_the_first_and_says_so(cuda: FakeCuda, caplog) -> None:
    before = counters.snapshot()["several_gpu_agents"]
    with agents.starting(AGENT):
        pass
    for device in (1, 2):
        agents.follow(AGENT, cuda.contexts[device])
        registry.add(AGENT, 1000 * device, 10, Owner(cuda.contexts[device], device))
    assert group_context() == cuda.contexts[1]
    assert counters.snapshot()["several_gpu_agents"] - before == 1 and "one agent for each GPU" in caplog.text


@needs_extension
def test_an_agent_that_moved_to_another_gpu_is_followed(cuda: FakeCuda) -> None:
    with agents.starting(AGENT):
        pass
    agents.follow(AGENT, cuda.contexts[1])
    registry.add(AGENT, 1000, 10, Owner(cuda.contexts[1], 1))
    registry.remove(AGENT, 1000, 10)
    agents.follow(AGENT, cuda.contexts[2])
    assert group_context() == cuda.contexts[2]


def test_an_agent_made_before_us_is_left_alone(cuda: FakeCuda) -> None:
    agents.follow(AGENT, cuda.contexts[1])
    agents.forget(AGENT)
    agents.gone(AGENT)
    assert agents._groups == {}


@needs_extension
def test_a_failing_extension_never_stops_an_agent(cuda: FakeCuda, monkeypatch, caplog) -> None:
    before = counters.snapshot()["hook_failures"]
    monkeypatch.setattr(native, "arm", lambda *_: 1 / 0)
    with agents.starting(AGENT):
        reached = True
    assert reached and counters.snapshot()["hook_failures"] - before == 1 and "native.arm" in caplog.text


def test_an_error_of_the_agent_passes_and_disarms(cuda: FakeCuda) -> None:
    with pytest.raises(KeyError), agents.starting(AGENT):
        raise KeyError
    if native.available():
        assert not native.present().on


@pytest.mark.parametrize("how", ["switched off", "not built"])
def test_off_means_nothing_is_done_and_it_is_said(cuda: FakeCuda, monkeypatch, how: str, caplog) -> None:
    if how == "switched off":
        monkeypatch.setattr(settings, "current", lambda: settings.Settings(native_threads="off"))
    else:
        monkeypatch.setattr(native, "_extension", None)
        monkeypatch.setattr(native, "_reason", "the extension was not built")
    with agents.starting(AGENT):
        pass
    agents.follow(AGENT, cuda.contexts[1])
    agents.hold(True)
    assert agents._groups == {} and not agents.calls_are_whole()
    for _ in range(2):
        with ctxfix.native_threads():
            pass
    assert len(caplog.records) == 1 and "native threads are not bound" in caplog.text


@needs_extension
def test_native_threads_by_memory_and_by_the_thread(cuda: FakeCuda) -> None:
    address = cuda.alloc(3)
    cuda.make_current(1)
    with ctxfix.native_threads((address, 10, 0)):
        assert native.present()[:2] == (True, cuda.contexts[3])
        assert cuda.current() == cuda.contexts[1], "the thread itself stays where it is"
    with ctxfix.native_threads():
        assert native.present()[:2] == (True, cuda.contexts[1])
    assert not native.present().on
    with pytest.raises(UnknownOwnerError), ctxfix.native_threads(0x1000):
        pytest.fail("entered")


def test_without_the_extension_its_functions_say_why() -> None:
    code = """
        import sys
        sys.modules["ctxfix.native._native"] = None
        from ctxfix import native
        assert not native.available() and native.reason()
        assert native.status() == {"available": False, "reason": native.reason()}
        try: native.arm(0)
        except native.CtxfixError as error: print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.returncode == 0 and "native threads are not covered" in done.stdout, done.stderr
    assert issubclass(native.CtxfixError, CtxfixError)


@needs_extension
def test_deactivate_takes_the_hooks_of_the_extension_off() -> None:
    code = """
    import ctxfix
    from ctxfix import native
    from ctxfix.native import agents
    slots = lambda: native.counters()["slots"]
    agents.install()
    assert native.status()["installed"] and slots()["patched"] > slots()["restored"] == 0, slots()
    ctxfix.deactivate()
    assert not native.status()["installed"] and slots()["restored"] == slots()["patched"], slots()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, env=clean_environment(), cwd="/"
    )


@needs_extension
def test_in_a_forked_child_of_a_process_with_cuda_the_extension_stays_off(cuda: FakeCuda) -> None:
    """It would ask the driver for the owner of whatever libfabric touches."""
    agents.install()
    child = os.fork()
    if child == 0:
        scans = native.counters()["slots"]["scans"]
        with agents.starting(AGENT), ctxfix.native_threads():
            agents.install()
            fine = not native.present().on
        os._exit(0 if fine and not agents.enabled() and native.counters()["slots"]["scans"] == scans else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert agents.enabled()
