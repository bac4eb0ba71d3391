# SPDX-License-Identifier: Apache-2.0
"""Verdicts: a perfect run passes, and whatever is taken from it, it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from evidence_of import BYTES, DESCRIPTORS, POSTS, calls, perfect, run_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfix.errors import EvidenceError
from ctxfix.evidence import fabric_log, merge
from ctxfix.verify.verdict import Path, judge

Files = dict[str, list[dict[str, Any]]]
N = POSTS * DESCRIPTORS


def counts(files: Files, name: str) -> dict[str, Any]:
    return files[name][-1]


def kinds(files: Files, name: str) -> dict[str, dict[str, int]]:
    return next(iter(counts(files, name)["calls"]["devices"].values()))


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_perfect_run_is_proven(world: int, both_ways: bool) -> None:
    judgement = judge(run_of(perfect(world, both_ways)))
    assert [row.path for row in judgement.rows] == [Path.CUDA_IPC] * world * (2 if both_ways else 1)
    assert judgement.code == 0, judgement.reason
    assert all(row.bytes == POSTS * BYTES and row.failures == 0 and row.compared for row in judgement.rows)


def without_copies(files: Files) -> None:
    """SAR with no warning: IPC was never selected (peer access is off), so nothing failed and nothing was said."""
    kinds(files, "prefill1").clear()
    kinds(files, "decode1").clear()


def through_the_host(files: Files) -> None:
    counts(files, "prefill1")["calls"] = calls(1, copy_dtoh=(99, POSTS * BYTES))
    counts(files, "decode1")["calls"] = calls(1, copy_htod=(99, POSTS * BYTES))


def range_fails(files: Files) -> None:
    kinds(files, "prefill1")["range"]["failures"] = 1


def handle_fails(files: Files) -> None:
    kinds(files, "prefill1")["get_handle"]["failures"] = 1


def copy_fails(files: Files) -> None:
    """The receiver fails its copy, and NIXL says DONE (libfabric to 2.4.0)."""
    kinds(files, "decode1")["copy_dtod"]["failures"] = 1


def wrong_bytes(files: Files) -> None:
    files["decode1"][1]["wrong"] = 1


def stale(files: Files) -> None:
    files["decode1"][1]["stale"] = 1


def not_compared(files: Files) -> None:
    del files["decode1"][1]


def compared_in_part(files: Files) -> None:
    files["decode1"][1]["bytes"] -= 1


def checked_by_another(files: Files) -> None:
    files["decode1"][1]["sender"] = "prefill0"


def never_posted(files: Files) -> None:
    counts(files, "prefill1")["posts"] = []


def no_record(files: Files) -> None:
    del files["prefill1"]


def neither_end(files: Files) -> None:
    del files["prefill1"], files["decode1"]


def no_receiver(files: Files) -> None:
    del files["decode1"]


def not_counted(files: Files) -> None:
    counts(files, "prefill1")["calls"] = None
    counts(files, "prefill1")["calls_reason"] = "libfabric's CUDA calls are not counted: not built"


def not_counted_there(files: Files) -> None:
    counts(files, "decode1")["calls"] = None


def never_opened(files: Files) -> None:
    del kinds(files, "decode1")["open_handle"]


def a_copy_too_few(files: Files) -> None:
    kinds(files, "decode1")["copy_dtod"]["calls"] -= 1


def a_byte_too_few(files: Files) -> None:
    kinds(files, "decode1")["copy_dtod"]["bytes"] -= 1


def a_handle_too_many(files: Files) -> None:
    kinds(files, "prefill1")["get_handle"]["calls"] += 1


def unfinished(files: Files) -> None:
    counts(files, "prefill1")["posts"][0]["done"] -= 1


def failed(files: Files) -> None:
    counts(files, "prefill1")["posts"][0]["failed"] = 1


def started_only(files: Files) -> None:
    kinds(files, "decode1")["copy_async"] = {"calls": 1, "failures": 0, "bytes": 0, "rebinds": 0}


def rank_twice(files: Files) -> None:
    counts(files, "prefill1")["identity"]["rank"] = 0


def two_runs(files: Files) -> None:
    files["again"] = files["decode1"]


def records_lost(files: Files) -> None:
    counts(files, "decode1")["lost"] = 1


def killed(files: Files) -> None:
    files["prefill1"].append({"kind": "post"})


def no_counts(files: Files) -> None:
    files["decode1"] = files["decode1"][:1]


def other_format(files: Files) -> None:
    files["decode1"][0]["schema"] = 99


def ranks_disagree(files: Files) -> None:
    counts(files, "prefill1")["identity"]["world"] = 4


def no_rank(files: Files) -> None:
    counts(files, "prefill1")["identity"]["rank"] = None


def receiver_of_no_such_rank(files: Files) -> None:
    counts(files, "decode1")["identity"]["rank"] = 11


def compared_in_no_transfer(files: Files) -> None:
    next(row for row in files["decode1"] if row["kind"] == "check")["transfers"] = 0


def unseen_posts(files: Files) -> None:
    counts(files, "prefill1")["unknown_posts"] = 1


def on_other_hosts(files: Files) -> None:
    files["decode1"][0]["boot"] = "another"


def ucx(files: Files) -> None:
    counts(files, "prefill1")["agents"]["prefill1"]["backends"] = ["UCX"]


def host_memory(files: Files) -> None:
    counts(files, "prefill1")["posts"][0]["device"] = -1


SPOILERS: list[Callable[[Files], None]] = [
    without_copies, through_the_host, range_fails, handle_fails, copy_fails, wrong_bytes, stale, not_compared,
    compared_in_part, checked_by_another, never_posted, no_record, neither_end, no_receiver, not_counted,
    not_counted_there, never_opened, a_copy_too_few, a_byte_too_few, a_handle_too_many, unfinished, failed,
    started_only,
    rank_twice, two_runs, records_lost, killed, no_counts, other_format, ranks_disagree, no_rank,
    receiver_of_no_such_rank, compared_in_no_transfer, unseen_posts,
    on_other_hosts, ucx, host_memory,
]  # fmt: skip
SAR = {through_the_host, range_fails, handle_fails}
OTHER = {ucx, host_memory}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
def test_no_run_that_was_spoilt_is_proven(spoil: Callable[[Files], None]) -> None:
    files = perfect()
    spoil(files)
    judgement = judge(run_of(files))
    assert judgement.code == 1, judgement.reason
    bad = [row for row in judgement.rows if not row.good]
    wanted = Path.SAR if spoil in SAR else Path.OTHER if spoil in OTHER else Path.UNPROVEN
    assert wanted in {row.path for row in bad}
    assert all(row.reasons and row.advice for row in bad)


def test_the_other_rank_keeps_its_verdict() -> None:
    files = perfect()
    through_the_host(files)
    assert {row.rank: row.path for row in judge(run_of(files)).rows} == {0: Path.CUDA_IPC, 1: Path.SAR}


def test_rank_zero_alone_proves_nothing() -> None:
    files = {name: rows for name, rows in perfect(1).items()}
    judgement = judge(run_of(files))
    assert judgement.code == 1
    assert "rank 0 alone" in judgement.rows[0].reasons[0]
    assert judge(run_of(files), ranks=1).code == 1


def test_nobody_says_how_many_ranks() -> None:
    files = perfect()
    for name in files:
        counts(files, name)["identity"]["world"] = None
    assert judge(run_of(files)).code == 1
    assert judge(run_of(files), ranks=2).code == 0
    assert judge(run_of(files), ranks=3).code == 1


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(
    ("ranks", "code", "advice"),
    [(None, 1, "Give --ranks N"), (2, 0, ""), (1, 1, "Record all ranks of one run"), (3, 1, "Record all ranks")],
)
def test_processes_that_do_not_know_their_rank_are_counted(
    ranks: int | None, code: int, advice: str, both_ways: bool
) -> None:
    files = perfect(both_ways=both_ways)
    for name in files:
        counts(files, name)["identity"] |= {"rank": None, "world": None}
    judgement = judge(run_of(files), ranks)
    assert judgement.code == code, judgement.reason
    assert [row.posts for row in judgement.rows] == [4] * (4 if both_ways else 2)  # no rows of ranks that never were
    told = "".join(cure for row in judgement.rows for cure in row.advice)
    assert told.startswith(advice) and ("--ranks" in told) == (ranks is None)


def test_one_that_does_not_know_its_rank_is_the_one_not_seen() -> None:
    files = perfect()
    no_rank(files)
    assert judge(run_of(files), ranks=2).code == 0
    rank_seven = perfect()
    no_rank(rank_seven)
    counts(rank_seven, "prefill0")["identity"]["rank"] = 7
    assert judge(run_of(rank_seven), ranks=2).code == 1


def test_without_a_comparison_counts_may_be_taken_alone() -> None:
    files = perfect()
    not_compared(files)
    judgement = judge(run_of(files), compared=False)
    assert judgement.code == 0
    assert any("not compared" in note for row in judgement.rows for note in row.notes)
    wrong = perfect()
    wrong_bytes(wrong)
    assert judge(run_of(wrong), compared=False).code == 1


def test_no_transfer_at_all_could_not_be_judged() -> None:
    files = perfect()
    for name in files:
        counts(files, name)["posts"] = []
    assert judge(run_of(files)).code == 2
    assert judge(merge.Run()).code == 2


def test_a_process_that_was_killed_after_its_counts_is_believed() -> None:
    files = perfect()
    counts(files, "prefill1")["final"] = False
    assert judge(run_of(files)).code == 0


def test_the_log_alone_convicts_but_never_acquits() -> None:
    files = perfect()
    for name in files:
        counts(files, name)["calls"] = None
    run = run_of(files)
    assert {row.path for row in judge(run).rows} == {Path.UNPROVEN}
    rank1 = next(process for process in run.processes if process.file == "prefill1")
    line = b"libfabric:1001:1:t:shm:ep_ctrl:smr_do_ipc():589<warn> unable to use IPC for msg, fallback to using SAR\n"
    rank1.said = fabric_log.parse([line])[1001]
    assert {row.rank: row.path for row in judge(run).rows} == {0: Path.UNPROVEN, 1: Path.SAR}


def nic(seen: int, *, apart: bool = True) -> Files:
    files = perfect()
    for name, rows in files.items():
        counts(files, name)["calls"] = calls(0)
        decode = name.startswith("decode")
        rows[0]["efa"] = {"known": True, "reason": "", "counters": {"rdmap0/1": {"rdma_write_bytes": 7}}}
        after = 7 + (0 if decode and apart else seen)
        counts(files, name)["efa"] = {
            "known": True,
            "reason": "",
            "counters": {"rdmap0/1": {"rdma_write_bytes": after}},
        }
        if apart and decode:
            rows[0]["boot"] = "another"
    return files


@pytest.mark.parametrize("apart", [True, False])
def test_the_network_is_proven_by_its_own_counters(apart: bool) -> None:
    payload = 2 * POSTS * BYTES
    for seen, code in ((payload, 0), (payload + 54_400, 0), (payload - 1, 1), (0, 1), (3 * payload, 1)):
        judgement = judge(run_of(nic(seen, apart=apart)))
        assert judgement.code == code, (seen, judgement)
        assert {row.path for row in judgement.rows} == {Path.UNPROVEN if code else Path.NIC}


def numbers(files: Files) -> list[tuple[Any, Any]]:
    """Every number that speaks for the path, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    for name, rows in files.items():
        for check in (row for row in rows if row["kind"] == "check"):
            found += [(check, key) for key in ("bytes", "wrong", "stale")]
        snapshot = rows[-1]
        for posted in snapshot["posts"]:
            found += [(posted, key) for key in ("posts", "bytes", "done", "failed")]
        for kind, values in kinds(files, name).items():
            if kind != "open_handle":
                found += [(values, "failures")]
            if kind == "copy_dtod":
                found += [(values, "calls"), (values, "bytes")]
            if kind == "get_handle":
                found += [(values, "calls")]
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_single_number_can_be_changed(data: st.DataObject) -> None:
    files = perfect(data.draw(st.integers(2, 3)), data.draw(st.booleans()))
    where = numbers(files)
    container, key = where[data.draw(st.integers(0, len(where) - 1))]
    container[key] = data.draw(st.integers(0, 2**40).filter(lambda n: n != container[key]))
    assert judge(run_of(files)).code == 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_junk_is_a_traceback(data: st.DataObject) -> None:
    files = perfect()
    name = data.draw(st.sampled_from(sorted(files)))
    record = data.draw(st.sampled_from(files[name]))
    key = data.draw(st.sampled_from(sorted(record)))
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
    record[key] = data.draw(junk) if key != "kind" else data.draw(st.text(max_size=9))
    judge(run_of(files))


