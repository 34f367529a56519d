"""The plan of a scan of affine maps: the bytes of both schedules, and which one is chosen."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_tree import tree_scan
from megatron_tree.core.comm import record
from megatron_tree.core.plan import default_topology, load_topology, place, plan_scan
from megatron_tree.core.plan.cost import placed_topology
from megatron_tree.core.plan.scan import ScanSizes, scans
from support.ranks import run_distributed

DGX, ETHERNET = default_topology("nccl"), default_topology("gloo")
MATRIX = dict(map_numbers=128 * 128, state_numbers=128 * 128)


def found(hosts, sizes, topology=ETHERNET):
    hosts = list(hosts)
    return {c.schedule: c.cost for c in scans(placed_topology(topology, place(topology, hosts)), sizes)}


def chosen(hosts, topology=ETHERNET, **sizes):
    hosts = list(hosts)
    options = {"segments": 2, "rows": 32, **MATRIX, **sizes}
    return plan_scan(len(hosts), topology=topology, placement=place(topology, hosts), **options)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("map_numbers", [128 * 128, 128, 1])
@pytest.mark.parametrize("with_final", [False, True])
@pytest.mark.parametrize("topology", [ETHERNET, DGX], ids=lambda t: t.name)
def test_bytes(world, map_numbers, with_final, topology):
    """Whole maps to all, or 1/p of their rows to each and as many initial states back; one or two rounds."""
    n, rows, state, share = 2, 24, 128 * 64, 24 // world
    cost = found(range(world), ScanSizes(n, rows, map_numbers, state, with_final), topology)
    whole, parts = cost["gather"], cost["exchange"]
    assert whole.bytes == pytest.approx((world - 1) * n * rows * (map_numbers + state) * 4) and whole.steps == 1
    each = n * (map_numbers + 2 * state) + with_final * state
    assert parts.bytes == pytest.approx((world - 1) * share * each * 4) and parts.steps == 2
    assert whole.peak_bytes == world * n * rows * (map_numbers + state) * 4
    assert parts.peak_bytes == world * share * each * 4
    assert parts.compute_s == pytest.approx(whole.compute_s / world)


def _sent(rank, world, schedule):
    update = torch.randn(1, 2, 3, 4, 5)  # 6 rows of 4 x 5 numbers
    with record() as log:
        tree_scan(
            torch.randn(1, 2, 3, 4),
            update,
            cp_group=dist.group.WORLD,
            layout="contiguous",
            schedule=schedule,
            return_final_state=True,
        )
    return sum(entry.bytes for entry in log if entry.op == "all_to_all")


@pytest.mark.parametrize("schedule", ["gather", "exchange"])
def test_bytes_are_those_of_a_scan(schedule):
    """The mean over four ranks, of which two scan one row and two two; but for the initial state of the first segment,
    which nobody sends: that of five rows that other ranks scan."""
    sent = run_distributed(_sent, 4, schedule)
    predicted = found([0] * 4, ScanSizes(1, 6, 4, 20, True))[schedule].bytes
    assert sum(sent) == pytest.approx(4 * predicted - (5 * 20 * 4 if schedule == "exchange" else 0))


def test_rows_that_ranks_cannot_share_evenly():
    """5 rows over 4 ranks: one has two, and 5/4 is the mean."""
    sizes = ScanSizes(1, 5, 1, 100)
    cost = found(range(4), sizes)["exchange"]
    assert cost.bytes == pytest.approx(3 * 5 / 4 * (1 + 2 * 100) * 4)
    assert cost.peak_bytes == 4 * 2 * (1 + 2 * 100) * 4
    assert found(range(4), sizes._replace(bytes_per_word=8))["exchange"].bytes == pytest.approx(2 * cost.bytes)


def test_the_choice():
    """Few small maps: one round. Many rows: the fewer bytes and products."""
    small = dict(rows=4, map_numbers=1, state_numbers=256)
    for hosts, topology in (([0] * 8, DGX), ([0] * 8, ETHERNET), ([0, 0, 1, 1], ETHERNET)):
        assert chosen(hosts, topology, **small) == "gather"
        assert chosen(hosts, topology, rows=512) == "exchange"
    assert chosen([n // 8 for n in range(64)], DGX) == "exchange"
    assert chosen([0]) == "gather"


@pytest.mark.parametrize("topology", ["laptop", "dgx_h100", "gb200_nvl72", "ethernet"])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 16, 1024])
def test_the_faster_one_is_taken(topology, world, rows):
    topology = load_topology(topology)
    for map_numbers in (1, 128, 128 * 128):
        sizes = ScanSizes(2, rows, map_numbers, 128 * 128, True)
        times = {name: cost.time_s for name, cost in found([0] * world, sizes, topology).items()}
        assert times[chosen([0] * world, topology, **sizes._asdict())] <= 1.01 * min(times.values())


def test_one_rank_sends_nothing():
    for cost in found([0], ScanSizes(2, 8, 1, 16)).values():
        assert cost.bytes == cost.steps == cost.peak_bytes == 0 and cost.time_s == cost.compute_s


def test_shared_memory():
    """A round through shared memory replaces the messages; the bytes are the same."""
    shm, sizes = dataclasses.replace(ETHERNET, transport="shm"), ScanSizes(2, 4, 1, 256)
    for name, cost in found([0] * 4, sizes, shm).items():
        of_messages = found([0] * 4, sizes)[name]
        assert cost.time_s < of_messages.time_s and cost.bytes == of_messages.bytes


def test_the_memory_budget():
    sizes = ScanSizes(2, 4, 1, 256)
    cost = found([0] * 8, sizes)
    assert cost["exchange"].peak_bytes < cost["gather"].peak_bytes
    options = sizes._asdict() | {"memory_budget": cost["exchange"].peak_bytes}
    assert chosen([0] * 8, **options) == "exchange"
    with pytest.raises(ValueError, match=r"memory_budget=10 bytes is too small .* of the scan of states: .* needs is"):
        chosen([0] * 8, **options | {"memory_budget": 10})
    with pytest.raises(ValueError, match="world=4 but placement holds 2 ranks"):
        plan_scan(4, segments=1, rows=1, **MATRIX, topology=ETHERNET, placement=place(ETHERNET, [0, 1]))
