"""Which rank holds which tokens: layouts, positions, and the segments that kernels work on.

- "zigzag": the sequence is cut into 2p equal chunks; rank r holds chunks r and 2p-1-r, in the order of Megatron's
  `get_batch_on_this_cp_rank`. Under a causal mask every rank has the same work.
- "contiguous": one piece per rank, as even as possible (the first seq_len % p ranks hold one token more).
- a tuple of p lengths: contiguous pieces of these lengths; zeros are allowed.
- `Packed`: documents one after another, each of them cut zigzag on its own. This is Megatron's packed (thd) layout.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

LAYOUTS = ("zigzag", "contiguous")


class Segment(NamedTuple):
    """A run of consecutive positions: rows row .. row+length-1 hold positions pos .. pos+length-1.

    seq: number of the packed document. Queries see only keys of the same document.
    """

    row: int
    pos: int
    length: int
    seq: int = 0


@dataclass(frozen=True)
class Packed:
    """Documents of `lengths` tokens, each padded at its end to the entry of `padded`. Zeros are allowed in both."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]

    def __post_init__(self):
        if len(self.lengths) != len(self.padded) or any(not 0 <= n <= m for n, m in zip(self.lengths, self.padded)):
            raise ValueError(
                f"cu_seqlens and cu_seqlens_padded give documents of {self._shown(self.lengths)} and "
                f"{self._shown(self.padded)} rows: they must have equally many, none longer than its padded length"
            )

    @staticmethod
    def _shown(lengths: tuple[int, ...]) -> str:
        return str(list(lengths)) if len(lengths) <= 16 else f"[{', '.join(map(str, lengths[:16]))}, ...]"

    def __repr__(self) -> str:
        """Short and, through the checksum, different for different documents: ranks compare it."""
        return f"{len(self.lengths)} documents ({zlib.crc32(str((self.lengths, self.padded)).encode()):08x})"


Layout = str | tuple[int, ...] | Packed

# cu_seqlens -> (its version, its values): all layers pass the same tensor, and reading it from a GPU is slow
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packed_layout(cu_seqlens, cu_seqlens_padded=None, *, num_rows: int | None = None) -> Packed:
    """The layout of packed documents from their boundaries.

    Args:
        cu_seqlens: integers [n + 1], list or tensor, that start at 0 and do not decrease, as in flash-attn.
        cu_seqlens_padded: the same including each document's padding. Default: no padding.
        num_rows: rows on all ranks together; those after the last document are padding.

    Raises: ``ValueError`` for boundaries that are not as described.
    """
    bounds = _bounds("cu_seqlens", cu_seqlens)
    padded = bounds if cu_seqlens_padded is None else _bounds("cu_seqlens_padded", cu_seqlens_padded)
    lengths = [[b - a for a, b in itertools.pairwise(x)] for x in (bounds, padded)]
    if num_rows is not None and padded[-1] != num_rows:
        if padded[-1] > num_rows:
            raise ValueError(f"the documents end at row {padded[-1]}, but q has {num_rows} on all ranks together")
        lengths = [lengths[0] + [0], lengths[1] + [num_rows - padded[-1]]]
    return Packed(*map(tuple, lengths))


def _bounds(name: str, values) -> list[int]:
    if isinstance(values, Tensor):
        known = _read.get(values)
        if known is None or known[0] != values._version:
            known = _read[values] = values._version, values.flatten().tolist()
        found = known[1]
    else:
        found = list(values)
    sorted_integers = all(isinstance(n, int) for n in found) and all(a <= b for a, b in itertools.pairwise(found))
    if not found or found[0] != 0 or not sorted_integers:
        raise ValueError(f"{name}={Packed._shown(tuple(found))} must be integers that start at 0 and do not decrease")
    return found


