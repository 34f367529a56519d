"""Blocks and pages that rows share: how many are used, and how many will be when rows have been changed."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


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
