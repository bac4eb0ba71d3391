# SPDX-License-Identifier: Apache-2.0
"""SGLang's own classes move a KV cache from prefill to decode, two ranks each: what is wrong by itself, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HERE, ROOT
from environment import NATIVE, Environment, Outcome

import ctxfix.native
from ctxfix.evidence.identity import Identity
from ctxfix.patches.sglang import SOURCE

OLD, NEW = "0.5.12.post1", "0.5.23"
RANKS = (0, 1)

Environments = Callable[[str], Environment]
runs: dict[tuple[str, bool], Outcome] = {}


def run(environment: Environments, sglang: str, active: bool) -> Outcome:
    """A run with ctxfix or without it, which several tests look at."""
    if (sglang, active) not in runs:
        switch = {"CTXFIX_STRICT": "1"} if active else {"CTXFIX_DISABLE": "1"}
        name = "active" if active else "disabled"
        runs[sglang, active] = environment(sglang).transfer(name=name, **switch)
    return runs[sglang, active]


@pytest.mark.parametrize("active", [False, True], ids=["disabled", "active"])
@pytest.mark.parametrize("sglang", [OLD, NEW])
def test_every_request_is_served_with_the_right_bytes(environment: Environments, sglang: str, active: bool) -> None:
    outcome = run(environment, sglang, active)
    assert outcome.done, (outcome.result, outcome.log)


@pytest.mark.parametrize("rank", RANKS)
def test_old_sglang_posts_without_a_context(environment: Environments, rank: int) -> None:
    """The bug. Rank 0 is no better; on a real GPU 0 it is put right by accident."""
    outcome = run(environment, OLD, active=False)
    assert outcome.gpu_posts(f"prefill-{rank}") == {("transfer_worker", rank, None, "none")}, outcome.log


@pytest.mark.parametrize("rank", RANKS)
def test_new_nixl_binds_the_sender_and_leaves_it_so(environment: Environments, rank: int) -> None:
    outcome = run(environment, NEW, active=False)
    assert outcome.gpu_posts(f"prefill-{rank}") == {("transfer_worker", rank, rank, "right")}, outcome.log
    host = {post for post in outcome.seen("post", f"prefill-{rank}") if post[3] == "host"}
    assert host == {("transfer_worker", None, rank, "host")}  # SGLang's thread has a context that nobody gave back


@pytest.mark.parametrize("end", ["prefill", "decode"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("sglang", [OLD, NEW])
def test_nixls_own_threads_have_no_context(environment: Environments, sglang: str, rank: int, end: str) -> None:
    """The receiver's fault, in both: 0.5.23 chooses the device where it makes the backend, and NIXL passes it to no
    thread that it starts."""
    outcome = run(environment, sglang, active=False)
    assert {verdict for *_, verdict in outcome.seen("completion", f"{end}-{rank}")} == {"none"}, outcome.log


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("sglang", [OLD, NEW])
def test_with_ctxfix_every_post_is_right(environment: Environments, sglang: str, rank: int) -> None:
    outcome = run(environment, sglang, active=True)
    assert outcome.gpu_posts(f"prefill-{rank}") == {("transfer_worker", rank, rank, "right")}, outcome.log
    assert {verdict for *_, verdict in outcome.seen("register", f"prefill-{rank}")} == {"right"}
    for end in ("prefill", "decode"):
        assert outcome.result["ranks"][f"{end}-{rank}"]["contexts"] == [rank]  # none of ours, on no other GPU


@pytest.mark.skipif(not ctxfix.native.available(), reason=f"the native part is not built: {ctxfix.native.reason()}")
@pytest.mark.parametrize("end", ["prefill", "decode"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("sglang", [OLD, NEW])
def test_with_ctxfix_nixls_own_threads_are_right(environment: Environments, sglang: str, rank: int, end: str) -> None:
    outcome = run(environment, sglang, active=True)
    assert outcome.seen("completion", f"{end}-{rank}") == {(NATIVE, rank, rank, "right")}, outcome.log


# ---- the patch of SGLang by itself -----------------------------------------------------------------------------------

ONLY_SGLANG = """
import ctxfix
from ctxfix import threads

