"""Sixteen million positions and hundreds of ranks in whole numbers: shares, blocks, books, merge trees and plans."""

import itertools
import math

import pytest
import torch

from megatron_tree import merge
from megatron_tree.cache import RowBook
from megatron_tree.comm.reductions import _butterfly_plan
from megatron_tree.config import AttnSpec
from megatron_tree.kernels import blocks, merge_packed
from megatron_tree.kernels.triton import host
from megatron_tree.kernels.triton import merge as triton_merge
from megatron_tree.layout import Packed, Segment, gathered_segments, packed_layout, shard_positions
from megatron_tree.plan import Shape, load_topology, place, plan_decode, plan_training
from support.plans import backward_words, forward_words
from support.rounding import rounding

MILLION = 1 << 20
LONG = 16 * MILLION + 16  # 2^24 + 16: the last ones are beyond what fp32 can count
NEG_INF = float("-inf")


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
    tiles, table = host._tables(segments, segments, 128, torch.device("cpu"))
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
    assert sum(book.num_local(row, 0) for book, row in zip(books, rows)) == tokens
    assert max(books[0].loads) - min(books[0].loads) <= 1
    writes = [w for a in appends for w in a.writes[0]]
    assert len(writes) == 1 and (writes[0].offset, writes[0].count) == ((tokens - 1) % page_size, 1)
    segments = [books[0].key_segments(0, 0, 500, rank) for rank in range(world)]
    true = [s for of_rank in segments for s in of_rank if s.pos >= page_size * -(-500 // page_size)]
    covered = sorted((s.pos, s.length) for s in true)
    assert covered[-1][0] + covered[-1][1] == tokens
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(covered))


def partials(n, rows=24, d=16, spread=4.0, seed=0):
    """n packed states [n, rows, d + 1], fp32, a tenth of them empty, and their merge in float64."""
    g = torch.Generator().manual_seed(seed)
    outs, lses = torch.randn(n, rows, d, generator=g), torch.randn(n, rows, generator=g) * spread
    empty = torch.rand(n, rows, generator=g) < 0.1
    outs, lses = outs.masked_fill(empty[..., None], 0.0), lses.masked_fill(empty, NEG_INF)
    packed = torch.cat((outs, lses[..., None]), -1)
    return packed, merge.merge_packed(packed.double())


def butterfly(states):
    """Recursive doubling as every rank does it, those beyond the largest power of two folded in: the same bits."""
    n = len(states)
    plans = [_butterfly_plan(n, at) for at in range(n)]
    core = 1 << (n.bit_length() - 1)
    held = list(states)
    for at in range(core, n):
        held[at - core] = merge_packed(torch.stack((held[at - core], states[at])))
    for step in range(core.bit_length() - 1):
        peers = [next(p for p, s, r in plans[at] if s and r and p == at ^ (1 << step)) for at in range(core)]
        held[:core] = [merge_packed(torch.stack((held[min(at, p)], held[max(at, p)]))) for at, p in enumerate(peers)]
    assert all(torch.equal(held[0], x) for x in held[:core])
    for at in range(core, n):
        assert plans[at] == [(at - core, True, False), (at - core, False, True)]
    return held[0]


def ring(states):
    """One after another into an accumulator, as the ring does."""
    heads = states.flatten(1, -2)[:, None]  # [n, s = 1, h = rows, d + 1]
    acc = merge.empty_state((*heads.shape[1:-1], heads.shape[-1] - 1))
    for state in heads:
        merge.merge_into(acc, merge.unpack_state(state, torch.float32))
    return merge.pack_state(*acc, torch.float32).view(states.shape[1:])


TREES = {  # largest errors of out and lse, relative to |lse| where that is above 1: its rounding is the weights' error
    "rank order": (merge_packed, 1e-6),
    "butterfly": (butterfly, 1e-6),
    "ring": (ring, rounding(512)),  # one after another
}


def errors(found, exact):
    """(of out, of lse), relative to the size of lse."""
    assert not found.isnan().any()
    size = exact[..., -1].abs().clamp(min=1)
    error = (found.double() - exact).abs() / size[..., None]
    return float(error[..., :-1].max()), float(error[..., -1].max())


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("n", [512, 509])
def test_merge_trees_of_many_ranks(n, tree):
    """Against float64, whatever the shape of the tree; with all states empty, empty."""
    run, limit = TREES[tree]
    found = []
    for seed, spread in enumerate((0.0, 4.0, 30.0)):
        states, exact = partials(n, spread=spread, seed=seed)
        found.append(errors(run(states), exact))
    worst = [max(x) for x in zip(*found)]
    assert max(worst) <= limit
    nothing = run(merge.pack_state(*merge.empty_state((n, 1, 2, 4)), torch.float32)[:, 0])
    assert not nothing[..., :-1].any() and bool((nothing[..., -1] == NEG_INF).all())


def test_the_kernel_merges_many_states():
    """Triton's merge of 512 states in one launch, in the interpreter."""
    states, exact = partials(512, rows=3, d=4)
    assert max(errors(triton_merge.merge_packed(states), exact)) <= 1e-6


@pytest.mark.parametrize("name", ["dgx_h100", "ethernet"])
def test_plans_for_many_ranks(name):
    world = 4096
    topology = load_topology(name)
    placement = place(topology, [r // 8 for r in range(world)])
    shape, tokens = Shape(32, 8, 128, 128), 32768
    sizes = dict(batch=1, seq_len=tokens * world, bytes_per_word=2, topology=topology, placement=placement)
    plan = plan_training(world, shape, **sizes)
    for chosen in (plan.forward, plan.backward):
        (a, b), (a_in, b_in), (across, inside) = chosen.grid, chosen.inner, chosen.arrangement.heads
        assert a * b * across * inside == world and a % a_in == b % b_in == 0
        assert a_in * b_in * inside == placement.block
        assert 0 < chosen.cost.time_s < math.inf and chosen.cost.steps > 0
    tables = zip(plan.candidates, (forward_words, backward_words))
    for c, words in ((c, words) for table, words in tables for c in table if c.schedule == "grid"):
        u = c.ulysses_size
        whole = words(c.grid, shape, u) * tokens * 2
        statistics = (c.grid[0] - 1) * shape.num_heads * tokens * 2  # lse and delta: 4 bytes, not 2
        delta = (u - 1) / u * shape.num_heads * tokens * 2  # is exchanged in the backward
        assert c.cost.bytes == pytest.approx(whole + (statistics if words is forward_words else 2 * statistics + delta))
    step = plan_decode(world, rows=64, head_dim_v=128, kv_bytes=None, topology=topology, placement=placement)
    assert 0 < step.cost.time_s < math.inf and step.schedule != "ring"
