"""All layers of a sharded KV cache: the book of rows, the pages of each layer, and the block tables for the kernels."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.selection import Blocks
from ..kernels import SharedPages
from .pages import CACHE_DTYPES, LayerPages, kept, on_device
from .prefixes import SAVED_TOKENS, common_beginnings
from .rows import Append, Row, RowBook

WIDER = 8  # tables are as wide as a multiple of so many pages
KEPT_TABLES = 3  # of the last views: a step's views between the views of prompts


@dataclass(frozen=True)
class View:
    """Where the kernels find some rows' tokens, in layers of one kind, on this rank."""

    block_table: Tensor
    """int32 [b, pages]: the pages of each row in order; entries beyond its length are not used."""
    lengths: Tensor
    """int64 [b]: tokens of each row on this rank."""
    indices: Tensor
    """int64 [b, pages]: each page's index in its row."""
    page_size: int
    """Entries of a page: tokens, or blocks of `block_size` tokens. Lengths and positions count these, too."""
    block_size: int = 1
    shared: tuple[SharedPages, ...] = ()
    """What some of the rows begin with on this rank, where reading it once for all of them is worth it,"""
    rest: View | None = None
    """and where what follows is."""

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 [b, pages * page_size]: the tokens' positions in the row."""
        within = torch.arange(self.page_size, device=self.indices.device)
        return (self.indices[..., None] * self.page_size + within).flatten(1)

    def last_seen(self, positions: Tensor) -> Tensor:
        """The last entry that queries at these positions see, int64: a block once it is complete; -1: none."""
        return positions if self.block_size == 1 else (positions + 1) // self.block_size - 1


class RowTables:
    """Pages int32 [b, width] of rows and their indices int64 [b, width], see `View`; `ShardedCache.fill` sets them.

    row_ids: of the rows, if they stay the same.
    """

    def __init__(self, num_rows: int, width: int, device, row_ids: tuple[int, ...] = ()):
        self.row_ids = row_ids
        with kept():
            self.pages = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
            self.indices = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        self.known: list[tuple[int, int] | None] = [None] * num_rows
        """(row, its version) that each line shows."""

    def take(self, other: RowTables) -> None:
        """Copy the lines of rows that are not known here yet."""
        lines = {row_id: i for i, row_id in enumerate(self.row_ids) if self.known[i] is None}
        both = [(lines[row_id], i) for i, row_id in enumerate(other.row_ids) if row_id in lines]
        if both and other.pages.device == self.pages.device:
            to, source = on_device(torch.tensor(both), self.pages.device).T
            width = min(self.pages.shape[1], other.pages.shape[1])
            self.pages[to, :width] = other.pages[source, :width]
            self.indices[to, :width] = other.indices[source, :width]
            for i, j in both:
                self.known[i] = other.known[j]


