# SPDX-License-Identifier: Apache-2.0
"""native_threads() around the making of engines: their workers, and what those start, are where the memory is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from host_environments import unpack
from rig import Rig

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

HERE = Path(__file__).resolve().parent
MOONCAKE = "mooncake-transfer-engine==0.3.13.post1"
INVALID_CONTEXT = 201


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["c", "rust"])
def library(request: pytest.FixtureRequest, rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("engine") / f"lib{request.param}engine.so"
    if request.param == "c":
        options = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
        run("cc", *options, str(HERE / "engine.c"), str(rig.libraries / "libcuda.so.1"), "-o", str(target))
        return target
    if shutil.which("rustc") is None:
        pytest.skip("no rustc here: the C stand-in is tested alone")
    (target.parent / "libcuda.so").symlink_to(rig.libraries / "libcuda.so.1")
    options = ["--edition", "2021", "--crate-type", "cdylib", "-O", "-L", str(target.parent)]
    run("rustc", *options, str(HERE / "engine.rs"), "-o", str(target))
    return target


@pytest.mark.parametrize("how", ["bare", "memory", "current"])
def test_workers(rig: Rig, library: Path, how: str) -> None:
    said = json.loads(run(sys.executable, str(HERE / "workers.py"), str(library), how, env=rig.env()))
    without = [[INVALID_CONTEXT, -1, INVALID_CONTEXT, -1]] * 3
    right = [[0, gpu, 0, gpu] for gpu in range(3)]
    assert said["answers"] == (without if how == "bare" else right)
    assert said["contexts"] == [1, 1, 1, 0], "nobody made another context"


def test_without_the_extension_nothing_happens(rig: Rig, library: Path) -> None:
    env = rig.env(CTXFIX_NATIVE_THREADS="off")
    said = json.loads(run(sys.executable, str(HERE / "workers.py"), str(library), "memory", env=env))
    assert {tuple(answer) for answer in said["answers"]} == {(INVALID_CONTEXT, -1, INVALID_CONTEXT, -1)}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="one wheel is enough")
@pytest.mark.parametrize("how", ["as it is", "native_threads"])
def test_mooncake(rig: Rig, tmp_path: Path, how: str) -> None:
    """The real engine: its threads are born without a context, and over TCP set the device before each copy."""
    files = unpack(MOONCAKE, "mooncake/engine.so", "mooncake/*.py", "mooncake/lib*.so", "*.libs/*")
    extra, log = tmp_path / "libextra.so", tmp_path / "calls"
    script = f"-Wl,--version-script={HERE / 'runtime_extra.map'}"
    run("cc", "-std=c11", "-fPIC", "-shared", script, str(HERE / "runtime_extra.c"), "-o", str(extra))
    env = rig.env(PYTHONPATH=str(files), LD_PRELOAD=str(extra), FAKECUDA_LOG=str(log))
    assert "equal=True" in run(sys.executable, str(HERE / "mooncake_tcp.py"), how, env=env)
    first: dict[str, str] = {}  # by thread: the context at its first call that needs one, or asks for one
    copies = defaultdict(set)
    main = ""
    for line in log.read_text().splitlines():
        fields = dict(field.split("=") for field in line.split()[:-1])
        call, tid, current = line.split()[-1], fields["tid"], fields["current"]
        main = main or tid
        if call in ("cuPointerGetAttributes", "cuMemcpy"):
            first.setdefault(tid, current)
        if call == "cuMemcpy":
            copies[tid].add(current)
    workers = {tid: current for tid, current in first.items() if tid != main}
    assert workers, "Mooncake's own threads copy"
    assert set(workers.values()) == {"-1" if how == "as it is" else "1"}
    assert set.union(*copies.values()) == {"1"}, "each copy is made where the memory is"