threads.apply = lambda: False
ctxfix.unpatch_nixl()
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(ONLY_SGLANG, (1, "right")), (ONLY_SGLANG + "ctxfix.unpatch_sglang()\n", (None, "none"))],
    ids=["on", "off"],
)
def test_the_patch_alone_binds_the_transfer_threads(
    environment: Environments, tmp_path: Path, code: str, expected: tuple[int | None, str]
) -> None:
    """With every other hook off, it is the patch of SGLang that puts the posts right; taken off, they are wrong."""
    (tmp_path / "sitecustomize.py").write_text(code)
    variables = {"CTXFIX_STRICT": "1", "CTXFIX_NATIVE_THREADS": "off"}
    outcome = environment(OLD).transfer(name=f"patch-{expected[1]}", paths=(tmp_path,), **variables)
    assert outcome.done, (outcome.result, outcome.log)
    assert outcome.gpu_posts("prefill-1") == {("transfer_worker", 1, *expected)}, outcome.log


# ---- which rank it is ------------------------------------------------------------------------------------------------

TELL_RANK = """
import os
from ctxfix.evidence import identity

def declare(*place, original=identity.declare):
    original(*place)
    print("RANK", os.getpid(), identity.current(), flush=True)

identity.declare = declare
"""


@pytest.mark.parametrize("sglang", [OLD, NEW])
def test_each_process_knows_its_rank(environment: Environments, sglang: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELL_RANK)
    outcome = environment(sglang).transfer(name="ranks", paths=(tmp_path,))
    assert outcome.done, (outcome.result, outcome.log)
    told = [line for line in outcome.log.read_text().splitlines() if line.startswith("RANK ")]
    pids = {name: of["pid"] for name, of in outcome.result["ranks"].items()}
    assert sorted(told) == sorted(
        f"RANK {pids[f'{mode}-{rank}']} {Identity(rank, len(RANKS), mode, SOURCE)}"
        for mode in ("prefill", "decode")
        for rank in RANKS
    )


# ---- SGLang is left working ------------------------------------------------------------------------------------------


def test_a_method_that_moved_leaves_sglang_working(environment: Environments, tmp_path: Path) -> None:
    """The other hooks still serve it, and the log says what was not found, once in each process."""
    prepared = environment(NEW)
    package = next(folder / "sglang" for folder in prepared.modules if (folder / "sglang").is_dir())
    link_but(
        package, tmp_path / "sglang", Path("srt/disaggregation/nixl/conn.py"), "transfer_worker", "serve_transfers"
    )
    outcome = prepared.transfer(name="moved", paths=(tmp_path,))
    assert outcome.done, (outcome.result, outcome.log)
    assert outcome.gpu_posts("prefill-1") == {("serve_transfers", 1, 1, "right")}
    told = f"PatchError: SGLang {NEW} has no NixlKVManager.transfer_worker in sglang.srt.disaggregation.nixl.conn."
    assert told in outcome.log.read_text()


def link_but(source: Path, copy: Path, changed: Path, old: str, new: str) -> None:
    """A copy of a package made of links, but for one module in which a word is another."""
    copy.mkdir()
    for entry in source.iterdir():
        if entry.name == changed.parts[0] and len(changed.parts) > 1:
            link_but(entry, copy / entry.name, Path(*changed.parts[1:]), old, new)
        elif entry.name == changed.name:
            (copy / entry.name).write_text(entry.read_text().replace(old, new))
        elif entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


# What SGLang's loader does in a process for each of these settings; SGLang is imported once.
PLUGIN = """
import json, os, sys
import managers
from sglang.srt.plugins import load_plugins
for variables in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(variables)
        load_plugins()
        startup = sys.modules.get("ctxfix._startup")
        print("LOADED", startup and (startup.installed(), startup.started_by), flush=True)
        os._exit(0)
    os.wait()
"""
SETTINGS: list[tuple[dict[str, str], str]] = [
    ({}, "(True, 'SGLang plugin')"),
    ({"SGLANG_PLUGINS": "another,ctxfix"}, "(True, 'SGLang plugin')"),
    ({"SGLANG_PLUGINS": "another"}, "None"),
    ({"CTXFIX_DISABLE": "1"}, "(False, 'import ctxfix')"),
]


@pytest.mark.parametrize("sglang", [OLD, NEW])
def test_sglangs_own_plugin_loader(environment: Environments, sglang: str) -> None:
    """In an interpreter that runs no start-up file, SGLang itself loads ctxfix, unless it is left out or off."""
    paths = [str(ROOT), str(HERE), *[path for path in sys.path if path.endswith("site-packages")]]
    env = environment(sglang).env()
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *paths])
    settings = json.dumps([variables for variables, _ in SETTINGS])
    command = [sys.executable, "-S", "-W", "ignore", "-c", PLUGIN, settings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    found = [line.removeprefix("LOADED ") for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert found == [expected for _, expected in SETTINGS], done.stderr
