"""Decoding: few queries, replicated; a KV cache sharded over ranks. One reduction of the partial states per step."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from . import comm, kernels
from .config import AttnSpec
from .merge import merge_sinks, state_dtype, unpack_state
from .plan import Placement


def decode(
    q, k, v, sinks, *, visible: kernels.Visible, spec: AttnSpec, group, schedule: str, across: str, transport: str,
    placement: Placement, backend: str, timeout_s: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [b, s_q, h, d] over every rank's k, v [b, s_local, h_kv, d].

    Returns out [b, s_q, h, d_v] and lse [b, h, s_q], fp32, the same bits on every rank.
    """
    if schedule == "ring" and comm.group_size(group) > 1:
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
        state = reduction.finish(kernels.attn_decode(q, k, v, visible=visible, spec=spec, backend=backend))
    out, lse = unpack_state(state, state_dtype(q.dtype))
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks.to(lse.dtype))
    return out, lse.transpose(1, 2)


def _ring(q, k, v, visible, spec, group, order, backend: str, timeout_s: float) -> Tensor:
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
        slots = torch.arange(k.shape[1], device=k.device)
        if positions is None:
            positions = torch.zeros(k.shape[:2], dtype=torch.int64, device=k.device)
        positions = torch.where(slots < visible.lengths[:, None], positions, -1)
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
        parts[order[at - step]] = kernels.attn_decode(q, *shard[:2], visible=seen, spec=spec, backend=backend)
        shard = [x for x in (t.wait() for t in transfers) if x is not None]
        coming = following.wait().tolist() if following else None
    return kernels.merge_packed(torch.stack([parts[r] for r in range(p)]))


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
