"""The a x b grid: gather keys along rows and queries down columns, compute a cell, reduce the results back.

Rank (i, j) computes the queries of its column against the keys of its row, so every (query share, KV share) pair is
computed once. Its own pair needs no message and is computed while the first gather is under way. Then the KV heads go
in groups: while one group is computed, the next group's gather and the last group's reduction are under way.
With the global lse and delta no softmax statistics are left to merge backward: gradients are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..config import AttnSpec
from ..merge import StateReducer, SumReducer, bits_float, float_bits, merge_into, pack_state, state_dtype
from .call import AttnCall


def grid_fwd(q: Tensor, k: Tensor, v: Tensor, call: AttnCall) -> tuple[Tensor, Tensor]:
    """(out [b, s, h, d_v], lse [b, h, s]), fp32, of this rank's queries over the whole sequence."""
    cell, attn_fwd, dtype = call.cell(call.plan.forward), call.backend.attn_fwd, state_dtype(q.dtype)
    column = _Reductions(cell.column, StateReducer(call.wire_dtype, dtype))

    def gather(heads: _Heads) -> tuple[_Gather, _Gather]:
        return (
            _Gather((k[:, :, heads.kv], v[:, :, heads.kv]), cell.row, call.keys.rows),
            _Gather((q[:, :, heads.q],), cell.column, call.queries.rows),
        )

    gathers = _Gathers(_head_groups(q, k, call.spec, call.plan.forward.head_groups), gather)
    out, lse = attn_fwd(q, k, v, q_segments=cell.own_queries, k_segments=cell.own_keys, spec=call.spec)
    out = out.to(dtype)
    for heads, (keys, values), (queries,) in gathers:
        out_own, lse_own = out[:, :, heads.q], lse[:, heads.q]
        if cell.row.size > 1:  # own queries against the other keys of the row
            segments = dict(q_segments=cell.own_queries, k_segments=cell.other_keys)
            part = attn_fwd(q[:, :, heads.q], keys, values, **segments, spec=heads.spec)
            merge_into((out_own, lse_own), part)
        if cell.column.size > 1:  # the other queries of the column against all keys of the row
            segments = dict(q_segments=cell.other_queries, k_segments=cell.all_keys)
            out_column, lse_column = attn_fwd(queries, keys, values, **segments, spec=heads.spec)
            out_column = out_column.to(call.wire_dtype)
            out_column[:, cell.own_query_rows] = out_own
            lse_column[..., cell.own_query_rows] = lse_own
            column.start(pack_state(out_column, lse_column, call.wire_dtype))
        column.advance()
        del keys, values, queries  # at most two groups are gathered at any time
    if cell.column.size == 1:
        return out, lse
    states = column.wait()  # of each group [rows, b, h, d_v + 1]
    out = torch.cat([state[..., :-1] for state in states], 2).transpose(0, 1)
    lse = torch.cat([state[..., -1] for state in states], 2).permute(1, 2, 0)
    return out[:, : q.shape[1]], lse[..., : q.shape[1]]


