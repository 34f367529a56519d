"""The loss of an index over a sharded sequence against the definition in float64: its sum and all gradients."""

import itertools
import random

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
)
from megatron_tree.core import energy
from megatron_tree.core.attention import selection
from megatron_tree.core.attention.index_loss import tree_index_loss_func
from megatron_tree.core.kernels import index as kernel
from megatron_tree.core.spec import AttnSpec
from support.attention import seen_in
from support.prefix_trees import grown
from support.ranks import on_ranks
from support.rounding import assert_near
from support_matrix import slow_but

SEQ, TOPK, SCALE, INDEX_SCALE = 48, 7, 0.3, 0.5
LENGTH = SEQ * 16  # of the sums: over keys, and over heads or dimensions


def _inputs(batch=2, seq_len=SEQ, *, heads=4, heads_kv=2):
    """index_q, index_weights, index_k, q and k of a sequence."""
    g = torch.Generator().manual_seed(5)
    shapes = (3, 5), (3,), (5,), (heads, 6), (heads_kv, 6)
    return [torch.randn(batch, seq_len, *shape, generator=g) for shape in shapes]


def _truth(inputs, sequences, topk, epsilon, times=1):
    """[b, s], the divergences times these numbers, and the gradients of their sum by the index, in float64.

    sequences: of which the tokens are, or which of them see which, [1, s, s]."""
    inputs = [x.double() for x in inputs]
    leaves = [x.requires_grad_() for x in inputs[:3]]
    keep = torch.as_tensor(sequences)
    if keep.dim() == 1:
        keep = (keep[:, None] == keep).tril()
    keep = keep.expand(len(inputs[0]), -1, -1)
    if topk is not None:
        keep = energy.selected(*(x.detach() for x in leaves), topk, keep, INDEX_SCALE)
    spec, options = AttnSpec(softmax_scale=SCALE), dict(keep=keep, scale=INDEX_SCALE, epsilon=epsilon)
    loss = energy.index_divergence(*leaves, *inputs[3:], spec=spec, **options) * times
    return loss.detach(), torch.autograd.grad(loss.sum(), leaves)