def test_host_memory_beside_the_kv_cache_is_no_matter() -> None:
    files = perfect()
    row = {**counts(files, "prefill1")["posts"][0], "device": -1, "bytes": 7, "contexts": {"host": 1}}
    counts(files, "prefill1")["posts"].append(row)
    judgement = judge(run_of(files))
    assert judgement.code == 0
    assert len(judgement.rows) == 2


def test_gpu_memory_of_unknown_owner_is_still_gpu_memory() -> None:
    files = perfect()
    counts(files, "prefill1")["posts"][0]["device"] = -2
    assert judge(run_of(files)).code == 0
    without_copies(files)
    assert judge(run_of(files)).code == 1


def many_to_one() -> Files:
    """Four prefill ranks, two of them to each decode rank."""
    files = perfect(4)
    for rank in (2, 3):
        del files[f"decode{rank}"]
        counts(files, f"prefill{rank}")["posts"][0]["remote"] = f"decode{rank - 2}"
        files[f"decode{rank - 2}"].insert(1, {**files[f"decode{rank - 2}"][1], "sender": f"prefill{rank}"})
        copies = kinds(files, f"decode{rank - 2}")["copy_dtod"]
        copies["calls"], copies["bytes"] = 2 * copies["calls"], 2 * copies["bytes"]
    for rank in (0, 1):
        counts(files, f"decode{rank}")["identity"]["world"] = 2
    return files


