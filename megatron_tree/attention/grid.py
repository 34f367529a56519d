"""The a x b grid: gather keys along rows and queries down columns, compute a cell, reduce the results back.

Rank (i, j) computes the queries of its column against the keys of its row, so every (query share, KV share) pair is
computed once. Its own pair needs no message and is computed while the gather is under way. With the global lse and
delta no softmax statistics are left to merge backward: gradients are sums.

The functions compute one group of KV heads and its query heads. They are generators: while one group is computed, the
next group's gather and the last group's reduction are under way (`plan/pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..config import AttnSpec
from ..merge import StateReducer, SumReducer, bits_float, float_bits, merge_into, pack_state, state_dtype
from .call import AttnCall, Cell

State = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


def grid_fwd(
    q: Tensor, k: Tensor, v: Tensor, own: Callable[[], State], cell: Cell, call: AttnCall, spec: AttnSpec
) -> Generator[None, None, State]:
    """(out [b, s, h, d_v], lse [b, h, s]), fp32, of this rank's queries over the whole sequence.

    own: computes the state of the own queries over the own keys, which becomes the result in place.
    """
    attn_fwd, dtype = call.backend.attn_fwd, state_dtype(q.dtype)
    key_gather = Gather((k, v), cell.row, cell.key_rows)
    query_gather = Gather((q,), cell.column, cell.query_rows)
    yield
    out, lse = own()
    (keys, values), (queries,) = key_gather.wait(), query_gather.wait()
    del key_gather, query_gather
    yield
    if cell.row.size > 1:  # own queries against the other keys of the row
        segments = dict(q_segments=cell.own_queries, k_segments=cell.other_keys)
        merge_into((out, lse), attn_fwd(q, keys, values, **segments, spec=spec))
    if cell.column.size == 1:
        return out, lse
    # the other queries of the column against all keys of the row
    segments = dict(q_segments=cell.other_queries, k_segments=cell.all_keys)
    out_column, lse_column = attn_fwd(queries, keys, values, **segments, spec=spec, out_dtype=call.wire_dtype)
    del keys, values, queries  # at most two groups are gathered at any time
    out_column = out_column.to(call.wire_dtype)
    out_column[:, cell.own_query_rows] = out
    lse_column[..., cell.own_query_rows] = lse
    packed = pack_state(out_column, lse_column, call.wire_dtype)
    reduction = _reduce_scatter(packed, cell.column, StateReducer(call.wire_dtype, dtype))
    del out_column, lse_column, packed
    yield
    reduction.advance()
    yield
    state = reduction.wait().transpose(0, 1)[:, : q.shape[1]]  # [b, s, h, d_v + 1]
    return out.copy_(state[..., :-1]), lse.copy_(state[..., -1].transpose(1, 2))


def grid_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    own: Callable[[], Grads],
    cell: Cell,
    call: AttnCall,
    spec: AttnSpec,
) -> Generator[None, None, Grads]:
    """dq, dk, dv of this rank's shares, fp32, from the global lse and delta [b, h, s].

    own: computes the gradients of the own pair, which become the results in place.
    """
    attn_bwd = call.backend.attn_bwd
    reducer = SumReducer(call.wire_dtype, state_dtype(q.dtype))
    statistics = float_bits(torch.stack((lse, delta), -1).transpose(1, 2), q.dtype)  # [b, s, h, words]
    key_gather = Gather((k, v), cell.row, cell.key_rows)
    query_gather = Gather((q, dout, statistics), cell.column, cell.query_rows)
    yield
    dq, dk, dv = own()
    (keys, values), (queries, douts, bits) = key_gather.wait(), query_gather.wait()
    del key_gather, query_gather
    yield
    if cell.row.size > 1:  # own queries against the other keys of the row
        segments = dict(q_segments=cell.own_queries, k_segments=cell.other_keys)
        dq_part, dk_row, dv_row = attn_bwd(dout, q, keys, values, lse, delta, **segments, spec=spec)
        dq += dq_part
        dk_row[:, cell.own_key_rows] += dk
        dv_row[:, cell.own_key_rows] += dv
    else:
        dk_row, dv_row = dk, dv  # the row's keys are this rank's: what is added to them is in dk and dv
    reductions = {}
    if cell.column.size > 1:  # the other queries of the column against all keys of the row
        lses, deltas = bits_float(bits, lse.dtype).permute(3, 0, 2, 1)  # [b, h, a * rows] each
        segments = dict(q_segments=cell.other_queries, k_segments=cell.all_keys)
        dq_column, dk_part, dv_part = attn_bwd(douts, queries, keys, values, lses, deltas, **segments, spec=spec)
        dq_column[:, cell.own_query_rows] = dq
        dk_row += dk_part
        dv_row += dv_part
        reductions["column"] = _reduce_scatter(dq_column.to(call.wire_dtype), cell.column, reducer)
        del dq_column, dk_part, dv_part
    if cell.row.size > 1:
        dkv_row = torch.cat((dk_row.to(call.wire_dtype), dv_row.to(call.wire_dtype)), -1)
        reductions["row"] = _reduce_scatter(dkv_row, cell.row, reducer)
        del dkv_row
    del keys, values, queries, douts, bits, dk_row, dv_row  # at most two groups are gathered at any time
    yield
    for reduction in reductions.values():
        reduction.advance()
    yield
    if "column" in reductions:
        dq.copy_(reductions["column"].wait().transpose(0, 1)[:, : q.shape[1]])
    if "row" in reductions:
        dkv = reductions["row"].wait().transpose(0, 1)[:, : k.shape[1]]
        for grad, x in zip((dk, dv), dkv.split((k.shape[-1], v.shape[-1]), -1)):
            grad.copy_(x)
    return dq, dk, dv


class Gather:
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


def _reduce_scatter(x: Tensor, team: comm.Team, reducer: StateReducer | SumReducer) -> comm.Pending:
    """Start to reduce x [b, n * rows, h, ...]: this rank gets [rows, b, h, ...], the sum or state of its own rows."""
    return comm.start_reduce_scatter(x.transpose(0, 1), team, reducer)
