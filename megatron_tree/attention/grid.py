"""The a x b grid: gathers of KV along rows and of queries down columns, tree reductions back, pipelined over heads.

Rank (i, j) computes the queries of its column against the keys of its row, so every (query share, KV share) pair is
computed once. Its own pair needs no message and is computed while the first gather is under way; then, for one
group of KV heads after another, the next group's gather and the last one's reduction run while a group is computed.
With the global lse and delta no softmax statistics are left to merge backward: gradients are sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec
from ..merge import bits_float, float_bits, merge_into, merge_states, pack_state, state_dtype, unpack_state
from .call import AttnCall


class HeadGroup:
    """A group of KV heads with their query heads, as slices of the head axis, and what the kernels compute of them."""

    def __init__(self, index: int, count: int, h: int, h_kv: int, spec: AttnSpec):
        n = h_kv // count
        ratio = h // h_kv
        self.kv = slice(index * n, (index + 1) * n)
        self.q = slice(index * n * ratio, (index + 1) * n * ratio)
        self.spec = spec.heads_from(self.q.start)


def _head_groups(q: Tensor, k: Tensor, call: AttnCall, count: int) -> list[HeadGroup]:
    return [HeadGroup(i, count, q.shape[2], k.shape[2], call.spec) for i in range(count)]


class StateReducer:
    """Packed states on the wire, merged to (out, lse) in fp32."""

    def __init__(self, wire: torch.dtype, dtype: torch.dtype):
        self.wire, self.dtype = wire, dtype

    def merge(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        return merge_states(*unpack_state(parts, self.dtype))

    def narrow(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return pack_state(*state, self.wire)


class SumReducer:
    """Gradients, narrow on the wire, summed in fp32."""

    def __init__(self, wire: torch.dtype, dtype: torch.dtype):
        self.wire, self.dtype = wire, dtype

    def merge(self, parts: Tensor) -> Tensor:
        total = parts[0].to(self.dtype)
        for part in parts[1:]:
            total = total + part
        return total

    def narrow(self, total: Tensor) -> Tensor:
        return total.to(self.wire)


def grid_fwd(q: Tensor, k: Tensor, v: Tensor, call: AttnCall) -> tuple[Tensor, Tensor]:
    """(out [b, s, h, d_v] fp32, lse [b, h, s] fp32) of this rank's queries over the whole sequence."""
    plan, s = call.plan.forward, q.shape[1]
    cell = call.cell(plan)
    groups, backend = _head_groups(q, k, call, plan.head_groups), dict(backend=call.config.backend)
    reducer = StateReducer(call.wire_dtype, state_dtype(q.dtype))

    def gather(group: HeadGroup) -> list:
        return [
            _start_gather((k[:, :, group.kv], v[:, :, group.kv]), cell.row, call.keys.rows),
            _start_gather((q[:, :, group.q],), cell.column, call.queries.rows),
        ]

    def compute(group: HeadGroup, gathered) -> list:
        keys, values = _views(gathered[0], k[:, :, group.kv], v[:, :, group.kv])
        mine = out[:, :, group.q], lse[:, group.q].transpose(1, 2)
        if cell.other_keys:
            segments = dict(q_segments=cell.own_queries, k_segments=cell.other_keys)
            o, l = kernels.attn_fwd(q[:, :, group.q], keys, values, **segments, spec=group.spec, **backend)
            merge_into(mine, (o, l.transpose(1, 2)))
        if cell.column.size == 1:
            return []
        (queries,) = _views(gathered[1], q[:, :, group.q])
        segments = dict(q_segments=cell.other_queries, k_segments=cell.all_keys)
        o, l = kernels.attn_fwd(queries, keys, values, **segments, spec=group.spec, **backend)
        o = o.to(out.dtype)
        o[:, cell.own_query_rows], l[..., cell.own_query_rows] = mine[0], mine[1].transpose(1, 2)
        packed = pack_state(o.transpose(0, 1), l.permute(2, 0, 1), call.wire_dtype)
        return [comm.start_reduce_scatter(packed, cell.column, reducer)]

    arriving = gather(groups[0])
    own = dict(q_segments=cell.own_queries, k_segments=cell.own_keys)
    out, lse = kernels.attn_fwd(q, k, v, **own, spec=call.spec, **backend)
    out, lse = out.to(state_dtype(q.dtype)), lse.contiguous()
    reduced = _pipeline(groups, arriving, gather, compute)
    if cell.column.size > 1:
        out = torch.cat([o for ((o, _),) in reduced], 2).transpose(0, 1)[:, :s]
        lse = torch.cat([l for ((_, l),) in reduced], 2).permute(1, 2, 0)[..., :s]
    return out, lse


