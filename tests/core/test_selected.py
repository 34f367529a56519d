"""Attention to the keys that an index selects, over a sharded sequence: selection, values and gradients are exact."""

import functools
import random
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree import (
    TreeConfig,
    dispatch_documents,
    dispatch_prefix_tree,
    prefix_tree,
    shard_positions,
    shard_sequence,
    tree_attn_func,
    tree_attn_varlen_func,
    tree_prefill,
    tree_select_func,
)
from megatron_tree.core import energy
from megatron_tree.core.attention import selection
from megatron_tree.core.attention.cell import SelectedKeys
from megatron_tree.core.attention.selection import tree_select_prefill
from megatron_tree.core.comm import work
from megatron_tree.core.layout import document_positions
from megatron_tree.core.plan import grids
from megatron_tree.core.spec import AttnSpec
from support.attention import configs, make_inputs, make_sinks, run_call, seen_in, worst_error
from support.prefix_trees import grown
from support.ranks import on_ranks

SEQ, TOPK, HEADS, DIM = 48, 7, 3, 5


def _index(batch, seq_len, *, ties=False):
    """index_q, index_weights and index_k of a sequence."""
    g = torch.Generator().manual_seed(5)
    q, k = torch.randn(batch, seq_len, HEADS, DIM, generator=g), torch.randn(batch, seq_len, DIM, generator=g)
    weights = torch.randn(batch, seq_len, HEADS, generator=g)
    return (q.round(), weights.sign(), k.round()) if ties else (q, weights, k)


def _chosen(index, sequences, topk=TOPK, visible=None):
    """bool [b, s, s]: which keys queries select, from the definition, pair by pair. visible: bool [s, s], default all
    of the query's sequence before it."""
    q, weights, k = (x.double() for x in index)
    scores = torch.einsum("bqh,bqhk->bqk", weights, torch.einsum("bqhd,bkd->bqhk", q, k).relu())
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    for b, i in ((b, i) for b in range(len(scores)) for i in range(scores.shape[1])):
        seen = [j for j in range(i + 1) if (sequences[j] == sequences[i] >= 0 if visible is None else visible[i, j])]
        best = sorted(seen, key=lambda j: (-float(scores[b, i, j]), j))[:topk]
        chosen[b, i, best] = True
    return chosen


def _oracle(inputs, chosen, sinks, *, grads=True):
    """(out, lse, dq, dk, dv, dsinks), or without gradients, under this mask."""
    spec = AttnSpec(softmax_scale=inputs[0].shape[-1] ** -0.5)
    parts = []
    for row, keep in enumerate(chosen):
        of_row = [x[row : row + 1].double() for x in inputs]
        options = dict(spec=spec, keep=keep, keep_weights=None, sinks=sinks)
        out, lse = energy.attention(*of_row[:3], **options)
        parts.append((out, lse, *(energy.attention_grads(*of_row, **options) if grads else ())))
    if not grads:
        return tuple(map(torch.cat, zip(*parts)))
    *rows, dsinks = zip(*parts)
    return *(torch.cat(x) for x in rows), sum(dsinks)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_selection_and_attention(rank, world, ties):
    inputs, index, sinks = make_inputs(SEQ, (4, 2)), _index(2, SEQ, ties=ties), make_sinks(4)
    truth = _oracle(inputs, _chosen(index, [0] * SEQ), sinks)
    for layout in ("zigzag", "contiguous"):
        rows = shard_positions(SEQ, rank, world, layout)
        options = dict(cp_group=dist.group.WORLD, layout=layout)
        selected = tree_select_func(*(x[:, rows] for x in index), topk=TOPK, **options)
        assert selected.shape == (2, len(rows), TOPK)
        assert (selected >= 0).sum(-1).equal((rows + 1).clamp(max=TOPK).expand(2, -1))
        for name, config in configs(world):
            call = functools.partial(tree_attn_func, **options, selected=selected, config=config, return_lse=True)
            assert worst_error(rows, run_call(inputs, rows, rows, call, sinks), truth) < 1e-13, (layout, name)


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_packed_documents(rank, world):
    lengths = (3, 21, 1, 17, 6)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    layout = dispatch_documents(bounds, dist.group.WORLD)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).tolist()
    inputs, index = make_inputs(SEQ, (4, 2), batch=1), _index(1, SEQ)
    truth = _oracle(inputs, _chosen(index, sequences), make_sinks(4))
    mine = [shard_sequence(x, dist.group.WORLD, 1, layout) for x in index]
    selected = tree_select_func(*mine, topk=TOPK, cp_group=dist.group.WORLD, layout=layout)
    assert (selected.amax(-1)[0] <= document_positions(layout, rank, world)).all()
    rows = shard_positions(world * layout.num_rows, rank, world, layout)
    assert (rows >= 0).all(), "a test without rows of padding"

    def call(q, k, v, sinks):
        options = dict(cp_group=dist.group.WORLD, layout=layout, selected=selected[0], return_lse=True)
        out, lse = tree_attn_varlen_func(q[0], k[0], v[0], sinks=sinks, **options)
        return out[None], lse[None]

    assert worst_error(rows, run_call(inputs, rows, rows, call, make_sinks(4)), truth) < 1e-13


