# SPDX-License-Identifier: Apache-2.0
"""evidence/nvlink.py: counters of NVLink where the driver gives them, and nothing where it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ctxfix.evidence import contexts, nvlink


class Nvml:
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def __init__(self, kib: dict[tuple[int, int], int], error: int = 0) -> None:
        self.kib, self.error, self.open = kib, error, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-%d" % handle

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        ((field, scope),) = fields
        assert scope == 0xFFFFFFFF, "over all links"
        return [SimpleNamespace(nvmlReturn=self.error, value=SimpleNamespace(ullVal=self.kib[handle, field]))]


def counted(*kib: int) -> Nvml:
    return Nvml(dict(zip([(0, 138), (0, 139), (1, 138), (1, 139)], kib, strict=True)))


def test_what_was_added() -> None:
    first, last = counted(10, 20, 30, 40), counted(13, 20, 30, 43)
    before, after = nvlink.read(first), nvlink.read(last)
    assert before["gpus"]["GPU-1"] == {"sent": 30 * 1024, "received": 40 * 1024}
    assert nvlink.told(before, after) == "NVLink carried 3,072 bytes from GPU to GPU meanwhile (3,072 arrived)"
    assert first.open == last.open == 0


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (Nvml({(gpu, field): 1 for gpu in (0, 1) for field in (138, 139)}, error=3), "does not count"),
        (Nvml({}), "could not say (KeyError"),
        (SimpleNamespace(), "NVML is not there"),
    ],
)
def test_who_cannot_say(nvml: Any, words: str) -> None:
    reading = nvlink.read(nvml)
    assert not reading["known"] and words in reading["reason"]
    good = nvlink.read(counted(1, 1, 1, 1))
    assert nvlink.told(reading, good) == nvlink.told(good, reading) == ""


def test_a_counter_that_was_reset_says_nothing() -> None:
    assert nvlink.told(nvlink.read(counted(5, 5, 5, 5)), nvlink.read(counted(1, 9, 5, 5))) == ""
    gone = nvlink.read(counted(9, 9, 9, 9))
    del gone["gpus"]["GPU-1"]
    assert nvlink.told(nvlink.read(counted(1, 1, 1, 1)), gone) == ""


def test_an_nvml_that_does_not_shut_down_says_what_it_has_said() -> None:
    class Stuck(Nvml):
        def nvmlShutdown(self) -> None:
            raise OSError("no")

    assert nvlink.read(Stuck({(gpu, field): 1 for gpu in (0, 1) for field in (138, 139)}))["known"]
    assert contexts.read_nvml(Stuck({}))["known"] is False
