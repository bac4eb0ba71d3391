# SPDX-License-Identifier: Apache-2.0
"""Files of records: private, bounded, whole after a kill, and read back whatever happened to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from evidence_of import perfect, write
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfix.errors import EvidenceError
from ctxfix.evidence import merge, records
from ctxfix.verify.verdict import judge


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    writer = records.Writer(str(folder), "host.1")
    writer.write({"kind": "post"})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / writer.name).stat().st_mode & 0o777 == 0o600


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    first, second = (records.Writer(str(tmp_path / "r"), "host.1") for _ in range(2))
    assert first.name != second.name


def test_a_writer_that_is_closed_writes_into_no_other_file(tmp_path: Path) -> None:
    """A transfer that was under way may have something to record yet, when the number is another file's."""
    writer = records.Writer(str(tmp_path / "r"), "host.1")
    number = writer._file
    writer.close()
    with open(tmp_path / "theirs", "wb") as theirs:
        assert theirs.fileno() == number, "else this shows nothing"
        assert not writer.write({"kind": "post"}) and writer.lost == 1
        writer.close()
        theirs.write(b"x")
    assert (tmp_path / "theirs").read_bytes() == b"x"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(EvidenceError, match="no records"):
        records.Writer(str(tmp_path / "link"), "host.1")
    (tmp_path / "mine" / f"host.1{records.SUFFIX}").symlink_to(tmp_path / "elsewhere")
    writer = records.Writer(str(tmp_path / "mine"), "host.1")
    assert writer.name != f"host.1{records.SUFFIX}"
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_others_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(EvidenceError, match="others may write"):
        records.Writer(str(tmp_path / "open"), "host.1")
    (tmp_path / "file").touch()
    with pytest.raises(EvidenceError):
        records.Writer(str(tmp_path / "file"), "host.1")


def test_a_file_stops_growing_and_says_so(tmp_path: Path) -> None:
    writer = records.Writer(str(tmp_path / "r"), "host.1", cap=1000)
    for n in range(100):
        writer.write({"kind": "post", "n": n})
    assert writer.write({"kind": "snapshot"}, essential=True)
    assert writer.lost > 50
    (file,), _ = records.read_folder(str(tmp_path / "r"))
    assert file.truncated
    assert file.records[-1]["kind"] == "snapshot"
    assert (tmp_path / "r" / writer.name).stat().st_size < 1200


def test_a_full_disk_is_counted_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = records.Writer(str(tmp_path / "r"), "host.1")
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    assert not writer.write({"kind": "post"})
    monkeypatch.setattr(os, "write", real)
    assert writer.write({"kind": "snapshot"})
    (file,), _ = records.read_folder(str(tmp_path / "r"))
    assert (file.junk, [record["kind"] for record in file.records]) == (1, ["snapshot"])
    assert writer.lost == 1

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert not writer.write({"kind": "post"})
    assert writer.problem == "No space left on device"


def test_a_killed_process_loses_its_last_line_at_most(tmp_path: Path) -> None:
    """Linux may cut a write of several pages short when the process is killed in it: that line is told, and dropped."""
    code = (
        "import sys; from ctxfix.evidence.records import Writer\n"
        "w = Writer(sys.argv[1], 'p'); print('up', flush=True)\n"
        "while True: w.write({'kind': 'post', 'text': 'x' * 3000})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (file,), problems = records.read_folder(str(tmp_path / "r"))
    assert (file.junk, problems) == (0, [])
    assert all(len(record["text"]) == 3000 for record in file.records)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    folder = write(perfect(), tmp_path / "r")
    (folder / "notes.txt").write_text("mine")
    (folder / f"link{records.SUFFIX}").symlink_to("/etc/passwd")
    (folder / f"folder{records.SUFFIX}").mkdir()
    files, problems = records.read_folder(str(folder))
    assert len(files) == 4
    assert any("link" in problem for problem in problems)


def test_one_folder_a_host_is_read_too(tmp_path: Path) -> None:
    write({name: rows for name, rows in perfect().items() if name.startswith("prefill")}, tmp_path / "a")
    write({name: rows for name, rows in perfect().items() if name.startswith("decode")}, tmp_path / "b")
    assert judge(merge.read(str(tmp_path))).code == 0


def test_no_folder_and_no_record(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="holds no record"):
        merge.read(str(tmp_path))
    with pytest.raises(EvidenceError, match="No such file"):
        merge.read(str(tmp_path / "nowhere"))


def test_a_folder_without_records_is_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To paste: a relative CTXFIX_RECORD is taken from where the program imports NIXL."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvidenceError, match=f"CTXFIX_RECORD={tmp_path}/empty, "):
        merge.read("empty")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    folder = write(perfect(), tmp_path / "r")
    next(folder.glob("decode1*")).chmod(0)
    run = merge.read(str(folder))
    assert any("Permission denied" in problem for problem in run.problems)
    assert judge(run).code == 1


@pytest.mark.parametrize("name", ["prefill1", "decode1"])
def test_a_torn_file_is_never_a_pass(tmp_path: Path, name: str) -> None:
    folder = write(perfect(), tmp_path / "r")
    path = folder / f"{name}{records.SUFFIX}"
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert judge(merge.read(str(folder))).code == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_garbage_is_a_traceback_or_a_pass(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write(perfect(), tmp_path_factory.mktemp("r"))
    path = folder / f"prefill1{records.SUFFIX}"
    lines = path.read_bytes().splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines)))
    junk = data.draw(
        st.binary(min_size=1, max_size=80).filter(lambda b: b.strip() and b"\n" not in b and b"\r" not in b)
    )
    path.write_bytes(b"".join([*lines[:at], junk + b"\n", *lines[at:]]))
    assert judge(merge.read(str(folder))).code == 1


def test_a_line_too_long_to_be_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 50)
    path = tmp_path / f"p{records.SUFFIX}"
    path.write_text("x" * 500 + "\n" + json.dumps({"kind": "post"}) + "\n")
    (file,), _ = records.read_folder(str(tmp_path))
    assert (file.junk, len(file.records), file.torn) == (1, 1, False)