@pytest.mark.parametrize("world", [1, 3])
@on_ranks()
def test_prefix_trees(rank, world):
    """A query selects among the tokens before it in its rows."""
    trees = [prefix_tree(grown(random.Random(seed), 7)) for seed in range(12)]
    for tree in [tree for tree in trees if tree.input_ids.shape[1] % world == 0][:3]:  # without rows of padding
        n, layout = tree.input_ids.shape[1], dispatch_prefix_tree(tree, dist.group.WORLD)
        inputs, index = make_inputs(n, (4, 2), batch=1), _index(1, n, ties=True)
        rows = shard_positions(n, rank, world, layout)
        truth = _oracle(inputs, _chosen(index, None, visible=seen_in(tree.ranges(), n, n)), make_sinks(4))
        options = dict(cp_group=dist.group.WORLD, layout=layout)
        options["selected"] = tree_select_func(*(x[:, rows] for x in index), topk=TOPK, **options)
        call = functools.partial(tree_attn_func, **options, causal=True, return_lse=True)
        assert worst_error(rows, run_call(inputs, rows, rows, call, make_sinks(4)), truth) < 1e-13
    blocks = selection.Blocks(2, lambda x, _: x.mean(2))
    with pytest.raises(ValueError, match="within a block of 2: call prefix_tree.rows, block_size=2"):
        tree_select_func(*(x[:, rows] for x in index), topk=2, blocks=blocks, cp_group=dist.group.WORLD, layout=layout)


def test_strips_and_blocks_of_scores(monkeypatch):
    from megatron_tree.core.attention import selection
    from megatron_tree.core.kernels import index as kernel

    index = _index(2, SEQ)
    want = tree_select_func(*index, topk=TOPK, cp_group=None)
    monkeypatch.setattr(selection, "SCORES", SEQ * 5)
    monkeypatch.setattr(kernel, "LEAST", 4)
    monkeypatch.setattr(kernel, "PRODUCTS", HEADS * 5 * 4)
    assert torch.equal(tree_select_func(*index, topk=TOPK, cp_group=None), want)


