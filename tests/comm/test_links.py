"""Links that a group's first call measures: what the network was set to, equal on all ranks, only where asked for."""

import contextlib
import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_attn_func, tree_decode
from megatron_tree.core.comm import Ranks, links
from megatron_tree.core.comm.group import GroupState
from megatron_tree.core.log import say_once
from megatron_tree.core.plan import default_topology
from megatron_tree.tools.emulate import Cluster
from support.emulation import emulated
from support.failing_ranks import LIMIT, run_to_the_end
from support.ranks import run_distributed

CPU = torch.device("cpu")
LATENCY_S, RATE_BITS = 10e-3, 100e6
PAYLOAD = RATE_BITS / 8 * 1448 / 1538  # bytes/s: TCP's share of a full Ethernet frame
TUNED = TreeConfig(tune=True)


def _call(config):
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    return tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config)


@contextlib.contextmanager
def _shifts():
    """A list that fills with the bytes that this rank sends to measure."""
    counted, shift = [], links._Rings._shift_early

    def counting(rings, ring, sent, arriving, count, mail):
        counted.append(count * sent.nbytes)
        return shift(rings, ring, sent, arriving, count, mail)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links._Rings, "_shift_early", counting)
        yield counted


def _on_cluster():
    dist.init_process_group("gloo")
    _call(TreeConfig(tune=False))  # connections are made, and gloo's threads have started
    began = time.monotonic()
    with _shifts() as shifts:
        _call(TUNED)
    seconds = time.monotonic() - began
    return Ranks.of(dist.group.WORLD, CPU, TUNED).network.topology, sum(shifts), seconds


@pytest.mark.alone
@emulated
def test_finds_what_the_network_was_set_to():
    with Cluster(nodes=2, ranks_per_node=2, latency_s=LATENCY_S, rate_bits=RATE_BITS, lifetime_s=60) as cluster:
        (found, num_bytes, seconds), *others = cluster.run(_on_cluster)
    assert all(other == found for other, *_ in others)
    inside, between = found.levels
    ratios = between.latency_s / LATENCY_S, between.bandwidth / PAYLOAD, between.port_bandwidth / PAYLOAD
    # within 2 on idle cores; the network that would be assumed is 100 times as fast
    assert all(1 / 4 < x < 4 for x in ratios), ratios
    assert inside.latency_s < LATENCY_S / 2
    assert num_bytes < 3 * links.FEW * (links.MOST["cpu"] + links.PROBE) and seconds < 5


def _whoever_asks(rank, world):
    """How often a call measures, with which result, on two hosts that hold two ranks and one."""
    GroupState.of(dist.group.WORLD).hosts = ("a", "a", "b")
    counts, lines = [], []
    links.say_once = lines.append
    for config in (
        TreeConfig(tune=False),
        TreeConfig(tune=True, deterministic=True),
        TreeConfig(tune=True, topology="ethernet"),
        TUNED,
        TUNED,
        TreeConfig(tune=True, timeout_s=60),
    ):
        with _shifts() as shifts:
            _call(config)
        counts.append(len(shifts))
    with _shifts() as shifts:
        q, (k, v) = torch.ones(1, 1, 2, 16), torch.randn(2, 1, 8, 2, 16)
        tree_decode(q, k, v, cp_group=dist.group.WORLD, config=TUNED)
    links.say_once = say_once
    assert not shifts
    nets = [Ranks.of(dist.group.WORLD, CPU, x).network.topology for x in (TUNED, TreeConfig(tune=False))]
    return counts, nets, lines


def test_only_where_the_network_is_left_open():
    found = run_distributed(_whoever_asks, 3)
    assumed = default_topology("gloo")
    for rank, (counts, (measured, other), lines) in enumerate(found):
        of_levels = 3 * (rank != 2) + 3 * (rank != 1)  # of a small, a larger and a large size
        assert counts == [0, 0, 0, of_levels, 0, 0]
        assert other == assumed and measured == found[0][1][0]
        assert len(lines) == (rank == 0) and all("inside a host, " in x and "/s between hosts" in x for x in lines)
        assert measured.name == "measured" and measured.flops == assumed.flops


def _different(rank, world):
    with pytest.raises(ValueError, match="tune=True"), _shifts() as shifts:
        _call(TreeConfig(tune=rank == 0))
    assert not shifts
    _call(TUNED)


def test_ranks_agree_before_they_measure():
    run_distributed(_different, 2)


def _ends(rank, world):
    if rank == 1:
        links._long = lambda *_: os._exit(1)
    _call(TreeConfig(tune=True, timeout_s=LIMIT))


@pytest.mark.alone
def test_a_rank_that_dies_meanwhile_is_named():
    for rank, outcome in enumerate(run_to_the_end(_ends, 3, victims=(1,))):
        assert rank == 1 or (outcome.error == "CommError" and "rank 1" in outcome.text), outcome


class _Event:
    """As torch.cuda.Event, where nothing is queued."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1000


def _queued(rank, world):
    """Messages as with NCCL, whose receives are not posted early, through gloo."""
    torch.cuda.Event, event = _Event, torch.cuda.Event
    try:
        rings = links._Rings(Ranks.of(dist.group.WORLD, CPU, limit_s=30.0))
        rings._early = False
        mine = [rings.shift([ring], 1 << 12, links.FEW) for ring in ((0, 1, 2), (2, 0))]
        return mine, rings.slowest(mine)
    finally:
        torch.cuda.Event = event


def test_messages_that_are_queued():
    found = run_distributed(_queued, 3)
    assert [[x > 0 for x in mine] for mine, _ in found] == [[True, True], [True, False], [True, True]]
    assert all(slowest == [max(mine[i] for mine, _ in found) for i in (0, 1)] for _, slowest in found)