def test_several_ranks_to_one() -> None:
    judgement = judge(run_of(many_to_one()))
    assert judgement.code == 0, judgement
    assert [row.rank for row in judgement.rows] == [0, 1, 2, 3]


def test_one_rank_cannot_stand_in_for_another() -> None:
    """Both ranks copy into one process: what one copies too much does not make up for what the other lacks."""
    files = many_to_one()
    kinds(files, "prefill0")["get_handle"]["calls"] += N
    kinds(files, "prefill2").clear()
    paths = {row.rank: row.path for row in judge(run_of(files)).rows}
    assert paths == {0: Path.UNPROVEN, 1: Path.CUDA_IPC, 2: Path.UNPROVEN, 3: Path.CUDA_IPC}
    files = many_to_one()
    through = calls(2, get_handle=N, copy_dtoh=(5, 1000))
    counts(files, "prefill2")["calls"] = through
    paths = {row.rank: row.path for row in judge(run_of(files)).rows}
    assert (paths[2], paths[0]) == (Path.SAR, Path.UNPROVEN)


def test_a_stray_context_is_named_with_its_memory() -> None:
    files = perfect()
    contexts = counts(files, "prefill1")["contexts"]
    contexts["active"], contexts["nvml"] = [0, 1], {"known": True, "used": {"GPU-a": 524 << 20}}
    row = next(row for row in judge(run_of(files)).rows if row.rank == 1)
    assert (row.path, row.stray) == (Path.CUDA_IPC, [0])
    assert "524 MiB of GPU-a" in row.notes[0]
    assert "A context is on a GPU" in row.advice[0]


