"""Pages that rows share: which numbers are used, and how many pages will be when rows have been changed."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


class PageNumbers:
    """Assigns the lowest free page numbers and counts references; a page without references is free.

    Attributes: capacity: numbers that were assigned. num_shared: references beyond the first of each page.
    """

    def __init__(self):
        self.capacity = self.num_shared = 0
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
        self.num_shared += 1
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
        if self._references[page]:
            self.num_shared -= 1
        else:
            del self._references[page]
            heapq.heappush(self._free, page)


@dataclass(eq=False, slots=True)
class RowPage:
    """A page of neighbouring tokens of a row, or of rows that share it."""

    rank: int
    rows: int = 1


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


class Forecast:
    """How many tokens fit into a cache once its rows have been changed; the cache stays as it is.

    Args: book: a `RowBook`. rows: ids by the names that the methods take. capacity_tokens: of the cache.
    """

    def __init__(self, book, rows: Mapping[int, int], capacity_tokens: int):
        self._book, self._ids, self._size = book, rows, book.page_size
        self._free = capacity_tokens // self._size - sum(book.loads)
        self._rows: dict[int, tuple[int, list[RowPage]]] = {}  # those that change: (length, pages)
        self._changes: Counter[RowPage] = Counter()  # of the numbers of rows that share a page

    @property
    def free_tokens(self) -> int:
        """In whole pages; less than 0 if the rows don't fit."""
        return self._free * self._size

    def add(self, name: int) -> None:
        self._rows[name] = 0, []

    def fork(self, name: int, copy: int) -> None:
        length, pages = self._row(name)
        full = length // self._size
        self._changes.update(pages[:full])
        self._rows[copy] = length, pages[:full] + [self._copy(page) for page in pages[full:]]

    def crop(self, name: int, length: int) -> None:
        _, pages = self._row(name)
        keep = -(-length // self._size)
        for page in pages[keep:]:
            self._release(page)
        pages = pages[:keep]
        if length % self._size and pages[-1].rows + self._changes[pages[-1]] > 1:
            self._release(pages[-1])
            pages[-1] = self._copy(pages[-1])
        self._rows[name] = length, pages

    def remove(self, name: int) -> None:
        self.crop(name, 0)
        del self._rows[name]

    def _row(self, name: int) -> tuple[int, list[RowPage]]:
        if name in self._rows:
            return self._rows[name]
        row = self._book.rows[self._ids[name]]
        return row.length, row.parts

    def _copy(self, page: RowPage) -> RowPage:
        self._free -= 1
        return RowPage(page.rank)

    def _release(self, page: RowPage) -> None:
        self._changes[page] -= 1
        self._free += page.rows + self._changes[page] == 0
