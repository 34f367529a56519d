"""Blocks of tokens that an index selects, over a sharded sequence: as from the definition, query by query."""

import itertools
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree import (
    dispatch_documents,
    dispatch_prefix_tree,
    prefix_tree,
    shard_positions,
    shard_sequence,
    tree_select_func,
    unshard_sequence,
)
from megatron_tree.core.attention import selection
from megatron_tree.core.attention.selection import Blocks, selected_tokens, tree_select_prefill
from megatron_tree.core.comm import work
from megatron_tree.core.config import TreeConfig
from support.prefix_trees import grown
from support.ranks import on_ranks
from support_matrix import slow_but

SEQ, TOPK, HEADS, DIM, SCALE = 48, 3, 5, 4, 0.5


def _index(seq_len):
    g = torch.Generator().manual_seed(5)
    q, k = torch.randn(2, seq_len, HEADS, DIM, generator=g), torch.randn(2, seq_len, DIM, generator=g)
    return q, torch.randn(2, seq_len, HEADS, generator=g), k


def _key(tokens, positions):
    """Of tokens [b, n, size, d]: it depends on their order and the block's place."""
    weights = torch.arange(1.0, tokens.shape[2] + 1)[:, None]
    return (tokens * weights).mean(2) * torch.cos(0.3 * positions)[:, None]


def _wanted(index, size):
    """For each row and query the set of tokens that it sees, of one document."""
    q, weights, k = (x.double() for x in index)
    b, n = q.shape[:2]
    found = []
    for row in range(b):
        for i in range(n):
            complete, scores = (i + 1) // size, []
            for j in range(complete):
                tokens = k[row, j * size : (j + 1) * size][None, None]
                key = _key(tokens, torch.tensor([j * size]))[0, 0]
                scores.append(float((weights[row, i] * (SCALE * (q[row, i] @ key)).relu()).sum()))
            best = sorted(range(complete), key=lambda j: (-scores[j], j))[:TOPK]
            seen = {t for j in best for t in range(j * size, (j + 1) * size)}
            found.append(seen | set(range(complete * size, i + 1)))
    return [found[row * n : (row + 1) * n] for row in range(b)]


