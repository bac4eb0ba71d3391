# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in records, logs and the environment: never a traceback, and never a pass that was not earned.

The same examples in every run; ``--hypothesis-profile=long`` looks harder (conftest.py).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from evidence_of import perfect, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxfix.evidence import fabric_log, merge, records
from ctxfix.settings import Settings, parse
from ctxfix.verify import report
from ctxfix.verify.verdict import Judgement, as_json, judge

# ---- records ---------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 5), st.sampled_from([2**31, 2**63, 10**400, 4_000_000, 3_999_999, 1284]), st.floats()
)
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["prefill0", "decode1", "0", ""])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a tree of JSON."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def spoil(data: st.DataObject, files: dict[str, list[dict[str, Any]]]) -> None:
    """Change, drop, add or double something, anywhere."""
    path = data.draw(st.sampled_from(places(files)[1:]))
    parent: Any = files
    for key in path[:-1]:
        parent = parent[key]
    how = data.draw(st.sampled_from(["change", "drop", "double", "swap"]))
    if how == "change":
        parent[path[-1]] = data.draw(JSON)
    elif how == "drop":
        del parent[path[-1]]
    elif how == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[path[-1]]))
    elif how == "swap":
        other = data.draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
        parent[path[-1]], parent[other] = parent[other], parent[path[-1]]


def shown(judgement: Judgement) -> None:
    """In every form, and none of them breaks."""
    report.as_text(judgement)
    assert report.junit(judgement).startswith("<?xml")
    json.dumps(as_json(judgement))
    assert report.html(judgement).startswith("<!DOCTYPE html>")


KINDS = ("get_handle", "open_handle", "copy_dtod", "copy_htod", "copy_dtoh", "copy_async")
POSTED = ("agent", "remote", "operation", "posts", "bytes", "done", "failed")  # descriptors are joined and striped
COMPARED = ("sender", "receiver", "bytes", "wrong", "stale")  # in how many transfers is the application's word


def essence(files: dict[str, list[dict[str, Any]]]) -> Any:
    """What a proof rests on: who moved how much to whom, by which calls, and that every byte was compared."""
    found = []
    for records_of_one in files.values():
        last = next(record for record in reversed(records_of_one) if record["kind"] == "snapshot")
        calls = [
            # Handles are opened once and kept: how often says nothing.
            (kind, bool(row["calls"]) if kind == "open_handle" else row["calls"], row["failures"])
            + ((row["bytes"],) if kind.startswith("copy") else ())
            for kinds in last["calls"]["devices"].values()
            for kind, row in kinds.items()
            if kind in KINDS
        ]
        posts = [[post[name] for name in POSTED] for post in last["posts"]]
        checks = [[r[name] for name in COMPARED] for r in records_of_one if r["kind"] == "check"]
        # Of who only receives, the rank is a name.
        rank = [last["identity"][name] for name in ("rank", "world")] if posts else []
        found.append(repr((sorted(calls), posts, checks, rank, sorted(last["agents"]), last["unknown_posts"])))
    return sorted(found)


@pytest.mark.parametrize("both_ways", [False, True], ids=["one way", "both ways"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spoilt_records(tmp_path: Path, both_ways: bool, data: st.DataObject) -> None:
    files = perfect(both_ways=both_ways)
    honest = essence(files)
    for _ in range(data.draw(st.integers(1, 3))):
        spoil(data, files)
    folder = tmp_path / "records"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else [rows]))
        (folder / f"{str(list(files).index(name))}{records.SUFFIX}").write_text(text)
    if not files:
        return
    judgement = judge(merge.read(str(folder)), ranks=2)
    shown(judgement)
    if judgement.code == 0:
        assert essence(files) == honest
    else:
        assert any(not row.good for row in judgement.rows) or judgement.reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spoilt_bytes(tmp_path: Path, data: st.DataObject) -> None:
    """Bits turned, pieces cut out, doubled or put in between, in one of the files."""
    honest = essence(perfect())
    folder = write(perfect(), tmp_path / "records")
    path = folder / f"{data.draw(st.sampled_from(sorted(perfect())))}{records.SUFFIX}"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        end = at + data.draw(st.integers(0, 40))
        how = data.draw(st.sampled_from(["turn", "cut", "double", "insert"]))
        if how == "turn" and content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del content[at:end]
        elif how == "double":
            content[at:at] = content[at:end]
        else:
            content[at:at] = data.draw(st.binary(max_size=12))
    path.write_bytes(content)
    judgement = judge(merge.read(str(folder)), ranks=2)
    shown(judgement)
    if judgement.code == 0:
        read, _ = records.read_folder(str(folder))
        assert essence({file.name: file.records for file in read}) == honest


# ---- logs ------------------------------------------------------------------------------------------------------------

SAR = b"libfabric:%d:1700000000:p:shm:core:smr_format_sar():1<warn> unable to use IPC for msg, fallback to using SAR"
PIECES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([SAR % 1000, SAR % 7, b"libfabric:", b"libfabric:%d:1:a:b:c:d():1<warn> x" % 10**20, b"\xff<"]),
    st.sampled_from([b"Multi-GPU detected", b"| cuda_ipc/cuda |", b"Failed to perform cudaMemcpy: \x00", b"\r", b"\n"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.lists(PIECES, max_size=5).map(b"".join), max_size=8), told=st.booleans(), data=st.data())
def test_a_log_laced_with_anything(tmp_path: Path, lines: list[bytes], told: bool, data: st.DataObject) -> None:
    """It breaks nothing, and what it says plainly convicts, whatever stands around it."""
    folder = write(perfect(), tmp_path / "records")
    if told:
        lines.insert(data.draw(st.integers(0, len(lines))), SAR % 1000)
    log = tmp_path / "saved.log"
    log.write_bytes(b"\n".join(lines))
    judgement = judge(merge.read(str(folder), [str(log)]), ranks=2)
    shown(judgement)
    assert not told or judgement.code == 1


@given(record=JSON)
def test_what_was_heard_may_be_anything(record: Any) -> None:
    try:
        said = fabric_log.from_record(record)
    except (ValueError, TypeError, AttributeError, KeyError):
        return  # which merge.py takes for damage
    assert all(isinstance(line, str) for lines in said.examples.values() for line in lines)


# ---- settings --------------------------------------------------------------------------------------------------------

VARIABLES = [f"CTXFIX_{name}" for name in ("DISABLE", "STRICT", "LOG", "RECORD", "SYNC_MEMOPS", "NATIVE_THREADS")]
ANY_NAME = st.one_of(st.sampled_from(VARIABLES), st.text(max_size=9).map("CTXFIX_{}".format), st.text())
VALUES = st.one_of(st.text(), st.sampled_from(["0", "1", "on", "OFF", " yes ", "debug", "always", "\udcff", "İ"]))


@given(environ=st.dictionaries(ANY_NAME, VALUES))
def test_any_environment_gives_settings(environ: dict[str, str]) -> None:
    """Each with a value of its kind; what was not understood is named, once."""
    got = parse(environ)
    assert isinstance(got, Settings) and isinstance(got.disable, bool) and isinstance(got.strict, bool)
    assert got.log in ("warning", "debug", "info", "off") and got.native_threads in ("auto", "off")
    assert got.sync_memops in ("auto", "always", "never") and got.record in (None, environ.get("CTXFIX_RECORD"))
    assert len(got.problems) == len(set(got.problems)) <= len(environ)
    if environ.get("CTXFIX_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off"):
        assert got.disable
