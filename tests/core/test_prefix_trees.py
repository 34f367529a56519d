"""Rows with shared prefixes as one packed row: what it holds, its mask, and who computes what."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, dispatch_prefix_tree, prefix_tree, shard_positions, tree_attn_func
from megatron_tree.core import comm, energy
from megatron_tree.core.kernels.ranges import slice_groups
from megatron_tree.core.layout import spread_tree
from megatron_tree.core.spec import AttnSpec
from support.attention import make_inputs, seen_in
from support.prefix_trees import grown, in_a_tree
from support.ranks import largest, on_ranks, run_distributed


@pytest.mark.parametrize("min_shared", [1, 2, 4, 50])
def test_every_row_lies_in_the_tree(min_shared):
    for seed in range(20):
        draw = random.Random(seed)
        rows = grown(draw, draw.randint(1, 12), vocab=draw.choice([1, 2, 3]))
        tree = prefix_tree(rows, min_shared=min_shared, num_predicted=1 + seed % 3)
        for row, index in zip(rows, tree.row_index):
            at = index[: len(row)]
            assert tree.input_ids[0, at].tolist() == row
            assert tree.position_ids[0, at].tolist() == list(range(len(row)))
            assert tree.labels[0, at[:-1]].tolist() == row[1:]
            assert (index[len(row) :] == -1).all()
        for window, chunk in ((None, None), (1, None), (2, None), (5, None), (None, 1), (None, 4)):
            num_tokens = tree.input_ids.shape[1]
            keep = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
            for row, index in zip(rows, tree.row_index):
                for i in range(len(row)):
                    begin = max(0, i + 1 - window) if window else i // chunk * chunk if chunk else 0
                    keep[index[i], index[begin : i + 1]] = True
            ranges = tree.ranges(window, chunk)
            assert torch.equal(seen_in(ranges, num_tokens, num_tokens), keep)
            assert sum(piece.pairs for piece in ranges) == keep.sum()  # none twice
        if min_shared == 1:
            assert tree.input_ids.shape[1] == _num_different(rows, tree.num_predicted)


def _num_different(rows, num_predicted):
    """Beginnings with the tokens that are predicted, and the last tokens of rows that no other begins with."""
    followed = {tuple(row[:n]) for row in rows for n in range(1 + num_predicted, len(row) + 1)}
    beginnings = {tuple(row[:n]) for row in rows for n in range(len(row))}
    return len(followed) + sum(min(num_predicted, len(row)) for row in {tuple(row) for row in rows} - beginnings)


def test_a_group_of_answers():
    """8 answers to one prompt: each prompt token once, the last for each answer; two calls of a kernel."""
    rows = in_a_tree(prompt=200, answers=8, length=50)
    tree = prefix_tree(rows)
    assert tree.input_ids.shape == (1, 200 + 8 * 50 + 7)
    spec = AttnSpec(softmax_scale=1.0, causal=False, ranges=tree.ranges())
    assert len(spec.ranges) == 9 and len(slice_groups(spec)) == 2
    assert tree.weights[0, :199].tolist() == [8] * 199 and tree.weights[0, 199:].tolist().count(1) == 400
    again = prefix_tree(rows + rows)
    assert again.branches == tree.branches and torch.equal(again.weights, 2 * tree.weights)


def test_weights_are_summed_and_labels_counted():
    rows = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6]]
    tree = prefix_tree(rows, weights=[[9, 0, 0.5, 2], [9, 0, 0, 3], [9, 0]])
    assert tree.input_ids.tolist() == [[5, 6, 7, 8, 7, 9]] or tree.input_ids.tolist() == [[5, 6, 7, 9, 7, 8]]
    by_label = dict(zip(tree.labels[0].tolist(), tree.weights[0].tolist()))
    assert by_label == {-100: 0.0, 7: 0.5, 8: 2.0, 9: 3.0}
    assert tree.row_weights.tolist() == [[0, 0.5, 2, 0], [0, 0, 3, 0], [0, 0, 0, 0]]
    x = torch.arange(6.0)[None].requires_grad_()
    assert tree.to("meta").labels.is_meta and tree.to("cpu").branches is tree.branches
    assert torch.equal(tree.sum_of_rows(tree.row_weights), tree.weights)
    assert (tree.next_of_rows(x) != 0).sum() == 3  # those with a weight
    tree.rows_of(x).sum().backward()
    assert x.grad.tolist() == [[3, 3, 1, 1, 1, 1]] and tree.rows_of(torch.ones(1, 6, 2)).shape == (3, 4, 2)


def test_few_calls_of_kernels():
    """Most rows stay on their branch, so that a tree of n rows has at most about log2(n) branches before a token."""
    draw = random.Random(1)
    tree = prefix_tree(grown(draw, 64, longest=40))
    depth = [1] * len(tree.branches)
    for i, branch in enumerate(tree.branches):
        depth[i] += depth[branch.parent] if branch.parent >= 0 else 0
    assert max(depth) <= 7
    long_only = prefix_tree(grown(draw, 64, longest=40), min_shared=10)
    assert len(long_only.ranges()) < len(tree.ranges())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_work_is_balanced(world):
    """All ranks have equally many tokens, and see about equally many keys."""
    group = prefix_tree(in_a_tree(prompt=2000, answers=8, length=400))
    turns = prefix_tree(grown(random.Random(world), 40, longest=300))
    for tree in (group, turns):
        layout = spread_tree(tree.runs(), world)
        seen = [sum(int(tree.position_ids[0, a : a + n].sum()) + n for a, n in share) for share in layout.shares]
        assert max(seen) <= 1.06 * sum(seen) / world
        assert layout.num_rows == -(-tree.input_ids.shape[1] // world)


def _visible_keys(rank, world):
    """Bytes that this rank sends in the cast's forward for 8 answers to a prompt."""
    tree = prefix_tree(in_a_tree(prompt=64, answers=8, length=32))
    layout = dispatch_prefix_tree(tree, dist.group.WORLD)
    q, k, v = (torch.zeros(1, layout.num_rows, h, 4) for h in (4, 2, 2))
    config = TreeConfig(schedule="cast", ulysses_size=1)
    with comm.record() as log:
        tree_attn_func(q, k, v, cp_group=dist.group.WORLD, ranges=tree.ranges(), layout=layout, config=config)
    keys = seen_in(tree.ranges(), layout.lengths[0], layout.lengths[0])
    rows = [shard_positions(layout.num_rows * world, r, world, layout) for r in range(world)]
    mine, *others = [x[x >= 0] for x in (rows[rank], *rows[:rank], *rows[rank + 1 :])]
    visible = sum(int(keys[theirs][:, mine].any(0).sum()) for theirs in others)
    return sum(x.bytes for x in log), visible * 2 * 2 * 4 * 4, len(mine) * (world - 1) * 2 * 2 * 4 * 4


