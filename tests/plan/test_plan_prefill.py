"""Do activations move for a chunk of a prompt, or weights? And on which grid does attention run?"""

import dataclasses

import pytest

from megatron_tree.core.plan import chunk_sizes, grids, place, plan_prefill_grid
from megatron_tree.core.plan.weights import PrefillSizes, plan_prefill
from support.plans import DGX, ETHERNET

H = 8192
LAYERS = 80
SIZES = PrefillSizes(  # Llama 70B in bf16 on 16 ranks: 64 heads, 8 KV heads
    world=16,
    head_groups=8,
    hidden=2 * H,
    heads=2 * 2 * (64 + 8) * 128,
    attention=[15 * 2 * (2 * H * H + 2 * H * 1024) // 16] * LAYERS,
    blocks=[15 * 2 * 3 * H * 28672 // 16] * LAYERS,
)


def test_the_form_that_sends_less():
    for num_tokens in (1, 2048, 8192, 12288, 32768, 131072):
        plan = plan_prefill(num_tokens, SIZES)
        assert plan.shares_tokens == (plan.sharing < plan.otherwise)
    assert not plan_prefill(8192, SIZES).shares_tokens
    middle, long = plan_prefill(16384, SIZES), plan_prefill(65536, SIZES)
    assert middle.shares_tokens and not any(middle.gathers)  # attention's weights are gathered, the MLPs' tokens
    assert long.shares_tokens and all(long.gathers)
    assert plan_prefill(131072, SIZES).sharing < 1.1 * long.sharing  # bytes stop growing with the chunk ...
    assert plan_prefill(131072, SIZES).otherwise == 2 * long.otherwise  # ... which activations don't


def test_bytes():
    sizes = PrefillSizes(world=4, head_groups=2, hidden=10, heads=30, attention=[50], blocks=[70, 1000])
    plan = plan_prefill(8, sizes)
    hidden = 8 * 10 * 3 / 4  # gathered, or reduced and scattered
    assert plan.gathers == (True, False)
    assert plan.sharing == hidden / 4 + 50 + 70 + 2 * hidden + 8 / 4 * 30 / 2
    assert plan.otherwise == 2 * hidden * 4  # the embedding, attention, two blocks


def test_one_rank_runs_everything():
    assert not plan_prefill(10**6, SIZES._replace(world=1, head_groups=1)).shares_tokens


def _grid(topology, hosts, num_queries, num_keys, heads=(32, 8), **options):
    """The plan of a chunk in bf16, heads of 128."""
    world, (h, h_kv) = len(hosts), heads
    sizes = chunk_sizes(
        world, num_queries, num_keys, num_heads=h, head_dims=(128, 128), key_numbers=h_kv * 256, bytes_per_word=2
    )
    placement = place(topology, hosts)
    plan = plan_prefill_grid((sizes,) * len(grids(world)), topology=topology, placement=placement, **options)
    return plan, sizes


def _bytes(grid, sizes):
    return (grid[0] - 1) * (sizes.q + sizes.o + sizes.statistic) + (grid[1] - 1) * sizes.kv


@pytest.mark.parametrize("hosts", [range(8), [0] * 8], ids=["network", "one host"])
def test_the_grid_that_sends_least(hosts):
    found = []
    for num_keys in (2048, 8192, 32768, 131072, 1 << 20):
        plan, sizes = _grid(ETHERNET, list(hosts), 2048, num_keys)
        assert plan.cost.bytes == pytest.approx(_bytes(plan.grid, sizes))
        assert plan.cost.bytes == pytest.approx(min(_bytes(grid, sizes) for grid in grids(8)))
        found.append(plan.grid)
    assert found == [(1, 8), (2, 4), (4, 2), (8, 1), (8, 1)]


def test_ranks_that_share_memory_gather_together():
    shared = dataclasses.replace(ETHERNET, transport="shm")
    for num_keys in (2048, 4096, 8192, 16384, 65536):
        plan, sizes = _grid(shared, [0] * 8, 2048, num_keys)
        assert 1 in plan.grid and _bytes(plan.grid, sizes) == min(_bytes(grid, sizes) for grid in ((1, 8), (8, 1)))
    sizes = tuple(sizes if grid == (2, 4) else None for grid in grids(8))
    assert plan_prefill_grid(sizes, topology=shared, placement=place(shared, [0] * 8)).grid == (2, 4)


def test_what_is_larger_stays_inside_nodes():
    """2 nodes of 8: whichever crosses, crosses once for a node and not for every rank there."""
    hosts = [rank // 8 for rank in range(16)]
    for num_keys, outer in ((4096, (1, 2)), (1 << 17, (2, 1))):
        plan, sizes = _grid(DGX, hosts, 4096, num_keys, heads=(64, 8))
        assert plan.arrangement.outer == outer
        crossing = sizes.kv if outer == (1, 2) else sizes.q + sizes.o + sizes.statistic
        assert plan.cost.bytes_per_level[1] == pytest.approx(crossing)
