"""Decoding over a sharded KV cache: a few replicated queries, one reduction per step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec
from ..merge import merge_sinks, state_dtype
from ..plan import DecodePlan, Placement
from .decode_ring import decode_ring
from .head_shares import gather_heads, slice_of


def project(out: Tensor, projection: Tensor) -> Tensor:
    """out [b, s, h, d_v] with the matrix of every head, [h, d, d_v], applied: [b, s, h, d]."""
    return torch.einsum("bshv,hdv->bshd", out, projection)


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """A decode call that is checked and planned, for any tensors of these shapes.

    q [b, s_q, h, d] with the heads of all ranks; every rank's k, v [b, s_local, h_kv, d], or pages of them.
    The results may be projected, head by head. That is linear, so partial results can be, too: then the ranks merge
    what is projected, which may be narrower.
    """

    visible: kernels.Visible
    spec: AttnSpec
    group: object
    plan: DecodePlan
    transport: str
    placement: Placement
    backend: kernels.Backend
    timeout_s: float
    rows: tuple[int, int]
    """(b, s_q)."""
    num_heads: int
    """Of this rank, ..."""
    head_shares: tuple[int, ...] | None
    """... and of every rank, if there are several and each has some of q's heads; so has its result."""
    exchanges_queries: bool
    """How heads are gathered, see `comm.gather_rows`."""
    head_dim_v: int
    merged_dim: int
    """Numbers of a result that is merged: head_dim_v, or, if partial results are projected, what that gives."""
    latent: bool
    """v begins k."""
    dtype: torch.dtype
    device: torch.device
    block_table: Tensor | None
    shared: Sequence[kernels.SharedPages]

    @functools.cached_property
    def _merges_own(self) -> bool:
        """Whether each rank merges the results of its own heads only."""
        return self.head_shares is not None and self.plan.schedule == "scatter"

    @functools.cached_property
    def _reducer(self) -> comm.Reducer:
        shares, width = self.head_shares, self.merged_dim + 1
        shape = (*self.rows, self.num_heads if shares is None else sum(shares), width)
        if self._merges_own:
            shape = (sum(shares), *self.rows, width)
        return comm.prepare_reduction(
            shape,
            state_dtype(self.dtype),
            self.device,
            self.group,
            "own_share" if self._merges_own else self.plan.schedule,
            transport=self.transport,
            timeout_s=self.timeout_s,
            order=self.placement.order,
            block=self.placement.block,
            across=self.plan.across,
            shares=shares if self._merges_own else (),
        )

    def run(self, q, k, v, sinks, k_scale=None, v_scale=None, projection=None) -> tuple[Tensor, Tensor]:
        """out [b, s_q, h, d_v] of q's dtype and lse [b, h, s_q], fp32, the same bits on every rank that has a head.

        projection: see `DecodeStep.decode`.
        """
        shares, group, backend = self.head_shares, self.group, self.backend
        paged = None if self.block_table is None else kernels.PagedKV(self.block_table, k_scale, v_scale)
        if self.plan.schedule == "ring" and comm.group_size(group) > 1:
            q = self._all_heads(q)
            options = dict(group=group, order=self.placement.order, backend=backend, timeout_s=self.timeout_s)
            options.update(visible=self.visible, spec=self.spec, paged=paged, latent=self.latent)
            state = decode_ring(q, k, v, **options)
        else:
            # receives are posted before the local attention, so that gloo announces the buffers to the senders then
            reduction, q = self._reducer.start(), self._all_heads(q)
            state = backend.attn_decode(q, k, v, visible=self.visible, spec=self.spec, paged=paged, shared=self.shared)
            if self.merged_dim != self.head_dim_v:
                partial = project(state[..., : self.head_dim_v].to(self.dtype), projection)
                state, projection = torch.cat((partial, state[..., self.head_dim_v :]), -1), None
            state = reduction.finish(state.permute(2, 0, 1, 3) if self._merges_own else state)
        if self._merges_own:
            state = state.permute(1, 2, 0, 3)
        elif shares is not None:
            state = state[:, :, slice_of(shares, comm.group_rank(group))]
        out, lse = state.narrow(-1, 0, self.merged_dim), state.select(-1, self.merged_dim).transpose(1, 2)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
        out = out.to(self.dtype)
        if projection is not None:
            if len(projection) != self.num_heads:
                projection = projection[slice_of(shares, comm.group_rank(group))]
            out = project(out, projection)
        return out, lse

    def _all_heads(self, q: Tensor) -> Tensor:
        if self.head_shares is None:
            return q
        messages = {"transport": self.transport, "timeout_s": self.timeout_s, "exchanged": self.exchanges_queries}
        return gather_heads(q, self.head_shares, self.group, **messages)
