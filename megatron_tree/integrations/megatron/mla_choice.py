"""What travels between context-parallel ranks in multi-latent attention, latents or keys and values. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from ...plan import Shape, Topology, TrainingPlan, plan_training
from ...units import format_bytes, format_seconds


class Choice(NamedTuple):
    """Whether the latent travels, and why."""

    latent: bool
    latent_bytes: float
    """What a rank would send to others of its context-parallel group, forward and backward."""
    expanded_bytes: float
    """What it would send of queries, keys and values."""
    reason: str


def choose_latent(
    world: int,
    shape: Shape,
    latent_words: int,
    projection_flops: float,
    *,
    memory_budget: int | None = None,
    topology: Topology,
    **sizes,
) -> Choice:
    """Whether the latents travel: if that is predicted to be faster than tree attention over keys and values.

    Fewer bytes are sent, but every rank projects the tokens of all ranks, and nothing is hidden under compute: inside a
    node with fast links that does not pay. A pure function.

    Args:
        world: context-parallel ranks.
        shape: heads on this rank, and their sizes.
        latent_words: words a token of this rank's share that travel as latent and rotary part.
        projection_flops: of the projection of one share's latents to keys and values, forward.
        memory_budget: bytes that a rank may use; keys and values of the whole sequence must fit in, too.
        topology, sizes: batch, seq_len (of the whole sequence), bytes_per_word, placement, as of `plan_training`.
    """
    keys = _Predicted.of(plan_training(world, shape, memory_budget=memory_budget, topology=topology, **sizes))
    # latents go as one KV head of their size would: gathered forward and backward, their gradients reduced
    latents = _Predicted.of(
        plan_training(world, Shape(1, 1, latent_words, 0), grid=(1, world), topology=topology, **sizes)
    )
    # all shares forward, once more in the backward, and twice for the gradients, instead of the own one thrice
    projection = (4 * world - 3) * projection_flops / topology.flops
    time = latents.time_s - latents.compute_s + projection + keys.compute_s
    whole = sizes["batch"] * sizes["seq_len"] * sizes["bytes_per_word"]
    whole *= shape.num_heads_kv * (shape.head_dim + shape.head_dim_v) + latent_words
    fits = memory_budget is None or whole <= memory_budget
    reason = (
        f"latents {format_seconds(time)} and {format_bytes(latents.bytes)} sent by a rank forward and backward, "
        f"keys and values {format_seconds(keys.time_s)} and {format_bytes(keys.bytes)} (predicted for {topology.name})"
    )
    if not fits:
        reason += f"; all keys and values would take {format_bytes(whole)}, memory_budget={memory_budget}"
    return Choice(fits and time < keys.time_s, latents.bytes, keys.bytes, reason)


class _Predicted(NamedTuple):
    """Of a forward and backward."""

    time_s: float
    compute_s: float
    bytes: float

    @classmethod
    def of(cls, plan: TrainingPlan) -> _Predicted:
        costs = plan.forward.cost, plan.backward.cost
        return cls(*(sum(getattr(cost, name) for cost in costs) for name in cls._fields))
