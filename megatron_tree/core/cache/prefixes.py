"""What rows begin with alike: pages that are found by a key, stay when their rows go, and are read once in a step.

A page's key is a hash of its tokens and of the key of the page before it, so equal keys are equal beginnings. All ranks
keep the same pages under the same numbers; the one that makes plans has the keys, finds pages, and names their numbers.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .pages import RowPage
from .states import RowState

SAVED_TOKENS = 1024  # that need not be read again; fewer are not worth a second call of the kernel


def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Keys of a text's whole pages; others with another salt."""
    data, size = np.asarray(tokens, dtype=np.int64).tobytes(), 8 * page_size
    keys, key = [], salt.encode("utf-8", "surrogatepass")
    for end in range(size, len(data) + 1, size):
        key = hashlib.sha256(key + data[end - size : end]).digest()
        keys.append(key)
    return keys


@dataclass(eq=False, slots=True)
class PrefixPage:
    """A full page that rows may begin with, behind those before it."""

    page: RowPage
    numbers: list[int | None]
    """By kind of layer: its number in this rank's pool, if it is there."""
    is_whole: tuple[bool, ...]
    """By kind: whether its tokens are there, on the page's rank; a window drops them."""
    has_states: bool
    """Whether the row has recurrent states: another one can begin only where one of these ends."""
    state: RowState | None
    """That of the tokens up to the end of this page, if it is known."""
    note: object
    next_positions: Tensor | None
    """See `Row`: of the row that it comes from."""
    key: bytes | None = None


class Prefixes:
    """The pages that rows may begin with, by number. `RowBook` adds them and takes them away.

    Attributes: unused: numbers of those that no row has, the ones used least recently first.
    """

    def __init__(self, page_size: int, windows: Sequence[int | None]):
        self._page_size, self._windows = page_size, windows
        self._pages: dict[int, PrefixPage] = {}
        self._by_key: dict[bytes, int] = {}
        self.unused: dict[int, None] = {}
        self._next = 0

    def __getitem__(self, number: int) -> PrefixPage:
        return self._pages[number]

    def __iter__(self) -> Iterator[PrefixPage]:
        return iter(self._pages.values())

    def add(self, entry: PrefixPage) -> None:
        number, self._next = self._next, self._next + 1
        self._pages[number], entry.page.prefix = entry, number
        if entry.key is not None:
            self._forget_key(entry.key)
            self._by_key[entry.key] = number

    def remove(self, number: int) -> PrefixPage:
        entry = self._pages.pop(number)
        self.unused.pop(number, None)
        self._forget_key(entry.key)
        entry.page.prefix = None
        return entry

    def _forget_key(self, key: bytes | None) -> None:
        number = self._by_key.pop(key, None)
        if number in self._pages:
            self._pages[number].key = None

    def known(self, key: bytes) -> PrefixPage | None:
        """The page with this key."""
        return self._pages[self._by_key[key]] if key in self._by_key else None

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The longest beginning of a text with these keys that a row can begin with: numbers of its pages."""
        found = []
        for key in keys:
            if key not in self._by_key:
                break
            found.append(self._by_key[key])
        while found and not self._is_enough(found):
            found.pop()
        return found

    def _is_enough(self, numbers: list[int]) -> bool:
        last = self._pages[numbers[-1]]
        if last.has_states and last.state is None:
            return False
        for kind, window in enumerate(self._windows):
            first = 0 if window is None else self.first_visible(len(numbers), window)
            if not all(self._pages[number].is_whole[kind] for number in numbers[first:]):
                return False
        return True

    def first_visible(self, num_pages: int, window: int) -> int:
        """The first of a row's full pages that queries behind them see through a window."""
        return max(0, num_pages * self._page_size - window + 1) // self._page_size


def common_beginnings(pages: Sequence[list[int]], least: int) -> list[tuple[list[int], int]]:
    """Groups of rows that begin with the same pages: (numbers of the rows, pages), each row in one group at most.

    pages: of every row, in order. least: pages that a group saves at least: rows but one, times the pages they share.
    """
    order = sorted(range(len(pages)), key=pages.__getitem__)
    shared = [_length(pages[a], pages[b]) for a, b in itertools.pairwise(order)]  # by neighbours
    groups = []
    _split(order, shared, max(least, 1), groups)
    return groups


def _split(order: list[int], shared: list[int], least: int, groups: list[tuple[list[int], int]]) -> None:
    """Add the group of neighbours that saves most, and those on both sides of it."""
    best = (least - 1, 0, 0, 0)
    for first in range(len(shared)):
        most = shared[first]
        for last in range(first, len(shared)):
            most = min(most, shared[last])
            if not most:
                break
            best = max(best, ((last - first + 1) * most, -first, last, most))
    if best[3]:
        first, last = -best[1], best[2]
        groups.append((order[first : last + 2], best[3]))
        _split(order[:first], shared[: max(first - 1, 0)], least, groups)
        _split(order[last + 2 :], shared[last + 2 :], least, groups)


def _length(a: list[int], b: list[int]) -> int:
    """How many pages two rows begin with."""
    if not a or not b or a[0] != b[0]:
        return 0
    return bisect.bisect(range(min(len(a), len(b))), False, key=lambda i: a[: i + 1] != b[: i + 1])
