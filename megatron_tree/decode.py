"""Decoding: few queries, replicated; a KV cache sharded over ranks. One reduction of the partial states per step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import comm, kernels
from .config import AttnSpec
from .merge import merge_sinks, state_dtype, unpack_state


def decode(q, k, v, sinks, *, visible: kernels.Visible, spec: AttnSpec, group, schedule: str, backend: str, timeout_s):
    """Attention of q [b, s_q, h, d] over every rank's k, v [b, s_local, h_kv, d].

    Returns out [b, s_q, h, d_v] and lse [b, h, s_q], fp32, the same bits on every rank.
    """
    if schedule == "ring":
        state = _ring(q, k, v, visible, spec, group, backend, timeout_s)
    else:
        state = kernels.attn_decode(q, k, v, visible=visible, spec=spec, backend=backend)
        state = comm.reduce_state(state, group, schedule, timeout_s=timeout_s)
    out, lse = unpack_state(state, state_dtype(q.dtype))
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks.to(lse.dtype))
    return out, lse.transpose(1, 2)


def _ring(q, k, v, visible: kernels.Visible, spec: AttnSpec, group, backend: str, timeout_s: float) -> Tensor:
    """The rival: every rank's cache is passed round, p - 1 times; each rank merges in rank order."""
    p, r = comm.group_size(group), comm.group_rank(group)
    (b, s_q), s_local = q.shape[:2], k.shape[1]
    widths = (k.shape[-1], v.shape[-1])
    slots = torch.arange(s_local, device=k.device)
    q_positions, positions = visible.q_positions, visible.k_positions
    if positions is None:
        q_positions = torch.zeros((b, s_q), dtype=torch.int64, device=q.device)
        positions = torch.zeros((b, s_local), dtype=torch.int64, device=k.device)
    if visible.lengths is not None:
        positions = torch.where(slots < visible.lengths[:, None], positions, -1)
    lengths = comm.gather_sequence(torch.tensor([s_local], device=k.device), group, timeout_s=timeout_s)
    missing = int(lengths.max()) - s_local
    kv = F.pad(torch.cat((k, v), -1), (0, 0, 0, 0, 0, missing)).contiguous()
    positions = F.pad(positions, (0, missing), value=-1).contiguous()
    parts = {}
    for step in range(p):
        transfers = [comm.start_shift(x, group, timeout_s=timeout_s) for x in (kv, positions)] if step < p - 1 else []
        seen = kernels.Visible(q_positions=q_positions, k_positions=positions)
        parts[(r - step) % p] = kernels.attn_decode(q, *kv.split(widths, -1), visible=seen, spec=spec, backend=backend)
        if transfers:
            kv, positions = (t.wait() for t in transfers)
    return kernels.merge_packed(torch.stack([parts[source] for source in range(p)]))
