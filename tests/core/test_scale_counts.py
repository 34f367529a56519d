"""Sixteen million positions in whole numbers, shares, blocks, tables and books."""

import itertools

import pytest
import torch

from megatron_tree.core.cache import RowBook
from megatron_tree.core.kernels import blocks
from megatron_tree.core.kernels.triton import host
from megatron_tree.core.layout import Packed, Segment, gathered_segments, packed_layout, shard_positions
from megatron_tree.core.spec import AttnSpec

MILLION = 1 << 20
LONG = 16 * MILLION + 16  # 2^24 + 16: the last ones are beyond what fp32 can count


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "packed"])
def test_every_position_is_held_once(layout):
    seq_len, world = LONG, 8
    if layout == "packed":
        lengths = (5, seq_len - 16 * world, 0)
        padded = (16, seq_len - 16, 0)
        cu = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths, padded)]
        layout = packed_layout(*cu, num_rows=seq_len)
        assert layout == Packed(lengths, padded)
    held = torch.zeros(seq_len, dtype=torch.uint8)
    for rank in range(world):
        mine = shard_positions(seq_len, rank, world, layout)
        assert mine.dtype == torch.int64 and len(mine) == seq_len // world
        held[mine] += 1
    assert bool((held == 1).all())


def visible_pairs(block, spec):
    """How many pairs of a block are visible, by arithmetic."""
    if block.kind == blocks.FULL:
        return block.q_len * block.k_len
    if block.kind == blocks.DIAGONAL:
        return block.q_len * (block.q_len + 1) // 2
    count = 0
    for position in range(block.q_pos, block.q_pos + block.q_len):
        first = block.k_pos if spec.left is None else max(block.k_pos, position - spec.left)
        last = block.k_pos + block.k_len - 1
        count += max(0, (last if spec.right is None else min(last, position + spec.right)) - first + 1)
    return count


def test_blocks_of_a_grid_hold_every_visible_pair_once():
    """A 2 x 4 grid of zigzag shares, causal: n (n + 1) / 2 pairs, equally many in every cell but for the diagonal."""
    spec, n = AttnSpec(softmax_scale=1.0), LONG
    rows = n // 8
    cells = {}
    for column in range(4):
        queries = gathered_segments((column, column + 4), n, 8, "zigzag", rows)
        for row in range(2):
            keys = gathered_segments(tuple(range(4 * row, 4 * row + 4)), n, 8, "zigzag", rows)
            cells[row, column] = sum(visible_pairs(b, spec) for b in blocks.split(queries, keys, spec))
    assert sum(cells.values()) == n * (n + 1) // 2
    assert max(cells.values()) - min(cells.values()) <= 2 * rows


@pytest.mark.parametrize("left", [0, 4095, MILLION // 2])
def test_windows_hold_every_visible_pair_once(left):
    """The last 4096 queries of 2^24 + 16, over all keys."""
    spec = AttnSpec(softmax_scale=1.0, window_size=(left, 0))
    queries, keys = (Segment(0, LONG - 4096, 4096),), (Segment(0, 0, LONG),)
    assert sum(visible_pairs(b, spec) for b in blocks.split(queries, keys, spec)) == 4096 * (left + 1)


def test_tables_of_the_kernels():
    """int32 [first row, rows, first position, ...] of 2^24 + 16 queries."""
    segments = (Segment(0, 0, 16 * MILLION), Segment(16 * MILLION, 1 << 29, 16))
    tiles, table = host.tables(segments, segments, 128, torch.device("cpu"))
    assert table.tolist() == [[s.row, s.length, s.pos, s.seq] for s in segments]
    assert tiles[:, 1].long().sum() == LONG
    assert tiles[0].tolist() == [16 * MILLION, 16, 1 << 29, 0, 2]
    assert torch.equal(tiles[1:, 2].sort().values, torch.arange(0, 16 * MILLION, 128, dtype=torch.int32))


def test_books_of_long_rows():
    """A prompt in two chunks and tokens one by one: every position on one rank, loads even, the last block's place."""
    world, tokens, page_size = 8, LONG, 256
    books = [RowBook(rank, world, page_size) for rank in range(world)]
    rows = [book.add() for book in books]
    chunk = tokens - 1000 - 3
    for n, sharded in ((1000, True), (chunk, True), (1, False), (1, False), (1, False)):
        appends = [book.append([row], n, sharded=sharded) for book, row in zip(books, rows)]
    assert [a.first for a in appends] == [(tokens - 1,)] * world
    assert sum(book.rows[row].local[0] for book, row in zip(books, rows)) == tokens
    assert max(books[0].loads) - min(books[0].loads) <= 1
    places = [book.places(append, 0) for book, append in zip(books, appends)]
    ((token,), (slot,)) = next(place for place in places if place[0])
    assert sum(len(numbers) for numbers, _ in places) == 1
    assert token == 0 and slot % page_size == (tokens - 1) % page_size
    segments = [books[0].key_segments(0, 0, 500, rank) for rank in range(world)]
    true = [s for of_rank in segments for s in of_rank if s.pos >= page_size * -(-500 // page_size)]
    covered = sorted((s.pos, s.length) for s in true)
    assert covered[-1][0] + covered[-1][1] == tokens
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(covered))
