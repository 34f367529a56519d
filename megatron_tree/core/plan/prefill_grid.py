"""The grid on which a chunk of a prompt attends to a sharded cache.

Of p ranks in a x b, each has 1/p of the chunk's queries and of the sequence's visible keys. With x bytes of the
chunk's q, out and lse and y bytes of the sequence's keys and values, a rank sends ((a - 1) x + (b - 1) y) / p.
"""

from __future__ import annotations

from functools import lru_cache

from .choice import MAX_HEAD_CHUNKS, choose, choose_head_chunks
from .cost import placed_topology
from .plans import STATISTIC, Arrangement, CallSizes, HeadSplit, PassPlan, grids, inner_grids
from .topology import Placement, Topology
from .training import grid_plan

_NO_HEADS = (1, 1)  # exchanged


def chunk_sizes(
    world: int,
    num_queries: int,
    num_keys: int,
    *,
    num_heads: int,
    head_dims: tuple[int, int],
    key_numbers: int,
    bytes_per_word: int,
    sends_queries: bool = True,
) -> CallSizes:
    """What a chunk over a cache moves and computes, on each of `world` ranks.

    Args:
        num_queries, num_keys: tokens of the chunk, and of the sequence that they see, on all ranks together.
        num_heads: query heads of all ranks. head_dims: (d, d_v) of q and of out.
        key_numbers: numbers of a token's keys and values as they travel.
        sends_queries: False where every rank has the queries of all heads.
    """
    vectors, (d, d_v) = num_queries * num_heads / world, head_dims
    return CallSizes(
        q=vectors * d * bytes_per_word * sends_queries,
        o=vectors * d_v * bytes_per_word,
        statistic=vectors * max(STATISTIC, bytes_per_word),
        kv=num_keys * key_numbers * bytes_per_word / world,
        flops=2 * vectors * num_keys * (d + d_v),
        widening=max(1.0, 4 / bytes_per_word),
    )


@lru_cache(maxsize=1024)
def plan_prefill_grid(
    sizes: tuple[CallSizes | None, ...], *, num_heads_kv: int = 1, topology: Topology, placement: Placement
) -> PassPlan:
    """The grid of a chunk, its nesting and its head chunks, chosen as by `plan_training`.

    Ranks that share memory gather through it only if all of them do: there p x 1 or 1 x p is taken, whichever sends
    fewer bytes, unless another grid is the only one.

    Args:
        sizes: of the chunk on each grid of `grids(world)`, in this order; None: it can't run on this one.
        num_heads_kv: KV heads that may be gathered in chunks.
        topology, placement: the machine, and the group's ranks in it.
    """
    placed, split = placed_topology(topology, placement), HeadSplit.of(1, 1, 1)
    allowed = [(grid, size) for grid, size in zip(grids(placed.world), sizes, strict=True) if size is not None]

    def plan(arrangement: Arrangement, size: CallSizes, chunks: int = 1) -> PassPlan:
        return grid_plan(placed, size, arrangement, split, chunks, backward=False, local_first=False)

    if placed.shared:
        ends = [(grid, size) for grid, size in allowed if 1 in grid] or allowed
        flat = [plan(Arrangement(_NO_HEADS, grid, (1, 1), 1), size) for grid, size in ends]
        return min(flat, key=lambda candidate: candidate.cost.bytes)
    size_of = dict(allowed)
    nested = [Arrangement(_NO_HEADS, g, inner, placed.block) for g in size_of for inner in inner_grids(g, placed.block)]
    best = choose([plan(arrangement, size_of[arrangement.grid]) for arrangement in nested], placed, None, "prefill")
    chunks = [n for n in range(2, MAX_HEAD_CHUNKS + 1) if num_heads_kv % n == 0] if placed.world > 1 else []
    return choose_head_chunks([best, *(plan(best.arrangement, size_of[best.grid], n) for n in chunks)], None)
