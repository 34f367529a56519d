"""The cast: a rank is sent only the keys that its queries can see. Exact, and no byte too many."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, packed_layout, tree_attn_func
from megatron_tree.core import comm
from megatron_tree.core.layout import Segment, by_document, shard_segments, visible_rows
from megatron_tree.core.spec import MaskBounds
from support.ranks import run_distributed


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (2, 5), (None, 0), (4, None), (None, None)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", packed_layout([0, 16, 16, 48])])
def test_visible_rows_are_those_that_some_query_sees(layout, window):
    left, right = window
    world, n = 4, 48
    for a, b in itertools.product(range(world), repeat=2):
        queries, keys = shard_segments(n, a, world, layout), shard_segments(n, b, world, layout)
        found = visible_rows(by_document(queries), by_document(keys), MaskBounds(left, right))
        seen = set()
        for q, k in itertools.product(queries, keys):
            for i, j in itertools.product(range(q.length), range(k.length)):
                apart = q.pos + i - (k.pos + j)
                if q.seq == k.seq and (left is None or apart <= left) and (right is None or -apart <= right):
                    seen.add((k.row + j, k.pos + j, k.seq))
        assert sorted(seen) == sorted((s.row + i, s.pos + i, s.seq) for s in found for i in range(s.length))


def test_overlapping_queries_ask_for_a_row_once():
    queries = (Segment(0, 4, 4), Segment(4, 6, 4))
    assert visible_rows({0: list(queries)}, {0: [Segment(0, 0, 16)]}, MaskBounds(1, 0)) == (Segment(3, 3, 7),)


def _bytes(rank, world, window, rows):
    q, k, v = (torch.randn(1, rows, h, 4, requires_grad=True) for h in (4, 2, 2))
    sent = []
    for config in (TreeConfig(schedule="cast", ulysses_size=1), TreeConfig(topology="ethernet", tune=False)):
        with comm.record() as log:
            out = tree_attn_func(q, k, v, cp_group=dist.group.WORLD, window_size=(window, 0), config=config)
            out.backward(torch.ones_like(out))
        sent.append(sum(x.bytes for x in log))
    return sent


@pytest.mark.parametrize("rows", [32, 64])
def test_a_window_sends_the_ends_of_chunks(rows):
    """Twice keys and values of `window` rows before each of the receiver's chunks, and once their gradients."""
    window, world, kv_row = 5, 4, 2 * 2 * 4 * 4
    sent = run_distributed(_bytes, world, window, rows)
    # 2 p chunks have 2 p - 1 ends that the next chunk's rank needs; of zigzag's, chunks p - 1 and p are on one rank
    assert sum(cast for cast, _ in sent) == 3 * (2 * world - 2) * window * kv_row
    assert all(auto <= cast for cast, auto in sent), "the planner takes the cast or something that sends less"