@on_ranks(2)
def test_tangents(rank, world):
    """jvp, and a gradient of it, against those of dense attention under the same mask."""
    inputs, index = [x[:1] for x in make_inputs(SEQ, (4, 2))], _index(1, SEQ)
    rows = shard_positions(SEQ, rank, world, "zigzag")
    options = dict(cp_group=dist.group.WORLD, layout="zigzag")
    options["selected"] = tree_select_func(*(x[:, rows] for x in index), topk=TOPK, **options)
    keep = _chosen(index, [0] * SEQ)[0]
    spec = AttnSpec(softmax_scale=inputs[0].shape[-1] ** -0.5)
    tangents = [x.flip(1) for x in inputs[:3]]
    outt, _ = energy.attention_tangents(*inputs[:3], tangents, spec=spec, keep=keep)
    mine, mine_t = ([x[:, rows] for x in y] for y in (inputs[:3], tangents))
    config = TreeConfig(grid=(world, 1))
    attend = functools.partial(tree_attn_func, **options, config=config)
    _, got = torch.func.jvp(attend, tuple(mine), tuple(mine_t))
    assert (got - outt[:, rows]).abs().max() < 1e-13


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_prefill_over_a_cache(rank, world):
    """The last tokens of a prompt over a cache whose pages of 4 are dealt out; what the selection sends."""
    inputs, index = [x[:1] for x in make_inputs(SEQ, (4, 2))], _index(1, SEQ)
    first, pages = SEQ - 16, [range(i, i + 4) for i in range(0, SEQ, 4)]
    held = [[i for page in pages[r::world] for i in page] for r in range(world)]
    segments = [[(4 * j, page[0], 4) for j, page in enumerate(pages[r::world])] for r in range(world)]
    shares = [[(first + r * 16 // world, 16 // world)] for r in range(world)]
    queries = slice(shares[rank][0][0], sum(shares[rank][0]))
    q, k, v = inputs[0][:, queries], inputs[1][:, held[rank]], inputs[2][:, held[rank]]
    out, *_ = _oracle(inputs, _chosen(index, [0] * SEQ), None, grads=False)
    where = dict(shares=shares, key_segments=segments, cp_group=dist.group.WORLD)
    of_index = index[0][:, queries], index[1][:, queries], index[2][:, held[rank]]
    selections = []
    for travels in (False, True):
        plan = mock.patch.object(selection, "queries_travel", lambda *_, travels=travels: travels and world > 1)
        with plan, work.record() as log:
            selections.append(tree_select_prefill(*of_index, topk=TOPK, config=TreeConfig(transport="direct"), **where))
        of_keys, of_queries = max(map(len, held)) * DIM * 4, 16 // world * (HEADS * (DIM + 1) * 4 + TOPK * 8)
        assert sum(x.bytes for x in log) == (world - 1) * (of_queries if travels else of_keys)
    assert torch.equal(*selections)
    selected = selections[0]
    for grid in grids(world):
        got = tree_prefill(q, k, v, selected=selected, grid=grid, **where)
        assert (got - out[:, queries]).abs().max() < 1e-13, grid


def test_queries_travel_where_they_are_fewer_bytes():
    """In a chunk of 2,048 queries with 64 heads of 128, over a long cache on 8 ranks; not where all ranks have them."""
    sizes = dict(query_bytes=64 * 129 * 4 + 2048 * 8, key_bytes=128 * 2)
    assert selection.queries_travel([256] * 8, [1 << 17] * 8, **sizes)
    assert not selection.queries_travel([256] * 8, [1 << 12] * 8, **sizes)
    assert not selection.queries_travel([2048], [1 << 17] * 8, **sizes)


@on_ranks(2)
def test_what_travels_is_a_list(rank, world):
    """4 m bytes of a query in a grid that sends queries, nothing where they stay."""
    inputs, index = make_inputs(SEQ, (4, 2)), _index(2, SEQ)
    rows = shard_positions(SEQ, rank, world, "zigzag")
    q, k, v, _ = (x[:, rows] for x in inputs)
    options = dict(cp_group=dist.group.WORLD)
    with work.record() as log:
        selected = tree_select_func(*(x[:, rows] for x in index), topk=TOPK, **options)
    assert sum(x.bytes for x in log) == (world - 1) * index[2][:, rows].numel() * 4
    for grid, travels in (((2, 1), True), ((1, 2), False)):
        config, sent = TreeConfig(grid=grid), []
        for given in (None, selected):
            with work.record() as log:
                tree_attn_func(q, k, v, selected=given, config=config, **options)
            sent.append(sum(x.bytes for x in log))
        assert sent[1] - sent[0] == travels * selected.numel() * 4, grid


@on_ranks(2)
def test_gathered_lists_do_not_wait_for_the_backward():
    """Every layer has lists of its own: those of other ranks' queries are freed with the pass that gathered them."""
    lists, begin = [], SelectedKeys.__init__

    def seen(self, *args):
        lists.append(weakref.ref(self))
        begin(self, *args)

    group, config = dist.group.WORLD, TreeConfig(grid=(2, 1))
    q, k, v = (shard_sequence(x.float(), group, 1).requires_grad_() for x in make_inputs(SEQ, (4, 2))[:3])
    selected = torch.zeros(*q.shape[:2], 1, dtype=torch.int32)
    with mock.patch.object(SelectedKeys, "__init__", seen):
        out = tree_attn_func(q, k, v, cp_group=group, selected=selected, config=config)
        assert len(lists) == 1 and lists[0]() is None
        out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(selected=torch.zeros(2, 7, 3, dtype=torch.int32)), "selected must be int32 .* got torch.int32"),
        (dict(selected=torch.zeros(2, SEQ, 3)), "selected must be int32"),
        (dict(ranges=[((0, SEQ), (0, SEQ))]), "selected can't be combined with ranges"),
        (dict(return_max_logit=True), "return_max_logit=True does not take selected"),
        (dict(config=TreeConfig(backend="aten")), "backend='aten' can't take selected keys"),
    ],
)
def test_refused(change, message):
    q, k, v, _ = make_inputs(SEQ, (4, 2))
    options = dict(selected=torch.zeros(2, SEQ, 3, dtype=torch.int32)) | change
    with pytest.raises(ValueError, match=message):
        tree_attn_func(q, k, v, cp_group=None, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(topk=0), "topk=0 must be a positive integer"),
        (dict(index_weights=torch.zeros(2, SEQ)), "index_weights must be \\[2, 48, 3\\]"),
        (dict(softmax_scale=0.0), "softmax_scale=0.0 must be a positive number"),
    ],
)
def test_refused_selections(change, message):
    q, weights, k = _index(2, SEQ)
    options = dict(index_q=q, index_weights=weights, index_k=k, topk=TOPK, cp_group=None) | change
    with pytest.raises(ValueError, match=message):
        tree_select_func(**options)
