"""tree_prefill on grids: nested by host, in chunks of heads, and how many bytes it sends."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_prefill
from megatron_tree.core import comm
from megatron_tree.core.attention import prefill
from megatron_tree.core.cache.forward import forward_pass
from megatron_tree.core.layout import Segment
from megatron_tree.core.plan import chunk_sizes, default_topology, grids, place, save_topology
from megatron_tree.core.plan.plans import inner_grids
from support.attention import make_slopes
from support.decoding import cache_of, cached_oracle, decode_inputs, prefill_chunk
from support.hosts import Hosts
from support.ranks import largest, run_distributed
from support.rounding import error, rounding

B, H, H_KV, D, D_V, ROWS = 2, 4, 2, 8, 6, 10  # rows: queries of a rank


def _prefill_over_hosts(rank, world, hosts, transport, head_chunks):
    """Every grid and nesting on hosts in any order: the worst error, and how many were nested."""
    q, k, v = decode_inputs(1, 59, 59, (8, 4), dtype=torch.float32)
    placement, worst, planned = place(default_topology("gloo"), hosts), [], prefill.plan_prefill_grid
    arrangements = [(grid, inner) for grid in grids(world) for inner in inner_grids(grid, placement.block)]
    options = {"config": TreeConfig(transport=transport, timeout_s=30), "alibi_slopes": make_slopes(8)}
    with Hosts(hosts):
        for grid, inner in arrangements:

            def pinned(*args, inner=inner, **kwargs):
                plan = planned(*args, **kwargs)
                return replace(plan, arrangement=plan.arrangement._replace(inner=inner), head_chunks=head_chunks)

            cache, row = cache_of(rank, world, options, 4)
            with mock.patch.object(prefill, "plan_prefill_grid", pinned):
                for new in (slice(0, 7), slice(7, 59)):
                    out, mine = prefill_chunk(cache, row, q[:, new], k[:, new], v[:, new], options, grid)
                    truth = cached_oracle(
                        q[:, new], k[:, : new.stop], v[:, : new.stop], new.start, alibi_slopes=make_slopes(8)
                    )[0]
                    worst.append(error(out, truth[:, torch.tensor(mine).long()]))
    return largest(worst), sum(inner != (1, 1) for _, inner in arrangements)


@pytest.mark.parametrize(
    ("hosts", "transport", "head_chunks"),
    [
        ((0, 1, 1, 0), "direct", 4),
        ((0, 1, 1, 0), "builtin", 1),
        *(
            pytest.param(hosts, transport, chunks, marks=pytest.mark.slow)
            for hosts in ((0, 0, 0, 1), (0, 1, 0, 1, 0, 1), (0, 0, 0, 0, 1, 1, 1, 1))
            for transport, chunks in (("direct", 2), ("builtin", 4))
        ),
    ],
)
def test_prefill_on_nested_grids(hosts, transport, head_chunks):
    for worst, nested in run_distributed(_prefill_over_hosts, len(hosts), hosts, transport, head_chunks, timeout=300):
        assert worst < rounding(59) and (nested > 0) == (hosts != (0, 0, 0, 1))


def _prefill_traffic(rank, world, dtype):
    """By grid: what a rank sends for a chunk of ROWS tokens on each rank over 3 ROWS keys there."""
    g = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(B, n, *x, generator=g).to(dtype)
        for n, *x in ((ROWS, H, D), (3 * ROWS, H_KV, D), (3 * ROWS, H_KV, D_V))
    )
    shares = [[(2 * ROWS * world + ROWS * r, ROWS)] for r in range(world)]
    keys = [[Segment(0, 0, 2 * ROWS), Segment(2 * ROWS, *shares[r][0])] for r in range(world)]
    found = {}
    for grid in grids(world):
        with comm.record() as log:
            config = TreeConfig(transport="direct")
            tree_prefill(q, k, v, cp_group=dist.group.WORLD, shares=shares, key_segments=keys, grid=grid, config=config)
        found[grid] = [(sent.op, sent.bytes) for sent in log]
    return found


@pytest.mark.parametrize(("world", "dtype"), [(4, torch.bfloat16), (6, torch.float32)])
def test_prefill_sends_what_the_design_says(world, dtype):
    """((a - 1) x + (b - 1) y) / p bytes, of q, out and lse x and of keys and values y: the planner counts the same."""
    size = dtype.itemsize
    q, o, kv = B * ROWS * H * D * size, B * ROWS * H * D_V * size, 3 * B * ROWS * H_KV * (D + D_V) * size
    stat = 4 * B * ROWS * H
    sizes = chunk_sizes(
        world,
        B * ROWS * world,
        3 * B * ROWS * world,
        num_heads=H,
        head_dims=(D, D_V),
        key_numbers=H_KV * (D + D_V),
        bytes_per_word=size,
    )
    assert (sizes.q, sizes.o, sizes.statistic, sizes.kv) == (q, o, stat, kv)
    for found in run_distributed(_prefill_traffic, world, dtype):
        for (a, b), sent in found.items():
            row, column = (b - 1) * kv, [("all_gather", (a - 1) * q), ("all_to_all", (a - 1) * (o + stat))]
            assert sent == [("all_gather", row)] * (b > 1) + column * (a > 1)


def _chunks_of_a_row(rank, world, topology):
    """By chunk of 16 tokens: bytes that this rank sends where the planner chooses, and the worst error."""
    q, k, v = decode_inputs(1, 160, 160, (8, 2), dtype=torch.float32)
    (cache, row), sent, worst = cache_of(rank, world, {}, 4), [], []
    with Hosts(range(world)):
        for new in (slice(at, at + 16) for at in range(0, 160, 16)):
            with forward_pass(cache, [row], 16, cp_group=dist.group.WORLD, sharded=True) as forward:
                ((first, count),) = forward.append.shares[rank]
                mine = slice(first, first + count)
                forward.write(0, k[:, mine], v[:, mine])
                with comm.record() as log:
                    out = forward.attend(0, q[:, mine], config=TreeConfig(topology=topology, timeout_s=30))
            sent.append(sum(x.bytes for x in log))
            truth = cached_oracle(q[:, new], k[:, : new.stop], v[:, : new.stop], new.start)[0]
            worst.append(error(out, truth[:, first - new.start :][:, :count]))
    return sent, largest(worst)


def test_a_row_goes_from_gathered_keys_over_grids_to_gathered_queries(tmp_path):
    """Without latencies the fastest grid is the one that sends least."""
    network = default_topology("gloo")
    levels = tuple(replace(level, latency_s=0.0) for level in network.levels)
    save_topology(replace(network, levels=levels, overhead_s=0.0), tmp_path / "network.yaml")
    x, y = 16 * 8 * (8 + 8 + 1) * 4, 16 * 2 * (8 + 8) * 4  # of a chunk
    ends = [min(3 * y * n, 3 * x) / 4 for n in range(1, 11)]
    least = [min(end, (x + y * n) / 4) for n, end in enumerate(ends, 1)]
    for sent, worst in run_distributed(_chunks_of_a_row, 4, str(tmp_path / "network.yaml")):
        assert sent == least and sum(sent) < 0.9 * sum(ends) and worst < rounding(160)
