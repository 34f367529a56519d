"""Repeated calls that measure their plans: exact in every turn, one choice on all ranks, and the fast one."""

import time

import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, shard_sequence, tree_attn_func
from support.ranks import run_distributed

SEQ, HEADS, DIM = 256, 8, 64  # enough bytes that heads over all ranks is worth a try
CALLS = 60


def _step(rank, world, config):
    """(out, gradients) of this rank's shard after one call."""
    torch.manual_seed(1)
    qkv = (torch.randn(1, SEQ, HEADS, DIM) for _ in "qkv")
    qkv = [shard_sequence(x, dist.group.WORLD, 1).requires_grad_() for x in qkv]
    out = tree_attn_func(*qkv, cp_group=dist.group.WORLD, config=config)
    out.backward(out.detach())
    return out.detach(), *(x.grad for x in qkv)


def _slow_where(ulysses):
    """Passes take longer where heads are exchanged, or where they are not."""
    from megatron_tree.attention import passes

    def slower(run):
        def slow(*args):
            call = next(x for x in args if hasattr(x, "plan"))
            if (call.plan.forward.ulysses_size > 1) == ulysses:
                time.sleep(0.03)
            return run(*args)

        return slow

    passes._forward, passes._backward = slower(passes._forward), slower(passes._backward)


def _tuned(rank, world, ulysses):
    from megatron_tree.comm.group import GroupState

    named = TreeConfig(schedule="grid", ulysses_size=1)
    want = _step(rank, world, named)
    _slow_where(ulysses)
    errors = []
    for _ in range(CALLS):
        got = _step(rank, world, TreeConfig(tune=True))
        errors.append(max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, want)))
    (tuning,) = GroupState.of(dist.group.WORLD).tunings.values()
    return max(errors), str(tuning.chosen.forward), str(tuning.chosen.backward)


def test_all_ranks_take_the_fast_plan():
    for ulysses in (True, False):
        found = run_distributed(_tuned, 4, ulysses, fresh=True)
        assert len({(forward, backward) for _, forward, backward in found}) == 1, found
        assert max(error for error, *_ in found) < 2e-6
        assert ("heads over" in found[0][1]) != ulysses, found