def _check(inputs, rows, truth, selected, what, **options):
    """A rank's part of the loss, and its gradients, times 3; rows -1 are padding."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    loss = tree_index_loss_func(
        *leaves, *inputs[3:], softmax_scale=SCALE, index_scale=INDEX_SCALE, selected=selected, **options
    )
    (3 * loss).backward()
    real, (divergence, grads) = rows >= 0, truth
    assert_near(loss, divergence[:, rows[real]].sum(), LENGTH, f"{what}: loss")
    for leaf, grad in zip(leaves, grads, strict=True):
        assert_near(leaf.grad[:, real], 3 * grad[:, rows[real]], LENGTH, f"{what}: gradient {list(leaf.shape)}")
        assert leaf.grad[:, ~real].count_nonzero() == 0


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_loss_and_gradients(rank, world):
    inputs, group = _inputs(), dist.group.WORLD
    for layout, topk, epsilon in itertools.product(("zigzag", "contiguous"), (None, TOPK), (0.0, 0.01)):
        rows = shard_positions(SEQ, rank, world, layout)
        mine = [x[:, rows] for x in inputs]
        options = dict(cp_group=group, layout=layout)
        selected = topk and tree_select_func(*mine[:3], topk=topk, softmax_scale=INDEX_SCALE, **options)
        truth = _truth(inputs, [0] * SEQ, topk, epsilon)
        _check(mine, rows, truth, selected, f"{layout}, topk={topk}, {epsilon}", epsilon=epsilon, **options)


@pytest.mark.parametrize("world", slow_but([2], [1, 2, 4]))
@on_ranks()
def test_rows_that_begin_alike(rank, world):
    """A token of a tree counts as often as rows have it."""
    group, rows = dist.group.WORLD, grown(random.Random(4), 6)
    tree = prefix_tree(rows)
    layout, n = dispatch_prefix_tree(tree, group), tree.input_ids.shape[1]
    inputs = _inputs(1, n)
    times = tree.sum_of_rows((tree.row_index >= 0).double())
    at = shard_positions(world * layout.num_rows, rank, world, layout)
    mine = [shard_sequence(x, group, 1, layout, padding=7.0) for x in inputs]
    where = dict(cp_group=group, layout=layout)
    for topk in (None, 4):
        selected = topk and tree_select_func(*mine[:3], topk=topk, softmax_scale=INDEX_SCALE, **where)
        truth = _truth(inputs, seen_in(tree.ranges(), n, n)[None], topk, 0.0, times)
        weights = shard_sequence(times.float(), group, 1, layout, padding=3.0)
        _check(mine, at, truth, selected, f"topk={topk}", weights=weights, **where)


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_packed_documents(rank, world):
    lengths, group = (3, 21, 1, 17, 6), dist.group.WORLD
    bounds = [0, *itertools.accumulate(lengths)]
    layout = dispatch_documents(bounds, group)
    sequences = [i for i, n in enumerate(lengths) for _ in range(n)]
    inputs = _inputs(1)
    rows = shard_positions(world * layout.num_rows, rank, world, layout)
    mine = [shard_sequence(x, group, 1, layout, padding=7.0) for x in inputs]
    for topk in (None, TOPK):
        where = dict(cp_group=group, layout=layout)
        selected = topk and tree_select_func(*mine[:3], topk=topk, softmax_scale=INDEX_SCALE, **where)
        _check(mine, rows, _truth(inputs, sequences, topk, 0.0), selected, f"topk={topk}", **where)


@on_ranks(4)
def test_heads_of_other_ranks(rank, world):
    """Two ranks share the sequence; of each, two have half of the heads."""
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    lines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inputs, (place, part) = _inputs(heads=4, heads_kv=2), divmod(rank, 2)
    rows = shard_positions(SEQ, place, 2)
    mine = [x[:, rows] for x in inputs]
    mine[3:] = mine[3][:, :, 2 * part : 2 * part + 2], mine[4][:, :, part : part + 1]
    options = dict(cp_group=columns[part], head_group=lines[place])
    _check(mine, rows, _truth(inputs, [0] * SEQ, None, 0.0), None, "half of the heads", **options)


def test_strips_and_blocks_of_keys(monkeypatch):
    inputs, rows = _inputs(), torch.arange(SEQ)
    monkeypatch.setattr(selection, "SCORES", SEQ * 5)
    monkeypatch.setattr(kernel, "LEAST", 4)
    monkeypatch.setattr(kernel, "PRODUCTS", 3 * 5 * 4)
    _check(inputs, rows, _truth(inputs, [0] * SEQ, None, 0.0), None, "in parts", cp_group=None)


def test_without_gradients_only_the_loss():
    inputs = _inputs()
    loss = tree_index_loss_func(*inputs, cp_group=None, softmax_scale=SCALE, index_scale=INDEX_SCALE)
    assert not loss.requires_grad
    assert_near(loss, _truth(inputs, [0] * SEQ, None, 0.0)[0].sum(), LENGTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(index_weights=torch.zeros(2, SEQ)), r"index_weights must be \[2, 48, 3\]"),
        (dict(index_scale=0.0), "index_scale=0.0 must be a positive number"),
        (dict(softmax_scale=-1), "softmax_scale=-1 must be a positive number"),
        (dict(epsilon=-1.0), "epsilon=-1.0 is added to probabilities"),
        (dict(q=torch.zeros(2, SEQ - 1, 4, 6)), r"q \[2, 47, 4, 6\] and k \[2, 48, 2, 6\] must have the tokens of ind"),
        (dict(k=torch.zeros(2, SEQ, 3, 6)), "q has 4 heads and k 3: the number of KV heads must divide"),
        (dict(weights=torch.ones(1, SEQ)), r"weights \[1, 48\] must have a number for each query of q, \[2, 48\]"),
        (dict(weights=torch.ones(2, SEQ).double()), "in fp32, not torch.float64"),
        (dict(selected=torch.zeros(2, SEQ, 3)), "selected must be int32"),
        (dict(softmax_scale="big"), "softmax_scale='big' must be a number"),
    ],
)
def test_refused(change, message):
    names = ("index_q", "index_weights", "index_k", "q", "k")
    options = dict(zip(names, _inputs(), strict=True)) | dict(cp_group=None, softmax_scale=SCALE) | change
    with pytest.raises(ValueError, match=message):
        tree_index_loss_func(**options)


@on_ranks(2)
def test_ranks_that_differ(rank):
    inputs = [x[:, : SEQ // 2] for x in _inputs()]
    with pytest.raises(ValueError, match="scales"):
        tree_index_loss_func(*inputs, cp_group=dist.group.WORLD, softmax_scale=SCALE + rank)
