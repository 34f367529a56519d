"""Over a sharded KV cache: decoding of few replicated queries, one reduction per step; prefill of sharded queries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec
from ..merge import StateReducer, merge_into, merge_sinks, pack_state, state_dtype, unpack_state
from ..plan import Placement
from .decode_ring import decode_ring
from .head_shares import by_owner, gather_heads, own_heads, slice_of

EXPANDED = 4096  # latents whose keys and values exist at a time


def decode(
    q, k, v, sinks, *, visible: kernels.Visible, spec: AttnSpec, group, schedule: str, across: str, transport: str,
    placement: Placement, backend: kernels.Backend, timeout_s: float, paged: kernels.PagedKV | None = None,
    shared: Sequence[kernels.SharedPages] = (), head_shares: tuple[int, ...] | None = None, latent: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [b, s_q, h, d] over every rank's k, v [b, s_local, h_kv, d], or pages of them.

    head_shares: heads of every rank; q and the result are then of this rank's heads. latent: v begins k.
    Returns out [b, s_q, h, d_v] and lse [b, h, s_q], fp32, the same bits on every rank.
    """
    num_heads, world, messages = q.shape[2], comm.group_size(group), dict(transport=transport, timeout_s=timeout_s)
    head_shares = None if world == 1 else head_shares
    shape = (*q.shape[:2], num_heads if head_shares is None else sum(head_shares), v.shape[-1] + 1)
    keeps_own = head_shares is not None and schedule == "scatter"
    if keeps_own:
        schedule, shape = "own_share", (world, max(head_shares), *q.shape[:2], shape[-1])
    if schedule == "ring" and world > 1:
        q = q if head_shares is None else gather_heads(q, head_shares, group, **messages)
        options = dict(group=group, order=placement.order, backend=backend, timeout_s=timeout_s, paged=paged)
        options["latent"] = latent
        state = decode_ring(q, k, v, visible=visible, spec=spec, **options)
    else:
        # receives are posted before the local attention, so that gloo announces the buffers to the senders during it
        reduction = comm.start_reduction(
            shape,
            state_dtype(q.dtype),
            q.device,
            group,
            schedule,
            **messages,
            order=placement.order,
            block=placement.block,
            across=across,
        )
        q = q if head_shares is None else gather_heads(q, head_shares, group, **messages)
        state = backend.attn_decode(q, k, v, visible=visible, spec=spec, paged=paged, shared=shared)
        state = reduction.finish(by_owner(state, head_shares) if keeps_own else state)
    if keeps_own:
        state = own_heads(state, num_heads)
    elif head_shares is not None:
        state = state[:, :, slice_of(head_shares, comm.group_rank(group))]
    out, lse = unpack_state(state, state_dtype(q.dtype))
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


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
    """`prefill` of queries whose heads are sharded, not their tokens: q [b, n, h_local, d] of all n tokens.

    The heads are gathered, and the partial states reduced so that every rank ends with those of its own heads.
    """
    num_heads, team = q.shape[2], _team(group, transport, timeout_s)
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
