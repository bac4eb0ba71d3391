# SPDX-License-Identifier: Apache-2.0
"""SGLang's releases, without running them: the hook points are there, and ctxfix installs beside SGLang's pins."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from environment import PAIRS, _install, sources
from rig import _cached, _one_at_a_time

from ctxfix.patches.sglang import _host

RIG = ROOT / ".rig"
#: The two that are run, some between them, and the newest there is.
RELEASES = ("0.5.12.post1", "0.5.13.post1", "0.5.15.post1", "0.5.17", "0.5.19", "0.5.21", "0.5.22", "0.5.23", "")
UV = "uv==0.13.9"


@pytest.fixture(scope="session", autouse=True)
def rig_folder() -> None:
    RIG.mkdir(exist_ok=True)


def thread_mains(cls: ast.ClassDef) -> Iterator[str]:
    """The methods that a class gives to new threads as their target."""
    for call in ast.walk(cls):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "threading.Thread":
            for keyword in call.keywords:
                if keyword.arg == "target" and ast.unparse(keyword.value).startswith("self."):
                    yield ast.unparse(keyword.value).removeprefix("self.")


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release or "newest")
def test_hook_points(release: str) -> None:
    texts = sources(release, RIG)
    # Of these the rank is made.
    common = texts["sglang.srt.disaggregation.common.conn"]
    for axis in ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp"):
        assert f"self.{axis}_rank = " in common and f"self.{axis}_size = " in common
    assert "self.disaggregation_mode = " in common
    for module in _host.modules:
        hooks = [hook for hook in _host.hooks if hook.module == module]
        (name,) = {hook.method.partition(".")[0] for hook in hooks}
        classes = {node.name: node for node in ast.parse(texts[module]).body if isinstance(node, ast.ClassDef)}
        assert name in classes, f"{module} has no {name}: {sorted(classes)}"
        methods = {node.name: node for node in classes[name].body if isinstance(node, ast.FunctionDef)}
        first, second, *_ = methods["__init__"].args.args
        assert (first.arg, second.arg) == ("self", "args")
        workers = {hook.method.partition(".")[2]: hook.optional for hook in hooks if hook.thread}
        started = set(thread_mains(classes[name]))
        assert {worker for worker, optional in workers.items() if not optional} <= methods.keys() & started
        # Whatever else becomes a thread's main in this class is to be known here, and hooked if it moves data.
        assert started <= {*workers, "_failed_session_probe_loop"}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("release", PAIRS)
def test_installs_beside_sglangs_pins(release: str, python: str, tmp_path: Path) -> None:
    """All that SGLang requires and all that ctxfix requires, resolved together as an installer would, without a GPU's
    worth of downloads: uv reads the metadata alone."""
    with _one_at_a_time(RIG):
        uv = _cached(RIG / UV.replace("==", "-"), lambda to: _install(to, print, "--no-deps", UV)) / "bin" / "uv"
    asked = tmp_path / "asked.txt"
    asked.write_text(f"sglang=={release}\n{ROOT}\n")
    command = [str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", sys.executable]
    command += ["--python-version", python, "--cache-dir", str(RIG / "uv-cache"), str(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env={**os.environ})
    assert done.returncode == 0, done.stderr
    chosen = dict(line.split("==") for line in done.stdout.splitlines() if line.count("==") == 1)
    assert chosen["sglang"] == release
    assert chosen["cuda-python"].split(".")[0] == "13"  # what both releases require
