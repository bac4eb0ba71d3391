# SPDX-License-Identifier: Apache-2.0
"""The same program and NIXL with ctxfix installed: the start-up file activates it, the program knows nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import HERE, Outcome, Rig

from ctxfix import native

VERSIONS = ["1.1.0", "1.4.0"]
MODES = [
    "main",
    "thread",
    "timer",
    "executor",
    "preexisting-thread",
    "wrong-context",
    "wrong-devid",
    "two-gpus",
    "read",
    "prepped",
    "vmm",
]

pytestmark = pytest.mark.rig
needs_extension = pytest.mark.skipif(not native.available(), reason=f"native threads: {native.reason()}")


def run(rig: Rig, version: str, mode: str, *options: str, **environ: str) -> Outcome:
    name = "-".join(["with", mode, version, *(option.strip("-") for option in options), *environ])
    outcome = rig.transfer(version, mode, *options, name=name, **{"CTXFIX_STRICT": "1", **environ})
    assert outcome.done, (outcome.result, outcome.log)
    return outcome


def test_the_program_does_not_know_us() -> None:
    assert "ctxfix" not in Path(HERE / "transfer.py").read_text().lower()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", MODES)
def test_every_post_is_in_its_owners_context_and_the_callers_is_kept(rig: Rig, mode: str, version: str) -> None:
    if version == "1.4.0" and mode in ("wrong-devid", "vmm") and not native.available():
        pytest.skip(f"inside the post NIXL 1.4.0 goes by its own state: {native.reason()}")
    outcome = run(rig, version, mode)
    assert outcome.verdicts.keys() == {"right"}, outcome.verdicts
    assert outcome.context_kept, outcome.result
    registrations = {post.verdict for post in outcome.records if post.op == "register"}
    assert registrations == {"right"}, registrations


@pytest.mark.parametrize("version", VERSIONS)
def test_processes_of_a_forkserver_are_served(rig: Rig, version: str) -> None:
    outcome = run(rig, version, "thread", "--start-method", "forkserver")
    assert outcome.verdicts.keys() == {"right"}


@pytest.mark.parametrize("version", VERSIONS)
def test_of_a_mixed_post_the_first_descriptor_decides_where_nixl_does_not(rig: Rig, version: str) -> None:
    outcome = run(rig, version, "mixed")
    # 1.4.0 sets the device of each descriptor itself, better than anybody could from outside: it is not held off.
    assert outcome.verdicts == ({"right": 1, "wrong": 1} if version == "1.1.0" else {"right": 2})
    assert outcome.context_kept


@pytest.mark.parametrize("version", VERSIONS)
def test_host_memory_stays_without_cuda(rig: Rig, version: str) -> None:
    outcome = run(rig, version, "dram")
    assert outcome.verdicts.keys() == {"host"}


def test_the_newest_nixl_with_host_memory(rig: Rig) -> None:
    """NIXL 1.5.1's LIBFABRIC plugin needs a libfabric that no registry has; its Python API is hooked all the same."""
    newest = Rig.prepare(versions=("1.5.1",))
    outcome = newest.transfer("1.5.1", "dram", "--backend", "UCX", name="with-1.5.1", CTXFIX_STRICT="1")
    assert outcome.done, (outcome.result, outcome.log)


# ---- NIXL's own threads ----------------------------------------------------------------------------------------------


@needs_extension
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("agent", ["last", "first", "on-other-gpu"])
def test_progress_threads_follow_the_agents_memory(rig: Rig, version: str, agent: str) -> None:
    """Made after the memory, before any CUDA in the process, or on a thread that sits on another GPU."""
    outcome = run(rig, version, "thread", "--agent", agent)
    assert outcome.progress_gpus == {1}
    assert outcome.verdicts.keys() == {"right"}


@needs_extension
@pytest.mark.parametrize("version", VERSIONS)
def test_progress_threads_alone_are_left_when_switched_off(rig: Rig, version: str) -> None:
    outcome = run(rig, version, "thread", CTXFIX_NATIVE_THREADS="off")
    assert outcome.progress_gpus == {None}
    assert outcome.verdicts.keys() == {"right"}, "the rest works"


@needs_extension
def test_receiver_and_sender_on_different_gpus(rig: Rig) -> None:
    outcome = run(rig, "1.1.0", "thread", "--gpu", "2", "--peer-gpu", "3")
    assert outcome.progress_gpus == {2, 3}
