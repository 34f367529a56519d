"""Pages that rows share: which numbers are used, and where a row's pages are."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from dataclasses import dataclass, field


class PageNumbers:
    """Assigns the lowest free page numbers and counts references; a page without references is free.

    Attributes: capacity: numbers that were assigned.
    """

    def __init__(self):
        self.capacity = 0
        self._free: list[int] = []
        self._references: Counter[int] = Counter()

    @property
    def used(self) -> int:
        """Number of pages that are referenced."""
        return len(self._references)

    def take(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, self.capacity = self.capacity, self.capacity + 1
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        self._references[page] += 1
        return page

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def forget_free(self) -> None:
        """Start again from 0. No page may be referenced any more."""
        assert not self._references, self._references
        self._free.clear()
        self.capacity = 0

    def release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            del self._references[page]
            heapq.heappush(self._free, page)


@dataclass(eq=False, slots=True)
class RowPage:
    """A page of neighbouring tokens of a row, or of rows that share it."""

    rank: int
    holders: int = 1
    """Rows that have it, and `Prefixes`."""
    prefix: int | None = None
    """Its number there."""


@dataclass
class PageRuns:
    """Indices of a row's pages on one rank, ascending, as runs of neighbours: prompts make a few, however long."""

    firsts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """How many pages are in earlier runs."""

    def add(self, index: int) -> None:
        """index: behind all others."""
        if self.stops and self.stops[-1] == index:
            self.stops[-1] += 1
        else:
            self.before.append(self.count())
            self.firsts.append(index)
            self.stops.append(index + 1)

    def count(self, stop: int | None = None) -> int:
        """How many pages there are, before index `stop`."""
        i = len(self.firsts) if stop is None else bisect.bisect_left(self.firsts, stop)
        if not i:
            return 0
        last = self.stops[i - 1] if stop is None else min(stop, self.stops[i - 1])
        return self.before[i - 1] + last - self.firsts[i - 1]

    def since(self, index: int) -> list[tuple[int, int]]:
        """Runs (first, stop) of the pages from this one on."""
        i = bisect.bisect_right(self.stops, index)
        return [(max(first, index), stop) for first, stop in zip(self.firsts[i:], self.stops[i:])]

    def cut(self, stop: int) -> None:
        """Drop page `stop` and those behind it."""
        n = bisect.bisect_left(self.firsts, stop)
        del self.firsts[n:], self.stops[n:], self.before[n:]
        if n:
            self.stops[-1] = min(self.stops[-1], stop)

    def copy(self) -> PageRuns:
        return PageRuns(list(self.firsts), list(self.stops), list(self.before))
