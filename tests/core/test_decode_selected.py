"""tree_select and attention to what it selects, in real processes, against the float64 oracle; ties included."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode, tree_select
from megatron_tree.config import SELECT_SCHEDULES
from support.decoding import decode_inputs, same_everywhere
from support.ranks import largest, run_distributed
from support.rounding import error, rounding
from support.selection import chosen_by_all, held, in_pages, index_inputs, oracle, oracle_keep, positions_of

TOTAL, QUERIES, LENGTHS = 60, 3, (60, 33, 7)
TOPK = 8


def _case(rank, world, seed):
    """(q, k, v, index, this rank's positions, positions of queries) of rows of LENGTHS, their keys dealt out: a share
    of them differs between ranks, and the last of several ranks has none."""
    g = torch.Generator().manual_seed(seed)
    owners = torch.randint(0, max(1, world - 1), (TOTAL,), generator=g) if seed else torch.arange(TOTAL) % world
    q_positions = torch.tensor(LENGTHS)[:, None] - QUERIES + torch.arange(QUERIES)
    qkv = decode_inputs(len(LENGTHS), QUERIES, TOTAL, (4, 2), 8, 6, torch.float32, seed)
    return *qkv, index_inputs(len(LENGTHS), QUERIES, TOTAL, seed), positions_of(rank, owners, LENGTHS), q_positions


def _select(rank, world, transport):
    """Every schedule, dense and in pages: the oracle's keys on some rank each, attention to them, the same bits."""
    worst, group = 0.0, dist.group.WORLD
    config = TreeConfig(transport=transport, timeout_s=60)
    for seed in range(3):
        q, k, v, index, positions, q_positions = _case(rank, world, seed)
        keep = oracle_keep(index, TOPK, q_positions, LENGTHS)
        sinks = torch.linspace(-1, 1, 4)
        truth, lse_truth = oracle(q, k, v, keep, sinks.double())
        local_k, local_v, local_i = (held(x, positions) for x in (k, v, index[2]))
        seen = dict(q_positions=q_positions, cache_positions=positions)
        call = dict(topk=TOPK, cp_group=group, config=config)
        for schedule in SELECT_SCHEDULES:
            rows = tree_select(*index[:2], local_i, **seen, schedule=schedule, **call)
            assert rows.dtype == torch.int32 and rows.shape[2] <= min(TOPK, positions.shape[1])
            assert torch.equal(chosen_by_all(rows, positions, TOTAL), keep.int()), (seed, schedule)
        of_decode = dict(selected=rows, sinks=sinks, cp_group=group, config=config, return_lse=True)
        out, lse = tree_decode(q, local_k, local_v, **of_decode)
        assert same_everywhere(out) and same_everywhere(lse)
        worst = largest((worst, error(out, truth), error(lse, lse_truth)))

        pages, table, lengths, at = in_pages(local_i, positions)
        seen = dict(q_positions=q_positions, cache_positions=at, cache_seqlens=lengths, block_table=table)
        of_pages = tree_select(*index[:2], pages, **seen, **call)
        assert torch.equal(of_pages, rows)
    return worst


@pytest.mark.parametrize(("world", "transport"), [(1, "auto"), (2, "auto"), (3, "direct"), (4, "builtin"), (4, "shm")])
def test_selected_keys_are_the_oracles(world, transport):
    assert largest(run_distributed(_select, world, transport)) < rounding(TOTAL)
