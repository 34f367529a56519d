"""A decode step whose launches depend on the number of rows and a capacity alone; all else is in tensors that stay.

What changes from token to token (tokens, positions, lengths, pages, and where this rank stores the new ones) is read on
the device. A rank that does not own a row's new page stores its token in a page that no row has. So the same
launches are right for every token, and a CUDA graph of them can be replayed (graph.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .forward import ForwardPass
from .pages import kept
from .rows import Append
from .sharded import RowTables, ShardedCache, View

LEAST_PAGES, LEAST_TOKENS = 8, 128  # capacities below these are not distinguished


class Capacity(NamedTuple):
    """What a static step's launches depend on, the same on all ranks."""

    rows: int
    """A power of two; rows beyond those that are run are empty."""
    tokens: int
    """Upper bound of the rows' lengths, a power of two: all that the host knows of them."""
    pages: tuple[int, ...]
    """By kind of layer: upper bound of a row's pages on one rank."""


class Capacities:
    """The capacity for the rows of a step. Every rank finds the same, in its own book of all ranks' pages."""

    def __init__(self, store: ShardedCache):
        self._book = store.book
        self._most: dict[int, tuple[tuple[int, int], int]] = {}

    def of(self, row_ids) -> Capacity:
        """For rows that hold the step's tokens already."""
        book, most = self._book, {}
        for row_id in row_ids:
            row = book.rows[row_id]
            state = row.version, len(row.parts)
            known = self._most.get(row_id)
            if known is None or known[0] != state:  # when a page begins
                known = state, max(runs.count() for runs in row.runs)
            most[row_id] = known
        self._most = most
        whole = _quarter_steps(max(LEAST_PAGES, *(pages for _, pages in most.values())))
        widths = tuple(whole if window is None else min(whole, window // book.page_size + 2) for window in book.windows)
        longest = max(book.rows[row_id].length for row_id in row_ids)
        return Capacity(_power_of_2(len(row_ids)), max(LEAST_TOKENS, _power_of_2(longest)), widths)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _quarter_steps(n: int) -> int:
    """The smallest of 8, 10, 12, 14, 16, 20, 24, ... that is n at least: at most a quarter more."""
    unit = max(1, _power_of_2(n) // 8)
    return -(-n // unit) * unit


class StepInputs:
    """The tensors that a static step reads, for one capacity. They stay where they are; `fill` writes the next step's.

    tokens, positions: int64 [rows, 1]. By kind of layer: lengths int64 [rows], slots int64 [rows], those of the new
    tokens, and tables. Rows that are not run have length 0.
    """

    def __init__(self, store: ShardedCache, capacity: Capacity, device: torch.device):
        rows, kinds = capacity.rows, len(capacity.pages)
        self.store, self.capacity = store, capacity
        with kept():
            self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self._numbers = torch.zeros(1 + 2 * kinds, rows, dtype=torch.int64, device=device)
        first, *others = self._numbers.unbind()
        self.positions, self.lengths, self.slots = first[:, None], others[::2], others[1::2]
        self.tables = [RowTables(rows, width, device) for width in capacity.pages]

    def fill(self, append: Append, tokens: Tensor) -> None:
        """Write what a step over these rows reads; tokens int64 [rows of the append, 1]. Two copies to the device, and
        one for every row that began a page."""
        store, book = self.store, self.store.book
        empty = [0] * (self.capacity.rows - len(append.rows))
        numbers = [[*append.first, *empty]]
        for kind, tables in enumerate(self.tables):
            slots = [store.unused_slot(kind)] * self.capacity.rows
            for i, slot in zip(*book.places(append, kind), strict=True):
                slots[i] = slot
            numbers += [[*(book.rows[row_id].local[kind] for row_id in append.rows), *empty], slots]
            store.fill(tables, kind, append.rows)
        pinned = self._numbers.device.type == "cuda"
        self._numbers.copy_(torch.tensor(numbers, pin_memory=pinned), non_blocking=True)
        self.tokens[: len(tokens)].copy_(tokens)


class StaticPass(ForwardPass):
    """A pass over one new token of each row of `StepInputs`, with the same launches whatever they hold.

    end: the length of the longest row as the host takes it; default the capacity. options: of `ForwardPass`.
    """

    def __init__(self, inputs: StepInputs, *, end: int | None = None, **options):
        n, last = inputs.capacity.rows, (end or inputs.capacity.tokens) - 1
        append = Append(tuple(range(n)), 1, (last,) * n, copies=[], shares=None)
        super().__init__(inputs.store, append, **options)
        self.inputs = inputs
        self.views = {
            kind: View(tables.pages, inputs.lengths[kind], tables.indices, inputs.store.page_size)
            for kind, tables in enumerate(inputs.tables)
        }

    def new_positions(self, device: torch.device) -> Tensor:
        return self.inputs.positions

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        kind, pages = self.store.kind_of[layer], self.store.layers[layer]
        self.written.add(layer)
        pages.reserve(self.store.book.numbers[kind].capacity, k, v)
        pages.write(self.inputs.slots[kind], k.flatten(0, 1), v.flatten(0, 1))

    def attend(self, layer: int, q: Tensor, *, visible: Tensor | None = None, **options) -> Tensor:
        if (
            visible is not None
            or options.get("attention_chunk_size") is not None
            or options.get("selected") is not None
        ):
            raise ValueError(
                "cuda_graphs=True: layers with a mask of their own, or whose queries see their chunk or selected keys "
                "only, depend on lengths that the host knows; leave cuda_graphs out for this model"
            )
        return super().attend(layer, q, **options)
