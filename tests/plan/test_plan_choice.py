"""Which candidate the planner takes, and how long it needs."""

import dataclasses
import functools
import time

import pytest

from megatron_tree.core.plan import Shape, load_topology
from megatron_tree.core.plan.choice import alternatives
from support.plans import DGX, ETHERNET, GQA4, GQA8, MHA, MQA, NO_COPIES, training


def fastest_pair(plan, allowed=lambda candidate: True):
    """Least time of a forward and a backward that exchange heads over the same ranks."""
    least = [{}, {}]
    for found, table in zip(least, plan.candidates):
        for c in filter(allowed, table):
            heads = c.arrangement.heads
            found[heads] = min(c.cost.time_s, found.get(heads, c.cost.time_s))
    return min((least[0][heads] + least[1][heads] for heads in least[0]), default=float("inf"))


RANKS = {"dgx_h100": (64, 4096), "ethernet": (64, 512), "gb200_nvl72": (72,)}


@pytest.mark.parametrize("shape", [MHA, GQA4, GQA8, MQA], ids=("MHA", "GQA 4:1", "GQA 8:1", "MQA"))
@pytest.mark.parametrize(("name", "world"), [(name, world) for name in RANKS for world in RANKS[name]])
def test_no_rival_is_faster_by_more_than_1_percent(name, world, shape):
    topology = load_topology(name)
    hosts = [n // topology.host_size for n in range(world)]
    slower = []
    for seq_len in (1 << 15, 1 << 18, 1 << 21):
        plan = training(world, shape, topology, hosts, seq_len=seq_len)
        time_s = plan.forward.cost.time_s + plan.backward.cost.time_s
        assert plan.forward.arrangement.heads == plan.backward.arrangement.heads
        assert time_s <= 1.01 * (1 + 1e-9) * fastest_pair(plan)
        slower += [sum(c.cost.time_s for c in pair) > 1.01 * time_s for pair in zip(*plan.candidates)]
    assert any(slower), "all candidates took as long: this test shows nothing"


def test_a_ring_is_taken_only_where_all_others_take_1_percent_longer():
    hosts, taken = [n // 8 for n in range(512)], []
    for seq_len in (1 << 15, 1 << 18, 1 << 22):
        plan = training(512, GQA4, NO_COPIES, hosts, seq_len=seq_len)
        trees = fastest_pair(plan, lambda c: c.schedule != "ring")
        is_ring = "ring" in (plan.forward.schedule, plan.backward.schedule)
        assert is_ring == (1.01 * fastest_pair(plan) < trees)
        taken.append(is_ring)
    assert True in taken and False in taken


@pytest.mark.parametrize(("topology", "world"), [(DGX, 8), (ETHERNET, 32)])
def test_a_ring_of_one_rank_costs_as_much_as_ulysses(topology, world):
    """An exchange of heads is counted alike before a ring and before a grid."""
    hosts = [n // 8 for n in range(world)]
    ring, grid = (
        training(world, MHA, topology, hosts, seq_len=1 << 16, ulysses_size=world, **options)
        for options in (dict(schedule="ring"), dict(head_chunks=1))
    )
    for one, other in ((ring.forward, grid.forward), (ring.backward, grid.backward)):
        assert (one.grid, other.grid) == ((1, 1), (1, 1))
        assert one.cost.time_s == pytest.approx(other.cost.time_s, rel=0.02)
        assert one.cost.bytes_per_level == pytest.approx(other.cost.bytes_per_level)
    plan = training(world, MHA, topology, hosts)
    assert all(c.grid != (1, 1) for table in plan.candidates for c in table if c.schedule == "ring")


def test_the_memory_budget_excludes_candidates():
    starting = dataclasses.replace(ETHERNET, overhead_s=1.0)  # few head chunks are fast, and take more memory
    free = training(16, MHA, starting)
    budget = max(free.forward.cost.peak_bytes, free.backward.cost.peak_bytes) - 1
    tight = training(16, MHA, starting, memory_budget=budget)
    assert max(tight.forward.cost.peak_bytes, tight.backward.cost.peak_bytes) <= budget
    assert (tight.forward, tight.backward) != (free.forward, free.backward)


def test_the_ring_is_the_last_resort():
    one = Shape(1, 1, 128, 128)  # nothing to divide into head chunks
    kv = 2 * 1024 * 128 * 2
    least = 2 * (2 * kv + 3 * kv)  # the backward's KV and its gradient twice each, and two fp32 dq, dk, dv
    plan = training(16, one, memory_budget=least)
    assert plan.backward.schedule == "ring"
    with pytest.raises(ValueError, match=f"the least that any schedule needs is {least} bytes"):
        training(16, one, memory_budget=least - 1)
    with pytest.raises(ValueError, match=f"the least that this schedule needs is {4 * kv} bytes"):
        training(16, one, schedule="ring", memory_budget=4 * kv - 1)


EMULATED = """
# `megatron-tree calibrate` on four emulated nodes of one rank, 1 ms and 1 Gbit/s, that share two busy cores
name: emulated
transport: direct
host_size: 1
overhead_s: 1.6e-4
chunk_s: 1.2e-2
byte_s: 5.0e-9
shared_overhead_s: 1.9e-4
wake_s: 1.1e-4
memory_bandwidth: 1.0e+9
flops: 3.8e+9
levels:
  - {name: network, size: 0, latency_s: 1.2e-3, bandwidth: 1.14e+8, port_bandwidth: 1.14e+8}
"""


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_ranks_that_share_cores_take_few_head_chunks(seq_len, tmp_path):
    """Heads over all ranks with as many KV heads as query heads, which sends less than a grid. With four query heads
    to a KV head, keys are gathered at the shorter length, and never all heads exchanged."""
    (tmp_path / "emulated.yaml").write_text(EMULATED)
    call = dict(topology=load_topology(tmp_path / "emulated.yaml"), seq_len=seq_len, bytes_per_word=4)
    mha, gqa = (training(4, Shape(8, h_kv, 64, 64), **call) for h_kv in (8, 2))
    for chosen in (mha.forward, mha.backward):
        assert (chosen.ulysses_size, chosen.head_chunks) == (4, 1), str(chosen)
    for chosen in (gqa.forward, gqa.backward):
        assert chosen.ulysses_size < 4 and chosen.head_chunks == 1, str(chosen)
        assert (chosen.ulysses_size, chosen.grid) == (1, (1, 4)) or seq_len > 2048, str(chosen)


@pytest.mark.parametrize("ranks", [8, 7])  # 4,096 ranks on nodes of 7 leave one for the last node: nothing is alike
def test_4096_ranks_are_planned_within_a_second(ranks):
    hosts = [n // ranks for n in range(4096)]
    start = time.process_time()
    training(4096, Shape(128, 128, 128, 128), DGX, hosts, seq_len=1 << 22)
    assert time.process_time() - start < 10  # usually 0.5 and 0.2; a slow machine is no reason to fail


def test_calls_without_a_backward_try_the_ring():
    """Also where the planner would not take it, on no network like this one."""
    plan_on = functools.partial(_plan_on, seq_len=1 << 12)
    for backward in (True, False):
        plans = alternatives(plan_on, load_topology("ethernet"), backward=backward)
        schedules = [plan.forward.schedule for plan in plans]
        assert schedules.count("ring") == (not backward) and schedules[0] != "ring"


def _plan_on(topology, seq_len):
    return training(4, GQA4, topology, range(4), seq_len=seq_len)
