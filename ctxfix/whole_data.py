# SPDX-License-Identifier: Apache-2.0
"""No completion or notification before the bytes have landed: how registered memory is made safe to read at once.

libfabric 2.4.0 to 2.6.0 copy between GPUs with cudaMemcpy, which returns before the copy has ended, and complete the
transfer on both sides: a reader on another stream sees old bytes, and a sender that uses its buffer again tears them
(32 of 40 transfers each, NIXL 1.4.0, libfabric 2.4.0, H200, driver 580; benchmarks/results/gpu-stale.json). Where the
extension makes those copies, it waits for their end. Elsewhere CU_POINTER_ATTRIBUTE_SYNC_MEMOPS on the target's memory
does it; that has a price for the application, whose own copies of that memory become synchronous too, so it is the
second choice.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from functools import lru_cache

from ctxfix import counters, driver, guard, settings
from ctxfix.native import agents


def apply(address: int) -> None:
    """Make the allocation at ``address``, which is being registered, safe, if that is needed."""
    if not needed() or driver.set_sync_memops(address):
        return
    counters.count("unsynchronised_ranges")
    guard.warn_once(
        "unsynchronised_range",
        f"ctxfix: memory at {address:#x} takes no synchronous operations (VMM memory such as PyTorch's "
        "expandable_segments does not), so a notification may arrive before its bytes. Synchronise the device before "
        "you read, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False.",
    )


def needed() -> bool:
    """Whether registered memory has to be marked for synchronous operations (CTXFIX_SYNC_MEMOPS)."""
    choice = settings.current().sync_memops
    if choice != "auto":
        return choice == "always"
    if agents.calls_are_whole():
        return False
    library = loaded_libfabric()
    return library is not None and not copies_by_event(library)


_looked: tuple[int, str | None] = (-1, None)  # how many objects were loaded when it was looked for, and what was found


def loaded_libfabric() -> str | None:
    """Path of the libfabric in this process, the first if there are several; None: there is none.

    A process with PyTorch maps thousands of files: they are read (0.5 ms and more) only when something has been loaded
    since, as the extension tells; without it each time.
    """
    global _looked
    objects = agents.objects_loaded()
    if objects is None:
        return _look()
    if objects != _looked[0]:
        _looked = (objects, _look())
    return _looked[1]


def _look() -> str | None:
    try:
        with open("/proc/self/maps") as maps:
            return libfabric_in(maps)
    except TimeoutError:  # no file gives it: a signal handler of the application did
        raise
    except OSError:
        return None


def libfabric_in(maps: Iterable[str]) -> str | None:
    """Path of the first libfabric among the lines of a /proc/PID/maps."""
    for line in maps:
        _, slash, path = line.rstrip("\n").partition("/")
        if path.rpartition("/")[2].startswith(("libfabric.so", "libfabric-")):
            return slash + path
    return None


@lru_cache
def copies_by_event(library: str) -> bool:
    """Whether this libfabric completes a copy only when an event says that it has ended.

    By behaviour, not by version: such a libfabric looks up cudaMemcpyAsync. 2.4.0 and 2.6.0 do not, the development
    head after 2.6.0 (libfabric#12451) does.
    """
    try:
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(b"cudaMemcpyAsync\0") >= 0
    except TimeoutError:  # as above
        raise
    except (OSError, ValueError):
        return False
