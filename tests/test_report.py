# SPDX-License-Identifier: Apache-2.0
"""`ctxfix report`: its forms and exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from evidence_of import perfect, run_of, write
from rich.console import Console
from test_verdict import through_the_host

from ctxfix import cli
from ctxfix.verify import report, verdict


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(perfect(), tmp_path / "good")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    files = perfect()
    through_the_host(files)
    return write(files, tmp_path / "bad")


def test_exit_codes(good: Path, bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(good)]) == 0
    assert "every rank is proven: 2 CUDA_IPC" in capsys.readouterr().out
    assert cli.main(["report", str(bad)]) == 1
    out = capsys.readouterr().out
    assert "prefill rank 1 → decode rank 1: SAR" in out
    assert "⇒" in out
    assert cli.main(["report", str(good), "--ranks", "3"]) == 1
    assert cli.main(["report", str(tmp_path)]) == 1  # two runs in one folder
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["report", str(good), "--html", str(tmp_path / "no" / "page.html")]) == 2


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_no_ranks_at_all_are_refused(good: Path, capsys: pytest.CaptureFixture[str], ranks: str) -> None:
    assert cli.main(["report", str(good), "--ranks", ranks]) == 2
    assert capsys.readouterr().err == f"ctxfix report: {ranks} ranks were asked for: at least one must be there\n"


def test_fewer_ranks_than_the_records_speak_of_are_told(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(good), "--ranks", "1"]) == 0
    assert "! the processes of prefill speak of 2 ranks, asked for: 1" in capsys.readouterr().out


@pytest.mark.timeout(20)
def test_a_billion_ranks_are_told_in_one_row(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, suite = tmp_path / "page.html", tmp_path / "v.xml"
    arguments = ["report", str(good), "--ranks", "1000000000", "--html", str(page), "--junit", str(suite)]
    assert cli.main(arguments) == 1
    told = capsys.readouterr().out
    assert "ranks 2 to 999999999 of 1000000000: there is no record of it" in told
    assert "1 of 3 directions are not proven" in told
    assert "prefill ranks 2 to 999999999" in page.read_text() and "prefill ranks 2 to 999999999" in suite.read_text()


@pytest.mark.timeout(20)
def test_logs_that_may_never_end_are_refused(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for log in ("/dev/zero", str(pipe), str(tmp_path)):
        assert cli.main(["report", str(good), "--log", log]) == 2
        assert capsys.readouterr().err == f"ctxfix report: {log} is no regular file: save the log as one\n"


def test_json(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(bad), "--json", "-"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [(row["rank"], row["path"], row["good"]) for row in printed["rows"]] == [
        (0, "CUDA_IPC", True),
        (1, "SAR", False),
    ]
    cli.main(["report", str(bad), "--json", str(tmp_path / "v.json")])
    assert json.loads((tmp_path / "v.json").read_text()) == printed


def test_junit(bad: Path, good: Path, tmp_path: Path) -> None:
    cli.main(["report", str(bad), "--junit", str(tmp_path / "v.xml")])
    suite = ET.parse(tmp_path / "v.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [failure.get("type") for failure in suite.iter("failure")] == ["SAR"]
    nobody = verdict.judge(run_of({}))
    assert ET.fromstring(report.junit(nobody)).get("errors") == "1"
    files = perfect()
    for rows in files.values():
        rows[-1]["identity"]["world"] = None
    assert ET.fromstring(report.junit(verdict.judge(run_of(files)))).get("failures") == "1"


def test_junit_of_a_log_laced_with_binary() -> None:
    files = perfect()
    files["prefill1"][-1]["calls"] = None
    files["prefill1"][-1]["calls_reason"] = "\x00\x1b[31m \ud800 <b>"
    ET.fromstring(report.junit(verdict.judge(run_of(files))))


def test_the_page_stands_alone_and_is_escaped(tmp_path: Path) -> None:
    files = perfect(2, both_ways=True)
    through_the_host(files)
    files["prefill1"][0]["host"] = "<script>alert(1)</script>"
    page = report.html(verdict.judge(run_of(files)), "run <1>")
    assert "<script" not in page
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert page.count("<svg") == 1
    ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert "host memory" in page
    assert report.html(verdict.judge(run_of({}))).count("<svg") == 0


def test_what_nvlink_carried_is_told_where_it_was_counted() -> None:
    judgement = verdict.judge(run_of(perfect(2)))
    assert "NVLink" not in report.html(judgement) and verdict.as_json(judgement)["nvlink"] == ""
    judgement.nvlink = "NVLink carried 3,072 bytes <meanwhile>"
    shown = io.StringIO()
    Console(width=200, file=shown).print(report.table(judgement))
    assert judgement.nvlink in shown.getvalue()
    assert "NVLink carried 3,072 bytes &lt;meanwhile&gt;" in report.html(judgement)
    assert verdict.as_json(judgement)["nvlink"] == judgement.nvlink


def test_numbers_as_people_read_them() -> None:
    assert [report.size(n) for n in (0, 999, 1000, 254_803_968, 2 << 30)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "255 MB",
        "2.1 GB",
    ]


def test_a_thousand_ranks() -> None:
    judgement = verdict.judge(run_of(perfect(300)))
    assert judgement.code == 0
    report.html(judgement)
