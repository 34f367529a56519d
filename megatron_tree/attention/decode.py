"""Over a sharded KV cache: decoding of few replicated queries, one reduction per step; prefill of sharded queries."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec
from ..merge import StateReducer, merge_sinks, pack_state, state_dtype, unpack_state
from ..plan import Placement


def decode(
    q, k, v, sinks, *, visible: kernels.Visible, spec: AttnSpec, group, schedule: str, across: str, transport: str,
    placement: Placement, backend: kernels.Backend, timeout_s: float, paged: kernels.PagedKV | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [b, s_q, h, d] over every rank's k, v [b, s_local, h_kv, d], or pages of them.

    Returns out [b, s_q, h, d_v] and lse [b, h, s_q], fp32, the same bits on every rank.
    """
    if schedule == "ring" and comm.group_size(group) > 1:
        if paged is not None:
            k, v, visible = _gathered(q, k, v, visible, paged)
        state = _ring(q, k, v, visible, spec, group, placement.order, backend, timeout_s)
    else:
        # receives are posted before the local attention: gloo tells the senders meanwhile where to put their states
        reduction = comm.start_reduction(
            (*q.shape[:3], v.shape[-1] + 1),
            state_dtype(q.dtype),
            q.device,
            group,
            schedule,
            transport=transport,
            timeout_s=timeout_s,
            order=placement.order,
            block=placement.block,
            across=across,
        )
        state = backend.attn_decode(q, k, v, visible=visible, spec=spec, paged=paged)
        state = reduction.finish(state)
    out, lse = unpack_state(state, state_dtype(q.dtype))
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


def _gathered(q, k, v, visible: kernels.Visible, paged: kernels.PagedKV):
    """A paged cache as one [b, longest row, ...], to be sent whole."""
    lengths = [None] * q.shape[0] if visible.lengths is None else visible.lengths.tolist()
    rows = [kernels.gather_row(k, v, paged, i, n, q.dtype) for i, n in enumerate(lengths)]
    k, v = (torch.nn.utils.rnn.pad_sequence([row[i][0] for row in rows], batch_first=True) for i in (0, 1))
    if visible.k_positions is not None:
        visible = visible._replace(k_positions=visible.k_positions[:, : k.shape[1]])
    return k, v, visible


def _ring(q, k, v, visible, spec, group, order, backend: kernels.Backend, timeout_s: float) -> Tensor:
    """The rival: every rank's cache is passed round, p - 1 times, while the one at hand is computed.

    Shards differ in length, and where only some slots are valid their positions go along: what the next message will
    be travels with each. Parts are merged in rank order at the end.
    """
    p, at = len(order), order.index(comm.group_rank(group))

    def shift(send, recv):
        return comm.start_shift(send, recv, group, order, timeout_s=timeout_s)

    def tell(*header):
        header = torch.tensor(header, device=k.device)
        return shift(header, torch.empty_like(header))

    q_positions, positions = visible.q_positions, visible.k_positions
    if q_positions is None:
        q_positions = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
    if visible.lengths is not None:
        beyond = torch.arange(k.shape[1], device=k.device) >= visible.lengths[:, None]
        if positions is None:
            positions = torch.zeros(k.shape[:2], dtype=torch.int64, device=k.device)
        positions = positions.masked_fill(beyond, -1)
        k, v = (x.masked_fill(beyond[..., None, None], 0) for x in (k, v))  # NaN may lie there
    shard = [x.contiguous() for x in (k, v, positions) if x is not None]
    coming = tell(k.shape[1], int(positions is not None)).wait().tolist()
    parts, buffers = {}, _TwoBuffers()
    for step in range(p):
        transfers, following = [], None
        if step < p - 1:
            length, with_positions = coming
            arriving = [buffers.take(step, x, length) for x in (k, v)]
            if with_positions:
                arriving.append(torch.empty(k.shape[0], length, dtype=torch.int64, device=k.device))
            transfers = [shift(*pair) for pair in itertools.zip_longest(shard, arriving)]
            following = tell(*coming) if step < p - 2 else None
        seen = kernels.Visible()
        if len(shard) > 2:
            seen = kernels.Visible(q_positions=q_positions, k_positions=shard[2])
        parts[order[at - step]] = backend.attn_decode(q, *shard[:2], visible=seen, spec=spec)
        shard = [x for x in (t.wait() for t in transfers) if x is not None]
        coming = following.wait().tolist() if following else None
    return kernels.merge_packed(torch.stack([parts[r] for r in range(p)]))


