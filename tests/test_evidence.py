# SPDX-License-Identifier: Apache-2.0
"""The sources of evidence, each on what it reads."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evidence_of import perfect, run_of, write
from hypothesis import given
from hypothesis import strategies as st

from ctxfix.evidence import contexts, efa, fabric_calls, fabric_log, identity, merge, posts
from ctxfix.verify.verdict import Path as Path_
from ctxfix.verify.verdict import judge

SAR = b"libfabric:%d:1796074417::shm:ep_ctrl:smr_do_ipc():723<warn> unable to use IPC for msg, fallback to using SAR\n"
RANGE = (
    b"libfabric:%d:1796074417:tag:core:core:cuda_get_base_addr():453<warn> Failed to perform cuMemGetAddressRange: "
    b"CUDA_ERROR_NOT_FOUND:named symbol not found\n"
)

# ---- logs ------------------------------------------------------------------------------------------------------------


def test_lines_of_libfabric_are_sorted_by_process() -> None:
    found = fabric_log.parse([SAR % 7, RANGE % 7, RANGE % 7, RANGE % 8, b"INFO: server started\n"])
    assert found[7].counts == {"sar": 1, "range_failure": 2}
    assert found[8].counts == {"range_failure": 1}
    assert found[7].providers == {"shm": 1, "core": 2}


def test_several_messages_glued_into_one_line() -> None:
    glued = b"\x00\xff garbage " + (SAR % 7).strip() + (RANGE % 8).strip() + b" trailing\n"
    found = fabric_log.parse([glued])
    assert (found[7].counts["sar"], found[8].counts["range_failure"]) == (1, 1)


def test_a_torn_head_is_nobody_s_evidence() -> None:
    found = fabric_log.parse([(SAR % 7)[12:]])
    assert 7 not in found
    assert found[None].counts["sar"] == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("Failed to perform cudaIpcGetMemHandle: cudaErrorInvalidValue:invalid argument", "handle_failure"),
        ("Failed to perform cudaIpcOpenMemHandle: cudaErrorMapBufferObjectFailed:x", "open_failure"),
        ("Failed to perform cudaMemcpy: cudaErrorInvalidValue:invalid argument", "copy_failure"),
        ("EFA will not use SHM for intranode communication because FI_EFA_ENABLE_SHM_TRANSFER=0", "shm_off"),
        ("Successfully inserted fe80::1 to shm provider's av. efa_fiaddr: 0 shm_fiaddr = 0", "shm_peer"),
    ],
)
def test_what_else_libfabric_says(line: str, what: str) -> None:
    head = "libfabric:7:1700000000:p:efa:av:function():1<info> "
    assert fabric_log.parse([head + line])[7].counts == {what: 1}


def test_lines_of_nixl_and_ucx() -> None:
    lines = [
        "I1130 21:28:42.798280 21492 libfabric_backend.cpp:980] Multi-GPU detected (device 1), using cudaSetDevice",
        "[1700:1:a] +--------+ ucp_context_0 intra-node cfg#2 | remote memory write by ucp_put* from cuda/GPU0 |",
        "[1700:1:a] |  0..inf | zero-copy            | cuda_ipc/cuda                                          |",
    ]
    said = fabric_log.parse(lines)[None]
    assert said.counts == {"nixl_multi_gpu": 1, "ucx_path": 1}


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_any_bytes_can_be_parsed(lines: list[bytes]) -> None:
    fabric_log.parse(lines)


def test_the_log_of_another_run_is_not_evidence(tmp_path: Path) -> None:
    folder = write(perfect(), tmp_path / "r")
    log = tmp_path / "other.log"
    log.write_bytes(SAR % 99)
    run = merge.read(str(folder), [str(log), str(tmp_path / "missing.log")])
    assert any("another run" in problem for problem in run.problems)
    assert any("missing.log" in problem for problem in run.problems)
    log.write_bytes(SAR % 1001)
    run = merge.read(str(folder), [str(log)])
    assert next(p for p in run.processes if p.pid == 1001).said.counts["sar"] == 1


def test_a_pid_of_two_hosts_is_nobody_s(tmp_path: Path) -> None:
    files = perfect()
    files["decode0"][0]["pid"] = files["prefill1"][0]["pid"]
    log = tmp_path / "x.log"
    log.write_bytes(SAR % 1001)
    run = merge.read(str(write(files, tmp_path / "r")), [str(log)])
    assert any("two recorded processes" in problem for problem in run.problems)
    assert not any(process.said.counts for process in run.processes)


# ---- EFA -------------------------------------------------------------------------------------------------------------


def device(root: Path, name: str, **counters: int) -> None:
    folder = root / name / "ports" / "1" / "hw_counters"
    folder.mkdir(parents=True, exist_ok=True)
    for counter, value in counters.items():
        (folder / counter).write_text(f"{value}\n")


def test_counters_of_all_devices_are_added(tmp_path: Path) -> None:
    device(tmp_path, "rdmap0", rdma_write_bytes=100, tx_bytes=7)
    device(tmp_path, "rdmap1", rdma_write_bytes=5)
    before = efa.read(str(tmp_path))
    device(tmp_path, "rdmap0", rdma_write_bytes=150)
    device(tmp_path, "rdmap1", rdma_write_bytes=6)
    device(tmp_path, "rdmap2", rdma_write_bytes=3)
    (tmp_path / "rdmap0/ports/1/hw_counters/lifespan").write_text("no number")
    assert efa.added(before, efa.read(str(tmp_path))) == ({"rdma_write_bytes": 54, "tx_bytes": 0}, "")


def test_counters_that_vanish_or_run_backwards(tmp_path: Path) -> None:
    device(tmp_path, "rdmap0", rdma_write_bytes=100)
    before = efa.read(str(tmp_path))
    device(tmp_path, "rdmap0", rdma_write_bytes=99)
    added, why = efa.added(before, efa.read(str(tmp_path)))
    assert (added, "backwards" in why) == (None, True)
    gone = {"known": True, "reason": "", "counters": {}}
    assert "vanished" in efa.added(before, gone)[1]
    assert "No such file" in efa.read(str(tmp_path / "nowhere"))["reason"]
    assert not efa.read(str(tmp_path / "rdmap0"))["known"]


# ---- contexts, identity, calls ---------------------------------------------------------------------------------------


class Nvml:
    def __init__(self, pid: int) -> None:
        self.pid, self.shut = pid, 0

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=self.pid, usedGpuMemory=500 << 20), SimpleNamespace(pid=1, usedGpuMemory=None)]


def test_nvml_tells_where_this_process_holds_memory() -> None:
    nvml = Nvml(4242)
    assert contexts.read_nvml(nvml, 4242) == {"known": True, "used": {"GPU-0": 500 << 20, "GPU-1": 500 << 20}}
    assert "PID namespaces" in contexts.read_nvml(nvml, 77)["reason"]
    assert nvml.shut == 2

    class Broken(Nvml):
        def nvmlDeviceGetCount(self) -> int:
            raise RuntimeError("GPU is lost")

    assert "GPU is lost" in contexts.read_nvml(Broken(1), 1)["reason"]


@pytest.mark.parametrize(
    ("environ", "title", "rank", "world", "source"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, "", 3, 8, "torch environment"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "", 1, 2, "Slurm"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "", 0, 2, "Open MPI"),
        ({"RANK": "0"}, "sglang::scheduler_DP0_TP3", 3, None, "SGLang's process title"),
        ({"RANK": "x"}, "python serve.py", None, None, "nobody says"),
        ({}, "", None, None, "nobody says"),
    ],
)
def test_who_says_which_rank(environ: dict[str, str], title: str, rank: Any, world: Any, source: str) -> None:
    assert identity.find(environ, title) == identity.Identity(rank, world, "", source)


def test_counts_of_all_gpus_are_added() -> None:
    row = {"calls": 3, "failures": 1, "bytes": 70, "rebinds": 0}
    total = fabric_calls.total({"devices": {"0": {"get_handle": row, "copy_dtod": row}, "-1": {"copy_dtod": row}}})
    assert (total.handles, total.handle_failures, total.copies, total.copied_bytes) == (2, 1, 4, 140)
    for junk in ({}, {"devices": []}, {"devices": {"0": 7}}, {"devices": {"0": {"range": {"failures": "x"}}}}):
        with pytest.raises(ValueError):
            fabric_calls.total(junk)


# ---- posts -----------------------------------------------------------------------------------------------------------


class Serialising:
    """As nixlXferDList: read index by index, or all at once from its serialisation."""

    def __init__(self, rows: list[tuple[int, int, int]], tail: bytes = b"", state: bytes | None = None) -> None:
        self.rows, self.asked = rows, 0
        words = array("Q", [word for row in rows for word in row])
        self.state = b"head|" + words.tobytes() + tail if state is None else state

    def descCount(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        self.asked += 1
        return self.rows[index]

    def __getstate__(self) -> bytes:
        return self.state


ROWS = [(4096 * i, 100 + i, 1) for i in range(50)]


@pytest.mark.parametrize("tail", [b"", b"|"])
def test_lengths_are_taken_from_the_serialisation(tail: bytes) -> None:
    descs = Serialising(ROWS, tail)
    assert list(posts.lengths(descs)) == [row[1] for row in ROWS]
    assert descs.asked <= 4


@pytest.mark.parametrize("state", [b"", b"another format altogether" * 100, b"x" * 24])
def test_an_unknown_serialisation_is_not_trusted(state: bytes) -> None:
    descs = Serialising(ROWS, state=state)
    assert list(posts.lengths(descs)) == [row[1] for row in ROWS]
    assert posts.measure(descs) == (50, sum(row[1] for row in ROWS), 0)


def test_a_handle_used_again_is_another_transfer() -> None:
    told: list[dict[str, Any]] = []
    observer = posts.Observer(told.append)
    observer.agent(self := object(), "me", ["LIBFABRIC"])
    for size in (10, 20):
        observer.made(self, 7, "WRITE", [(0, size, 0)], "you")
        observer.posted(7, "PROC", 0, 0)
        observer.polled(7, "PROC")
        observer.polled(7, "DONE")
        observer.polled(7, "DONE")
        observer.forget(7)
        observer.released(7, refused=False)
    observer.posted(7, "PROC", 0, 0)
    (row,) = observer.snapshot()["posts"]
    assert (row["posts"], row["bytes"], row["done"], row["done_bytes"]) == (2, 30, 2, 30)
    assert observer.unknown_posts == 1
    assert [record["kind"] for record in told] == ["agent", "post", "end", "post", "end"]


def test_a_release_that_was_refused_changes_nothing() -> None:
    observer = posts.Observer()
    observer.made(self := object(), 7, "WRITE", [(0, 5, 0)], "you")
    observer.posted(7, "PROC", 0, 0)
    observer.forget(7)
    observer.released(7, refused=True)
    observer.polled(7, "DONE")
    assert observer.snapshot()["posts"][0]["done"] == 1
    del self


def test_a_truncated_file_still_has_its_counts() -> None:
    files = perfect()
    files["prefill1"].insert(1, {"kind": "truncated", "cap": 1})
    assert all(not process.damage for process in run_of(files).processes)


# ---- the recorder ----------------------------------------------------------------------------------------------------


def run_python(code: str, **environ: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    code = """
import os, sys
from ctxfix.evidence import recorder
r = recorder.start(sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLDER"])
r.observer.agent(object(), "parent", [])
if os.fork() == 0:
    r.observer.agent(object(), "child", [])
    recorder.current().finish()
    os._exit(0)
os.wait()
"""
    run_python(code, FOLDER=str(tmp_path / "r"))
    run = merge.read(str(tmp_path / "r"))
    assert sorted(tuple(process.agents) for process in run.processes) == [("child",), ("parent",)]
    assert len({process.pid for process in run.processes}) == 2


def test_a_forked_child_still_knows_whom_it_watches(tmp_path: Path) -> None:
    """Without VRAM_SEG it would take GPU memory for the host's, and without the other hear nothing of libfabric."""
    code = """
import os
from ctxfix.evidence import recorder
r = recorder.start(os.environ["FOLDER"])
r.observer.vram = "VRAM_SEG"
pid = os.fork()
if pid == 0:
    r.observer.agent(object(), "child", [])
    observer = recorder.current().observer
    fine = observer.vram == "VRAM_SEG" and observer.libraries_came is recorder.count_calls
    recorder.current().finish()
    os._exit(0 if fine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    run_python(code, FOLDER=str(tmp_path / "r"))


def test_a_fork_while_the_recorder_looks_whether_it_is_to_end(tmp_path: Path) -> None:
    code = """
import os, signal, time
from ctxfix.evidence import recorder
r = recorder.start(os.environ["FOLDER"])
with r._ended._cond:  # as its thread does for a moment each second
    pid = os.fork()
    if pid == 0:
        os._exit(0)
deadline = time.monotonic() + 10
while time.monotonic() < deadline and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
    time.sleep(0.01)
os.kill(pid, signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child waited within os.fork()"
"""
    run_python(code, FOLDER=str(tmp_path / "r"))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_of_multiprocessing_leaves_its_last_counts(method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import multiprocessing, os
from ctxfix.evidence import recorder

def child():
    recorder.start(os.environ["FOLDER"]).observer.agent(object(), "child", [])

def main(method):
    process = multiprocessing.get_context(method).Process(target=child)
    process.start()
    process.join()
""")
    code = f"import program; program.main({method!r})"
    run_python(code, FOLDER=str(tmp_path / "r"), PYTHONPATH=str(tmp_path))
    (process,) = merge.read(str(tmp_path / "r")).processes
    assert process.final and list(process.agents) == ["child"] and not process.damage


def test_a_folder_that_cannot_be_used_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = "from ctxfix.evidence import recorder; assert recorder.start({!r}) is None"
    run_python(code.format(str(tmp_path / "file")))


def test_the_log_is_left_to_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_log, "_import_reason", None)
    monkeypatch.setenv("FI_LOG_LEVEL", "warn")
    assert "FI_LOG_LEVEL" in fabric_log.listen()
    assert not fabric_log.heard()["known"]
    monkeypatch.setattr(fabric_log, "_import_reason", None)
    monkeypatch.delenv("FI_LOG_LEVEL")
    monkeypatch.setattr("ctxfix.whole_data.loaded_libfabric", lambda: None)
    assert fabric_log.listen()  # no libfabric here, or no extension
    assert not fabric_log.heard()["known"]


