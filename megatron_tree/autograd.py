"""The two training schedules as autograd functions: the a x b grid, and the ring it is compared with.

Rank (i, j) of the grid, r = i * b + j, gathers KV along its row (b shares) and queries down its column (a shares),
computes that cell, and the partial outputs are merged down the column by a tree reduce-scatter. Every (query share,
KV share) pair is computed once. The backward moves (q, dout, lse, delta) and KV the same way and sums dq down the
column, dk and dv along the row: with the global lse and delta no softmax statistics are left to merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import comm, kernels
from .config import AttnSpec, TreeConfig
from .merge import bits_float, empty_state, float_bits, merge_into, merge_sinks, state_dtype
from .plan import Plan
from .shard import Layout, Segment, gathered_segments, shard_lengths


@dataclass(frozen=True, kw_only=True)
class Job:
    """One validated call: the mathematics, the ranks, the layout and the plan."""

    spec: AttnSpec
    group: object
    seq_len: int
    layout: Layout
    plan: Plan
    config: TreeConfig
    wire: torch.dtype

    @property
    def world(self) -> int:
        return comm.group_size(self.group)

    @property
    def rank(self) -> int:
        return comm.group_rank(self.group)

    @property
    def rows(self) -> int:
        """Rows of a share on the wire: the longest share's; shorter ones are padded."""
        return max(shard_lengths(self.seq_len, self.world, self.layout))

    def segments(self, ranks) -> tuple[Segment, ...]:
        return gathered_segments(ranks, self.seq_len, self.world, self.layout, self.rows)

    def grid(self, size: tuple[int, int]):
        """(row group, column group, KV segments of the row, query segments of the column) on a grid of this size."""
        b = size[1]
        i, j = divmod(self.rank, b)
        row, column = comm.grid_groups(self.group, size, self.config.timeout_s)
        return row, column, self.segments(range(i * b, (i + 1) * b)), self.segments(range(j, self.world, b))


def tree_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job) -> tuple[Tensor, Tensor]:
    """Differentiable attention of this rank's queries over the whole sequence: (out, lse) of its own share."""
    return _TreeAttention.apply(q, k, v, sinks, job)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, job: Job):
        run = _ring_fwd if job.plan.schedule == "ring" else _grid_fwd
        out, lse = run(q, k, v, job)
        if sinks is not None:  # one more leaf, added once, where the whole tree has met
            out, lse = merge_sinks(out, lse.transpose(1, 2), sinks.to(lse.dtype))
            lse = lse.transpose(1, 2)
        out, lse = out.to(q.dtype), lse.contiguous()
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        job = ctx.job
        # every rank takes part in the backward's collectives, with or without a gradient of its own
        dout = torch.zeros_like(out) if dout is None else dout.to(q.dtype)
        flowing = None if dlse is None else torch.where(lse == float("-inf"), 0.0, dlse)
        delta = kernels.attn_delta(dout, out, flowing)
        run = _ring_bwd if job.plan.schedule == "ring" else _grid_bwd
        dq, dk, dv = run(dout, q, k, v, lse, delta, job, flowing_lse=dlse is not None)
        dsinks = None
        if sinks is not None:
            seen = torch.exp(sinks.to(lse.dtype)[:, None] - torch.where(lse == float("-inf"), float("inf"), lse))
            dsinks = -(seen * delta).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _gather(tensors, group, job: Job) -> list[Tensor]:
    """All-gather [b, s, h, d_i] tensors of one head count in one buffer; returns views [b, n * rows, h, d_i] of it."""
    packed = torch.cat([x.transpose(0, 1) for x in tensors], -1) if len(tensors) > 1 else tensors[0].transpose(0, 1)
    whole = comm.gather_sequence(_padded(packed, job), group, timeout_s=job.config.timeout_s).transpose(0, 1)
    return list(whole.split([x.shape[-1] for x in tensors], -1))


def _padded(x: Tensor, job: Job) -> Tensor:
    """x [s, ...] with its share's rows filled up with zeros to the longest share's."""
    missing = job.rows - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _grid_fwd(q, k, v, job: Job) -> tuple[Tensor, Tensor]:
    row, column, k_segments, q_segments = job.grid(job.plan.forward)
    s = q.shape[1]
    keys, values = _gather((k, v), row, job)
    (queries,) = _gather((q,), column, job)
    segments = dict(q_segments=q_segments, k_segments=k_segments)
    out, lse = kernels.attn_fwd(queries, keys, values, **segments, spec=job.spec, backend=job.config.backend)
    out, lse = comm.reduce_scatter_state(out, lse, column, wire=job.wire, timeout_s=job.config.timeout_s)
    return out[:, :s], lse[..., :s]