class ShardedCache:
    """The rows of a cache, and this rank's part of their keys and values.

    Args:
        windows: for every layer, how many of the last tokens a query sees, including its own; None: all.
        block_sizes: for every layer, of how many tokens a block is that has one key, which is its value, too, in the
            model's dtype. It lies where the block's tokens do: in a page of all layers, on one rank. Default: 1.
        rank, world: this rank's number in the group, and the group's size.
        page_size: tokens of a page.
        dtype: "auto" (that of the keys), "int8" or "fp8" (e4m3), the last two with a scale per token and head.
        latent: the keys are latents, the values rotary keys; see `LayerPages`.
    Raises: ValueError for sizes below 1, blocks that do not divide a page, or an unknown dtype.
    """

    def __init__(
        self,
        windows: list[int | None],
        *,
        block_sizes: list[int] | None = None,
        rank: int = 0,
        world: int = 1,
        page_size: int = 16,
        dtype: str = "auto",
        latent: bool = False,
    ):
        if dtype not in CACHE_DTYPES:
            raise ValueError(f"dtype={dtype!r} must be one of {', '.join(CACHE_DTYPES)}")
        layers = list(zip(windows, block_sizes or [1] * len(windows), strict=True))
        kinds = list(dict.fromkeys(layers))
        self.kind_of = [kinds.index(layer) for layer in layers]
        self.block_sizes = [size for _, size in kinds]
        """By kind."""
        self.book = RowBook(rank, world, page_size, tuple([window for window, _ in kinds]))
        if odd := [size for size in self.block_sizes if page_size % size]:
            raise ValueError(
                f"page_size={page_size}: layers have one key for each block of {odd[0]} tokens, which have to divide "
                f"it: choose {math.lcm(*self.block_sizes)}, or a multiple of it"
            )
        of_tokens = {"stored": CACHE_DTYPES[dtype], "latent": latent}
        self.layers = [
            LayerPages(page_size // size, **of_tokens if size == 1 else {"latent": True}) for _, size in layers
        ]
        self._tables: dict[int, list[RowTables]] = {}  # by kind: of the last views
        self._shared: dict[int, tuple] = {}  # and what the rows of the last one begin with
        self._nobodys: dict[int, int] = {}  # by kind: a page that no row has
        self.resets = 0

    @property
    def page_size(self) -> int:
        return self.book.page_size

    def append(self, row_ids, num_tokens: int, *, sharded: bool = False) -> Append:
        """See `RowBook.append`. Afterwards call `write` for every layer, or `crop` the rows to their old lengths."""
        append = self.book.append(row_ids, num_tokens, sharded=sharded)
        # copy in all layers at once: the copies are needed even if the model fails before a layer writes
        if any(append.copies):
            self.reserve()
        for pages, kind in zip(self.layers, self.kind_of, strict=True):
            if append.copies[kind]:
                pages.copy(append.copies[kind])
        return append

    def write(self, layer: int, append: Append, k: Tensor, v: Tensor) -> None:
        """Store this rank's part of the new tokens.

        k [b, n, h_kv, d], v [b, n, h_kv, d_v]: the new tokens of the append's rows, in its order. Sharded: this rank's
        tokens of the one row, at the front of n; the rest is ignored. Or [1, m, ...] of the `places` alone.
        """
        pages, kind, device = self.layers[layer], self.kind_of[layer], k.device
        pages.reserve(self.book.most[kind] + (kind in self._nobodys), k, v)  # num_pages, without a call in every layer
        tokens, slots = self.places(append, kind, device)
        if tokens.shape[0]:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            if tokens.shape[0] < k.shape[0]:  # in ascending order
                k, v = k[tokens], v[tokens]
            pages.write(slots, k, v)

    def write_index(self, layer: int, append: Append, index_k: Tensor) -> None:
        """Store this rank's part of the new tokens' index keys [b, n, d_i], after `write`, as there."""
        pages, kind = self.layers[layer], self.kind_of[layer]
        pages.reserve_index(index_k)
        tokens, slots = self.places(append, kind, index_k.device)
        if tokens.shape[0]:
            index_k = index_k.flatten(0, 1)
            index_k = index_k[tokens] if tokens.shape[0] < index_k.shape[0] else index_k
            pages.put(slots, {"index_k": index_k[:, None]})

    def finish_blocks(self, layer: int, append: Append, positions: Tensor, blocks: Blocks) -> None:
        """Put the keys of blocks that the new tokens complete in the places of their last tokens' index keys, which may
        have more numbers than these.

        positions: int64 [b, n] of the new tokens, as in `write_index`.
        """
        pages, kind = self.layers[layer], self.kind_of[layer]
        tokens, slots = self.places(append, kind, positions.device)
        if not tokens.shape[0]:
            return
        completes = slots % blocks.size == blocks.size - 1
        tokens, slots = tokens[completes], slots[completes]
        of_block = torch.arange(1 - blocks.size, 1, device=slots.device)
        raw = pages.index_k.flatten(0, 1)[slots[:, None] + of_block, 0]
        keys = blocks.key(raw[None], positions.flatten()[tokens] + 1 - blocks.size)[0]
        pages.index_k.flatten(0, 1)[slots, 0, : keys.shape[-1]] = keys

    def places(self, append: Append, kind: int, device) -> tuple[Tensor, Tensor]:
        """(numbers of the new tokens to store, or of those that complete a block to store, their slots), int64 [n];
        made once for all layers of a kind."""
        if (kind, device) not in append.places:
            numbers, size = torch.tensor(self.book.places(append, kind), dtype=torch.int64), self.block_sizes[kind]
            if size > 1:
                tokens, slots = numbers[:, numbers[1] % size == size - 1]
                numbers = torch.stack((tokens, slots // size))
            append.places[kind, device] = on_device(numbers, device).unbind()
        return append.places[kind, device]

    def unused_slot(self, kind: int) -> int:
        """Where a static step (graph.py) puts tokens that this rank does not store; it takes a page."""
        if kind not in self._nobodys:
            self._nobodys[kind] = self.book.numbers[kind].take()
        return self._nobodys[kind] * self.page_size

    def num_pages(self, kind: int) -> int:
        """Pages that a layer needs on the rank that has had the most: so all ranks' get other memory in one step."""
        return self.book.most[kind] + (kind in self._nobodys)

    def reserve(self, spare: int = 1) -> None:
        """Allocate all pages that have numbers, in layers that have stored a token, and fewer than `spare` others: up
        to the next power of two, or multiple of `spare`."""
        for pages, kind in zip(self.layers, self.kind_of, strict=True):
            n = self.num_pages(kind)
            pages.grow(min(1 << max(0, n - 1).bit_length(), -(-n // spare) * spare))

    @property
    def moves(self) -> int:
        """Grows when pages of a layer get other memory."""
        return sum(pages.moves for pages in self.layers)

    def kept(self, append: Append, kind: int) -> tuple[Tensor, Tensor]:
        """The tokens, or blocks, of an append of one row that this rank stores: (positions in the row, or numbers of
        blocks, slots), int64 [n] each."""
        tokens, slots = self.places(append, kind, "cpu")
        return (append.first[0] + tokens) // self.block_sizes[kind], slots

    def runs(self, kind: int, row_id: int, first: int = 0) -> list[tuple[int, int, int]]:
        """This rank's tokens of a row from position `first` on, or complete blocks, as runs (position, slot, count) in
        ascending order."""
        row, size, runs, block = self.book.rows[row_id], self.page_size, [], self.block_sizes[kind]
        for i, page in zip(row.indices[kind], row.pages[kind], strict=True):
            start, stop = max(first, i * size) // block, min(row.length, (i + 1) * size) // block
            if start < stop:
                runs.append((start, (page - i) * size // block + start, stop - start))
        return runs

    def view(self, kind: int, row_ids, device) -> View:
        """Where the kernels find these rows, for layers of a kind; the block table has at least one column."""
        row_ids, rows, block = tuple(row_ids), [self.book.rows[row_id] for row_id in row_ids], self.block_sizes[kind]
        held, size = [row.local[kind] for row in rows], self.page_size // block
        lengths, width = on_device(torch.tensor(held) // block, device), max(1, -(-max(held) // self.page_size))
        tables = self._tables_of(kind, row_ids, width, device)
        self.fill(tables, kind, row_ids)
        pages, indices = tables.pages[:, :width], tables.indices[:, :width]
        firsts = [row.pages[kind][0] for row in rows if row.pages[kind]]
        if self.book.windows[kind] is not None or len(set(firsts)) == len(firsts):
            return View(pages, lengths, indices, size, block)
        state = row_ids, device, [row.version for row in rows]
        shared, skipped, tables = self._beginnings(kind, rows, held, state, [pages, indices])
        rest = View(tables[0], lengths - skipped * size, tables[1], size, block) if shared else None
        return View(pages, lengths, indices, size, block, shared, rest)

    def fill(self, tables: RowTables, kind: int, row_ids) -> None:
        """Bring tables of these rows, wide enough for the longest, up to date: a few rows begin a page in a step."""
        lines, columns, pages, indices = [], [], [], []
        for i, row_id in enumerate(row_ids):
            row, known = self.book.rows[row_id], tables.known[i]
            if known == (row_id, row.version):
                continue
            (version, same), count = row.tabled[kind], len(row.pages[kind])
            first = same if known == (row_id, version) else 0
            lines += [i] * (count - first)
            columns += range(first, count)
            pages += row.pages[kind][first:]
            indices += row.indices[kind][first:]
            tables.known[i], row.tabled[kind] = (row_id, row.version), (row.version, count)
        if lines:
            numbers = torch.tensor([lines, columns, pages, indices])
            lines, columns, pages, indices = on_device(numbers, tables.pages.device)
            tables.pages[lines, columns], tables.indices[lines, columns] = pages.int(), indices

    def _tables_of(self, kind: int, row_ids: tuple[int, ...], width: int, device) -> RowTables:
        """Tables of these rows, at least so wide, with what is known of them."""
        kept = self._tables.setdefault(kind, [])
        for tables in kept:
            if tables.row_ids == row_ids and tables.pages.device == device and tables.pages.shape[1] >= width:
                break
        else:
            tables = RowTables(len(row_ids), -(-width // WIDER) * WIDER, device, row_ids)
            for other in reversed(kept):
                tables.take(other)
        if not kept or tables is not kept[-1]:
            kept[:] = [*[x for x in kept if x is not tables][1 - KEPT_TABLES :], tables]
        return tables

    def _beginnings(self, kind: int, rows: list[Row], held: list[int], state: tuple, tables: list[Tensor]) -> tuple:
        """(shared pages, how many of each row's pages are among them int64 [b], tables of the others).

        held: tokens of each row on this rank.
        """
        if kind not in self._shared or self._shared[kind][0] != state:
            device = tables[0].device
            full = [row.pages[kind][: n // self.page_size] for row, n in zip(rows, held, strict=True)]
            shared, skipped, rest = [], [0] * len(rows), None
            for group, count in common_beginnings(full, -(-SAVED_TOKENS // self.page_size)):
                numbers = on_device(torch.tensor(sorted(group)), device)
                for i in group:
                    skipped[i] = count
                shared.append(SharedPages(numbers, tables[0][numbers[:1], :count]))
            width, skipped = max(1, tables[0].shape[1] - min(skipped)), on_device(torch.tensor(skipped), device)
            if shared:
                at = (torch.arange(width, device=device) + skipped[:, None]).clamp(max=tables[0].shape[1] - 1)
                rest = [table.gather(1, at) for table in tables]
            self._shared[kind] = state, (tuple(shared), skipped, rest)
        return self._shared[kind][1]

    def key_segments(self, append: Append, kind: int, *, of_all_ranks: bool, by_position: bool = False) -> list:
        """For a sharded append this rank's keys of the row, or by rank all ranks'; `RowBook.key_segments`."""
        key = kind, of_all_ranks, by_position
        if key not in append.segments:
            ranks = range(self.book.world) if of_all_ranks else (None,)
            row = append.rows[0], kind, append.first[0]
            by_rank = [self.book.key_segments(*row, rank, by_position=by_position) for rank in ranks]
            append.segments[key] = by_rank if of_all_ranks else by_rank[0]
        return append.segments[key]

    def crop(self, row_id: int, length: int) -> None:
        """See `RowBook.crop`."""
        self.book.crop(row_id, length)

    def remove(self, row_id: int) -> None:
        self.book.remove(row_id)

    def reset(self) -> None:
        self.resets += 1
        for row_id in list(self.book.rows):
            self.remove(row_id)
        self.book.evict(len(self.book.prefixes.unused))
        self._tables.clear()
        self._shared.clear()
        for kind, numbers in enumerate(self.book.numbers):
            if kind in self._nobodys:
                numbers.release(self._nobodys.pop(kind))
            numbers.forget_free()
        self.book.most = [0] * len(self.book.most)
        for pages in self.layers:
            pages.reset()

    def num_local(self, kind: int = 0) -> int:
        """Tokens of all rows, or complete blocks, that this rank holds for layers of a kind."""
        return sum(row.local[kind] // self.block_sizes[kind] for row in self.book.rows.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and scales of the tokens that this rank holds."""
        held = [self.num_local(kind) for kind in range(len(self.book.windows))]
        return sum(held[kind] * pages.bytes_of_a_token for kind, pages in zip(self.kind_of, self.layers, strict=True))

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages and recurrent states that rows use on this rank; what several share counts once."""
        used = [numbers.used for numbers in self.book.numbers]
        layers = zip(self.kind_of, self.layers, strict=True)
        return self.state_bytes + sum(used[kind] * x.page_size * x.bytes_of_a_token for kind, x in layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the rows' recurrent states; one that several rows share counts once."""
        holders = itertools.chain(self.book.rows.values(), self.book.prefixes)
        states = {id(holder.state): holder.state for holder in holders if holder.state is not None}
        return sum(state.nbytes for state in states.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated, including free pages."""
        return sum(pages.allocated_bytes for pages in self.layers)
