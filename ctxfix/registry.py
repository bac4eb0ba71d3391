# SPDX-License-Identifier: Apache-2.0
"""Whose registered memory is this address: ranges of GPU memory and their owners, as NIXL agents registered them.

Ranges may overlap, be registered twice, and vanish without deregistration; the registration made last
answers. A look-up is a binary search under a lock: well under a microsecond for thousands of ranges.

A finalizer or a signal handler may call in here on a thread that is in here already. That never waits, and finds
nothing half made: a look-up finds nothing at all (the driver is asked then), a change is put off until the present call
is through. A change that is broken off by an exception from outside leaves no half of it.
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from ctxfix.driver import Owner


@dataclass(frozen=True, eq=False, slots=True)
class Registration:
    """A registered range ``[start, end)`` and its owner when it was registered.

    ``buffer_id`` is the driver's id of the allocation at ``start`` (0: it gave none): another id at the same
    address means that the memory was freed and allocated anew, so ``owner`` says nothing any more.
    """

    start: int
    end: int
    owner: Owner
    buffer_id: int
    number: int = field(default_factory=itertools.count().__next__)  # the order in which they were made


class _Contexts:
    """The distinct contexts of a set of registrations, in the order in which they appeared."""

    def __init__(self) -> None:
        self._refs: Counter[int] = Counter()
        self.all: tuple[int, ...] = ()

    def add(self, context: int) -> None:
        self._refs[context] += 1
        if self._refs[context] == 1:
            self.all = tuple(self._refs)

    def drop(self, context: int) -> None:
        self._refs[context] -= 1
        if not self._refs[context]:
            del self._refs[context]
            self.all = tuple(self._refs)


class _AgentRanges:
    """What one agent registered: range (start, length) -> its registrations, the latest last."""

    def __init__(self) -> None:
        self.registrations: defaultdict[tuple[int, int], list[Registration]] = defaultdict(list)
        self.contexts = _Contexts()


class Registry:
    """The registrations of this process, by agent (its id()). Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._busy = False
        self._clear()

    def _clear(self) -> None:
        self._agents: defaultdict[int, _AgentRanges] = defaultdict(_AgentRanges)
        self._later: deque[Callable[[], None]] = deque()  # changes put off
        self._clear_segments()

    def _clear_segments(self) -> None:
        # Disjoint segments, sorted: where registrations overlap, a segment holds several, the latest last.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._stacks: list[tuple[Registration, ...]] = []
        self._contexts = _Contexts()

    def add(self, agent: int, start: int, length: int, owner: Owner, buffer_id: int = 0) -> None:
        """Record that ``agent`` registered ``length`` bytes at ``start``; a length of 0 is ignored."""
        self.add_all(agent, [Registration(start, start + length, owner, buffer_id)] if length > 0 else [])

    def add_all(self, agent: int, news: Sequence[Registration]) -> None:
        """Record that ``agent`` made these registrations, none of them empty, one after the other."""
        if news:
            self._change(partial(self._add_all, agent, news))

    def remove(self, agent: int, start: int, length: int) -> bool:
        """Forget one registration of exactly this range by ``agent``; False if there is none."""
        return self.remove_all(agent, [(start, length)]) == 1

    def remove_all(self, agent: int, ranges: Iterable[tuple[int, int]]) -> int:
        """Forget one registration by ``agent`` of each range (start, length); how many there were."""
        found: list[Registration] = []
        self._change(partial(self._remove, agent, tuple(ranges), found))
        return len(found)

    def forget(self, agent: int) -> None:
        """Forget all that ``agent`` registered: it is gone, or goes. May be called by the garbage collector."""
        self._later.append(partial(self._forget, agent))
        self._catch_up()

    # ---- changes, one at a time; while one is made, or a look-up, the thread is busy

    def _change(self, change: Callable[[], None]) -> None:
        with self._lock:
            if self._busy:
                self._later.append(change)
            else:
                self._do(change)
        self._catch_up()

    def _catch_up(self) -> None:
        # Who cannot have the lock leaves it to its holder, who looks here after letting it go.
        while self._later and not self._busy and self._lock.acquire(blocking=False):
            try:
                if not self._busy:
                    self._do()
            finally:
                self._lock.release()

    def _do(self, change: Callable[[], None] | None = None) -> None:
        try:
            self._busy = True
            while self._later:  # before anything else: a new agent may have got the id of one that is gone
                self._later.popleft()()
            if change is not None:
                change()
        except BaseException:
            self._rebuild()
            raise
        finally:
            self._busy = False

    def _add_all(self, agent: int, news: Sequence[Registration]) -> None:
        ranges = self._agents[agent]
        for new in news:
            ranges.registrations[new.start, new.end - new.start].append(new)
            ranges.contexts.add(new.owner.context)
            self._contexts.add(new.owner.context)
        self._insert_all(news)

    def _remove(self, agent: int, ranges: Iterable[tuple[int, int]], found: list[Registration]) -> None:
        known = self._agents.get(agent)
        if known is None:
            return
        for at in ranges:
            if at in known.registrations:
                found.append(known.registrations[at].pop())
                known.contexts.drop(found[-1].owner.context)
                if not known.registrations[at]:
                    del known.registrations[at]
        if not known.registrations:
            del self._agents[agent]
        self._drop_all(found)

    def _forget(self, agent: int) -> None:
        known = self._agents.pop(agent, None)
        if known is not None:
            self._drop_all([old for olds in known.registrations.values() for old in olds])

    def _rebuild(self) -> None:
        """Make everything anew from what the agents registered: a change was broken off in its middle."""
        self._clear_segments()
        for agent, ranges in list(self._agents.items()):
            kept = sorted(itertools.chain.from_iterable(ranges.registrations.values()), key=attrgetter("number"))
            ranges.contexts = _Contexts()
            for registration in kept:
                ranges.contexts.add(registration.owner.context)
            if not kept:
                del self._agents[agent]
        everything = sorted(self._all(), key=attrgetter("number"))
        for registration in everything:
            self._contexts.add(registration.owner.context)
        self._insert_all(everything)

    def _all(self) -> Iterator[Registration]:
        for ranges in self._agents.values():
            yield from itertools.chain.from_iterable(ranges.registrations.values())

    # ---- questions

    def find(self, address: int) -> Registration | None:
        """The registration that holds ``address``, the latest if there are several."""
        with self._lock:
            if self._busy:
                return None
            if self._later:
                self._do()
            try:
                self._busy = True
                i = bisect_right(self._starts, address) - 1
                found = None if i < 0 or address >= self._ends[i] else self._stacks[i][-1]
            finally:
                self._busy = False
        if self._later:
            self._catch_up()
        return found

    def contexts(self) -> tuple[int, ...]:
        """The distinct contexts that own registered memory, in the order in which they appeared."""
        return self._contexts.all

    def contexts_of(self, agent: int) -> tuple[int, ...]:
        """The distinct contexts that own memory registered by ``agent``, in the order in which they appeared."""
        ranges = self._agents.get(agent)
        return ranges.contexts.all if ranges is not None else ()

    def __len__(self) -> int:
        with self._lock:
            return sum(1 for _ in self._all())

    # ---- segments

    def _insert_all(self, news: Sequence[Registration]) -> None:
        if not (len(news) > 1 and len(news) * 16 >= len(self._starts) and self._merge(news)):
            for new in news:
                self._insert(new)

    def _merge(self, news: Sequence[Registration]) -> bool:
        """Insert many at once, in one pass instead of a shift of everything for each; False: some overlap."""
        starts = [*self._starts, *(new.start for new in news)]
        ends = [*self._ends, *(new.end for new in news)]
        order = sorted(range(len(starts)), key=starts.__getitem__)
        if any(ends[i] > starts[j] for i, j in itertools.pairwise(order)):
            return False
        stacks = [*self._stacks, *((new,) for new in news)]
        self._starts, self._ends = [starts[i] for i in order], [ends[i] for i in order]
        self._stacks = [stacks[i] for i in order]
        return True

    def _insert(self, new: Registration) -> None:
        at = new.start
        i = self._split(new.start)
        self._split(new.end)
        while at < new.end:
            if i < len(self._starts) and self._starts[i] == at:
                self._stacks[i] = (*self._stacks[i], new)
            else:  # a gap, up to the next segment
                end = min(self._starts[i], new.end) if i < len(self._starts) else new.end
                self._starts.insert(i, at)
                self._ends.insert(i, end)
                self._stacks.insert(i, (new,))
            at = self._ends[i]
            i += 1

    def _drop_all(self, olds: Sequence[Registration]) -> None:
        if len(olds) * 16 < len(self._starts):
            for old in olds:
                self._drop(old)
            return
        # Many at once: one pass over everything instead of a shift of everything for each.
        gone = set(olds)
        segments: list[tuple[int, int, tuple[Registration, ...]]] = []
        for start, end, stack in zip(self._starts, self._ends, self._stacks, strict=True):
            left = tuple(r for r in stack if r not in gone)
            if left and segments and segments[-1][1] == start and segments[-1][2] == left:
                segments[-1] = (segments[-1][0], end, left)
            elif left:
                segments.append((start, end, left))
        self._starts = [start for start, _, _ in segments]
        self._ends = [end for _, end, _ in segments]
        self._stacks = [stack for _, _, stack in segments]
        for old in olds:
            self._contexts.drop(old.owner.context)

    def _drop(self, old: Registration) -> None:
        first = bisect_left(self._starts, old.start)
        last = bisect_left(self._starts, old.end)
        for i in range(first, last):
            self._stacks[i] = tuple(r for r in self._stacks[i] if r is not old)
        # Empty segments go, and neighbours that became alike are one again: no fragments are left behind.
        for i in range(min(last, len(self._starts) - 1), max(first - 1, 0) - 1, -1):
            joined = i > 0 and self._ends[i - 1] == self._starts[i] and self._stacks[i - 1] == self._stacks[i]
            if joined:
                self._ends[i - 1] = self._ends[i]
            if joined or not self._stacks[i]:
                del self._starts[i], self._ends[i], self._stacks[i]
        self._contexts.drop(old.owner.context)

    def _split(self, at: int) -> int:
        """Make ``at`` a border of segments; the index of the first segment that starts at or after it."""
        i = bisect_left(self._starts, at)
        if i and self._ends[i - 1] > at:
            self._starts.insert(i, at)
            self._ends.insert(i, self._ends[i - 1])
            self._stacks.insert(i, self._stacks[i - 1])
            self._ends[i - 1] = at
        return i

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._busy = False
        self._clear()


#: The registry of this process. A forked child starts with an empty one: its parent's GPU memory is not its own.
registry = Registry()
os.register_at_fork(after_in_child=registry._after_fork)
