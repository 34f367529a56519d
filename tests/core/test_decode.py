"""tree_decode in real processes against the float64 oracle: every schedule, any shards, same bits on all ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import energy, tree_decode
from megatron_tree.cache import ShardedCache
from megatron_tree.config import DECODE_SCHEDULES, AttnSpec
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


def _many_tokens(rank, world):
    """s_q = 3 over a round-robin cache with windows, left padding and ragged rows."""
    total, s_q = 4 * world + 5, 3
    q, k, v = decode_inputs(2, s_q, total, dtype=torch.float32)
    slots = torch.arange(total)
    positions = torch.stack((slots, torch.where(slots < 4, -1, slots - 4)))  # row 1: four slots of left padding
    q_positions = positions[:, -s_q:]
    cache = ShardedCache([None], rank=rank, world=world, page_size=2)
    rows = [cache.book.add(), cache.book.add()]
    for a, b in ((0, 5), (5, total - 1), (total - 1, total)):  # three appends
        cache.write(0, cache.append(rows, b - a), k[:, a:b], v[:, a:b])
    view, pages = cache.view(0, rows, q.device), cache.layers[0]
    cache_positions = positions.gather(1, view.positions.clamp(max=total - 1))
    worst = 0.0
    for window in ((-1, -1), (4, 0), (0, 0)):
        spec = AttnSpec(softmax_scale=1.0, window_size=window)
        keep = energy.visible(q_positions, positions, spec) & (positions >= 0)[:, None]
        out, lse = decode_oracle(q, k, v, keep)
        for schedule in DECODE_SCHEDULES:
            o, l = tree_decode(
                q,
                pages.k,
                pages.v,
                cp_group=dist.group.WORLD,
                block_table=view.block_table,
                cache_seqlens=view.lengths,
                q_positions=q_positions,
                cache_positions=cache_positions,
                window_size=window,
                schedule=schedule,
                return_lse=True,
            )
            assert same_everywhere(o)
            worst = largest((worst, error(o, out), error(l, lse)))
    return worst


@pytest.mark.parametrize("world", [1, 3])
def test_many_tokens_windows_and_padding(world):
    assert largest(run_distributed(_many_tokens, world)) < rounding(4 * world + 5)