def _grid_bwd(dout, q, k, v, lse, delta, job: Job, flowing_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    row, column, k_segments, q_segments = job.grid(job.plan.backward)
    s = q.shape[1]
    keys, values = _gather((k, v), row, job)
    if column is not None:
        statistics = float_bits(torch.stack((lse, delta), -1).transpose(1, 2), q.dtype)  # [b, s, h, words]
        q, dout, statistics = _gather((q, dout, statistics), column, job)
        lse, delta = bits_float(statistics, lse.dtype).permute(3, 0, 2, 1)  # [b, h, a * rows] each
    elif job.rows > s:
        q, dout = (_padded(x.transpose(0, 1), job).transpose(0, 1) for x in (q, dout))
        lse, delta = (F.pad(x, (0, job.rows - s)) for x in (lse, delta))
    segments = dict(q_segments=q_segments, k_segments=k_segments)
    options = dict(spec=job.spec, backend=job.config.backend, flowing_lse=flowing_lse)
    dq, dk, dv = kernels.attn_bwd(dout, q, keys, values, lse, delta, **segments, **options)
    reduce = dict(wire=job.wire, timeout_s=job.config.timeout_s)
    dq = comm.reduce_scatter_sum(dq, column, **reduce)
    dk, dv = comm.reduce_scatter_sum(torch.cat((dk, dv), -1), row, **reduce).split((k.shape[-1], v.shape[-1]), -1)
    return dq[:, :s], dk[:, :s], dv[:, :s]


def _ring_fwd(q, k, v, job: Job) -> tuple[Tensor, Tensor]:
    """KV passes round the ring, p - 1 times, each transfer under way while the share at hand is computed."""
    p, r, group, limit = job.world, job.rank, job.group, job.config.timeout_s
    q_segments = job.segments([r])
    kv = _padded(torch.cat((k, v), -1).transpose(0, 1), job).contiguous()
    out, lse = empty_state((*q.shape[:3], v.shape[-1]), dtype=state_dtype(q.dtype), device=q.device)
    for step in range(p):
        transfer = comm.start_shift(kv, group, timeout_s=limit) if step < p - 1 else None
        keys, values = kv.transpose(0, 1).split((k.shape[-1], v.shape[-1]), -1)
        segments = dict(q_segments=q_segments, k_segments=job.segments([(r - step) % p]))
        o, l = kernels.attn_fwd(q, keys, values, **segments, spec=job.spec, backend=job.config.backend)
        merge_into((out, lse), (o, l.transpose(1, 2)))
        if transfer:
            kv = transfer.wait()
    return out, lse.transpose(1, 2)


def _ring_bwd(dout, q, k, v, lse, delta, job: Job, flowing_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """KV goes round again; its gradient follows one step behind, gathers a summand at every rank, and comes home."""
    p, r, group, limit = job.world, job.rank, job.group, job.config.timeout_s
    s, widths = q.shape[1], (k.shape[-1], v.shape[-1])
    q_segments = job.segments([r])
    kv = _padded(torch.cat((k, v), -1).transpose(0, 1), job).contiguous()
    dq, going_home = 0, None
    for step in range(p):
        transfer = comm.start_shift(kv, group, timeout_s=limit) if step < p - 1 else None
        keys, values = kv.transpose(0, 1).split(widths, -1)
        segments = dict(q_segments=q_segments, k_segments=job.segments([(r - step) % p]))
        options = dict(spec=job.spec, backend=job.config.backend, flowing_lse=flowing_lse)
        dq_part, dk, dv = kernels.attn_bwd(dout, q, keys, values, lse, delta, **segments, **options)
        dq = dq_part + dq
        dkv = torch.cat((dk, dv), -1).transpose(0, 1).contiguous()
        if going_home:
            dkv += going_home.wait()
        if p > 1:
            going_home = comm.start_shift(dkv, group, timeout_s=limit)
        if transfer:
            kv = transfer.wait()
    dkv = (going_home.wait() if going_home else dkv).transpose(0, 1)[:, :s]
    return dq, *dkv.split(widths, -1)