def grid_bwd(dout, q, k, v, lse, delta, call: AttnCall) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shares, fp32, from the global lse and delta [b, h, s]."""
    cell, attn_bwd, dtype = call.cell(call.plan.backward), call.backend.attn_bwd, state_dtype(q.dtype)
    reducer = SumReducer(call.wire_dtype, dtype)
    column, row = _Reductions(cell.column, reducer), _Reductions(cell.row, reducer)
    statistics = float_bits(torch.stack((lse, delta), -1).transpose(1, 2), q.dtype)  # [b, s, h, words]

    def gather(heads: _Heads) -> tuple[_Gather, _Gather]:
        of_queries = tuple(x[:, :, heads.q] for x in (q, dout, statistics))
        return (
            _Gather((k[:, :, heads.kv], v[:, :, heads.kv]), cell.row, call.keys.rows),
            _Gather(of_queries, cell.column, call.queries.rows),
        )

    gathers = _Gathers(_head_groups(q, k, call.spec, call.plan.backward.head_groups), gather)
    own_pair = dict(q_segments=cell.own_queries, k_segments=cell.own_keys)
    dq, dk, dv = attn_bwd(dout, q, k, v, lse, delta, **own_pair, spec=call.spec)
    for heads, (keys, values), (queries, douts, bits) in gathers:
        dq_own, dk_own, dv_own = dq[:, :, heads.q], dk[:, :, heads.kv], dv[:, :, heads.kv]
        if cell.row.size > 1:  # own queries against the other keys of the row
            own = (dout[:, :, heads.q], q[:, :, heads.q], keys, values, lse[:, heads.q], delta[:, heads.q])
            segments = dict(q_segments=cell.own_queries, k_segments=cell.other_keys)
            dq_part, dk_row, dv_row = attn_bwd(*own, **segments, spec=heads.spec)
            dq_own += dq_part
            dk_row[:, cell.own_key_rows] += dk_own
            dv_row[:, cell.own_key_rows] += dv_own
        else:
            dk_row, dv_row = dk_own, dv_own  # the row's keys are this rank's: what is added to them is in dk and dv
        if cell.column.size > 1:  # the other queries of the column against all keys of the row
            lses, deltas = bits_float(bits, lse.dtype).permute(3, 0, 2, 1)  # [b, h, a * rows] each
            segments = dict(q_segments=cell.other_queries, k_segments=cell.all_keys)
            grads = attn_bwd(douts, queries, keys, values, lses, deltas, **segments, spec=heads.spec)
            dq_column, dk_part, dv_part = grads
            dq_column[:, cell.own_query_rows] = dq_own
            dk_row += dk_part
            dv_row += dv_part
            column.start(dq_column.to(call.wire_dtype))
        if cell.row.size > 1:
            row.start(torch.cat((dk_row.to(call.wire_dtype), dv_row.to(call.wire_dtype)), -1))
        column.advance()
        row.advance()
        del keys, values, queries, douts, bits  # at most two groups are gathered at any time
    if cell.column.size > 1:
        dq = torch.cat(column.wait(), 2).transpose(0, 1)[:, : q.shape[1]]
    if cell.row.size > 1:
        dkv = torch.cat(row.wait(), 2).transpose(0, 1)[:, : k.shape[1]]
        dk, dv = dkv.split((k.shape[-1], v.shape[-1]), -1)
    return dq, dk, dv


@dataclass(frozen=True)
class _Heads:
    """A group of KV heads with their query heads, as slices of the head axis, and the mathematics of these heads."""

    kv: slice
    q: slice
    spec: AttnSpec


def _head_groups(q: Tensor, k: Tensor, spec: AttnSpec, count: int) -> list[_Heads]:
    n_kv, n_q = k.shape[2] // count, q.shape[2] // count
    starts = [(i * n_kv, i * n_q) for i in range(count)]
    return [_Heads(slice(kv, kv + n_kv), slice(q, q + n_q), spec.heads_from(q)) for kv, q in starts]


class _Gather:
    """All-gather of tensors [b, s, h, d_i] over a team, in one buffer [n * rows, b, h, sum d_i]."""

    def __init__(self, tensors: tuple[Tensor, ...], team: comm.Team, rows: int):
        self._own, self._pending = tensors, None
        if team.size > 1:
            first, *others = [x.transpose(0, 1) for x in tensors]
            packed = torch.cat((first, *others), -1) if others else first
            missing = rows - packed.shape[0]
            padded = F.pad(packed, (0, 0) * 3 + (0, missing)) if missing else packed
            self._pending = comm.start_gather(padded, team)

    def wait(self) -> tuple[Tensor, ...]:
        """Views [b, n * rows, h, d_i] of the gathered tensors; the tensors themselves where the team is this rank."""
        if self._pending is None:
            return self._own
        return self._pending.wait().transpose(0, 1).split([x.shape[-1] for x in self._own], -1)


class _Gathers:
    """The gathers of all head groups, one group ahead of the computation; the first starts at once."""

    def __init__(self, groups: list[_Heads], gather: Callable[[_Heads], tuple[_Gather, ...]]):
        self._groups, self._gather = groups, gather
        self._next = gather(groups[0])

    def __iter__(self) -> Iterator[tuple]:
        for i, heads in enumerate(self._groups):
            arrived = [x.wait() for x in self._next]
            self._next = self._gather(self._groups[i + 1]) if i + 1 < len(self._groups) else ()
            yield heads, *arrived


class _Reductions:
    """The reduce-scatters of all head groups over one team, under way while the next group is computed."""

    def __init__(self, team: comm.Team, reducer: StateReducer | SumReducer):
        self._team, self._reducer = team, reducer
        self._pending: list[comm.Pending] = []

    def start(self, x: Tensor) -> None:
        """Reduce x [b, n * rows, h, ...] of one group: this rank gets the complete sum or state of its own rows."""
        self._pending.append(comm.start_reduce_scatter(x.transpose(0, 1), self._team, self._reducer))

    def advance(self) -> None:
        """Start the second level of the earlier groups' reductions."""
        for earlier in self._pending[:-1]:
            earlier.advance()

    def wait(self) -> list[Tensor]:
        """The reduced rows [rows, b, h, ...] of each group."""
        return [pending.wait() for pending in self._pending]
