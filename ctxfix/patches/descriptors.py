# SPDX-License-Identifier: Apache-2.0
"""Reading the forms in which applications give descriptors to NIXL, 1.1.0 to 1.5.1.

They are: lists of tuples (address, length, device id[, metadata]), Nx3 arrays of the same, Nx5 arrays (address,
length, device id, stride, count), a tensor, a list of tensors, and NIXL's own nixlRegDList and nixlXferDList.
Nothing here imports numpy, torch or NIXL: what is not loaded cannot be an argument.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

_GPU_NAMES = frozenset({"VRAM", "CUDA"})  # keys of nixl_agent.nixl_mems; "cuda" is NIXL's deprecated one


def is_gpu(descriptors: Any, mem_type: Any, vram_segment: Any) -> bool:
    """Whether ``descriptors`` describe GPU memory; ``vram_segment`` is NIXL's VRAM_SEG."""
    get_type = getattr(descriptors, "getType", None)
    if get_type is not None:
        return bool(get_type() == vram_segment)
    if isinstance(mem_type, str):
        return mem_type.upper() in _GPU_NAMES
    tensor = descriptors if hasattr(descriptors, "data_ptr") else descriptors[0]
    return bool(hasattr(tensor, "data_ptr") and tensor.get_device() >= 0)


def rows(descriptors: Any) -> Iterator[tuple[int, int, int]]:
    """Each descriptor as (address, length in bytes, device id given by the application)."""
    if hasattr(descriptors, "data_ptr"):
        yield _row(descriptors)
        return
    # NIXL's lists do not end iteration: an index past the end reads what lies behind (1.1.0 to 1.5.1).
    count = descriptors.descCount() if hasattr(descriptors, "descCount") else len(descriptors)
    for i in range(count):
        yield _row(descriptors[i])


def _row(one: Any) -> tuple[int, int, int]:
    if hasattr(one, "data_ptr"):
        return int(one.data_ptr()), int(one.numel()) * int(one.element_size()), int(one.get_device())
    return int(one[0]), int(one[1]), int(one[2])


#: Up to so many elements of NIXL's own lists are read when a list is prepared (about 1 µs each); of longer ones, which
#: cover whole KV pools, only what a transfer selects.
READ_AT_ONCE = 65_536


class _Later(Sequence[int]):
    """The addresses of one of NIXL's own lists, read when asked for. It keeps the list alive."""

    def __init__(self, descriptors: Any) -> None:
        self._descriptors = descriptors
        self._count = int(descriptors.descCount())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < self._count:  # NIXL's list would read what lies behind
            raise IndexError(i)
        return int(self._descriptors[i][0])


def addresses(descriptors: Any) -> Sequence[int]:
    """The address of each element, by the index that make_prepped_xfer uses.

    The blocks of a strided row (Nx5) are all given by the row's first address: they lie in one registration.
    """
    if getattr(descriptors, "ndim", 0) == 2:
        starts = descriptors[:, 0]
        if descriptors.shape[1] == 5:
            starts = starts.repeat(descriptors[:, 4].astype(int))
        return array("Q", starts.astype("uint64").tobytes())
    if hasattr(descriptors, "descCount") and descriptors.descCount() > READ_AT_ONCE:
        return _Later(descriptors)
    return array("Q", (address for address, _, _ in rows(descriptors)))
