"""Layers of a sharded cache that have one key for a block of tokens, against the float64 oracle."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core import energy
from megatron_tree.core.cache import ShardedCache
from megatron_tree.core.cache.attention import Index
from megatron_tree.core.cache.forward import forward_pass
from megatron_tree.core.spec import AttnSpec
from support.ranks import on_ranks
from support.rounding import assert_near

SIZE, PAGE, WINDOW, TOPK = 3, 6, 5, 2
H, D, D_INDEX, TOTAL = 4, 8, 4, 75
TOKENS, BLOCKS = 0, 1  # layers
PASSES = (  # (rows, new tokens, whether each rank has its own)
    ([0], 2, False),
    ([0], 39, True),  # from the middle of a block
    ([1], 4, False),
    ([1, 0], 1, False),
    ([1, 0], 5, False),
    ([0], 24, True),
    ([0, 1], 1, False),
)


def _truth(x, row, positions, selects):
    """Of queries at these positions: (out, state of their blocks)."""
    seen = torch.arange(TOTAL // SIZE) < ((positions + 1) // SIZE)[:, None]
    if selects:
        products = torch.einsum("nhd,md->nhm", x["index_q"][row, positions], x["index_k"][row]).relu()
        scores = torch.einsum("nhm,nh->nm", products, x["weights"][row, positions]).masked_fill(~seen, -torch.inf)
        best = scores.sort(descending=True, stable=True).indices[:, :TOPK]  # of equal ones the earlier
        seen &= torch.zeros_like(seen).scatter(1, best, True)
    spec = AttnSpec(softmax_scale=D**-0.5, window_size=(WINDOW - 1, 0))
    q, near = x["q"][row, positions][None], energy.visible(positions, torch.arange(TOTAL), spec)
    keys = x["keys"][row : row + 1]
    blocks = energy.attention(q, keys, keys, spec=AttnSpec(softmax_scale=D**-0.5), keep=seen)
    k, v = (torch.cat((x[name][row : row + 1], keys), 1) for name in "kv")
    plain = AttnSpec(softmax_scale=D**-0.5)
    return energy.attention(q, k, v, spec=plain, keep=torch.cat((near, seen), 1), sinks=x["sinks"])[0], blocks


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_attention_to_blocks_beside_a_window(world, selects):
    rank, g = dist.get_rank(), torch.Generator().manual_seed(0)
    shapes = {"q": (TOTAL, H, D), "k": (TOTAL, 1, D), "v": (TOTAL, 1, D), "keys": (TOTAL // SIZE, 1, D)}
    shapes |= {"index_q": (TOTAL, H, D_INDEX), "weights": (TOTAL, H), "index_k": (TOTAL // SIZE, D_INDEX)}
    x = {name: torch.randn(2, *shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    x["sinks"] = torch.randn(H, generator=g, dtype=torch.float64)
    store = ShardedCache([WINDOW, None], block_sizes=[1, SIZE], rank=rank, world=world, page_size=PAGE)
    rows = [store.book.add() for _ in range(2)]
    for which, n, sharded in PASSES:
        with forward_pass(store, [rows[i] for i in which], n, cp_group=dist.group.WORLD, sharded=sharded) as forward:
            positions = forward.new_positions("cpu")
            if sharded:
                runs = forward.append.shares[rank]
                positions = torch.tensor([[i for first, count in runs for i in range(first, first + count)]])
            row = torch.tensor(which)[:, None].expand_as(positions)
            forward.write(TOKENS, x["k"][row, positions], x["v"][row, positions])
            ends = forward.ends_of_blocks(BLOCKS, "cpu")
            of_row, number = row.flatten()[ends], positions.flatten()[ends] // SIZE
            keys, selected = x["keys"][of_row, number][None], None
            forward.write(BLOCKS, keys, keys[..., :0])
            if selects and forward.end >= SIZE:
                index = Index(x["index_q"][row, positions].float(), x["weights"][row, positions].float(), 1.0, TOPK)
                selected = forward.select(BLOCKS, x["index_k"][of_row, number][None], index)
            q, beside = x["q"][row, positions], None
            if forward.end >= SIZE:
                beside = forward.attend(BLOCKS, q, selected=selected, return_lse=True)
            options = {"window_size": (WINDOW - 1, 0), "sinks": x["sinks"]}
            out = forward.attend(TOKENS, q, beside=beside, **options)
        for i, (number, own) in enumerate(zip(which, positions)):
            truth, blocks = _truth(x, number, own, selects)
            assert_near(out[i : i + 1], truth, TOTAL)
            if beside is not None:
                assert_near(beside[0][i : i + 1], blocks[0], TOTAL)
                assert torch.equal(beside[1][i].isinf(), blocks[1][0].isinf())
                assert_near(beside[1][i].exp(), blocks[1][0].exp(), TOTAL)
    held = torch.tensor(store.num_local(BLOCKS))
    dist.all_reduce(held)
    lengths = [store.book.rows[row].length for row in rows]
    assert held == sum(length // SIZE for length in lengths), "no block is on two ranks"


def test_blocks_that_lie_in_two_pages_are_refused():
    with pytest.raises(ValueError, match="page_size=8: layers have one key for each block of 6 tokens, .* choose 12"):
        ShardedCache([None, None], block_sizes=[4, 6], page_size=8)
