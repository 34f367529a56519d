"""Which rank holds which tokens of a sharded KV cache, for any number of sequences ("rows"). Numbers, not keys.

A row is cut into pages of page_size tokens. Each page belongs to one rank: the one with the fewest pages of all rows
when the page starts. So the ranks' numbers of pages differ by at most one, whatever the lengths of the rows. Every rank
keeps the same book of all rows and computes the same result, without communication.

A page has an index in its row, and a number in the pool of its rank. Layers of one kind (all keys, or a window of the
last ones) hold the same tokens, so they share page numbers. Rows may share pages (a fork) until one of them writes.
Shared pages count once, but those that are not full count for every row: a row that goes on writes into its last page,
and gets a copy. Full pages can be put into `RowBook.prefixes`: new rows begin with them, and they stay until they are
evicted.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..layout import Segment, join
from .pages import PageNumbers, PageRuns, RowPage
from .prefixes import Prefixes, PrefixPage
from .states import RowState


@dataclass
class Row:
    """One sequence."""

    length: int = 0
    parts: list[RowPage] = field(default_factory=list)
    """All of its pages, on all ranks."""
    runs: list[PageRuns] = field(default_factory=list)
    """By rank: their indices."""
    indices: list[list[int]] = field(default_factory=list)
    """By kind: of the pages that this rank still holds, in ascending order."""
    pages: list[list[int]] = field(default_factory=list)
    """By kind: their page numbers."""
    forgotten: list[int] = field(default_factory=list)
    """By kind: positions below this have left the window."""
    local: list[int] = field(default_factory=list)
    """By kind: tokens that this rank holds."""
    owns_last: bool = True
    """Whether it is known that no other row has its last page, if that is not full."""
    version: int = 0
    """Changes whenever the row's pages change."""
    tabled: list[tuple[int, int]] = field(default_factory=list)
    """By kind: its version when a table of its pages was made, and how many of these have not changed since."""
    note: object = None
    """What a runner remembers of the row; a fork's is the same."""
    next_positions: Tensor | None = None
    """int64 [n], for its first n tokens the position of text that follows them, where it is not their number: behind
    images. A fork's is the same."""
    state: RowState | None = None
    """Of the model's recurrent layers, where it has some; a fork's is the same."""

    def change(self, kind: int, first: int) -> None:
        """Note that its pages from the first-th on are not what they were."""
        version, same = self.tabled[kind]
        self.tabled[kind] = version, min(same, first)
        self.version += 1


class Rows(dict):
    """Rows by id; an unknown id is a ``ValueError``."""

    def __missing__(self, row_id):
        known = f"{min(self)} to {max(self)}, {len(self)} of them" if self else "none yet"
        raise ValueError(f"row={row_id!r} is not in the cache: it was removed, or never added (rows: {known})")


@dataclass
class Append:
    """What one append of tokens means for this rank."""

    rows: tuple[int, ...]
    num_tokens: int
    """New tokens of each row."""
    first: tuple[int, ...]
    """Position of the first new token of each row."""
    copies: list[list[tuple[int, int]]]
    """By kind: pages (from, to) to copy first, because another row shares the old ones."""
    shares: list[list[tuple[int, int]]] | None
    """Sharded: by rank, its new tokens as runs (position, count). None: all tokens are on all ranks."""
    places: dict = field(default_factory=dict)
    """Tensors made from `RowBook.places`, the same for all layers of a kind (`ShardedCache`)."""
    segments: dict = field(default_factory=dict)
    """Sharded: keys that this append's queries may see, the same for all layers of a kind (`ShardedCache`)."""


