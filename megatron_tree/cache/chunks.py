"""On which grid a chunk of a prompt attends to the cache, and whether keys are made of latents there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.prefill_cell import why_not
from ..attention.topology import GroupTopology
from ..kernels import ACCELERATORS
from ..plan import chunk_sizes, grids, plan_prefill_grid
from .latent import LatentHeads
from .pages import LayerPages


class ChunkPlan(NamedTuple):
    """How the ranks attend to one layer."""

    grid: tuple[int, int]
    expands: bool
    """Keys and values are made of latents."""

    @property
    def gathers_keys(self) -> bool:
        """Whether a rank needs to know the keys of others."""
        return self.grid[1] > 1


def plan_chunk(
    q: Tensor,
    pages: LayerPages,
    latent: LatentHeads | None,
    *,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    shares_heads: bool,
    net: GroupTopology,
) -> ChunkPlan:
    """The plan of a chunk: the same on all ranks.

    Args:
        q: [b, n, h, d], this rank's queries. pages: the layer's. latent: how heads read it if it holds latents.
        num_queries, num_keys: tokens of the chunk, and of the row that they see. num_heads: query heads of all ranks.
        shares_heads: the queries' heads are sharded, not their tokens.
    """
    num_heads_kv, world, sizes, expands = pages.k.shape[2], len(net.placement.order), [], {}
    numbers = sum(x[0, 0].numel() for x in (pages.k, pages.v) if x is not None)  # of a token
    for a, b in grids(world):
        # queries that meet a key on a rank; where heads are sharded, a rank can make keys of its own heads only
        meeting = num_queries // b if not shares_heads else num_queries if a == 1 else 1
        expands[a, b] = latent is not None and _makes_keys(latent, meeting, q.device)
        if latent is None:
            head_dims = q.shape[-1], numbers // num_heads_kv - q.shape[-1]
        else:
            head_dims = (q.shape[-1], latent.head_dim_v) if expands[a, b] else (numbers, latent.rank)
        size = chunk_sizes(
            world,
            num_queries,
            num_keys,
            num_heads=num_heads,
            head_dims=head_dims,
            key_numbers=numbers,
            bytes_per_word=q.element_size(),
            sends_queries=not shares_heads or q.shape[2] < num_heads,
        )
        refused = why_not((a, b), shares_heads=shares_heads, num_heads_kv=num_heads_kv, expands=expands[a, b])
        sizes.append(None if refused else size)
    plan = plan_prefill_grid(tuple(sizes), topology=net.topology, placement=net.placement)
    return ChunkPlan(plan.grid, expands[plan.grid])


def _makes_keys(latent: LatentHeads, num_queries: int, device: torch.device) -> bool:
    """Whether keys and values are made that num_queries queries meet.

    Accelerators always do: their kernels for prefill take heads of 256 numbers at most.
    """
    return device.type in ACCELERATORS or latent.pays_to_expand(num_queries)
