# SPDX-License-Identifier: Apache-2.0
"""`ctxfix verify` on the rig: real NIXL, and where there is one a real libfabric that does IPC on the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rig import Rig

# As AWS's EFA installer brings it; no package registry has one.
BUILT = Path(os.environ.get("CTXFIX_TEST_CUDA_LIBFABRIC", "/opt/amazon/efa/lib/libfabric.so.1"))
needs_cuda_libfabric = pytest.mark.skipif(
    not BUILT.exists(), reason="no libfabric with CUDA support: CTXFIX_TEST_CUDA_LIBFABRIC names its libfabric.so.1"
)
SMALL = ("--size", "65536", "--tokens", "2", "--repeat", "1", "--timeout", "100")


def with_cuda(rig: Rig, tmp_path: Path) -> Rig:
    """The rig with the libfabric that speaks CUDA, and the name by which that looks for the runtime."""
    folder = tmp_path / "libfabric"
    folder.mkdir(exist_ok=True)
    for name, target in (("libfabric.so.1", BUILT), ("libcudart.so", rig.libraries / "libcudart.so.12")):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    return replace(rig, libfabric=folder)


def verify(
    rig: Rig, tmp_path: Path, nixl: str, *options: str, cuda: bool = True, **environ: str
) -> tuple[int, Any, str]:
    """Run it; the exit code, what it wrote as JSON, and stderr."""
    if cuda:
        rig = with_cuda(rig, tmp_path)
        environ = {"RIG_HMEM": "keep", **environ}
    done = subprocess.run(
        [sys.executable, "-m", "ctxfix", "verify", *SMALL, "--json", "-", *options],
        env=rig.env(nixl, TMPDIR=str(tmp_path), **environ),
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else None, done.stderr


def paths(judgement: Any) -> dict[str, str]:
    return {row["name"]: row["path"] for row in judgement["rows"]}


@needs_cuda_libfabric
@pytest.mark.parametrize("nixl", ["1.1.0", "1.4.0"])
def test_every_rank_and_direction_is_proven(rig: Rig, tmp_path: Path, nixl: str) -> None:
    code, judgement, stderr = verify(rig, tmp_path, nixl, "--record", str(tmp_path / "records"))
    assert code == 0, (judgement, stderr)
    assert set(paths(judgement).values()) == {"CUDA_IPC"}
    assert len(judgement["rows"]) == 4
    for row in judgement["rows"]:
        assert row["contexts"] == {"right": 3}
        assert (row["stray"], row["peer_stray"], row["failures"], row["compared"]) == ([], [], 0, True)
        assert row["witness"] == "no second witness: cupti-python is not installed"
    # The records say the same to whoever judges them later.
    again = subprocess.run([sys.executable, "-m", "ctxfix", "report", str(tmp_path / "records")], capture_output=True)
    assert again.returncode == 0


@needs_cuda_libfabric
@pytest.mark.parametrize(
    ("lie", "path", "words"), [("0", "CUDA_IPC", "as libfabric's"), ("1", "UNPROVEN", "disagrees")]
)
def test_a_second_witness(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str, path: str, words: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "cupti_stub"))
    code, judgement, _ = verify(rig, tmp_path, "1.4.0", RIG_CUPTI_LIE=lie)
    assert set(paths(judgement).values()) == {path}, judgement
    assert code == int(lie)
    assert all(words in row["witness"] for row in judgement["rows"])


@needs_cuda_libfabric
def test_several_efa_devices(rig: Rig, tmp_path: Path) -> None:
    """NIXL stripes large descriptors over the devices: more handles than descriptors, and the counts still agree."""
    code, judgement, _ = verify(rig, tmp_path, "1.4.0", "--size", "8000000", RIG_EFAS="4")
    assert code == 0, judgement


@needs_cuda_libfabric
def test_without_ctxfix_rank_1_falls_back(rig: Rig, tmp_path: Path) -> None:
    """What the project is about: rank 0 by CUDA IPC, rank 1 by SAR. Decode's GPUs are 2 and 3, so it sends by SAR
    too."""
    code, judgement, _ = verify(rig, tmp_path, "1.1.0", "--without")
    assert code == 1
    assert paths(judgement) == {
        "prefill rank 0 → decode rank 0": "CUDA_IPC",
        "prefill rank 1 → decode rank 1": "SAR",
        "decode rank 0 → prefill rank 0": "SAR",
        "decode rank 1 → prefill rank 1": "SAR",
    }
    rank1 = next(row for row in judgement["rows"] if row["name"].startswith("prefill rank 1"))
    assert rank1["stray"] == [0]
    assert set(rank1["contexts"]) == {"none", "wrong"}


@needs_cuda_libfabric
def test_sar_without_a_warning_is_seen(rig: Rig, tmp_path: Path) -> None:
    """Without peer access libfabric never selects IPC: nothing fails, nothing is logged."""
    code, judgement, _ = verify(rig, tmp_path, "1.1.0", FAKECUDA_PEERS="0")
    assert code == 1
    assert "CUDA_IPC" not in paths(judgement).values()
    assert "SAR" in paths(judgement).values()


@needs_cuda_libfabric
def test_a_copy_that_fails_though_nixl_says_done(rig: Rig, tmp_path: Path) -> None:
    code, judgement, _ = verify(rig, tmp_path, "1.1.0", FAKECUDA_FAIL="cuMemcpy:1:3:1,cuMemcpyDtoDAsync:1:3:1")
    assert code == 1
    assert not set(paths(judgement).values()) <= {"CUDA_IPC"}
    assert any("failed" in reason or "WRONG" in reason for row in judgement["rows"] for reason in row["reasons"])


@pytest.mark.parametrize("nixl", ["1.1.0", "1.4.0"])
def test_what_cannot_be_counted_is_not_proven(rig: Rig, tmp_path: Path, nixl: str) -> None:
    """A libfabric without CUDA moves the bytes rightly, and nobody can say how."""
    code, judgement, _ = verify(rig, tmp_path, nixl, cuda=False)
    assert code == 1
    assert set(paths(judgement).values()) == {"UNPROVEN"}
    assert all("not counted" in row["reasons"][0] for row in judgement["rows"])
    assert all("libfabric with CUDA support" in row["advice"][0] for row in judgement["rows"]), (
        "not a compiler, that is there"
    )
    assert all(row["compared"] and row["posts"] == 3 for row in judgement["rows"])


# Loaded by every Python of the run; it sees all that Python code asks of the network.
GUARD = """
import sys
def refuse(event, arguments):
    if event.startswith("socket.") and event != "socket.gethostname":
        with open({told!r}, "a") as file:
            file.write(f"{{event}} {{arguments}}\\n")