class RowBook:
    """All rows of a cache, as seen from one rank.

    Args:
        rank, world: this rank's number in the group over which the cache is sharded, and the group's size.
        page_size: tokens of a page.
        windows: for each kind of layer, how many of the last tokens a query sees, including its own; None: all.
    Raises: ValueError for a rank outside the group, or sizes below 1.
    """

    def __init__(self, rank: int, world: int, page_size: int = 16, windows: tuple[int | None, ...] = (None,)):
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not one of world={world} ranks")
        if not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size={page_size!r} must be a positive number of tokens")
        if any(window is not None and window < 1 for window in windows):
            raise ValueError(f"windows={windows} must be 1 or more each, or None")
        self.rank, self.world, self.page_size, self.windows = rank, world, page_size, windows
        self._windowed = [kind for kind, window in enumerate(windows) if window is not None]
        self.numbers = [PageNumbers() for _ in windows]
        self.loads = [0] * world
        self.held = [self.loads if window is None else [0] * world for window in windows]
        """By kind and rank: pages at most; what rows share counts once."""
        self.most = [0] * len(windows)
        """By kind: of any rank, so far."""
        self.rows: dict[int, Row] = Rows()
        self.prefixes = Prefixes(page_size, windows)
        self._next_id = 0

    def add(self) -> int:
        """A new, empty row; returns its id."""
        row_id, self._next_id = self._next_id, self._next_id + 1
        kinds = len(self.windows)
        self.rows[row_id] = Row(
            indices=[[] for _ in range(kinds)],
            pages=[[] for _ in range(kinds)],
            forgotten=[0] * kinds,
            local=[0] * kinds,
            tabled=[(0, 0)] * kinds,
            runs=[PageRuns() for _ in range(self.world)],
        )
        return row_id

    def append(self, row_ids, num_tokens: int, *, sharded: bool = False) -> Append:
        """Make room for num_tokens >= 1 more tokens at the end of each row.

        sharded: each rank receives only its own tokens (of one row), whole pages as in `Append.shares`. Otherwise
            all ranks receive all tokens and store their own.
        """
        assert num_tokens >= 1 and (not sharded or len(row_ids) == 1), (row_ids, num_tokens, sharded)
        rows, size, kinds = [self.rows[i] for i in row_ids], self.page_size, range(len(self.windows))
        copies = [[] for _ in kinds]
        first = tuple([row.length for row in rows])
        for row in rows:
            if self._windowed:
                self.forget(row)
            if num_tokens > 1 or not row.owns_last or row.length % size == 0:
                self._add_pages(row, row.length + num_tokens, copies)
                row.length += num_tokens
                self._count(row)
                continue
            row.length += 1
            if row.parts[-1].rank == self.rank:
                for kind in kinds:
                    row.local[kind] += 1
        shares = self._shares(rows[0], first[0]) if sharded else None
        return Append(tuple(row_ids), num_tokens, first, copies, shares)

    def _add_pages(self, row: Row, end: int, copies: list[list[tuple[int, int]]]) -> None:
        """Have pages for the tokens of a row up to `end`. Its last page is copied first if it is shared."""
        if row.length % self.page_size and not row.owns_last and row.parts[-1].rank == self.rank:
            for kind, numbers in enumerate(self.numbers):
                pages = row.pages[kind]
                if numbers.is_shared(pages[-1]):
                    copies[kind].append((pages[-1], numbers.take()))
                    numbers.release(pages[-1])
                    pages[-1] = copies[kind][-1][1]
                    row.change(kind, len(pages) - 1)
        row.owns_last = True
        num_pages = -(-end // self.page_size) - len(row.parts)
        for rank in self._assign(num_pages) if num_pages else ():
            row.runs[rank].add(len(row.parts))
            if rank == self.rank:
                row.version += 1
                for kind, numbers in enumerate(self.numbers):
                    row.indices[kind].append(len(row.parts))
                    row.pages[kind].append(numbers.take())
            row.parts.append(RowPage(rank))
            self._hold_windows(row, len(row.parts) - 1)
        self.most = [max(most, *held) for most, held in zip(self.most, self.held, strict=True)]

    def _hold_windows(self, row: Row, first: int = 0, holders: int = 1) -> None:
        """Count the row's pages from the first-th on that its windows have not left yet; holders=-1: no longer."""
        for kind in self._windowed:
            for page in row.parts[max(first, row.forgotten[kind] // self.page_size) :]:
                self._hold_window(kind, page, holders)

    def _hold_window(self, kind: int, page: RowPage, holders: int) -> None:
        before = page.in_windows.get(kind, 0)
        page.in_windows[kind] = after = before + holders
        if not (before and after):
            self.held[kind][page.rank] += holders

    def _count(self, row: Row) -> None:
        """Set how many of a row's tokens this rank holds: whole pages, and its part of the last one."""
        for kind, indices in enumerate(row.indices):
            beyond = max(0, (indices[-1] + 1) * self.page_size - row.length) if indices else 0
            row.local[kind] = len(indices) * self.page_size - beyond

    def places(self, append: Append, kind: int) -> tuple[list[int], list[int]]:
        """The tokens of the last append that this rank stores: (numbers among those that it receives, row by row, slots
        page * page_size + offset), in ascending order of the numbers."""
        rows, n, size = [self.rows[i] for i in append.rows], append.num_tokens, self.page_size
        tokens, slots = [], []
        if n == 1:
            tokens = [i for i, row in enumerate(rows) if row.parts[-1].rank == self.rank]
            slots = [rows[i].pages[kind][-1] * size + append.first[i] % size for i in tokens]
            return tokens, slots
        for index, (row, begin) in enumerate(zip(rows, append.first, strict=True)):
            mine = [i for i in range(begin // size, len(row.parts)) if row.parts[i].rank == self.rank]
            for at, i in enumerate(mine, -len(mine)):
                start, stop = max(begin, i * size), min(row.length, (i + 1) * size)
                token = len(tokens) if append.shares is not None else index * n + start - begin
                slot = row.pages[kind][at] * size + start - i * size
                tokens += range(token, token + stop - start)
                slots += range(slot, slot + stop - start)
        return tokens, slots

    def _assign(self, num_pages: int) -> list[int]:
        """Ranks of new pages: balanced, counting existing pages; each rank gets at most two runs (zigzag)."""
        if num_pages == 1:
            rank = self.loads.index(min(self.loads))
            self.loads[rank] += 1
            return [rank]
        counts = [0] * self.world
        heap = [(load, rank) for rank, load in enumerate(self.loads)]
        heapq.heapify(heap)
        for _ in range(num_pages):
            load, rank = heap[0]
            counts[rank] += 1
            self.loads[rank] += 1
            heapq.heapreplace(heap, (load + 1, rank))
        up = [rank for rank, count in enumerate(counts) for _ in range(-(-count // 2))]
        down = [rank for rank in reversed(range(self.world)) for _ in range(counts[rank] // 2)]
        return up + down

    def _shares(self, row: Row, begin: int) -> list[list[tuple[int, int]]]:
        """By rank: runs (position, count) of its tokens from position `begin` on."""
        shares, size = [[] for _ in range(self.world)], self.page_size
        for i in range(begin // size, len(row.parts)):
            start, stop = max(begin, i * size), min(row.length, (i + 1) * size)
            runs = shares[row.parts[i].rank]
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + stop - start)
            else:
                runs.append((start, stop - start))
        return shares

    def forget(self, row: Row) -> None:
        """Free the pages of a row that no later query can see."""
        for kind in self._windowed:
            first, beyond = row.forgotten[kind], row.length - self.windows[kind] + 1
            row.forgotten[kind] = max(first, beyond)
            for page in row.parts[first // self.page_size : row.forgotten[kind] // self.page_size]:
                self._hold_window(kind, page, -1)
            indices, pages = row.indices[kind], row.pages[kind]
            gone = 0
            while gone < len(indices) and (indices[gone] + 1) * self.page_size <= row.forgotten[kind]:
                self.numbers[kind].release(pages[gone])
                gone += 1
            del indices[:gone], pages[:gone]
            if gone:
                row.local[kind] -= gone * self.page_size
                row.change(kind, 0)

    def num_visible(self, append: Append, kind: int) -> int:
        """Tokens of the row that an append's queries may see, on all ranks (approximate: windows count whole pages)."""
        before, window = append.first[0], self.windows[kind]
        return append.num_tokens + (before if window is None else min(before, window + self.page_size))

    def key_segments(
        self, row_id: int, kind: int, begin: int, rank: int | None = None, *, by_position: bool = False
    ) -> list[Segment]:
        """A rank's tokens (default: this rank's) in the order of its pages, for queries at `begin` and later.

        Without a window all these queries see all tokens before `begin`, so those tokens form one segment; its
        positions are the real ones only if by_position.
        """
        by_position = by_position or self.windows[kind] is not None
        row, size = self.rows[row_id], self.page_size
        runs, held = row.runs[self.rank if rank is None else rank], row.forgotten[kind] // size
        first = held if by_position else max(held, begin // size)  # pages before this one only count
        before = runs.count(first) - runs.count(held)
        segments, at = [Segment(0, 0, before * size)] if before else [], before * size
        for i, last in runs.since(first):
            start, stop = i * size, min(row.length, last * size)
            if not by_position and start < begin:
                middle = min(begin, stop)
                segments.append(Segment(at, at, middle - start))
                at, start = at + middle - start, middle
            if stop > start:
                segments.append(Segment(at, start, stop - start))
                at += stop - start
        return list(join(segments))

    def crop(self, row_id: int, length: int) -> None:
        """Remove every token at position `length` or later. Raises: ValueError, see `check_crop`."""
        self.check_crop(row_id, length)
        row = self.rows[row_id]
        keep = -(-length // self.page_size)
        self._hold_windows(row, keep, -1)
        for page in reversed(row.parts[keep:]):  # the last ones are evicted first
            self._release(page)
        del row.parts[keep:]
        for runs in row.runs:
            runs.cut(keep)
        if length % self.page_size and row.parts[-1].holders > 1:
            self._hold_windows(row, keep - 1, -1)
            self._release(row.parts[-1])
            row.parts[-1] = self._new_page(row.parts[-1].rank)
            self._hold_windows(row, keep - 1)
        for kind, numbers in enumerate(self.numbers):
            indices, pages = row.indices[kind], row.pages[kind]
            while indices and indices[-1] >= keep:
                indices.pop()
                numbers.release(pages.pop())
            row.change(kind, len(pages))
            if not length:
                row.forgotten[kind] = 0
        row.length, row.owns_last = length, False
        self._count(row)
        if row.next_positions is not None:
            row.next_positions = row.next_positions[:length]
        if not length:
            row.state = row.next_positions = None

    def check_crop(self, row_id: int, length: int) -> None:
        """Raise ``ValueError`` if `length` is negative or beyond the row, or needs tokens that a window has freed, or a
        recurrent state of earlier tokens."""
        row = self.rows[row_id]
        if not 0 <= length <= row.length:
            raise ValueError(f"length={length} must be between 0 and the {row.length} tokens that the row holds")
        if row.state is not None and length not in (0, row.state.length):
            raise ValueError(
                f"length={length}: the recurrent layers have the state of {row.state.length} tokens, which can't go "
                f"back: crop to {row.state.length}, or to 0 and run the row again; or fork a row before it goes on"
            )
        for kind, window in enumerate(self.windows):
            if window is not None and length and max(0, length - window + 1) < row.forgotten[kind]:
                raise ValueError(
                    f"length={length}: layers with a window of {window} hold only the tokens from "
                    f"{row.forgotten[kind]} on; crop to {row.forgotten[kind] + window - 1} or more, or start again"
                )

    def fork(self, row_id: int) -> int:
        """Copy a row; the two share their pages until one of them writes. Returns the copy's id."""
        row, copy_id = self.rows[row_id], self.add()
        copy, full = self.rows[copy_id], row.length // self.page_size
        copy.length, copy.forgotten, copy.local = row.length, list(row.forgotten), list(row.local)
        copy.owns_last = row.owns_last = False
        copy.note, copy.state, copy.next_positions = row.note, row.state, row.next_positions
        copy.indices = [list(indices) for indices in row.indices]
        copy.pages = [[n.share(p) for p in pages] for n, pages in zip(self.numbers, row.pages, strict=True)]
        for page in row.parts[:full]:
            self._hold(page)
        copy.runs = [runs.copy() for runs in row.runs]
        copy.parts = row.parts[:full] + [self._new_page(page.rank) for page in row.parts[full:]]
        self._hold_windows(copy)
        return copy_id

    def pages_to_share(self, row_id: int, keys: Sequence[bytes]) -> list[int]:
        """Indices of a row's full pages, which have these keys, that rows can't begin with yet, or not as well."""
        row, found = self.rows[row_id], []
        for index, key in enumerate(keys[: row.length // self.page_size]):
            known, end = self.prefixes.known(key), (index + 1) * self.page_size
            ends_state = row.state is not None and row.state.length == end
            if row.parts[index].prefix is None and (
                known is None
                or (ends_state and known.state is None)
                or any(end > gone and not whole for gone, whole in zip(row.forgotten, known.is_whole))
            ):
                found.append(index)
        return found

    def share(self, row_id: int, indices: Sequence[int], keys: Sequence[bytes] = ()) -> None:
        """Let new rows begin with these full pages of a row, which have indices in ascending order.

        keys: of all full pages of the row, on the rank that finds pages.
        """
        row = self.rows[row_id]
        for index in indices:
            page, end = row.parts[index], (index + 1) * self.page_size
            if page.prefix is not None:
                continue
            numbers = []
            for kind, held in enumerate(row.indices):
                at = bisect.bisect_left(held, index)
                is_here = at < len(held) and held[at] == index
                numbers.append(self.numbers[kind].share(row.pages[kind][at]) if is_here else None)
            is_whole = tuple([end > forgotten for forgotten in row.forgotten])
            state = row.state if row.state is not None and row.state.length == end else None
            key = keys[index] if keys else None
            entry = PrefixPage(page, numbers, is_whole, row.state is not None, state, row.note, row.next_positions, key)
            self._hold(page)
            self._hold_prefix(entry)
            self.prefixes.add(entry)

    def begin(self, row_id: int, numbers: Sequence[int]) -> None:
        """Let an empty row begin with pages that `Prefixes.find` has found."""
        row, pages = self.rows[row_id], [self.prefixes[number] for number in numbers]
        assert not row.length and pages, row
        row.length, row.parts = len(pages) * self.page_size, [entry.page for entry in pages]
        row.forgotten = [0 if window is None else max(0, row.length - window + 1) for window in self.windows]
        for index, entry in enumerate(pages):
            self._hold(entry.page)
            row.runs[entry.page.rank].add(index)
            for kind, number in enumerate(entry.numbers):
                if number is not None and (index + 1) * self.page_size > row.forgotten[kind]:
                    row.indices[kind].append(index)
                    row.pages[kind].append(self.numbers[kind].share(number))
        self._hold_windows(row)
        row.note, row.state, row.version = pages[-1].note, pages[-1].state, row.version + 1
        if pages[-1].next_positions is not None:
            row.next_positions = pages[-1].next_positions[: row.length]
        self._count(row)

    def evict(self, count: int) -> None:
        """Take away this many of the pages that rows might begin with and none does, those used least recently."""
        for number in list(itertools.islice(self.prefixes.unused, count)):
            entry = self.prefixes.remove(number)
            for kind, page in enumerate(entry.numbers):
                if page is not None:
                    self.numbers[kind].release(page)
            self._hold_prefix(entry, -1)
            self._release(entry.page)

    def _hold_prefix(self, entry: PrefixPage, holders: int = 1) -> None:
        for kind in self._windowed:
            if entry.is_whole[kind]:
                self._hold_window(kind, entry.page, holders)

    def _hold(self, page: RowPage) -> None:
        page.holders += 1
        self.prefixes.unused.pop(page.prefix, None)

    def _new_page(self, rank: int) -> RowPage:
        self.loads[rank] += 1
        return RowPage(rank)

    def _release(self, page: RowPage) -> None:
        page.holders -= 1
        if not page.holders:
            self.loads[page.rank] -= 1
        elif page.holders == 1 and page.prefix is not None:
            self.prefixes.unused[page.prefix] = None

    def remove(self, row_id: int) -> None:
        self.crop(row_id, 0)
        del self.rows[row_id]