def check_layout(layout: Layout, world: int) -> None:
    """Raise ``ValueError`` if the layout is unknown or does not fit `world` ranks."""
    if isinstance(layout, Packed):
        bad = next((n for n in layout.padded if n % (2 * world)), 0) if world > 1 else 0
        if bad:
            raise ValueError(
                f"a packed document of {bad} padded tokens can't be sharded zigzag over {world} ranks: every document "
                f"must be padded to a multiple of 2 * {world} = {2 * world}; pass the padded boundaries as "
                "cu_seqlens_padded"
            )
        return
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
    if isinstance(layout, Packed):
        if sum(layout.padded) != seq_len:
            raise ValueError(f"the packed documents have {sum(layout.padded)} rows, the sequence {seq_len}")
        return (seq_len // world,) * world
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
    if isinstance(layout, Packed):
        return _packed_segments(layout, rank, world)
    if layout == "zigzag" and world > 1:
        c = seq_len // (2 * world)
        return join((Segment(0, rank * c, c), Segment(c, (2 * world - 1 - rank) * c, c)))
    return join((Segment(0, sum(lengths[:rank]), lengths[rank]),))


def join(segments) -> tuple[Segment, ...]:
    """Drop empty segments and fuse neighbours that are consecutive in both row and position."""
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


def _packed_segments(documents: Packed, rank: int, world: int) -> tuple[Segment, ...]:
    """Two chunks of every document, without its padding; whole documents if there is only one rank."""
    found, row, parts = [], 0, 2 * world if world > 1 else 1
    for seq, (length, padded) in enumerate(zip(documents.lengths, documents.padded)):
        c = padded // parts
        for chunk in (rank, parts - 1 - rank) if world > 1 else (0,):
            found.append(Segment(row, chunk * c, max(0, min(c, length - chunk * c)), seq))
            row += c
    return join(found)


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
        """Rows in which a shard travels: those of the longest shard; shorter ones are padded."""
        return max(shard_lengths(self.seq_len, self.world, self.layout))

    def segments(self, *holders: tuple[int, ...], skip: int | None = None) -> tuple[Segment, ...]:
        """Segments of these holders' shards one after another, without the holder at index `skip`."""
        shares = tuple(None if i == skip else r for i, holder in enumerate(holders) for r in holder)
        return gathered_segments(shares, self.seq_len, self.world, self.layout, self.rows)

    def rows_of(self, holder: tuple[int, ...], *, at: int = 0) -> slice:
        """Rows of this holder's shards among those of several holders, at index `at`. A single shard is not padded."""
        n = len(holder)
        lengths = shard_lengths(self.seq_len, self.world, self.layout)
        start = at * n * self.rows
        return slice(start, start + (lengths[holder[0]] if n == 1 else n * self.rows))


def visible_rows(
    queries: tuple[Segment, ...], keys: tuple[Segment, ...], left: int | None, right: int | None
) -> tuple[Segment, ...]:
    """The parts of `keys` that some query sees, in the order of their rows. left, right: of the window; None: all."""
    found = []
    for k in keys:
        end, spans = k.pos + k.length, []
        for q in (q for q in queries if q.seq == k.seq):
            first = k.pos if left is None else max(k.pos, q.pos - left)
            last = end if right is None else min(end, q.pos + q.length + right)
            spans += [(first, last)] if first < last else []
        for first, last in _united(sorted(spans)):
            found.append(Segment(k.row + first - k.pos, first, last - first, k.seq))
    return tuple(found)


def _united(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges without overlaps."""
    done: list[tuple[int, int]] = []
    for first, last in spans:
        if done and first <= done[-1][1]:
            done[-1] = done[-1][0], max(done[-1][1], last)
        else:
            done.append((first, last))
    return done


@functools.lru_cache(maxsize=256)
def gathered_segments(
    ranks: tuple[int | None, ...], seq_len: int, world: int, layout: Layout, stride: int
) -> tuple[Segment, ...]:
    """Segments of several ranks' shards one after another, each padded to `stride` rows; None: no segments."""
    return join(
        s._replace(row=i * stride + s.row)
        for i, r in enumerate(ranks)
        if r is not None
        for s in shard_segments(seq_len, r, world, layout)
    )


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
    """int64 [tokens of this rank]: the global position of every row of the shard, in row order.

    For packed documents: its row in the whole packed sequence, including padding.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not one of {world} ranks")
    num_rows = shard_lengths(seq_len, world, layout)[rank]
    if isinstance(layout, Packed):
        starts = [0, *itertools.accumulate(layout.padded)]
        whole = _packed_segments(Packed(layout.padded, layout.padded), rank, world)
        return positions_of([s._replace(pos=starts[s.seq] + s.pos) for s in whole], num_rows, device=device)
    return positions_of(shard_segments(seq_len, rank, world, layout), num_rows, device=device)
