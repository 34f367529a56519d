"""The predicted cost of the cast: every rank is sent only the keys that its queries can see."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ..layout import Sharding, by_document, visible_rows
from ..spec import MaskBounds
from .arrangement import Arrangement, HeadSplit
from .cost import Phase, PlacedTopology, Stage, spread
from .plans import Cost, PassPlan
from .sizes import CallSizes
from .training import exchange_buffers, exchanges, packing_seconds, seconds_of_pass


class Mask(NamedTuple):
    """Which keys a query sees, and who holds them."""

    bounds: MaskBounds
    queries: Sharding
    keys: Sharding


class Flow(NamedTuple):
    """What one position sends and receives: rows and messages by level."""

    sent: Counter
    messages: Counter
    received: int
    returned: Counter
    """Rows whose gradients it sends back."""


@lru_cache(maxsize=256)
def flows(placed: PlacedTopology, arrangement: Arrangement, mask: Mask) -> tuple[tuple[int, Flow], ...]:
    """(position, its flow) of some positions."""
    order = placed.placement.order

    def segments(x: int) -> tuple:
        holder = tuple(order[y] for y in arrangement.holder_of(x))
        queries = by_document(mask.queries.segments(holder))
        return queries, queries if mask.keys == mask.queries else by_document(mask.keys.segments(holder))

    by_position, held = [], {}
    for x in spread(placed.world):  # who sends what differs even where all ranks have the same links
        places = arrangement.places_of(x)
        held |= {y: segments(y) for y in places if y not in held}
        sent, messages, returned = Counter(), Counter(), Counter()
        for y in (y for y in places if y != x):
            level = placed.level(x, y)
            to, back = (
                sum(s.length for s in visible_rows(held[q][0], held[k][1], mask.bounds)) for q, k in ((y, x), (x, y))
            )
            sent[level] += to
            returned[level] += back
            messages[level] += to > 0
        by_position.append((x, Flow(sent, messages, sum(returned.values()), returned)))
    return tuple(by_position)


def cast_plan(
    placed: PlacedTopology,
    sizes: CallSizes,
    arrangement: Arrangement,
    split: HeadSplit,
    chunks: int,
    backward: bool,
    mask: Mask,
) -> PassPlan:
    """One pass of the cast, pipelined over head chunks."""
    u = arrangement.u
    sizes = sizes.split(split) if u > 1 else sizes
    rows = max(1, mask.keys.rows)
    row_bytes = sizes.kv / u / rows  # of a KV row, with the heads of this rank
    compute = sizes.seconds(placed.topology, backward)
    local_s = compute / (arrangement.grid[0] * arrangement.grid[1])
    sent, probes, most = [0.0] * len(placed.topology.levels), [], 0
    by_position = flows(placed, arrangement, mask)
    part = 1 / len(by_position)
    for x, flow in by_position:
        there, home = exchanges(placed, arrangement, sizes, chunks, backward, x, sent, part)
        casts = []
        for moved in (flow.sent, flow.returned if backward else Counter()):
            phases = [
                Phase(i, flow.messages[i], n * row_bytes / chunks, placed.behind(x, i)) for i, n in moved.items() if n
            ]
            casts.append([_cast_stage(placed, phases)] if phases else [])
            for i, n in moved.items():
                sent[i] += part * n * row_bytes
        probes.append([there, casts[0], casts[1], home])
        most = max(most, flow.received)
    beside = 0.0
    if not placed.direct:
        merged = dict(merged=most > 0, merged_keys=most / rows)
        beside = sizes.beside_products(placed.topology, backward, calls=1 + (most > 0), **merged)
    rest_s = (compute - local_s + beside) / chunks + placed.topology.chunk_s
    alive = min(chunks, 2) / chunks
    buffers = most * row_bytes * (alive * (2 if backward else 1) + (sizes.widening / chunks if backward else 0))
    packing = packing_seconds(placed, sizes, chunks, backward) if u > 1 else 0.0
    cost = Cost(
        time_s=seconds_of_pass(probes, chunks, local_s, rest_s, together=u == 1, packing=packing),
        compute_s=compute,
        bytes_per_level=tuple(sent),
        steps=chunks * (1 + backward + 2 * (u > 1)),
        peak_bytes=round(buffers + (exchange_buffers(sizes, chunks, backward) if u > 1 else 0)),
    )
    return PassPlan(schedule="cast", arrangement=arrangement, head_chunks=chunks, cost=cost)


def _cast_stage(placed: PlacedTopology, phases: list[Phase]) -> Stage:
    """A built-in exchange takes the stream of gathers."""
    if placed.direct:
        return placed.stage(phases, posted=False)
    busy = placed.busy(phases, 1, posted=False)
    return Stage(busy | {"gather": max(busy.values())})
