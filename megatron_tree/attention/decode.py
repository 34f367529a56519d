"""Over a sharded KV cache: decoding of few replicated queries, one reduction per step; prefill of sharded queries."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec
from ..merge import StateReducer, merge_into, merge_sinks, pack_state, state_dtype, unpack_state
from ..plan import DecodePlan, Placement
from .decode_ring import decode_ring
from .head_shares import by_owner, gather_heads, own_heads, slice_of

EXPANDED = 4096  # latents whose keys and values exist at a time


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """A decode call that is checked and planned, for any tensors of these shapes.

    q [b, s_q, h, d] with the heads of all ranks; every rank's k, v [b, s_local, h_kv, d], or pages of them.
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
    head_dim_v: int
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
        shares, width = self.head_shares, self.head_dim_v + 1
        shape = (*self.rows, self.num_heads if shares is None else sum(shares), width)
        if self._merges_own:
            shape = (len(shares), max(shares), *self.rows, width)
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
        )

    def run(self, q, k, v, sinks, k_scale=None, v_scale=None) -> tuple[Tensor, Tensor]:
        """out [b, s_q, h, d_v] of q's dtype and lse [b, h, s_q], fp32, the same bits on every rank that has a head."""
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
            state = reduction.finish(by_owner(state, shares) if self._merges_own else state)
        if self._merges_own:
            state = own_heads(state, self.num_heads)
        elif shares is not None:
            state = state[:, :, slice_of(shares, comm.group_rank(group))]
        out, lse = state[..., :-1], state[..., -1].transpose(1, 2)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
        return out.to(self.dtype), lse

    def _all_heads(self, q: Tensor) -> Tensor:
        if self.head_shares is None:
            return q
        return gather_heads(q, self.head_shares, self.group, transport=self.transport, timeout_s=self.timeout_s)


def prefill(
    q, k, v, sinks, *, q_segments, k_segments, num_queries: list[int], spec: AttnSpec, group, transport: str,
    wire: torch.dtype, backend: kernels.Backend, timeout_s: float, expand: Callable | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of sharded queries over sharded keys by the tree alone, for any number of keys.

    All ranks' queries are gathered, each rank attends with its own keys, and the partial states are reduced so that
    every rank ends with those of its own queries. The traffic grows with the queries, not with the cache.

    Args: q [b, n, h, d] of this rank, num_queries[r] = n of rank r; k, v [b, s_local, h_kv, d]; q_segments the rows
    of all queries, rank by rank, each rank's padded to the longest; k_segments this rank's keys. expand: see `_attend`.
    Returns out [b, n, h, d_v] and lse [b, h, n], fp32.
    """
    n, longest = q.shape[1], max(num_queries)
    team = _team(group, transport, timeout_s)
    if team.size > 1:
        padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, longest - n)).transpose(0, 1)
        q = comm.start_gather(padded.contiguous(), team).wait().transpose(0, 1)
    out, lse = _attend(backend, q, k, v, expand, q_segments=q_segments, k_segments=k_segments, spec=spec)
    if team.size > 1:
        packed, dtype = pack_state(out, lse, wire).transpose(0, 1), state_dtype(q.dtype)
        state = comm.start_reduce_scatter(packed, team, StateReducer(wire, dtype)).wait()
        out, lse = unpack_state(state.transpose(0, 1)[:, :n], dtype)
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


def prefill_gathered(
    q, k, v, sinks, *, q_segments, k_segments: list[list], spec: AttnSpec, group, transport: str,
    backend: kernels.Backend, timeout_s: float, expand: Callable | None = None, latent: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`prefill` while keys are few: all ranks' keys are gathered, and nothing is left to be merged.

    Args: k_segments[r] rank r's keys; q_segments this rank's queries. expand: see `_attend`. latent: k holds v.
    """
    longest = max(sum(segment.length for segment in segments) for segments in k_segments)
    team = _team(group, transport, timeout_s)
    d = k.shape[-1]
    if team.size > 1:
        both = k if latent else torch.cat((k, v), -1)
        both = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, longest - k.shape[1]))
        both = comm.start_gather(both.transpose(0, 1).contiguous(), team).wait().transpose(0, 1)
        k = both[..., :d]
        v = v if expand else both[..., : v.shape[-1]] if latent else both[..., d:]
    segments = [s._replace(row=s.row + r * longest) for r, own in enumerate(k_segments) for s in own]
    out, lse = _attend(backend, q, k, v, expand, q_segments=q_segments, k_segments=segments, spec=spec)
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


def prefill_of_heads(
    q, k, v, sinks, *, head_shares: tuple[int, ...], q_segments, k_segments, spec: AttnSpec, group, transport: str,
    wire: torch.dtype, backend: kernels.Backend, timeout_s: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`prefill` of queries whose heads are sharded, not their tokens: q [b, n, h_local or h, d] of all n tokens.

    The heads are gathered, and the partial states reduced so that every rank ends with those of its own heads.
    """
    num_heads, team = head_shares[comm.group_rank(group)], _team(group, transport, timeout_s)
    q = gather_heads(q, head_shares, group, transport=transport, timeout_s=timeout_s)
    out, lse = backend.attn_fwd(q, k, v, q_segments=q_segments, k_segments=k_segments, spec=spec)
    if team.size > 1:
        packed, dtype = by_owner(pack_state(out, lse, wire), head_shares).flatten(0, 1), state_dtype(q.dtype)
        state = comm.start_reduce_scatter(packed, team, StateReducer(wire, dtype)).wait()
        out, lse = unpack_state(own_heads(state, num_heads), dtype)
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


def _attend(
    backend: kernels.Backend, q, k, v, expand: Callable | None, *, q_segments, k_segments, spec: AttnSpec
) -> tuple[Tensor, Tensor]:
    """`Backend.attn_fwd`; with expand over the keys and values that it makes of k [b, s, 1, any], a part at a time."""
    options = dict(q_segments=q_segments, spec=spec)
    if expand is None:
        return backend.attn_fwd(q, k, v, k_segments=k_segments, **options)
    state = None
    for segments in _parts(k_segments):
        keys, values = expand(torch.cat([k[:, s.row : s.row + s.length] for s in segments] or [k[:, :0]], 1))
        ends = itertools.accumulate(s.length for s in segments)
        segments = [s._replace(row=end - s.length) for s, end in zip(segments, ends)]
        out, lse = backend.attn_fwd(q, keys, values, k_segments=segments, **options)
        if state is None:
            state = out.to(state_dtype(q.dtype)), lse
        else:
            merge_into(state, (out, lse))
    return state


def _parts(segments: list) -> list[list]:
    """Segments in lists of at most EXPANDED rows, at least one list."""
    pieces = [
        s._replace(row=s.row + i, pos=s.pos + i, length=min(EXPANDED, s.length - i))
        for s in segments
        for i in range(0, s.length, EXPANDED)
    ]
    parts, room = [[]], EXPANDED
    for piece in pieces:
        if piece.length > room:
            parts.append([])
            room = EXPANDED
        parts[-1].append(piece)
        room -= piece.length
    return parts


def _team(group, transport: str, timeout_s: float) -> comm.Team:
    return comm.Team.flat(group, transport=transport, timeout_s=timeout_s)
