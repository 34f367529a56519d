"""TreeConfig(check="finite"): NaN on one rank is one clear error on every rank, before anything is sent."""

import time

import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_attn_func, tree_attn_varlen_func, tree_decode, tree_prefill
from megatron_tree.core.layout import Segment
from support.attention import make_inputs, make_sinks
from support.ranks import on_ranks, run_distributed

NAN, INF = float("nan"), float("inf")
LIMIT_S = 25.0  # seconds: less than the time limit of 30
TENSORS = ("q", "k", "v", "sinks", "dout", "k_cache", "v_cache", "paged k_cache", "prefill v_cache")


def _call(rank, world, which, check):
    """This rank's error and how long it took, with bad values in `which` on one rank; then whether the group works."""
    group, config = dist.group.WORLD, TreeConfig(check=check, timeout_s=30)
    q, k, v, dout = (x.chunk(world, 1)[rank].clone() for x in make_inputs(8 * world, (4, 2), dtype=torch.float32))
    sinks = make_sinks(4).float()
    name, options = which.split()[-1], dict(cp_group=group, config=config)
    if rank == 1:
        bad = dict(q=q, k=k, v=v, dout=dout, sinks=sinks, k_cache=k, v_cache=v)[name]
        if name == "sinks":
            bad[2] = INF
        else:
            bad[1, 5, 1, 3], bad[1, 6, 0, 0] = NAN, INF
    slots = [[Segment(0, 8 * rank, 8)], [(8 * r, 8) for r in range(world)]]

    def run(q, k, v, sinks, dout):
        if which.startswith("prefill"):
            return tree_prefill(q, k, v, key_segments=slots[0], shares=[[x] for x in slots[1]], sinks=sinks, **options)
        if which == "paged k_cache":
            pages = [x.unflatten(1, (2, 4)).flatten(0, 1) for x in (k, v)]
            table = torch.arange(4, dtype=torch.int32).reshape(2, 2)
            options.update(block_table=table, cache_seqlens=torch.tensor([8, 8]))
            return tree_decode(q[:, :1].nan_to_num(), *pages, **options)
        if which.endswith("cache"):
            return tree_decode(q[:, :1].nan_to_num(), k, v, sinks=sinks, **options)
        leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
        out = tree_attn_func(*leaves[:3], sinks=sinks, **options)
        return torch.autograd.grad(out, leaves, dout)[0]

    dist.barrier()
    begin, said = time.monotonic(), None
    try:
        result = run(q, k, v, sinks, dout)
    except ValueError as error:
        said = str(error)
    took = time.monotonic() - begin
    finite = [x.detach().nan_to_num(0.0, 0.0, 0.0).requires_grad_(x.requires_grad) for x in (q, k, v, sinks, dout)]
    again = run(*finite).isfinite().all().item()
    return said, took, again if said else result.isfinite().all().item()


def _calls(rank, world):
    return [_call(rank, world, which, "finite") for which in TENSORS]


def test_every_rank_names_rank_and_tensor():
    for which, found in zip(TENSORS, zip(*run_distributed(_calls, 3, timeout=120)), strict=True):
        name = which.split()[-1]
        where = "in 1 place, the first at sinks[2] = inf" if name == "sinks" else "in 2 places, the first at "
        where += "" if name == "sinks" else f"{name}[1, 5, 1, 3] = nan"
        for said, took, works in found:
            assert said and f"{name} on rank 1 of cp_group holds NaN or infinities {where}" in said
            assert took < LIMIT_S and works


def test_without_it_the_result_is_silently_wrong():
    """The negative control: NaN in one rank's k comes out as NaN on other ranks, and nobody says a word."""
    found = run_distributed(_call, 2, "k", "always", timeout=60)
    assert [said for said, _, _ in found] == [None, None] and not all(finite for _, _, finite in found)


@on_ranks(2, timeout=60)
def test_padding_may_hold_anything(rank, world):
    """NaN where there is padding does not trip it: thd padding, and slots beyond a length or at position -1."""
    config, group = TreeConfig(check="finite"), dist.group.WORLD
    padded, length = 4 * world, 4 * world - 1
    q, k, v, dout = (x[0] for x in make_inputs(padded, (4, 2), batch=1, dtype=torch.float32))
    for x in (q, k, v, dout):
        x[length:] = NAN
    rows = torch.cat([torch.arange(r * 2, r * 2 + 2) for r in (rank, 2 * world - 1 - rank)])
    leaves = [x[rows].requires_grad_() for x in (q, k, v)]
    bounds = dict(cu_seqlens=torch.tensor([0, length]), cu_seqlens_padded=torch.tensor([0, padded]))
    out = tree_attn_varlen_func(*leaves, **bounds, cp_group=group, config=config)
    grads = torch.autograd.grad(out, leaves, dout[rows])
    q, k, v, _ = make_inputs(8, (4, 2), dtype=torch.float32)
    lengths, positions = torch.tensor([6, 8]), torch.arange(8).expand(2, -1).clone()
    positions[1, :3] = -1
    k[0, 6:], v[1, :3] = NAN, NAN
    at = dict(q_positions=torch.tensor([[7], [7]]), cache_positions=positions)
    o = tree_decode(q[:, :1], k, v, cp_group=group, cache_seqlens=lengths, config=config, **at)
    assert all(x.isfinite().all() for x in (out, *grads, o))
