"""Decoding: few queries, replicated; a KV cache sharded over ranks. One reduction of the partial states per step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import comm, kernels
from .config import AttnSpec
from .energy import visible
from .merge import empty_state, merge_into, merge_sinks, state_dtype


def decode(q, k, v, q_positions, k_positions, sinks, *, spec: AttnSpec, group, schedule: str, backend: str, timeout_s):
    """Attention of q [b, s_q, h, d] over every rank's k, v [b, s_local, h_kv, d]; positions as `key_mask` takes them.

    Returns out [b, s_q, h, d_v] and lse [b, h, s_q], fp32, the same bits on every rank.
    """
    if schedule == "ring":
        out, lse = _ring(q, k, v, q_positions, k_positions, spec, group, backend, timeout_s)
    else:
        keep = key_mask(q_positions, k_positions, spec)
        out, lse = kernels.attn_fwd_masked(q, k, v, keep=keep, spec=spec, backend=backend)
        out, lse = comm.reduce_state(out, lse.transpose(1, 2), group, schedule, timeout_s=timeout_s)
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks.to(lse.dtype))
    return out, lse.transpose(1, 2)


def key_mask(q_positions: Tensor | None, k_positions: Tensor | None, spec: AttnSpec) -> Tensor | None:
    """bool [b, s_q, s_k], or None where all is visible.

    k_positions int64 [b, s_k], -1 for slots that nobody sees, or None (every slot counts); q_positions int64 [b, s_q],
    or None (a query sees every slot that counts).
    """
    if k_positions is None:
        return None
    keep = (k_positions >= 0)[:, None]
    if q_positions is not None:
        return keep & visible(q_positions, k_positions, spec)
    return keep


def _ring(q, k, v, q_positions, k_positions, spec, group, backend, timeout_s):
    """The rival: every rank's cache is passed round, p - 1 times; each rank merges in rank order."""
    p, r = comm.group_size(group), comm.group_rank(group)
    b, s_local = k.shape[:2]
    widths = (k.shape[-1], v.shape[-1])
    if k_positions is None:
        k_positions = torch.zeros((b, s_local), dtype=torch.int64, device=k.device)
    lengths = comm.gather_sequence(torch.tensor([s_local], device=k.device), group, timeout_s=timeout_s)
    missing = int(lengths.max()) - s_local
    kv = F.pad(torch.cat((k, v), -1), (0, 0, 0, 0, 0, missing)).contiguous()
    positions = F.pad(k_positions, (0, missing), value=-1).contiguous()
    parts = {}
    for step in range(p):
        transfers = [comm.start_shift(x, group, timeout_s=timeout_s) for x in (kv, positions)] if step < p - 1 else []
        keep = key_mask(q_positions, positions, spec)
        parts[(r - step) % p] = kernels.attn_fwd_masked(q, *kv.split(widths, -1), keep=keep, spec=spec, backend=backend)
        if transfers:
            kv, positions = (t.wait() for t in transfers)
    acc = empty_state((*q.shape[:3], v.shape[-1]), dtype=state_dtype(q.dtype), device=q.device)
    for source in range(p):
        out, lse = parts[source]
        merge_into(acc, (out, lse.transpose(1, 2)))
    return acc
