# SPDX-License-Identifier: Apache-2.0
"""Every form in which descriptors are given to NIXL is read alike; NIXL's own lists are read in integration/rig."""

import numpy as np
import pytest

from ctxfix.patches import descriptors

VRAM = object()
ROWS = [(0x7F00_0000_0000, 64, 1), (0xFFFF_FFFF_0000_0000, 32, 2)]


class Tensor:
    def __init__(self, address: int, size: int, device: int) -> None:
        self._address, self._size, self._device = address, size, device

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._size // 2

    def element_size(self) -> int:
        return 2

    def get_device(self) -> int:
        return self._device


class DList:
    """Reads garbage past its end instead of raising, as NIXL's do."""

    def __init__(self, mem_type: object, given: list[tuple]) -> None:
        self._type, self._rows = mem_type, given

    def getType(self) -> object:
        return self._type

    def descCount(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple:
        return self._rows[i] if i < len(self._rows) else (0, 0, 0)


FORMS = {
    "3-tuples": ROWS,
    "4-tuples": [(*row, "meta") for row in ROWS],
    "uint64 array": np.array(ROWS, dtype=np.uint64),
    "object array": np.array(ROWS, dtype=object),
    "tensors": [Tensor(*row) for row in ROWS],
    "dlist": DList(VRAM, ROWS),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows(form: str) -> None:
    got = list(descriptors.rows(FORMS[form]))
    assert got == ROWS
    assert all(type(value) is int for row in got for value in row)


@pytest.mark.parametrize("form", FORMS)
def test_addresses(form: str) -> None:
    assert list(descriptors.addresses(FORMS[form])) == [row[0] for row in ROWS]


def test_int64_array() -> None:
    array = np.array([ROWS[0]], dtype=np.int64)
    assert list(descriptors.rows(array)) == [ROWS[0]] and list(descriptors.addresses(array)) == [ROWS[0][0]]


def test_one_tensor() -> None:
    assert list(descriptors.rows(Tensor(*ROWS[0]))) == [ROWS[0]]


def test_strided_array_gives_an_address_for_each_block() -> None:
    strided = np.array([(1000, 16, 1, 32, 3), (5000, 16, 1, 16, 2)], dtype=np.uint64)
    assert list(descriptors.addresses(strided)) == [1000, 1000, 1000, 5000, 5000]


@pytest.mark.parametrize(
    "empty", [[], np.zeros((0, 3), dtype=np.uint64), DList(VRAM, [])], ids=["list", "array", "dlist"]
)
def test_empty(empty: object) -> None:
    assert list(descriptors.rows(empty)) == [] and list(descriptors.addresses(empty)) == []


def test_a_long_dlist_is_read_where_it_is_asked_for() -> None:
    class Counting(DList):
        read = 0

        def __getitem__(self, i: int) -> tuple:
            Counting.read += 1
            return super().__getitem__(i)

    count = descriptors.READ_AT_ONCE + 1
    got = descriptors.addresses(Counting(VRAM, [(1000 + i, 1, 0) for i in range(count)]))
    assert (len(got), got[0], got[count - 1]) == (count, 1000, 1000 + count - 1) and Counting.read == 2
    for beyond in (count, -1):
        with pytest.raises(IndexError):
            got[beyond]


def test_gpu_or_not() -> None:
    is_gpu = descriptors.is_gpu
    assert is_gpu(DList(VRAM, ROWS), None, VRAM) and not is_gpu(DList(object(), ROWS), "VRAM", VRAM)
    assert is_gpu(ROWS, "VRAM", VRAM) and is_gpu(ROWS, "cuda", VRAM) and is_gpu(ROWS, "vram", VRAM)
    assert not is_gpu(ROWS, "DRAM", VRAM) and not is_gpu(ROWS, "FILE", VRAM)
    assert is_gpu(Tensor(*ROWS[0]), None, VRAM) and not is_gpu(Tensor(1, 2, -1), None, VRAM)
    assert is_gpu([Tensor(*ROWS[0])], None, VRAM) and not is_gpu([Tensor(1, 2, -1)], None, VRAM)
