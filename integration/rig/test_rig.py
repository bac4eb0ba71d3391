# SPDX-License-Identifier: Apache-2.0
"""The rig shows the fault of real NIXL, and can be prepared safely. No ctxfix is at work here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rig import HERE, MissingSystemPackage, Rig, _cached, read_posts

# What the shipped wheels do: verdict of the posts, and whether the posting thread's contexts are left alone.
# 1.4.0 binds the thread itself, and leaves it so.
FAULTS = {
    "main": {"1.1.0": ("right", True), "1.4.0": ("right", True)},
    "thread": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "timer": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "executor": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "preexisting-thread": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "wrong-context": {"1.1.0": ("wrong", True), "1.4.0": ("right", False)},
    "wrong-devid": {"1.1.0": ("none", True), "1.4.0": ("wrong", False)},  # 1.4.0 trusts the devId
    "two-gpus": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "mixed": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "read": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "prepped": {"1.1.0": ("none", True), "1.4.0": ("right", False)},
    "vmm": {"1.1.0": ("none", True), "1.4.0": None},  # 1.4.0 refuses: the context it recorded is NULL
    "dram": {"1.1.0": ("host", True), "1.4.0": ("host", True)},
}
CASES = [(mode, version) for mode, versions in FAULTS.items() for version in versions]


@pytest.mark.rig
@pytest.mark.parametrize(("mode", "version"), CASES)
def test_what_nixl_does_by_itself(rig: Rig, mode: str, version: str) -> None:
    outcome = rig.transfer(version, mode, name=f"self-{mode}-{version}", CTXFIX_DISABLE="1")
    expected = FAULTS[mode][version]
    if expected is None:
        assert outcome.result["state"] == "nixlBackendError: NIXL_ERR_BACKEND", outcome
        assert not outcome.verdicts
        return
    verdict, kept = expected
    assert outcome.done, (outcome.result, outcome.log)
    assert outcome.verdicts.keys() == {verdict}, outcome.verdicts
    assert outcome.context_kept is kept, outcome.result


@pytest.mark.rig
@pytest.mark.parametrize("version", ["1.1.0", "1.4.0"])
def test_progress_threads_have_no_context(rig: Rig, version: str) -> None:
    """The receiver's fault, open in both versions: nobody gives NIXL's own thread a context."""
    outcome = rig.transfer(version, "main", name=f"self-progress-{version}", CTXFIX_DISABLE="1")
    completions = [post for post in outcome.records if post.op == "completion"]
    posting = {post.tid for post in outcome.posts}
    assert {post.verdict for post in completions if post.tid not in posting} == {"none"}


@pytest.mark.rig
def test_forkserver_children_show_it_too(rig: Rig) -> None:
    outcome = rig.transfer("1.1.0", "thread", "--start-method", "forkserver", CTXFIX_DISABLE="1")
    assert outcome.done and outcome.verdicts == {"none": 1}, outcome


@pytest.mark.rig
def test_every_transfer_is_recorded(rig: Rig) -> None:
    options = ("--transfers", "5", "--size", "65536")
    outcome = rig.transfer("1.1.0", "thread", *options, name="self-five", CTXFIX_DISABLE="1")
    posts = outcome.posts
    assert [post.len for post in posts] == [65536] * 5
    assert {(post.owner, post.current) for post in posts} == {(1, None)}


@pytest.mark.rig
def test_a_transfer_that_does_not_end_is_killed_and_said(rig: Rig) -> None:
    outcome = rig.transfer("1.1.0", "thread", name="self-killed", deadline=0.01, CTXFIX_DISABLE="1")
    assert not outcome.done
    assert "killed after 0.01 s" in outcome.result["error"]


def test_the_program_under_test_does_not_know_ctxfix() -> None:
    assert "ctxfix" not in (HERE / "transfer.py").read_text().lower()


def test_a_failed_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "part").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _cached(tmp_path / "thing", half)
    assert list(tmp_path.iterdir()) == []


def test_two_preparations_at_once_both_succeed(tmp_path: Path, fake_driver: Rig) -> None:
    steps: list[str] = []
    rigs: list[Rig] = []
    prepare = lambda: rigs.append(Rig.driver_only(steps.append, tmp_path / "rig"))  # noqa: E731
    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rigs[0] == rigs[1]
    assert len(steps) == 1, "compiled once, by whoever came first"


def test_without_a_compiler_the_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(MissingSystemPackage, match="apt-get install -y gcc libc6-dev libfabric-dev libhwloc15"):
        Rig.driver_only(root=tmp_path)


def test_without_headers_the_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(MissingSystemPackage, match="stdio.h is missing. As root: apt-get install"):
        Rig.driver_only(root=tmp_path)


def test_the_callers_settings_do_not_leak_in(monkeypatch: pytest.MonkeyPatch, fake_driver: Rig) -> None:
    monkeypatch.setenv("NIXL_DISABLE_CUDA_ADDR_WA", "1")
    monkeypatch.setenv("FAKECUDA_FAIL", "cuInit:999")
    env = fake_driver.env(FAKECUDA_NDEV="2")
    assert "NIXL_DISABLE_CUDA_ADDR_WA" not in env and "FAKECUDA_FAIL" not in env
    assert env["FAKECUDA_NDEV"] == "2"


def test_no_records_without_a_file(tmp_path: Path) -> None:
    assert read_posts(tmp_path / "none.jsonl") == []


def test_the_program_lists_its_modes() -> None:
    command = [sys.executable, str(HERE / "transfer.py"), "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert all(f"  {mode} " in said for mode in FAULTS)


def test_leavings_of_killed_runs_and_old_logs_are_swept(tmp_path: Path, fake_driver: Rig) -> None:
    old, new = tmp_path / "runs" / "old.log", tmp_path / "runs" / "new.log"
    old.parent.mkdir()
    (tmp_path / "lib-0.new-killed" / "folder").mkdir(parents=True)
    old.touch(), new.touch()
    os.utime(old, (0, 0))
    Rig.driver_only(root=tmp_path)
    assert not old.exists() and new.exists()
    assert not (tmp_path / "lib-0.new-killed").exists()