# ---- how many ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_at_all_are_refused(ranks: int) -> None:
    """It would switch off the check that all ranks are there."""
    with pytest.raises(EvidenceError, match=f"^{ranks} ranks were asked for: at least one"):
        judge(run_of(perfect()), ranks=ranks)


def test_more_ranks_than_were_asked_for_need_a_record() -> None:
    files = perfect(4)
    for name in ("prefill2", "prefill3"):
        del files[name]
    judgement = judge(run_of(files), ranks=2)
    assert judgement.code == 1
    (row,) = (row for row in judgement.rows if not row.good)
    assert (row.name, row.reasons) == ("prefill ranks 2 to 3 → rank ?", ["ranks 2 to 3 of 4: there is no record of it"])
    assert judgement.problems == ["the processes of prefill speak of 4 ranks, asked for: 2"]


def test_more_ranks_than_were_asked_for_may_only_receive() -> None:
    """Ranks 0 and 1 send to ranks 2 and 3 of one launcher."""
    files = perfect()
    for rank in (0, 1):
        counts(files, f"prefill{rank}")["identity"] |= {"role": "", "world": 4}
        counts(files, f"decode{rank}")["identity"] |= {"role": "", "world": 4, "rank": 2 + rank}
    judgement = judge(run_of(files), ranks=2)
    assert (judgement.code, judgement.problems) == (0, ["the processes speak of 4 ranks, asked for: 2"])
    assert [row.reasons for row in judge(run_of(files)).rows if not row.good] == [
        [f"rank {rank} of 4: it posted no transfer"] for rank in (2, 3)
    ]


def test_missing_ranks_share_a_row() -> None:
    files = perfect(5)
    for rank in (1, 2):
        del files[f"prefill{rank}"]
    counts(files, "prefill3")["posts"] = []
    judgement = judge(run_of(files), ranks=10**9)
    assert [row.name.partition(" →")[0] for row in judgement.rows] == [
        "prefill rank 0", "prefill ranks 1 to 2", "prefill rank 3", "prefill rank 4", "prefill ranks 5 to 999999999",
    ]  # fmt: skip
    assert judgement.rows[4].reasons == ["ranks 5 to 999999999 of 1000000000: there is no record of it"]
    for name in files:
        counts(files, name)["identity"]["world"] = 2**63
    assert judge(run_of(files)).rows[-1].last_rank == 2**63 - 1
