# SPDX-License-Identifier: Apache-2.0
"""Verdicts with two witnesses: the second may spoil a verdict, and see the end of what the first saw begin."""

from __future__ import annotations

from typing import Any

import pytest
from evidence_of import BYTES, DESCRIPTORS, POSTS, perfect, run_of

from ctxfix.evidence import cupti
from ctxfix.verify import report
from ctxfix.verify.verdict import Path, as_json, judge

N, SIZE = POSTS * DESCRIPTORS, POSTS * BYTES
OWN = {"htod": [2, 500], "dtoh": [3, 700]}


def account(copies: int, size: int, **more: tuple[int, int]) -> dict[str, Any]:
    """What the witness writes: others' copies from GPU to GPU, ``more`` of others', and the process's own."""
    kinds = {kind: list(row) for kind, row in OWN.items()}
    kinds["ptop"], kinds["dtod"] = [copies // 2, size // 2], [copies - copies // 2, size - size // 2]
    for kind, (number, added) in more.items():
        row = kinds.setdefault(kind, [0, 0])
        row[0], row[1] = row[0] + number, row[1] + added
    return {"kind": "witness", "reason": "", "devices": {"0": kinds}, "own": OWN, "seconds": [0.1, 0.1]}


def absent(reason: str) -> dict[str, Any]:
    return {"kind": "witness", "reason": reason, "devices": {}, "own": {}, "seconds": [0.0, 0.0]}


AGREES = {"prefill": account(0, 0), "decode": account(N, SIZE)}

#: What the witness of decode 1 (or prefill 1) says -> the path of rank 1, and words of its evidence.
CASES: dict[str, tuple[str, dict[str, Any] | None, Path, str]] = {
    "agrees": ("decode", AGREES["decode"], Path.CUDA_IPC, "as libfabric's calls say"),
    "a byte more": ("decode", account(N, SIZE + 1), Path.UNPROVEN, f"{SIZE + 1:,} bytes between GPUs"),
    "a byte less": ("decode", account(N, SIZE - 1), Path.UNPROVEN, "the second witness disagrees"),
    "a copy more": ("decode", account(N + 1, SIZE), Path.UNPROVEN, f"{N + 1} copies"),
    "no copy at all": ("decode", account(0, 0), Path.UNPROVEN, "reports 0 copies of 0 bytes"),
    "from the host": ("decode", account(N, SIZE, htod=(1, 9)), Path.UNPROVEN, "reports 9 bytes from the host"),
    "to the host": ("prefill", account(0, 0, dtoh=(1, 9)), Path.UNPROVEN, "reports 9 bytes to the host"),
    "the poster copied": ("prefill", account(1, 5), Path.UNPROVEN, "reports 1 copies of 5 bytes"),
    "who knows where": ("decode", account(N, SIZE, other=(1, 9)), Path.UNPROVEN, "without saying from where"),
    "not installed": ("decode", absent(cupti.NOT_INSTALLED), Path.CUDA_IPC, "no second witness on one end"),
    "dropped": ("decode", absent("CUPTI dropped 3 records"), Path.CUDA_IPC, "CUPTI dropped 3 records"),
    "unfinished": ("decode", absent(cupti.UNFINISHED), Path.CUDA_IPC, cupti.UNFINISHED),
    "records missing": (
        "decode", {**account(N, SIZE), "own": {"htod": [2, 501]}}, Path.CUDA_IPC, "records are missing",
    ),
    "nobody asked": ("decode", None, Path.CUDA_IPC, "no first one to agree with"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_it_says_of_rank_1(name: str) -> None:
    role, said, path, words = CASES[name]
    files = perfect(2)
    for process, rows in files.items():
        witness = said if process == f"{role}1" else AGREES[process[:-1]]
        if witness is not None:
            rows.insert(1, witness)
    judgement = judge(run_of(files))
    zero, one = sorted(judgement.rows, key=lambda row: row.rank or 0)
    assert (zero.path, one.path) == (Path.CUDA_IPC, path)
    assert "as libfabric's calls say" in zero.witness
    assert words in one.witness
    agreed = "as libfabric's calls say" in one.witness
    assert agreed == (name == "agrees")
    assert judgement.code == (0 if path is Path.CUDA_IPC else 1)
    if path is Path.UNPROVEN:
        assert any("(CUPTI)" in why for why in one.reasons)
        assert any("Two witnesses disagree" in cure for cure in one.advice)


@pytest.mark.parametrize(
    ("said", "path", "words"),
    [
        (AGREES["decode"], Path.CUDA_IPC, "of exactly the bytes"),
        (account(N, SIZE - 1), Path.UNPROVEN, f"libfabric's calls are {N} of {SIZE:,}"),
        (account(N - 1, SIZE), Path.UNPROVEN, f"reports {N - 1} copies"),
        (absent(cupti.NOT_INSTALLED), Path.UNPROVEN, f"{N} copies were started and not seen to end"),
    ],
)
def test_copies_that_libfabric_only_starts(said: dict[str, Any], path: Path, words: str) -> None:
    """As its development head makes them: the GPU reports what has ended."""
    files = perfect(2)
    for name, rows in files.items():
        for kinds in rows[-1]["calls"]["devices"].values():
            if "copy_dtod" in kinds:
                kinds["copy_async"] = kinds.pop("copy_dtod")
        rows.insert(1, said if name == "decode1" else AGREES[name[:-1]])
    zero, one = sorted(judge(run_of(files)).rows, key=lambda row: row.rank or 0)
    assert (zero.path, one.path) == (Path.CUDA_IPC, path)
    assert any(words in why for why in one.reasons), one.reasons


def test_not_installed_is_said_once_and_changes_nothing() -> None:
    files = perfect(2, both_ways=True)
    before = judge(run_of(files))
    for rows in files.values():
        rows.insert(1, absent(cupti.NOT_INSTALLED))
    after = judge(run_of(files))
    assert [row.path for row in after.rows] == [row.path for row in before.rows]
    assert {row.witness for row in after.rows} == {"no second witness: cupti-python is not installed"}
    assert {row.witness for row in before.rows} == {""}
    shown = text_of(after)
    assert shown.count("no second witness") == 1
    assert "no second witness" in report.html(after) and "no second witness" in report.junit(after)
    assert all(row["witness"] for row in as_json(after)["rows"])


def test_it_makes_no_verdict_of_its_own() -> None:
    """Without the first witness its account is not enough."""
    files = perfect(2)
    for process, rows in files.items():
        rows.insert(1, AGREES[process[:-1]])
        rows[-1]["calls"] = None
    judgement = judge(run_of(files))
    assert {row.path for row in judgement.rows} == {Path.UNPROVEN}
    assert all("no first one" in row.witness for row in judgement.rows)


def text_of(judgement: Any) -> str:
    from rich.console import Console

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report.table(judgement))
    return console.export_text()
