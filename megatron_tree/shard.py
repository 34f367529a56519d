"""Which rank holds which tokens: layouts, positions, and the segments that kernels work on.

- "zigzag": the sequence is cut into 2p equal chunks; rank r holds chunks r and 2p-1-r. The order of Megatron's
  `get_batch_on_this_cp_rank`: under a causal mask every rank has the same work.
- "contiguous": one piece per rank, as even as can be (the first seq_len % p ranks hold one token more).
- a tuple of p lengths: contiguous pieces of just these lengths, zeros allowed.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("zigzag", "contiguous")
Layout = str | tuple[int, ...]


class Segment(NamedTuple):
    """A run of rows whose positions rise by one: rows row .. row+length-1 hold positions pos .. pos+length-1.

    Queries see keys of their own sequence only: `seq` tells packed documents apart.
    """

    row: int
    pos: int
    length: int
    seq: int = 0


def check_layout(layout: Layout, world: int) -> None:
    """Raise ``ValueError`` for a layout that does not exist or does not fit `world` ranks."""
    if isinstance(layout, (tuple, list)):
        if len(layout) != world or any(not isinstance(n, int) or n < 0 for n in layout):
            raise ValueError(f"layout={layout!r} must give {world} lengths, one per rank, each 0 or more")
    elif layout not in LAYOUTS:
        raise ValueError(
            f"layout={layout!r} is unknown: choose 'zigzag', 'contiguous' or a tuple of one length per rank"
        )


def shard_lengths(seq_len: int, world: int, layout: Layout = "zigzag") -> tuple[int, ...]:
    """How many tokens each of `world` ranks holds of a sequence of seq_len tokens."""
    check_layout(layout, world)
    if isinstance(layout, (tuple, list)):
        if sum(layout) != seq_len:
            raise ValueError(f"layout={layout!r} holds {sum(layout)} tokens, the sequence has {seq_len}")
        return tuple(layout)
    if layout == "zigzag":
        if seq_len % (2 * world) and world > 1:
            pad = -seq_len % (2 * world)
            raise ValueError(
                f"a sequence of {seq_len} tokens can't be sharded zigzag over {world} ranks: it must be a multiple of "
                f"2 * {world} = {2 * world}. Pad it by {pad} tokens, or use layout='contiguous'"
            )
        return (seq_len // world,) * world
    base, extra = divmod(seq_len, world)
    return tuple(base + (r < extra) for r in range(world))


def shard_segments(seq_len: int, rank: int, world: int, layout: Layout = "zigzag") -> tuple[Segment, ...]:
    """The segments of one rank's shard, in the order of its rows."""
    lengths = shard_lengths(seq_len, world, layout)
    if layout == "zigzag" and world > 1:
        c = seq_len // (2 * world)
        return join((Segment(0, rank * c, c), Segment(c, (2 * world - 1 - rank) * c, c)))
    return join((Segment(0, sum(lengths[:rank]), lengths[rank]),))


def join(segments) -> tuple[Segment, ...]:
    """Drop empty segments and fuse neighbours that go on in both row and position."""
    done: list[Segment] = []
    for s in segments:
        if s.length == 0:
            continue
        last = done[-1] if done else None
        if last and (last.row + last.length, last.pos + last.length, last.seq) == (s.row, s.pos, s.seq):
            done[-1] = last._replace(length=last.length + s.length)
        else:
            done.append(s)
    return tuple(done)


def gathered_segments(
    ranks, seq_len: int, world: int, layout: Layout, stride: int, *, skip: int | None = None
) -> tuple[Segment, ...]:
    """Segments of several ranks' shards laid one after another, each padded to `stride` rows, without number `skip`."""
    return join(
        Segment(i * stride + s.row, s.pos, s.length)
        for i, r in enumerate(ranks)
        if i != skip
        for s in shard_segments(seq_len, r, world, layout)
    )


def packed_segments(cu_seqlens) -> tuple[Segment, ...]:
    """Segments of packed documents: cu_seqlens, n + 1 rising row numbers, as in flash-attn's varlen functions."""
    bounds = [int(n) for n in cu_seqlens]
    if not bounds or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens={bounds} must start at 0 and never fall")
    return join(Segment(a, 0, b - a, i) for i, (a, b) in enumerate(itertools.pairwise(bounds)))


def sequences_of(segments, num_rows: int, *, device=None) -> Tensor:
    """int64 [num_rows]: the sequence each row belongs to, -1 for rows of no segment."""
    seq = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    for s in segments:
        seq[s.row : s.row + s.length] = s.seq
    return seq


def positions_of(segments, num_rows: int, *, device=None, padding: int = -1) -> Tensor:
    """int64 [num_rows]: the position of each row, `padding` for rows of no segment."""
    pos = torch.full((num_rows,), padding, dtype=torch.int64, device=device)
    for s in segments:
        pos[s.row : s.row + s.length] = torch.arange(s.pos, s.pos + s.length, device=device)
    return pos


def shard_positions(seq_len: int, rank: int, world: int, layout: Layout = "zigzag", *, device=None) -> Tensor:
    """int64 [tokens of this rank]: the global position of every row of the shard, in row order."""
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not one of {world} ranks")
    segments = shard_segments(seq_len, rank, world, layout)
    return positions_of(segments, sum(s.length for s in segments), device=device)