def _sets(selected):
    lists = [[x for x in tokens if x >= 0] for tokens in selected.flatten(0, 1).tolist()]
    assert all(len(set(tokens)) == len(tokens) for tokens in lists)
    return [set(tokens) for tokens in lists]


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_over_ranks(rank, world, size):
    index, options = _index(SEQ), {"topk": TOPK, "softmax_scale": SCALE, "blocks": Blocks(size, _key)}
    options["config"] = TreeConfig(transport="direct")
    want = _wanted(index, size)
    for layout in ("zigzag", "contiguous"):
        rows = shard_positions(SEQ, rank, world, layout)
        mine = [x[:, rows] for x in index]
        with work.record() as log:
            selected = tree_select_func(*mine, **options, cp_group=dist.group.WORLD, layout=layout)
        length = 8 if layout == "contiguous" else 0  # what ranks tell each other of their shards
        assert sum(x.bytes for x in log) == (world - 1) * (mine[2].numel() * 4 + length)
        assert selected.shape == (2, len(rows), min(TOPK, SEQ // size) * size + size - 1)
        assert _sets(selected) == [want[row][i] for row in range(2) for i in rows.tolist()], layout


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_packed_documents(world):
    """Some are shorter than a block, and one is cut."""
    size, lengths = 3, (1, 31, 2, 8, 5, 3)
    index = [x[:1, : sum(lengths)] for x in _index(64)]
    layout = dispatch_documents([0, *torch.tensor(lengths).cumsum(0).tolist()], dist.group.WORLD)
    mine = [shard_sequence(x, dist.group.WORLD, 1, layout) for x in index]
    of_rows = shard_sequence(torch.arange(sum(lengths)), dist.group.WORLD, 0, layout, padding=-1).tolist()
    options = {"topk": TOPK, "softmax_scale": SCALE, "blocks": Blocks(size, _key)}
    found = _sets(tree_select_func(*mine, **options, cp_group=dist.group.WORLD, layout=layout))
    parts = [x.split(lengths, 1) for x in index]
    want = [seen for document in zip(*parts) for seen in _wanted(document, size)[0]]
    for row, i in enumerate(of_rows):
        assert i < 0 or found[row] == want[i], i


@pytest.mark.parametrize("world", slow_but([2], [1, 2, 4]))
@on_ranks()
def test_rows_that_begin_alike(world):
    """Blocks of tokens, and keys that are of blocks already."""
    group, size = dist.group.WORLD, 3
    for seed in range(4):
        rows = grown(random.Random(seed), 7, vocab=2)
        tree = prefix_tree(rows, block_size=size)
        layout = dispatch_prefix_tree(tree, group)
        index = [x[:1] for x in _index(tree.input_ids.shape[1])]
        mine = [shard_sequence(x, group, 1, layout) for x in index]
        options = {"topk": TOPK, "softmax_scale": SCALE, "cp_group": group, "layout": layout}
        selected = tree_select_func(*mine, blocks=Blocks(size, _key), **options)
        found = unshard_sequence(selected, group, 1, layout)
        paths, of_blocks = layout.blocks(size).paths, layout.blocks(size)
        runs = zip(layout.by_run.starts, layout.by_run.lengths)
        firsts = torch.cat([torch.arange(first, first + n // size * size, size) for first, n in runs])
        at = firsts[:, None] + torch.arange(size)
        keys = _key(index[2][:, at], tree.position_ids[0, at[:, 0]])
        shard = shard_sequence(keys, group, 1, of_blocks)
        numbers = tree_select_func(*mine[:2], shard, block_size=size, **options)
        again = selected_tokens(numbers.long(), layout.in_rows(group.rank(), world), size, layout.tree)
        assert torch.equal(again, selected)
        for row in tree.row_index:
            row = row[row >= 0]
            want = _wanted([x[:, row] for x in index], size)[0]
            assert _sets(found[:, row]) == [{int(row[i]) for i in seen} for seen in want], seed
            whole = [number for number, tokens in enumerate(at.tolist()) if set(tokens) <= set(row.tolist())]
            assert tuple(whole) in [path[: len(whole)] for path in paths]


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_prefill_over_a_cache(rank, world):
    """The last tokens of a prompt over a cache whose pages of 4 are dealt out; the last page is not full."""
    size, length = 2, SEQ - 1
    index = [x[:1, :length] for x in _index(SEQ)]
    pages = [range(i, min(i + 4, length)) for i in range(0, length, 4)]
    held = [pages[r::world] for r in range(world)]
    segments = [[(4 * j, page[0], len(page)) for j, page in enumerate(of_rank)] for of_rank in held]
    cuts = [length - 16 + 16 * r // world for r in range(world + 1)]
    shares = [[(first, end - first)] for first, end in itertools.pairwise(cuts)]
    complete = [page[i : i + size] for page in held[rank] for i in range(0, len(page) // size * size, size)]
    tokens = torch.tensor([list(block) for block in complete])
    keys = _key(index[2][:, tokens], tokens[:, 0])
    queries = slice(cuts[rank], cuts[rank + 1])
    where = {"shares": shares, "key_segments": segments, "cp_group": dist.group.WORLD, "block_size": size}
    options = {"topk": TOPK, "softmax_scale": SCALE, "config": TreeConfig(transport="direct")}
    for travels in (False, world > 1):
        with mock.patch.object(selection, "queries_travel", lambda *_, travels=travels: travels):
            selected = tree_select_prefill(index[0][:, queries], index[1][:, queries], keys, **where, **options)
        assert _sets(selected) == _wanted(index, size)[0][queries]
