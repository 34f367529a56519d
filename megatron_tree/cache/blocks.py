"""Blocks and pages that rows share: how many are used, and how many will be when rows have been changed."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


class PageNumbers:
    """Assigns the lowest free page numbers and counts references; a page without references is free."""

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
class Block:
    """A block of neighbouring tokens of a row, or of rows that share it."""

    rank: int
    rows: int = 1


@dataclass
class Runs:
    """The blocks of a row on one rank, in ascending order, as runs of neighbours: prompts make a few, however long."""

    firsts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """How many blocks are in earlier runs."""

    def add(self, block: int) -> None:
        """block: behind all others."""
        if self.stops and self.stops[-1] == block:
            self.stops[-1] += 1
        else:
            self.before.append(self.count())
            self.firsts.append(block)
            self.stops.append(block + 1)

    def count(self, stop: int | None = None) -> int:
        """How many blocks there are, before block `stop`."""
        i = len(self.firsts) if stop is None else bisect.bisect_left(self.firsts, stop)
        if not i:
            return 0
        last = self.stops[i - 1] if stop is None else min(stop, self.stops[i - 1])
        return self.before[i - 1] + last - self.firsts[i - 1]

    def since(self, block: int) -> list[tuple[int, int]]:
        """Runs (first, stop) of the blocks from this one on."""
        i = bisect.bisect_right(self.stops, block)
        return [(max(first, block), stop) for first, stop in zip(self.firsts[i:], self.stops[i:])]

    def cut(self, stop: int) -> None:
        """Drop block `stop` and those behind it."""
        n = bisect.bisect_left(self.firsts, stop)
        del self.firsts[n:], self.stops[n:], self.before[n:]
        if n:
            self.stops[-1] = min(self.stops[-1], stop)

    def copy(self) -> Runs:
        return Runs(list(self.firsts), list(self.stops), list(self.before))


class Forecast:
    """How many tokens fit into a cache once its rows have been changed; the cache stays as it is.

    Args: book: a `RowBook`. rows: ids by the names that the methods take. capacity_tokens: of the cache.
    """

    def __init__(self, book, rows: Mapping[int, int], capacity_tokens: int):
        self._book, self._ids, self._size = book, rows, book.page_size
        self._free = capacity_tokens // self._size - sum(book.loads)
        self._rows: dict[int, tuple[int, list[Block]]] = {}  # those that change: (length, blocks)
        self._changes: Counter[Block] = Counter()  # of the numbers of rows that share a block

    @property
    def free_tokens(self) -> int:
        """In whole blocks; less than 0 if the rows don't fit."""
        return self._free * self._size

    def add(self, name: int) -> None:
        self._rows[name] = 0, []

    def fork(self, name: int, copy: int) -> None:
        length, blocks = self._row(name)
        full = length // self._size
        self._changes.update(blocks[:full])
        self._rows[copy] = length, blocks[:full] + [self._own(block) for block in blocks[full:]]

    def crop(self, name: int, length: int) -> None:
        _, blocks = self._row(name)
        keep = -(-length // self._size)
        for block in blocks[keep:]:
            self._release(block)
        blocks = blocks[:keep]
        if length % self._size and blocks[-1].rows + self._changes[blocks[-1]] > 1:
            self._release(blocks[-1])
            blocks[-1] = self._own(blocks[-1])
        self._rows[name] = length, blocks

    def remove(self, name: int) -> None:
        self.crop(name, 0)
        del self._rows[name]

    def _row(self, name: int) -> tuple[int, list[Block]]:
        if name in self._rows:
            return self._rows[name]
        row = self._book.rows[self._ids[name]]
        return row.length, row.parts

    def _own(self, block: Block) -> Block:
        self._free -= 1
        return Block(block.rank)

    def _release(self, block: Block) -> None:
        self._changes[block] -= 1
        self._free += block.rows + self._changes[block] == 0
