"""Keys of blocks of tokens, each on the rank of its block's last token: selection, values and gradients are exact."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_tree import dispatch_documents, shard_sequence, tree_attn_func, tree_select_func
from megatron_tree.core import energy
from megatron_tree.core.attention.selection import Blocks
from megatron_tree.core.layout import documents_over
from megatron_tree.core.spec import AttnSpec
from support.ranks import on_ranks
from support.rounding import assert_near

SIZE, TOPK, SCALE = 3, 2, 0.5
LENGTHS = (1, 31, 2, 9, 5, 16)  # of documents: some have no block, one is cut


def _layouts(world):
    """{name: layout}, whose pieces begin and end within blocks."""
    whole = (sum(LENGTHS),)
    return {
        "dispatched": dispatch_documents([0, *itertools.accumulate(LENGTHS)], dist.group.WORLD),
        "packed, zigzag": documents_over(LENGTHS, LENGTHS, world, "zigzag"),
        "packed, contiguous": documents_over(LENGTHS, LENGTHS, world, "contiguous"),
        "one document": documents_over(whole, whole, world, "zigzag"),
    }


def _random(*shape, seed):
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _best(index, lengths):
    """bool [b, tokens, blocks]: the blocks that queries select, one by one from the definition."""
    q, weights, keys = index
    chosen = torch.zeros(2, q.shape[1], keys.shape[1], dtype=torch.bool)
    tokens, blocks = (list(itertools.accumulate(x, initial=0)) for x in (lengths, [n // SIZE for n in lengths]))
    for row, (document, n) in itertools.product(range(2), enumerate(lengths)):
        for i in range(n):
            at, seen = tokens[document] + i, range(blocks[document], blocks[document] + (i + 1) // SIZE)
            scores = {j: float((weights[row, at] * (SCALE * q[row, at] @ keys[row, j]).relu()).sum()) for j in seen}
            chosen[row, at, sorted(seen, key=lambda j: (-scores[j], j))[:TOPK]] = True
    return chosen


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_over_ranks(world):
    group = dist.group.WORLD
    for name, layout in _layouts(world).items():
        lengths = layout.lengths
        n, count = sum(lengths), sum(x // SIZE for x in lengths)
        of_blocks = layout.blocks(SIZE)
        index = _random(n, 5, 4, seed=1), _random(n, 5, seed=2), _random(count, 4, seed=3)
        inputs = _random(n, 4, 8, seed=4), _random(count, 2, 8, seed=5), _random(count, 2, 6, seed=6)
        dout, places = _random(n, 4, 6, seed=7), (layout, of_blocks, of_blocks)
        options = {"cp_group": group, "softmax_scale": SCALE, "layout": layout}
        mine = [shard_sequence(x, group, 1, at) for x, at in zip(index, (layout, *places))]
        selected = tree_select_func(*mine, topk=TOPK, block_size=SIZE, **options)
        assert selected.shape[2] == TOPK
        chosen, spec = _best(index, lengths), AttnSpec(softmax_scale=SCALE)
        q, k, v = mine = [shard_sequence(x, group, 1, at).requires_grad_() for x, at in zip(inputs, places)]
        out = tree_attn_func(q, k, v, causal=False, selected=selected, layout_kv=of_blocks, **options)
        found = out.detach(), *torch.autograd.grad(out, mine, shard_sequence(dout, group, 1, layout))
        rows = ([x[i : i + 1] for x in (*inputs, dout)] for i in range(2))
        want = [
            (energy.attention(*x[:3], **of_row)[0], *energy.attention_grads(*x, **of_row)[:3])
            for x, keep in zip(rows, chosen)
            for of_row in [{"spec": spec, "keep": keep, "keep_weights": None, "sinks": None}]
        ]
        for what, x, whole, at in zip(("out", "dq", "dk", "dv"), found, zip(*want), (layout, *places)):
            assert_near(x, shard_sequence(torch.cat(whole), group, 1, at), n, f"{name}: {what}", torch.float64)


def test_blocks_lie_where_their_last_tokens_lie():
    layout = documents_over((10, 2, 7), (10, 2, 7), 2, "contiguous")  # 10 tokens; 9
    assert layout.blocks(3).lengths == (3, 0, 2)
    assert layout.blocks(3).shares == (((0, 3),), ((3, 2),))
    whole = documents_over((12,), (12,), 2, "zigzag")  # of 0-2 and 9-11; 3-8
    assert whole.blocks(4).shares == (((2, 1),), ((0, 2),))


def test_what_does_not_fit_is_refused():
    q, k = torch.zeros(1, 12, 2, 4), torch.zeros(1, 4, 2, 4)
    layout = documents_over((7, 5), (7, 5), 1)
    options = {"cp_group": None, "layout": layout}
    with pytest.raises(ValueError, match="cross attention, which needs causal=False"):
        tree_attn_func(q, q, q, causal=True, layout_kv=documents_over((12,), (12,), 1), **options)
    with pytest.raises(ValueError, match="layout has 2 documents and layout_kv 1"):
        tree_attn_func(q, k, k, causal=False, layout_kv=documents_over((4,), (4,), 1), **options)
    index = q, torch.zeros(1, 12, 2), k[:, :, 0]
    with pytest.raises(ValueError, match="3 rows, the sequence 4"):
        tree_select_func(*index, topk=2, block_size=3, **options)
    with pytest.raises(ValueError, match="index_k is of blocks already: leave blocks out"):
        tree_select_func(*index, topk=2, block_size=3, blocks=Blocks(3, lambda tokens, _: tokens[:, :, 0]), **options)
    with pytest.raises(ValueError, match="block_size=3 needs a Dispatched layout, not 'zigzag'"):
        tree_select_func(*index, topk=2, block_size=3, cp_group=None)
