"""Digests of what the same call gives again and again: training, decode and prefill, on every schedule."""

import hashlib

import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_attn_func, tree_decode
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.core.plan import grids
from support.attention import make_inputs, make_sinks
from support.decoding import cache_of, decode_inputs, prefill_chunk, same_everywhere
from support.ranks import run_distributed

FIXED = tuple(s for s in DECODE_SCHEDULES if s not in ("auto", "allreduce"))


def digest(*tensors):
    parts = [
        x.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes() for x in tensors
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def bits(rank, world, dtype, times, deterministic):
    """{what: digests of `times` runs}: training on every schedule, decode, prefill in both ways."""
    found, group = {}, dist.group.WORLD
    inputs = [x.chunk(world, 1)[rank] for x in make_inputs(32 * world, (4, 2), d=16, d_v=16, dtype=dtype)]
    schedules = {"tree": dict(grid=(world, 1)), "KV gather": dict(grid=(1, world)), "ring": dict(schedule="ring")}
    if world == 4:
        schedules["grid 2x2"] = dict(grid=(2, 2), head_chunks=2)
    for name, options in schedules.items():
        config = TreeConfig(**options, deterministic=deterministic)
        leaves = [x.clone().requires_grad_() for x in inputs[:3]] + [make_sinks(4).to(dtype).requires_grad_()]
        runs = found.setdefault((name, "training"), [])
        for _ in range(times):
            out, lse = tree_attn_func(*leaves[:3], sinks=leaves[3], cp_group=group, config=config, return_lse=True)
            runs.append(digest(out, lse, *torch.autograd.grad(out, leaves, inputs[3])))
    config = TreeConfig(deterministic=deterministic)
    q, k, v = decode_inputs(3, 1, 40 * world, d=16, d_v=16, dtype=dtype)
    k, v = (x.chunk(world, 1)[rank] for x in (k, v))
    lengths = torch.tensor([40, 11 + rank, 0])
    for schedule in FIXED:
        options = dict(cp_group=group, cache_seqlens=lengths, schedule=schedule, config=config, sinks=make_sinks(4))
        runs = [tree_decode(q, k, v, return_lse=True, **options) for _ in range(times)]
        assert same_everywhere(runs[0][0]) and same_everywhere(runs[0][1]), schedule
        found[schedule, "decode"] = [digest(*x) for x in runs]
    q, k, v = decode_inputs(1, 36, 36, d=16, d_v=16, dtype=dtype)
    for grid in grids(world):
        runs = found.setdefault((grid, "prefill"), [])
        for _ in range(times):
            cache, row = cache_of(rank, world, {}, 4)
            new = slice(0, 20), slice(20, 36)
            options = dict(config=config)
            outs = [prefill_chunk(cache, row, q[:, i], k[:, i], v[:, i], options, grid)[0] for i in new]
            runs.append(digest(*outs))
    return found


def print_bits():
    """What a program prints that has this module alone."""
    print(run_distributed(bits, 2, torch.bfloat16, 1, True))
