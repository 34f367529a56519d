"""The layout of split weights, where the planner decides what the user leaves open; the same on all ranks."""

from __future__ import annotations

import torch

from .... import comm
from ....config import TreeConfig
from ....plan import place
from ....plan.cost import placed_topology
from ....plan.weights import repeats_queries, splits_latents
from .split_rules import plan_layout
from .weight_layout import WeightLayout


def choose_layout(
    layout: WeightLayout,
    model,
    group,
    *,
    queries: str = "split",
    split_latents: bool | None = None,
    device: torch.device,
    dtype: torch.dtype,
    config: TreeConfig,
) -> WeightLayout:
    """The layout of a model's weights over all ranks of `group`. Collective.

    layout: from `plan_layout` with repeat_queries=(queries == "repeated"). queries, split_latents: see
    `init_inference`; "auto" and None let the planner predict which is faster.
    """
    repeats, ranks = layout.repeats_queries, comm.Ranks.of(group, device, config)
    if queries == "auto" or (split_latents is None and layout.latents):
        with ranks.call("init_inference") as call:
            options = {"queries": queries, "split_latents": split_latents, "dtype": dtype, "config": config}
            call.agree(**options, topology=ranks.fingerprint)
            network = ranks.network_of_memory
    if queries == "auto" and layout.heads.size > 1 and not layout.gates_queries:
        hosts = ranks.hosts[: layout.heads.size]  # all decide by the first group
        placed = placed_topology(network.topology, place(network.topology, hosts))
        repeats = repeats_queries(placed, layout.query_projection, dtype.itemsize)
    if split_latents is None and layout.world > 1 and layout.latents:
        sizes = [(layout.whole_shapes[f"{name}.weight"].numel(), layout.gathered[name]) for name in layout.latents]
        split_latents = splits_latents(placed_topology(*network), sizes, dtype.itemsize)
    if split_latents is not False and repeats == layout.repeats_queries:
        return layout
    split = split_latents is not False
    return plan_layout(model, layout.world, layout.rank, split_latents=split, repeat_queries=repeats)