def prefill(
    q, k, v, sinks, *, q_segments, k_segments, num_queries: list[int], spec: AttnSpec, group, transport: str,
    wire: torch.dtype, backend: kernels.Backend, timeout_s: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of queries that are sharded over keys that are sharded: the tree alone, whatever the keys' number.

    All ranks' queries are gathered, each rank attends with its own keys, and the partial states are reduced so that
    every rank ends with those of its own queries. What travels grows with the queries, never with the cache.

    Args: q [b, n, h, d] of this rank, num_queries[r] = n of rank r; k, v [b, s_local, h_kv, d]; q_segments the rows
    of all queries, rank by rank, each rank's padded to the longest; k_segments this rank's keys.
    Returns out [b, n, h, d_v] and lse [b, h, n], fp32.
    """
    n, longest = q.shape[1], max(num_queries)
    team = comm.Team.flat(group, transport=transport, timeout_s=timeout_s)
    if team.size > 1:
        padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, longest - n)).transpose(0, 1)
        q = comm.start_gather(padded.contiguous(), team).wait().transpose(0, 1)
    out, lse = backend.attn_fwd(q, k, v, q_segments=q_segments, k_segments=k_segments, spec=spec)
    if team.size > 1:
        packed, dtype = pack_state(out, lse, wire).transpose(0, 1), state_dtype(q.dtype)
        state = comm.start_reduce_scatter(packed, team, StateReducer(wire, dtype)).wait()
        out, lse = unpack_state(state.transpose(0, 1)[:, :n], dtype)
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


def prefill_gathered(
    q, k, v, sinks, *, q_segments, k_segments: list[list], spec: AttnSpec, group, transport: str,
    backend: kernels.Backend, timeout_s: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`prefill` while keys are few: all ranks' keys are gathered, and nothing is left to be merged.

    Args: k_segments[r] rank r's keys; q_segments this rank's queries.
    """
    longest = max(sum(segment.length for segment in segments) for segments in k_segments)
    team = comm.Team.flat(group, transport=transport, timeout_s=timeout_s)
    d = k.shape[-1]
    if team.size > 1:
        both = torch.nn.functional.pad(torch.cat((k, v), -1), (0, 0, 0, 0, 0, longest - k.shape[1]))
        both = comm.start_gather(both.transpose(0, 1).contiguous(), team).wait().transpose(0, 1)
        k, v = both[..., :d], both[..., d:]
    segments = [s._replace(row=s.row + r * longest) for r, own in enumerate(k_segments) for s in own]
    out, lse = backend.attn_fwd(q, k, v, q_segments=q_segments, k_segments=segments, spec=spec)
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


class _TwoBuffers:
    """Room for the shard at hand and for the one that arrives, used in turn."""

    def __init__(self):
        self._rooms: dict[tuple[int, int], Tensor] = {}

    def take(self, step: int, like: Tensor, length: int) -> Tensor:
        """[b, length, ...] of a tensor like this cache, where the shard of two steps ago was."""
        shape = (like.shape[0], length, *like.shape[2:])
        size, key = math.prod(shape), (step % 2, id(like))
        if key not in self._rooms or self._rooms[key].numel() < size:
            self._rooms[key] = like.new_empty(size)
        return self._rooms[key][:size].view(shape)
