# SPDX-License-Identifier: Apache-2.0
"""footprint.py: contexts on GPUs where the process has nothing."""

import sys
import types

import pytest
from fake_cuda import FakeCuda

from ctxfix import counters, driver, footprint
from ctxfix.driver import Owner
from ctxfix.registry import registry


@pytest.fixture(autouse=True)
def fresh(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_checked", False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(driver, "active_devices", lambda: [0, 1])


def register_on_1(cuda: FakeCuda) -> None:
    registry.add(1, 1000, 10, Owner(cuda.contexts[1], 1))


def test_a_context_beside_the_registered_memory_is_told_once(cuda: FakeCuda, caplog) -> None:
    register_on_1(cuda)
    before = counters.snapshot()["stray_contexts"]
    footprint.check()
    footprint.check()
    assert counters.snapshot()["stray_contexts"] - before == 1
    assert len(caplog.records) == 1 and "device 0" in caplog.text


def test_before_anything_is_registered_nothing_is_said(cuda: FakeCuda, caplog) -> None:
    footprint.check()
    assert not caplog.records
    register_on_1(cuda)
    footprint.check()
    assert caplog.records, "and that look does not count"


@pytest.mark.parametrize(("reserved", "stray"), [(1 << 20, []), (0, [0])])
def test_what_pytorch_holds_is_no_stray(cuda: FakeCuda, monkeypatch, reserved: int, stray: list[int]) -> None:
    register_on_1(cuda)
    fake = types.SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda device: reserved)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=fake))
    assert footprint.stray_devices() == stray


def test_half_a_torch_is_no_reason_to_fail(cuda: FakeCuda, monkeypatch) -> None:
    register_on_1(cuda)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert footprint.stray_devices() == [0]


def test_asking_makes_no_context(cuda: FakeCuda, monkeypatch) -> None:
    monkeypatch.undo()
    before = cuda.living_contexts(), cuda.retained()
    register_on_1(cuda)
    assert footprint.stray_devices() == [0, 2, 3]
    assert (cuda.living_contexts(), cuda.retained()) == before
