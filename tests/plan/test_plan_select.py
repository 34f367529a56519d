"""plan_select: bytes follow the formula; lists for few queries, counts for many."""

import math

import pytest

from megatron_tree.core.config import SELECT_SCHEDULES
from megatron_tree.core.plan import load_topology, place, plan_select
from megatron_tree.core.plan.decode import COUNT_BITS


def plan(world, rows, topk=2048, name="dgx_h100", per_host=8, **options):
    hosts = [rank // per_host for rank in range(world)]
    topology = load_topology(name)
    return plan_select(world, rows=rows, topk=topk, topology=topology, placement=place(topology, hosts), **options)


def test_lists_for_few_queries_and_counts_for_many():
    for world in (8, 64):
        chosen = [plan(world, rows)[0].schedule for rows in (1, 4, 1 << 12)]
        assert "counts" not in chosen[:2] and chosen[2] == "counts", (world, chosen)


@pytest.mark.parametrize("world", [1, 2, 8, 64])
def test_every_schedule(world):
    for schedule in SELECT_SCHEDULES:
        best, reason = plan(world, 16, schedule=schedule)
        assert schedule in ("auto", best.schedule) and str(best) in reason and "predicted for" in reason
        assert (best.schedule == "counts") == (best.bits in COUNT_BITS)
        assert world > 1 or best.cost.bytes == 0


def test_bytes_of_one_query():
    """DeepSeek-V3.2's 2,048 keys over 8 ranks: 16 KiB a list."""
    sent = {schedule: plan(8, 1, schedule=schedule)[0].cost.bytes for schedule in ("allgather", "butterfly")}
    assert sent == {"allgather": 7 * 16384, "butterfly": 3 * 16384}
    best, _ = plan(8, 512, schedule="counts")
    rounds, size = math.ceil(32 / best.bits), 512 * 4 * 2**best.bits
    assert best.cost.bytes == pytest.approx(rounds * 2 * 7 / 8 * size, rel=0.01)


def test_refusals():
    with pytest.raises(ValueError, match="schedule='ring' is unknown"):
        plan(8, 1, schedule="ring")
    with pytest.raises(ValueError, match="selection of keys"):
        plan(8, 1, memory_budget=100)