def grid_bwd(dout, q, k, v, lse, delta, call: AttnCall, flowing_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shares, fp32, from the global lse and delta [b, h, s]."""
    plan = call.plan.backward
    cell = call.cell(plan)
    groups, options = (
        _head_groups(q, k, call, plan.head_groups),
        dict(backend=call.config.backend, flowing_lse=flowing_lse),
    )
    reducer = SumReducer(call.wire_dtype, state_dtype(q.dtype))

    def gather(group: HeadGroup) -> list:
        of_column = q[:, :, group.q], dout[:, :, group.q]
        if cell.column.size > 1:
            statistics = torch.stack((lse[:, group.q], delta[:, group.q]), -1).transpose(1, 2)
            of_column += (float_bits(statistics, q.dtype),)  # [b, s, h, words]
        return [
            _start_gather((k[:, :, group.kv], v[:, :, group.kv]), cell.row, call.keys.rows),
            _start_gather(of_column, cell.column, call.queries.rows),
        ]

    def compute(group: HeadGroup, gathered) -> list:
        keys, values = _views(gathered[0], k[:, :, group.kv], v[:, :, group.kv])
        mine = dq[:, :, group.q], dk[:, :, group.kv], dv[:, :, group.kv]
        sums, started = None, []
        if cell.other_keys:
            own = (dout[:, :, group.q], q[:, :, group.q], keys, values, lse[:, group.q], delta[:, group.q])
            segments = dict(q_segments=cell.own_queries, k_segments=cell.other_keys)
            part, *sums = kernels.attn_bwd(*own, **segments, spec=group.spec, **options)
            mine[0].add_(part)
        if cell.column.size > 1:
            words = gathered[1].shape[-1] - q.shape[-1] - dout.shape[-1]
            queries, douts, statistics = gathered[1].transpose(0, 1).split((q.shape[-1], dout.shape[-1], words), -1)
            lses, deltas = bits_float(statistics, lse.dtype).permute(3, 0, 2, 1)  # [b, h, a * rows] each
            others = (douts, queries, keys, values, lses, deltas)
            segments = dict(q_segments=cell.other_queries, k_segments=cell.all_keys)
            down, *parts = kernels.attn_bwd(*others, **segments, spec=group.spec, **options)
            down[:, cell.own_query_rows] = mine[0]
            started.append(comm.start_reduce_scatter(down.transpose(0, 1).to(call.wire_dtype), cell.column, reducer))
            if cell.row.size == 1:
                sums = mine[1:]
            sums = _add(sums, parts)
        if cell.row.size > 1:
            sums = sums or [torch.zeros_like(x, dtype=dq.dtype) for x in (keys, values)]
            _add([x[:, cell.own_key_rows] for x in sums], mine[1:])
            along = torch.cat([x.to(call.wire_dtype) for x in sums], -1).transpose(0, 1)
            started.append(comm.start_reduce_scatter(along, cell.row, reducer))
        return started

    arriving = gather(groups[0])
    own = dict(q_segments=cell.own_queries, k_segments=cell.own_keys)
    dq, dk, dv = kernels.attn_bwd(dout, q, k, v, lse, delta, **own, spec=call.spec, **options)
    reduced = _pipeline(groups, arriving, gather, compute)
    if cell.column.size > 1:
        dq = torch.cat([parts[0] for parts in reduced], 2).transpose(0, 1)[:, : q.shape[1]]
    if cell.row.size > 1:
        dkv = torch.cat([parts[-1] for parts in reduced], 2).transpose(0, 1)[:, : k.shape[1]]
        dk, dv = dkv.split((k.shape[-1], v.shape[-1]), -1)
    return dq, dk, dv


def _add(totals, parts):
    """parts added to totals in place; the parts themselves where there are no totals yet."""
    if totals is None:
        return parts
    for total, part in zip(totals, parts):
        total.add_(part)
    return totals


def _pipeline(groups, arriving, gather, compute) -> list[list]:
    """Compute group after group while the next one's gather and the last one's reduction are under way.

    arriving: the first group's gathers. compute starts a group's reductions; returns their results by group.
    """
    leaving: list[list] = []
    for i, group in enumerate(groups):
        gathered = [x if x is None else x.wait() for x in arriving]
        arriving = gather(groups[i + 1]) if i + 1 < len(groups) else []
        started = compute(group, gathered)
        for earlier in leaving:
            for pending in earlier:
                pending.advance()
        leaving.append(started)
        del gathered  # at most two groups are gathered at any time
    return [[pending.wait() for pending in started] for started in leaving]


def _start_gather(tensors, team: comm.Team, rows: int):
    """All-gather [b, s, h, d_i] tensors in one buffer [n * rows, b, h, sum d_i]; None for a team of one."""
    if team.size == 1:
        return None
    packed = torch.cat([x.transpose(0, 1) for x in tensors], -1) if len(tensors) > 1 else tensors[0].transpose(0, 1)
    missing = rows - packed.shape[0]
    return comm.start_gather(F.pad(packed, (0, 0) * 3 + (0, missing)) if missing else packed, team)


def _views(gathered: Tensor | None, *own: Tensor) -> tuple[Tensor, ...]:
    """The gathered tensors as [b, n * rows, h, d_i] views, or this rank's own where nothing was gathered."""
    return own if gathered is None else gathered.transpose(0, 1).split([x.shape[-1] for x in own], -1)
