"""How the ranks scan affine maps S -> M S + U for the initial states of their segments: whole maps, or parts of them.

- "gather": every rank gets the maps of all segments, and applies those before its own.
- "exchange": an all-to-all hands each rank 1/p of the rows of all maps, which it applies in order; another returns the
  initial states of each rank's segments, and the final state.

Of n segments, b * h rows and words of B bytes a rank sends

    gather      (p - 1) n rows (|M| + |U|) B
    exchange    (p - 1) / p rows (n (|M| + 2 |U|) + |U| for the final state) B

bytes, which do not depend on the sequence's length; less the initial state of the first segment, and the map of the
last if the final state is not wanted. The backward scans gradients in the other direction, alike.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import NamedTuple

from .choice import choose
from .cost import PlacedTopology, placed_topology
from .decode import Rounds, add_exchange, add_gather
from .plans import Cost, ReductionPlan
from .topology import Placement, Topology


class ScanSizes(NamedTuple):
    """What one scan moves."""

    segments: int
    """Of the rank that has most."""
    rows: int
    """Maps of a segment: b * h."""
    map_numbers: int
    """|M|: d * d, d or 1."""
    state_numbers: int
    """|U| = d * d_v."""
    with_final: bool = False
    """Whether every rank needs the final state, too."""
    bytes_per_word: int = 4

    def seconds(self, topology: Topology, rows: int, segments: int) -> float:
        """Of applying the maps of so many segments in so many rows: reading them, or multiplying matrices."""
        read = rows * segments * (self.map_numbers + self.state_numbers) * self.bytes_per_word
        products = 2 * rows * segments * self.state_numbers * isqrt(self.map_numbers)
        return max(read / topology.memory_bandwidth, products / topology.flops)


@lru_cache(maxsize=1024)
def plan_scan(
    world: int,
    *,
    segments: int,
    rows: int,
    map_numbers: int,
    state_numbers: int,
    with_final: bool = False,
    bytes_per_word: int = 4,
    topology: Topology,
    placement: Placement,
    memory_budget: int | None = None,
) -> str:
    """The schedule of a scan over `world` ranks, "gather" or "exchange"; arguments as of `ScanSizes`.

    Args:
        topology, placement: the machine, and the group's ranks in it.
        memory_budget: limit in bytes of a rank's communication buffers; None: no limit.

    Raises: ValueError if neither schedule fits the budget, or if `placement` is of another group.
    """
    if world != len(placement.order):
        raise ValueError(f"world={world} but placement holds {len(placement.order)} ranks: place() the group itself")
    sizes = ScanSizes(segments, rows, map_numbers, state_numbers, with_final, bytes_per_word)
    placed = placed_topology(topology, placement)
    return choose(scans(placed, sizes), placed, memory_budget, "scan of states").schedule


def scans(placed: PlacedTopology, sizes: ScanSizes) -> list[ReductionPlan]:
    """Both schedules with their predicted cost, the simpler one first."""
    p, n, word = placed.world, sizes.segments, sizes.bytes_per_word
    one_map = (sizes.map_numbers + sizes.state_numbers) * word
    share = -(-sizes.rows // p)  # of the busiest rank
    returned = share * (n + sizes.with_final) * sizes.state_numbers * word
    mean = sizes.rows / (p * share)

    whole, parts = Rounds(placed), Rounds(placed)
    if p > 1:
        add_gather(whole, n * sizes.rows * one_map)
        add_exchange(parts, n * share * one_map)
        add_exchange(parts, returned)
    costs = []
    for schedule, rounds, rows, held, part in (
        ("gather", whole, sizes.rows, n * sizes.rows * one_map, 1.0),
        ("exchange", parts, share, n * share * one_map + returned, mean),
    ):
        compute = sizes.seconds(placed.topology, rows, p * n)
        cost = Cost(
            time_s=compute + rounds.time,
            compute_s=compute,
            bytes_per_level=tuple(part * sent for sent in rounds.sent),
            steps=rounds.steps,
            peak_bytes=p * held if p > 1 else 0,
        )
        costs.append(ReductionPlan(schedule=schedule, across="direct", cost=cost))
    return costs
