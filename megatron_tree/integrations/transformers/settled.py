"""What the user leaves open about sharded weights: the planner decides, on all ranks alike."""

from __future__ import annotations

import torch

from ... import comm
from ...attention.topology import GroupTopology
from ...config import TreeConfig
from ...plan import place
from ...plan.cost import placed_topology
from ...plan.step import repeats_queries, splits_latents
from .pieces import plan_pieces
from .rank_layout import Layout


def settled(
    layout: Layout,
    model,
    group,
    *,
    queries: str = "split",
    split_latents: bool | None = None,
    device: torch.device,
    dtype: torch.dtype,
    config: TreeConfig,
) -> Layout:
    """The layout of a model's weights over all ranks of `group`, with nothing left open. Collective.

    Args: layout: from `plan_pieces` with queries == "repeated"; queries, split_latents: see `init_inference`.
    """
    repeats, network = layout.repeats_queries, (layout, group, device, dtype, config)
    if queries == "auto" and layout.heads.size > 1:
        repeats = _repeats_queries(*network)
    if split_latents is None:
        split_latents = layout.world == 1 or not layout.gathered or _splits_latents(*network)
    if split_latents and repeats == layout.repeats_queries:
        return layout
    return plan_pieces(model, layout.world, layout.rank, split_latents=split_latents, repeat_queries=repeats)


def _splits_latents(layout: Layout, group, device, dtype: torch.dtype, config: TreeConfig) -> bool:
    """Whether the planner predicts that steps are faster if latent attention's projections are split."""
    net = GroupTopology.over_cache(group, device, config)
    placed = placed_topology(net.topology, net.placement)
    return splits_latents(placed, layout.latent_projections, dtype.itemsize)


def _repeats_queries(layout: Layout, group, device, dtype: torch.dtype, config: TreeConfig) -> bool:
    """Whether the planner predicts that steps are faster if queries are repeated in a head group."""
    topology = GroupTopology.over_cache(group, device, config).topology
    hosts = comm.hosts(group, timeout_s=config.timeout_s)
    placed = placed_topology(topology, place(topology, hosts[: layout.heads.size]))  # all decide by the first group
    return repeats_queries(placed, layout.query_projection, dtype.itemsize)
