"""Plans of simulated clusters: what the parts of `bench simulate` share."""

from __future__ import annotations

import functools

from ..plan import Placement, Shape, Topology, TrainingPlan, place, plan_training
from ..plan.plans import rival_names

BYTES_PER_WORD = 2  # bf16
SHAPES = {"MHA": Shape(32, 32, 128, 128), "GQA 4:1": Shape(32, 8, 128, 128), "GQA 8:1": Shape(64, 8, 128, 128)}


@functools.lru_cache
def placed(topology: Topology, ranks: int, ranks_per_node: int | None = None) -> Placement:
    """Ranks on nodes of ranks_per_node each; default: as many as the topology's hosts hold."""
    return place(topology, [n // (ranks_per_node or topology.host_size) for n in range(ranks)])


def training(
    topology: Topology,
    ranks: int,
    shape: Shape,
    seq_len: int,
    schedule: str = "auto",
    *,
    causal: bool = True,
    ranks_per_node: int | None = None,
    ulysses_size: int | None = None,
) -> TrainingPlan:
    """The plan of one attention in bf16; schedule: also "kv_gather" and "pure_tree"."""
    grid = {"kv_gather": (1, ranks), "pure_tree": (ranks, 1)}.get(schedule)
    return plan_training(
        ranks,
        shape,
        batch=1,
        seq_len=seq_len,
        bytes_per_word=BYTES_PER_WORD,
        causal=causal,
        topology=topology,
        placement=placed(topology, ranks, ranks_per_node),
        schedule="grid" if grid else schedule,
        grid=grid,
        ulysses_size=ulysses_size,
    )


def rival_seconds(plan: TrainingPlan, rival: str) -> float | None:
    """Seconds of forward and backward by the fastest schedule of this name; None where there is none.

    Both passes exchange heads over the same ranks.
    """
    least: list[dict] = [{}, {}]
    for by_heads, candidates in zip(least, plan.candidates):
        for candidate in candidates:  # the fastest first
            if rival in rival_names(candidate):
                by_heads.setdefault(candidate.arrangement.heads, candidate.cost.time_s)
    return min((least[0][heads] + least[1][heads] for heads in least[0].keys() & least[1].keys()), default=None)


def tokens_text(n: int) -> str:
    """1M, 32k."""
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k"
