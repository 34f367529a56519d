"""Which rank holds which tokens of a sequence.

- "zigzag": the sequence is cut into 2p equal chunks; rank r holds chunks r and 2p-1-r, in the order of Megatron's
  `get_batch_on_this_cp_rank`. Under a causal mask every rank has the same work.
- "contiguous": one piece per rank, as even as possible (the first seq_len % p ranks hold one token more).
- a tuple of p lengths: contiguous pieces of these lengths; zeros are allowed.
- packed documents: `Packed` and `Dispatched` (documents.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arguments import checked
from ..config import integers
from .documents import Dispatched, Packed
from .segments import Segment, join, positions_of

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("zigzag", "contiguous")

Layout = str | Sequence[int] | Packed | Dispatched


def check_layout(layout: Layout, world: int) -> Layout:
    """The layout, lengths as a tuple of integers; ``ValueError`` if it is unknown or does not fit `world` ranks."""
    if world < 1:
        raise ValueError(f"world={world} must be a positive number of ranks")
    if isinstance(layout, (Packed, Dispatched)):
        layout.check(world)
    elif isinstance(layout, (tuple, list)):
        lengths = integers(layout, 0)
        if lengths is None or len(lengths) != world:
            raise ValueError(f"layout={layout!r} must give {world} lengths, one per rank, each 0 or more")
        return lengths
    elif layout not in LAYOUTS:
        raise ValueError(
            f"layout={layout!r} is unknown: choose 'zigzag', 'contiguous' or a tuple of one length per rank"
        )
    return layout


def shard_lengths(seq_len: int, world: int, layout: Layout = "zigzag") -> tuple[int, ...]:
    """How many tokens each of `world` ranks holds of a sequence of seq_len tokens."""
    layout = check_layout(layout, world)
    if seq_len < 0:
        raise ValueError(f"seq_len={seq_len} must not be negative")
    if isinstance(layout, (Packed, Dispatched)):
        rows = layout.rows(world)
        if rows * world != seq_len:
            raise ValueError(f"the packed documents have {rows * world} rows, the sequence {seq_len}")
        return (rows,) * world
    if isinstance(layout, tuple):
        if sum(layout) != seq_len:
            raise ValueError(f"layout={layout!r} holds {sum(layout)} tokens, the sequence has {seq_len}")
        return layout
    if layout == "zigzag":
        if seq_len % (2 * world) and world > 1:
            pad = -seq_len % (2 * world)
            raise ValueError(
                f"a sequence of {seq_len} tokens can't be sharded zigzag over {world} ranks: it must be a multiple of "
                f"2 * {world} = {2 * world}. Pad it by {pad} tokens, or pass layout='contiguous' here and in every "
                "call over these shards"
            )
        return (seq_len // world,) * world
    base, extra = divmod(seq_len, world)
    return tuple(base + (r < extra) for r in range(world))


def shard_segments(
    seq_len: int, rank: int, world: int, layout: Layout = "zigzag", *, in_rows: bool = False
) -> tuple[Segment, ...]:
    """The segments of one rank's shard, in the order of its rows; in_rows: as of `Dispatched.in_rows`."""
    lengths = shard_lengths(seq_len, world, layout)
    if isinstance(layout, (Packed, Dispatched)):
        return layout.in_rows(rank, world) if in_rows else layout.segments(rank, world)
    if layout == "zigzag" and world > 1:
        c = seq_len // (2 * world)
        return join((Segment(0, rank * c, c), Segment(c, (2 * world - 1 - rank) * c, c)))
    return join((Segment(0, sum(lengths[:rank]), lengths[rank]),))


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one sequence is distributed over `world` ranks.

    A holder is a tuple of ranks whose shards one rank has, one after another: its own rank, or those with which it has
    exchanged heads.
    """

    seq_len: int
    world: int
    layout: Layout

    @property
    def rows(self) -> int:
        """Rows in which a shard travels: as many as the longest shard has; shorter ones are padded."""
        return max(shard_lengths(self.seq_len, self.world, self.layout))

    def segments(self, *holders: tuple[int, ...], skip: int | None = None) -> tuple[Segment, ...]:
        """Segments of these holders' shards one after another, without the holder at index `skip`."""
        shares = tuple(None if i == skip else r for i, holder in enumerate(holders) for r in holder)
        return gathered_segments(shares, self.seq_len, self.world, self.layout, self.rows)

    def in_rows(self, *ranks: int) -> tuple[Segment, ...]:
        """The same of these ranks' shards; of a prefix tree as `Dispatched.in_rows`."""
        return gathered_segments(ranks, self.seq_len, self.world, self.layout, self.rows, in_rows=True)

    def rows_of(self, holder: tuple[int, ...], *, at: int = 0) -> slice:
        """Rows of this holder's shards, at index `at` among several holders'. A single shard is not padded."""
        n = len(holder)
        lengths = shard_lengths(self.seq_len, self.world, self.layout)
        start = at * n * self.rows
        return slice(start, start + (lengths[holder[0]] if n == 1 else n * self.rows))


@functools.lru_cache(maxsize=256)
def gathered_segments(
    ranks: tuple[int | None, ...], seq_len: int, world: int, layout: Layout, stride: int, *, in_rows: bool = False
) -> tuple[Segment, ...]:
    """Segments of several ranks' shards one after another, each padded to `stride` rows; None: no segments."""
    return join(
        s._replace(row=i * stride + s.row)
        for i, r in enumerate(ranks)
        if r is not None
        for s in shard_segments(seq_len, r, world, layout, in_rows=in_rows)
    )


@checked
def shard_positions(seq_len: int, rank: int, world: int, layout: Layout = "zigzag", *, device=None) -> Tensor:
    """int64 [tokens of this rank]: the global position of every row of the shard, in row order.

    Of packed documents: its row in the whole packed sequence; -1 for rows that hold none of it (`Dispatched`).
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not one of {world} ranks")
    num_rows = shard_lengths(seq_len, world, layout)[rank]
    if isinstance(layout, (Packed, Dispatched)):
        return positions_of(layout.source(rank, world), num_rows, device=device)
    return positions_of(shard_segments(seq_len, rank, world, layout), num_rows, device=device)


@checked
def document_positions(layout: Packed | Dispatched, rank: int, world: int, *, device=None) -> Tensor:
    """int64 [tokens of this rank]: the position of every row within its document, in a prefix tree within its rows, 0
    for padding. For position_ids and rotary embeddings."""
    check_layout(layout, world)
    return positions_of(layout.in_rows(rank, world), layout.rows(world), device=device, padding=0)


def documents_over(
    lengths: tuple[int, ...], padded: tuple[int, ...], world: int, layout: str | tuple[int, ...] = "zigzag"
) -> Dispatched:
    """Packed documents in a sequence that is cut as a whole by `layout`."""
    seq_len = sum(padded)
    shares = (tuple((s.pos, s.length) for s in shard_segments(seq_len, r, world, layout)) for r in range(world))
    return Dispatched(lengths, padded, tuple(shares), max(shard_lengths(seq_len, world, layout)))