def test_only_visible_keys_are_sent():
    """Answers don't travel to ranks that have other answers only."""
    found = run_distributed(_visible_keys, 4)
    assert all(sent == visible for sent, visible, _ in found)
    assert sum(sent for sent, *_ in found) < 0.5 * sum(whole for *_, whole in found)


def _error(layout, at, inputs, ranges, config, truth):
    """The largest difference of this rank's out and gradients to the whole ones."""
    rows = layout.num_rows
    shards = [torch.cat((x[:, at], x.new_full((1, rows - len(at), *x.shape[2:]), float("nan"))), 1) for x in inputs]
    q, k, v = (x.requires_grad_() for x in shards[:3])
    config = TreeConfig(**config)
    out = tree_attn_func(q, k, v, cp_group=dist.group.WORLD, ranges=ranges, layout=layout, config=config)
    out.backward(shards[3])
    pairs = zip((out, q.grad, k.grad, v.grad), (truth[0], *truth[2:]))
    return max((x[:, : len(at)] - t[:, at]).abs().max().item() for x, t in pairs if len(at))


@on_ranks(4)
def test_attention_over_ranks_matches_the_oracle(rank, world):
    found, group = {}, dist.group.WORLD
    configs = [{}, dict(schedule="cast", ulysses_size=1), dict(grid=(world, 1)), dict(schedule="ring")]
    for seed in range(6):
        draw = random.Random(seed)
        tree = prefix_tree(grown(draw, draw.randint(2, 9)), min_shared=draw.choice([1, 3]))
        layout = dispatch_prefix_tree(tree, group)
        n = tree.input_ids.shape[1]
        q, k, v, dout = make_inputs(n, (4, 2), batch=1)
        spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5)
        at = shard_positions(layout.num_rows * world, rank, world, layout)
        at = at[at >= 0]
        for window, config in itertools.product((None, 3), configs):
            ranges = tree.ranges(window)
            keep = seen_in(ranges, n, n)
            truth = energy.attention(q, k, v, spec=spec, keep=keep)
            truth += energy.attention_grads(q, k, v, dout, spec=spec, keep=keep)
            found[str((seed, window, config))] = _error(layout, at, (q, k, v, dout), ranges, config, truth)
    assert len(found) == 48 and largest(found.values()) < 1e-12, found


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "rows has no row"),
        ([[1], []], {}, r"rows\[1\] must be token ids"),
        ([[1], [0.5]], {}, r"rows\[1\] must be token ids"),
        ([[1, 2]], dict(weights=[[1]]), "weights has 1 numbers for row 0"),
        ([[1, 2]], dict(weights=[]), "weights has 0 rows"),
        ([[1, 2]], dict(min_shared=0), "min_shared=0 must be a positive integer"),
    ],
)
def test_bad_rows(rows, options, message):
    with pytest.raises(ValueError, match=message):
        prefix_tree(rows, **options)
