"""Drawn documents and masks, and where their tokens lie, for fuzz_attention.py."""

import itertools

import torch
from hypothesis import strategies as st

from megatron_tree.core.layout import (
    Dispatched,
    Packed,
    documents_over,
    sequences_of,
    shard_positions,
    shard_segments,
    spread_documents,
)
from megatron_tree.core.spec import SLICES, AttnSlice
from support.attention import seen_in


def on_one_rank(layout, seq_len):
    """The same tokens on one rank; what dispatched documents leave over comes last."""
    if isinstance(layout, Dispatched):
        return Packed((*layout.lengths, 0), (*layout.padded, seq_len - layout.starts[-1]))
    return layout if isinstance(layout, Packed) else (seq_len,)


def padding_of(layout, seq_len):
    """bool [seq_len]: rows that hold no token."""
    return sequences_of(shard_segments(seq_len, 0, 1, on_one_rank(layout, seq_len)), seq_len) < 0


def rows_of(layout, seq_len, rank, world):
    """Where this rank's rows are on one rank."""
    shares = [shard_positions(seq_len, r, world, layout) for r in range(rank + 1)]
    missing = [int((rows < 0).sum()) for rows in shares]
    if missing[-1]:
        first = layout.starts[-1] + sum(missing[:-1])
        shares[-1][shares[-1] < 0] = torch.arange(first, first + missing[-1])
    return shares[-1]


@st.composite
def slices(draw, seq_len, seq_len_kv):
    """`AttnSlice`s that don't overlap."""
    found, seen = [], torch.zeros(seq_len, seq_len_kv, dtype=torch.bool)
    for _ in range(draw(st.integers(0, 5))):
        spans = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (seq_len, seq_len_kv)]
        piece = AttnSlice(*map(tuple, spans), draw(st.sampled_from(SLICES)))
        mine = seen_in([piece], seq_len, seq_len_kv)
        if not (mine & seen).any():
            found.append(piece)
            seen |= mine
    return tuple(found)


@st.composite
def dispatched(draw, world):
    """`Dispatched` documents: spread, or wherever they lie in a sequence that is cut as a whole."""
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 9), max_size=4))
        return spread_documents(tuple(lengths), world, multiple_of=draw(st.sampled_from([1, 1, 2, 3])))
    total = 2 * world * draw(st.integers(1, 6))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=3)))
    padded = tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))
    lengths = tuple(n - min(n, draw(st.sampled_from([0, 0, 1]))) for n in padded)
    return documents_over(lengths, padded, world, draw(st.sampled_from(["zigzag", "contiguous"])))


@st.composite
def documents(draw, world, count=None):
    """`Packed` documents, some empty, some all padding; on one rank any padding."""
    unit = 2 * world if world > 1 else 1
    n = draw(st.integers(1, 4)) if count is None else count
    padded = [unit * draw(st.integers(0, 3)) for _ in range(n)]
    lengths = [m - min(m, draw(st.sampled_from([0, 0, 1, 2, m]))) for m in padded]
    return Packed(tuple(lengths), tuple(padded))