def test_what_was_heard_convicts() -> None:
    files = perfect()
    files["prefill1"][-1]["log"] = {
        "known": True, "counts": {"sar": 1, "range_failure": 3}, "examples": {"sar": ["shm: fallback to using SAR"]},
    }  # fmt: skip
    rows = {row.rank: row for row in judge(run_of(files)).rows}
    assert rows[1].path is Path_.SAR
    assert rows[1].failures == 3
    assert rows[0].path is Path_.CUDA_IPC
    files["prefill1"][-1]["log"] = {"known": True, "counts": []}
    assert judge(run_of(files)).code == 1


@pytest.mark.parametrize("both_ways", [False, True])
def test_transfers_by_an_agent_that_the_process_does_not_have_are_no_proof(both_ways: bool) -> None:
    files = perfect(both_ways=both_ways)
    files["prefill0"][-1]["posts"][0]["agent"] = "decode1"
    assert judge(run_of(files), ranks=2).code == 1


@pytest.mark.parametrize("kind", ["get_handle", "range"])
def test_counts_without_their_failures_are_not_counts_without_failures(kind: str) -> None:
    files = perfect()
    del files["prefill0"][-1]["calls"]["devices"]["0"][kind]["failures"]
    assert judge(run_of(files), ranks=2).code == 1