sys.addaudithook(refuse)
open({told!r} + ".on", "a").write("x")
"""


def test_no_network(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of a verification, records and report and all: nothing of it opens a socket."""
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD.format(told=str(tmp_path / "told")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "guard"))
    code, judgement, stderr = verify(rig, tmp_path, "1.4.0", cuda=False)
    assert (code, len(judgement["rows"])) == (1, 4), stderr  # this libfabric counts nothing
    assert (tmp_path / "told.on").read_text() == "x" * 5, "the command and its four workers"
    assert not (tmp_path / "told").exists(), (tmp_path / "told").read_text()


def test_what_stops_it_is_said(rig: Rig, tmp_path: Path) -> None:
    code, _, stderr = verify(rig, tmp_path, "1.1.0", cuda=False, FAKECUDA_NDEV="0")
    assert (code, "no GPU" in stderr) == (2, True)
    code, _, stderr = verify(rig, tmp_path, "1.1.0", "--module", "nixl_none", cuda=False)
    assert (code, "nixl_none" in stderr) == (2, True)
    options = ("--backend", "UCX", "--record", str(tmp_path / "records"))
    code, judgement, _ = verify(rig, tmp_path, "1.1.0", *options, cuda=False, NIXL_PLUGIN_DIR="/nowhere")
    assert (code, "prefill" in judgement["reason"]) == (2, True)
    code, _, stderr = verify(rig, tmp_path, "1.1.0", cuda=False, RANK="1", WORLD_SIZE="2")
    assert (code, "--record" in stderr) == (2, True)


