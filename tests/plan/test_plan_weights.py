"""Where ranks that share a model's weights read more of them so as to send less."""

import dataclasses

from megatron_tree.core.plan import load_topology, place
from megatron_tree.core.plan.cost import placed_topology
from megatron_tree.core.plan.decode import exchanges_queries, gathered, gathered_queries
from megatron_tree.core.plan.weights import repeats_queries, splits_latents

DGX = load_topology("dgx_h100")
SLOW = dataclasses.replace(load_topology("laptop"), memory_bandwidth=1e9, transport="shm")


def test_projections_into_latents_are_split_where_that_is_faster():
    """Of DeepSeek V3: not on 2 nodes of GPUs, as gathers take longer than reading; on CPU ranks that read slowly."""
    both = [(7168 * 1536, 1536), (7168 * 576, 576)]
    for topology, hosts, splits in ((DGX, [n // 8 for n in range(16)], False), (SLOW, [0] * 4, True)):
        placed = placed_topology(topology, place(topology, hosts))
        assert splits_latents(placed, both, 2) == splits
        assert splits_latents(placed, [(1e12, 1.0)], 2) and not splits_latents(placed, [(1.0, 1.0)], 2)


def test_queries_are_repeated_where_that_is_faster():
    """For 70B on GPUs; not on ranks that read slowly."""
    for topology, hosts, repeated in ((DGX, [0, 0, 1, 1], True), (SLOW, [0] * 4, False)):
        placed = placed_topology(topology, place(topology, hosts))
        assert repeats_queries(placed, (1024 * 8192, 1024), 2) == repeated  # 8 of 64 heads of 128


def test_queries_are_exchanged_where_that_is_faster():
    """An all-to-all has one latency, an all-gather many; but that sends every share through each node's port once for
    every rank there. Between ranks that send to all at once anyway there is no choice."""
    two = placed_topology(DGX, place(DGX, [n // 8 for n in range(16)]))
    for share in (1e3, 1e5, 1e6):
        ring, at_once = gathered(two, share), gathered(two, share, exchanged=True)
        assert ring[1] == at_once[1] == 15 * share
        assert exchanges_queries(two, share) == (at_once[0] < ring[0]) == (share < 1e6)
        assert gathered_queries(two, share) == min(ring, at_once)
    direct = dataclasses.replace(DGX, transport="direct")
    assert not exchanges_queries(placed_topology(direct, two.placement), 1e3)


def test_two_ranks_always_exchange_queries():
    """The times of an all-to-all and of an all-gather are equal, but not their roundings."""
    for i in range(60):
        levels = [dataclasses.replace(level, latency_s=1e-6 * 1.1**i) for level in DGX.levels]
        topology = dataclasses.replace(DGX, levels=tuple(levels))
        assert exchanges_queries(placed_topology(topology, place(topology, [0, 0])), 384), i
