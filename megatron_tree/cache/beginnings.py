"""Pages that several rows begin with: a step reads them once for all of these rows."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

SAVED_TOKENS = 1024  # that need not be read again; fewer are not worth a second call of the kernel


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
