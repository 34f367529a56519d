"""tree_decode in real processes against the float64 oracle: every schedule, any shards, same bits on all ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import tree_decode
from megatron_tree.core import log
from megatron_tree.core.config import DECODE_SCHEDULES
from support.decoding import decode_inputs, decode_oracle, same_everywhere
from support.ranks import largest, run_distributed
from support.rounding import error, rounding


def _one_token(rank, world, lengths_list):
    """s_q = 1 over contiguous shards of the given lengths, fp32, all schedules; the worst error."""
    worst = 0.0
    for lengths in lengths_list:
        total, start = sum(lengths), sum(lengths[:rank])
        q, k, v = decode_inputs(3, 1, total, dtype=torch.float32)
        sinks = torch.linspace(-1, 1, 4)
        mine = slice(start, start + lengths[rank])
        for options in ({}, dict(softcap=2.0), dict(sinks=sinks)):
            out, lse = decode_oracle(q, k, v, None, **options)
            for schedule in DECODE_SCHEDULES:
                o, l = tree_decode(
                    q, k[:, mine], v[:, mine], cp_group=dist.group.WORLD, schedule=schedule, return_lse=True, **options
                )
                assert o.dtype == q.dtype and l.dtype == torch.float32
                assert same_everywhere(o) and same_everywhere(l), schedule
                worst = largest((worst, error(o, out), error(l, lse)))
    return worst


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_one_token_any_shards(world):
    lengths = [[1] * world, [7] * world, [31 + r for r in range(world)], [13] + [0] * (world - 1), [0] * world]
    lengths += [[0 if r == e else 5 for r in range(world)] for e in range(world) if world > 1]
    lengths += [[0] * (world - 1) + [1]]
    assert largest(run_distributed(_one_token, world, lengths)) < rounding(max(map(sum, lengths)))


def test_gradients_that_one_may_expect_are_said_to_be_missing(monkeypatch, caplog):
    monkeypatch.setattr(log, "_said", set())
    q, k, v = decode_inputs(1, 1, 4, dtype=torch.float32)
    for tensors in ((q, k, v), (q.requires_grad_(), k, v)):
        with torch.no_grad():
            tree_decode(*tensors, cp_group=None)
    assert not caplog.records
    for tensors in ((q, k, v), (q.detach(), k, v.requires_grad_())):
        assert not tree_decode(*tensors, cp_group=None).requires_grad
    (record,) = caplog.records
    assert "tree_decode gives no gradients" in record.message and "tree_attn_func" in record.message