@pytest.mark.parametrize("nixl", ["1.1.0", "1.4.0"])
def test_without_a_fabric_it_says_so_once(rig: Rig, tmp_path: Path, nixl: str) -> None:
    """Of two ranks, with ctxfix and without: NIXL's error, with NIXL's own reason and no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "ctxfix", "verify", *SMALL, "--compare"],
        env=rig.env(nixl, TMPDIR=str(tmp_path), LD_PRELOAD=""),
        capture_output=True,
        text=True,
        timeout=150,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "No EFA here" in said and "Traceback" not in said and 'File "' not in said
    reason = "nixlNotFoundError: NIXL_ERR_NOT_FOUND (registerMem: no available backends for mem type 'VRAM_SEG')"
    assert said.count(f"nothing was moved: ranks 0, 1: prefill: {reason}") == said.count("nixlNotFoundError") == 1


def test_one_gpu_is_shared(rig: Rig, tmp_path: Path) -> None:
    code, judgement, stderr = verify(rig, tmp_path, "1.1.0", cuda=False, FAKECUDA_NDEV="1")
    assert code == 1, stderr
    assert len(judgement["rows"]) == 4


def test_ranks_of_a_launcher_are_judged_by_rank_zero(rig: Rig, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ctxfix", "verify", *SMALL, "--record", str(tmp_path / "shared")]
    running = [
        subprocess.Popen(
            command, env=rig.env("1.1.0", RANK=str(rank), WORLD_SIZE="2"), stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    out = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [1, 0]  # this libfabric counts nothing
    assert out[0].count("UNPROVEN") >= 4
    assert "rank 0 judges" in out[1]


@needs_cuda_libfabric
def test_the_project_to_copy(rig: Rig, tmp_path: Path) -> None:
    """integration/downstream, as its user would run it."""
    downstream = Path(__file__).parents[1] / "downstream"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", str(downstream)]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    env = with_cuda(rig, tmp_path).env("1.1.0", RIG_HMEM="keep")
    skipped = subprocess.run(command, env=env, **options)
    assert "2 skipped" in skipped.stdout or "2 passed" in skipped.stdout
    done = subprocess.run([*command, "--ctxfix-require-gpu"], env=env, **options)
    assert done.returncode == 0, done.stdout
    assert "rank 1 → rank 1  CUDA_IPC" in done.stdout
    without = subprocess.run([*command, "--ctxfix-require-gpu"], env={**env, "CTXFIX_DISABLE": "1"}, **options)
    assert without.returncode == 1


@needs_cuda_libfabric
def test_libfabric_is_heard_without_its_log(rig: Rig, tmp_path: Path) -> None:
    """VMM memory has no IPC handle: libfabric says so to nobody, since FI_LOG_LEVEL is unset, and to us."""
    program = str(Path(__file__).with_name("transfer.py"))
    env = with_cuda(rig, tmp_path).env(
        "1.1.0", RIG_HMEM="keep", CTXFIX_RECORD=str(tmp_path / "records"), CTXFIX_LOG="off"
    )
    done = subprocess.run([sys.executable, program, "vmm"], env=env, capture_output=True, text=True, timeout=60)
    assert "fallback to using SAR" not in done.stdout + done.stderr
    report = [sys.executable, "-m", "ctxfix", "report", str(tmp_path / "records"), "--json", "-", "--ranks", "1"]
    verdict = json.loads(subprocess.run(report, capture_output=True, text=True).stdout)
    (row,) = [row for row in verdict["rows"] if row["posts"]]
    assert row["path"] == "SAR"
    assert "fallback to using SAR" in row["reasons"][0]
