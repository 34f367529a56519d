"""tree_attn_func in real processes against the float64 energy oracle: out, lse and every gradient."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, shard_positions, tree_attn_func
from megatron_tree.core.plan import grids
from support.attention import configs, low_precision, make_inputs, make_sinks, make_slopes, oracle, run_one, worst_error
from support.hosts import Hosts
from support.ranks import largest, on_ranks, run_distributed

WORLDS = (1, 2, 4, pytest.param(6, marks=pytest.mark.slow))
MASKS = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(window_size=(5, 0)),
    "two-sided window": dict(causal=False, window_size=(3, 2)),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "sinks, window": dict(sinks=True, window_size=(4, -1)),
    "alibi": dict(alibi_slopes=make_slopes(4)),
    "alibi of rows, two-sided window, softcap": dict(
        alibi_slopes=make_slopes(4, 2), causal=False, window_size=(7, 5), softcap=2.0
    ),
}
HEADS = {"MHA": (3, 3), "GQA": (4, 2), "MQA": (3, 1)}
DIMS = (24, 16), (8, 20)  # of queries and keys, and of values


def _against_oracle(rank, world, cases):
    worst = {}
    for name, seq_len, heads, layout, mask, dims in cases:
        inputs = make_inputs(seq_len, heads, d=dims[0], d_v=dims[1])
        kwargs = dict(mask, sinks=make_sinks(heads[0])) if mask.get("sinks") else mask
        truth = oracle(*inputs, **kwargs)
        for label, config in configs(world):
            rows, mine = run_one(inputs, layout, config, mask)
            worst[f"{name}, {label}"] = worst_error(rows, mine, truth)
    return worst


def check(world, cases):
    for worst in run_distributed(_against_oracle, world, cases, timeout=300):
        bad = {name: error for name, error in worst.items() if error > 1e-12}
        assert worst and not bad, bad


@pytest.mark.parametrize("world", WORLDS)
def test_masks_and_heads_match_the_oracle(world):
    n = 4 * world
    cases = [
        (f"{mask}, {heads}", n, HEADS[heads], "zigzag", MASKS[mask], (8, 8))
        for mask in MASKS
        for heads in (HEADS if mask == "causal" else ["GQA"])
    ]
    cases += [(f"head_dims {dims}", n, (4, 2), "zigzag", MASKS["window"], dims) for dims in DIMS]
    check(world, cases)


def _low_precision(rank, world, dtype):
    """Four ranks on two hosts: grids are nested."""
    several = [*configs(world), *((f"ulysses {u}", TreeConfig(ulysses_size=u)) for u in (2, 4) if u <= world)]
    several += [(f"{grid}, head chunks", TreeConfig(grid=grid, head_chunks=2)) for grid in grids(world)]
    with Hosts((0, 0, 1, 1)[:world]):
        return [low_precision(world, dtype, several, **mask) for mask in ({}, {"alibi_slopes": make_slopes(4)})]


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (2, torch.float16), (4, torch.bfloat16)])
def test_low_precision_within_the_rule(world, dtype):
    for found in (found for of_rank in run_distributed(_low_precision, world, dtype) for found in of_rank):
        for label, (out, *grads) in found.items():
            assert out <= 2 and largest(grads) <= 3, (label, out, grads)


@on_ranks(4)
def test_recomputation_gives_the_same_bits(rank, world):
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs(4 * world, (4, 2))
    rows = shard_positions(4 * world, rank, world)
    results = []
    for wrap in (False, True):
        q, k, v, dout = (x[:, rows].clone().requires_grad_() for x in inputs)
        call = lambda q, k, v: tree_attn_func(q, k, v, cp_group=dist.group.WORLD)  # noqa: E731
        out = checkpoint(call, q, k, v, use_reentrant=False) if wrap else call(q, k, v)
        results.append([out.detach(), *torch.autograd.grad((out * dout).sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@on_ranks(6)
def test_groups_that_are_not_world(rank, world):
    """Two groups of three, interleaved, work at the same time; a rank may not use the other's group."""
    groups = [dist.new_group([r for r in range(world) if r % 2 == i]) for i in range(2)]
    mine = groups[rank % 2]
    inputs = make_inputs(12, (4, 2), seed=rank % 2)
    truth = oracle(*inputs)
    rows = shard_positions(12, dist.get_rank(mine), 3)
    out, lse = tree_attn_func(*(x[:, rows] for x in inputs[:3]), cp_group=mine, return_lse=True)
    assert worst_error(rows, (out, lse), truth[:2]) < 1e-12
    with pytest.raises(ValueError, match="not a member"):
        tree_attn_func(*inputs[:3], cp_group=groups[1 - rank % 2])
