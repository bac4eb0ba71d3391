# SPDX-License-Identifier: Apache-2.0
"""The second witness: what it counts, and when it is none."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from fake_cupti import ActivityKind, FakeCupti, Record
from fake_cupti import ActivityMemcpyKind as Kind

from ctxfix.evidence import cupti, merge, records

OWN = Record(Kind.HTOD, 4096)


def witness(fake: FakeCupti) -> cupti.Witness:
    result = cupti.Witness(lambda: fake)
    assert result.begin() == ""
    fake.copies(OWN)
    result.own("htod", OWN.bytes)
    return result


def seen(report: dict[str, Any]) -> cupti.Seen:
    return cupti.from_record(json.loads(json.dumps(report)))


def test_copies_of_others_are_what_the_gpu_reports_less_our_own() -> None:
    fake = FakeCupti()
    it = witness(fake)
    it.own("dtod", 7)
    it.own("dtoh", 100)
    fake.copies(
        Record(Kind.DTOD, 7), Record(Kind.DTOD, 50, device_id=1), Record(Kind.PTOP, 60),
        Record(Kind.DTOD, 70, kind=ActivityKind.MEMCPY2), Record(Kind.DTOH, 60), Record(Kind.DTOH, 45),
        Record(Kind.HTOD, 3), Record(Kind.UNKNOWN, 1),
    )  # fmt: skip
    report = it.report()
    assert seen(report) == cupti.Seen("", 3, 180, 5, 3, 1)
    assert report["devices"]["1"] == {"dtod": [1, 50]}
    assert fake.enabled == set() and not fake.per_thread


def test_it_reports_once_and_lets_go() -> None:
    fake = FakeCupti()
    it = witness(fake)
    first = it.report()
    done = list(fake.done)
    assert it.report() == first
    assert fake.done == done


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    it = cupti.Witness()
    assert it.begin() == cupti.NOT_INSTALLED
    assert seen(it.report()) == cupti.Seen(cupti.NOT_INSTALLED)


def test_a_package_that_cannot_be_loaded() -> None:
    def load() -> Any:
        raise ImportError("libcupti.so.13: cannot open shared object file")

    assert "cannot be loaded (ImportError: libcupti.so.13" in cupti.Witness(load).begin()


def test_a_package_that_lacks_what_we_need() -> None:
    assert "CUPTI could not begin (AttributeError" in cupti.Witness(lambda: object()).begin()


@pytest.mark.parametrize("step", ["attribute", "register", "enable", "enable2"])
def test_an_error_on_the_way_is_a_reason_and_leaves_nothing_on(step: str) -> None:
    fake = FakeCupti(fail=step)
    it = cupti.Witness(lambda: fake)
    assert "CUPTI could not begin (RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)" in it.begin()
    assert fake.enabled == set()
    assert seen(it.report()).reason == it.reason
    assert "flush" not in fake.done


@pytest.mark.parametrize("step", ["flush", "dropped"])
def test_an_error_at_the_end_is_no_witness(step: str) -> None:
    fake = FakeCupti(fail=step)
    it = witness(fake)
    assert "CUPTI could not report" in seen(it.report()).reason
    assert fake.enabled == set()


def test_an_error_of_disabling_is_nobodys() -> None:
    assert seen(witness(FakeCupti(fail="disable")).report()) == cupti.Seen()


def test_dropped_records_are_no_witness() -> None:
    assert seen(witness(FakeCupti(dropped=3)).report()) == cupti.Seen("CUPTI dropped 3 records")


def test_a_record_that_makes_no_sense_is_no_witness() -> None:
    fake = FakeCupti()
    it = witness(fake)
    fake.copies(object(), Record(Kind.DTOD, 5))
    assert "a record of CUPTI's makes no sense" in seen(it.report()).reason


def test_own_copies_that_the_gpu_does_not_report_are_missing_records() -> None:
    it = witness(FakeCupti())
    it.own("htod", 1)
    assert "records are missing" in seen(it.report()).reason


def test_no_copy_of_our_own_proves_nothing() -> None:
    it = cupti.Witness(lambda: FakeCupti())
    it.begin()
    assert "no copy of its own" in seen(it.report()).reason


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"reason": "", "devices": {}},
        {"reason": "", "devices": {"0": {"dtod": [-1, 5]}}, "own": {}},
        {"reason": "", "devices": {"0": {"dtod": [True, 5]}}, "own": {}},
        {"reason": "", "devices": {"0": {"dtod": [1]}}, "own": {}},
        {"reason": "", "devices": {"0": {"sideways": [1, 1]}}, "own": {}},
        {"reason": "", "devices": [], "own": {}},
    ],
)
def test_nonsense_in_the_records_is_damage(record: dict[str, Any]) -> None:
    process = merge.process_of(records.File("f", [{"kind": "witness", **record}]))
    assert process.witness is None
    assert any("(witness) makes no sense" in why for why in process.damage)


def test_the_last_word_counts() -> None:
    rows = [{"kind": "witness", "reason": cupti.UNFINISHED}, {"kind": "witness", **witness(FakeCupti()).report()}]
    assert merge.process_of(records.File("f", rows[:1])).witness == cupti.Seen(cupti.UNFINISHED)
    assert merge.process_of(records.File("f", rows)).witness == cupti.Seen()
