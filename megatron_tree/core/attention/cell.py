"""One cell of the grid: gather rows of queries and of keys, attend, return the results to the ranks they belong to.

Schedules differ in the rows that travel (rows.py):

    schedule    queries                                          keys
    grid        the query team's (the rank's column)             the key team's (its row)
    cast        this rank's                                      those that this rank's queries see
    gather      this rank's; backward all ranks'                 all ranks'
    integers    this rank's                                      all ranks'
    prefill     the query team's tokens, or its heads            the key team's

A training pass computes the local pair, this rank's queries and keys, while others' rows are on their way. With the
global lse and delta no softmax statistics are left to merge backward: gradients are sums.

`CellForward` and `CellBackward` take one chunk of KV heads and its query heads through the stages of `plan.Stages`.
States are opaque here: merge.py knows what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import TreeConfig
from ..kernels import Backend, StateReducer, merge_into
from ..merge import (
    State,
    SumReducer,
    copy_state,
    heads_of_state,
    pack_state,
    pack_statistics,
    put_rows,
    round_state,
    state_dtype,
    unpack_state,
    unpack_statistics,
)
from ..plan import Stages
from ..spec import AttnSpec
from .rows import HeadRows, Segments, TeamRows, VisibleRows

Grads = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv, fp32."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a rank computes: the queries that arrive, against the keys that arrive."""

    queries: TeamRows | HeadRows
    keys: TeamRows | VisibleRows
    backend: Backend
    wire: torch.dtype
    """The dtype in which partial outputs and gradients are sent."""
    selected: SelectedKeys | None = None
    """The keys that queries see, if not all within the mask."""

    def local_dtype(self, dtype: torch.dtype, has_sinks: bool) -> torch.dtype:
        """The dtype of a local state of inputs of `dtype`: theirs, unless something is merged into it."""
        merges = self.queries.travel or self.keys.travel or has_sinks
        return state_dtype(dtype) if merges or self.backend.dual else dtype

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, ...],
        q_segments: Segments,
        k_segments: Segments,
        spec: AttnSpec,
        out_dtype: torch.dtype | None = None,
        *,
        arrived: bool = False,
    ) -> State:
        """The state of some queries over some keys; out in out_dtype if that is given.

        arrived: the queries are all that arrive here, not this rank's.
        """
        segments = dict(q_segments=q_segments, k_segments=k_segments, **self.selection(arrived))
        state = self.backend.attn_fwd(q, *kv, **segments, spec=spec, out_dtype=out_dtype)
        return state if out_dtype is None else round_state(state, out_dtype)

    def selection(self, arrived: bool) -> dict:
        """The selected keys of this rank's queries, or of all that arrive, as a kernel's argument, if there are any."""
        return {} if self.selected is None else {"selected": self.selected.of(arrived)}


class SelectedKeys:
    """The keys that this rank's queries see, int32 [b, s, m], and those of all queries that arrive here, which follow
    them once for all chunks."""

    def __init__(self, local: Tensor, queries: TeamRows | HeadRows):
        self._local = self._arriving = local  # where queries travel by heads, this rank has all of them
        if isinstance(queries, TeamRows):
            self._arriving = queries.start_gather(local[:, :, None])

    def of(self, arrived: bool) -> Tensor:
        if not arrived:
            return self._local
        if not isinstance(self._arriving, Tensor):
            self._arriving = self._arriving.wait()[0][:, :, 0]
        return self._arriving


class HeadChunk(NamedTuple):
    """KV heads and their query heads that go through a pass together."""

    queries: slice
    kv: slice
    spec: AttnSpec
    """The mathematics of these heads."""

    @classmethod
    def all(cls, spec: AttnSpec) -> HeadChunk:
        """All heads of the tensors."""
        return cls(slice(None), slice(None), spec)


def head_chunks(num_heads: int, num_heads_kv: int, n: int, spec: AttnSpec, first: int = 0) -> list[HeadChunk]:
    """Heads in n chunks of equal size; `first`: the first query head's number among the heads of spec."""
    queries, kv = num_heads // n, num_heads_kv // n
    return [
        HeadChunk(
            slice(i * queries, (i + 1) * queries),
            slice(i * kv, (i + 1) * kv),
            spec.heads_from(first + i * queries, queries),
        )
        for i in range(n)
    ]


class CellForward(Stages):
    """The forward of a head chunk: `state`, of this rank's queries over the whole sequence.

    Without `local` everything that arrives is computed at once, this rank's rows among it.
    """

    def __init__(
        self, cell: Cell, chunk: HeadChunk, q: Tensor, kv: tuple[Tensor, ...], local: LocalState | None = None
    ):
        self.cell, self.chunk, self.local = cell, chunk, local
        self.q, self.kv = q[:, :, chunk.queries], tuple(x[:, :, chunk.kv] for x in kv)
        self.state: State | None = None
        self.reduction = None

    def gather(self) -> None:
        keys = self.cell.keys.start_gather(*self.kv)
        self.arriving = self.cell.queries.start_gather(self.q), keys

    def receive(self) -> None:
        if self.local is not None:
            self.state = self.local.part(self.chunk)
        queries, keys = self.arriving
        kv, (q,) = keys.wait(), queries.wait()
        self.arriving, self.arrived = None, (q, kv)

    def attend(self) -> None:
        cell, state = self.cell, self._state_of_arrived()
        if cell.queries.travel:
            reducer = StateReducer(cell.wire, state_dtype(self.q.dtype))
            self.reduction = cell.queries.start_reduce(pack_state(*state, cell.wire), reducer)
        else:
            self.state = state

    def _state_of_arrived(self) -> State:
        """The state of all queries that have arrived."""
        cell, spec, (queries, kv) = self.cell, self.chunk.spec, self.arrived
        self.arrived = None
        out_dtype = cell.wire if cell.queries.travel else None
        if self.state is None:
            return cell.attend(queries, kv, cell.queries.arriving, cell.keys.arriving, spec, out_dtype, arrived=True)
        if cell.keys.others:
            merge_into(self.state, cell.attend(self.q, kv, cell.queries.local, cell.keys.others, spec))
        if not cell.queries.travel:
            return self.state
        state = cell.attend(queries, kv, cell.queries.others, cell.keys.arriving, spec, out_dtype, arrived=True)
        put_rows(state, cell.queries.at, self.state)
        return state

    def advance(self) -> None:
        if self.reduction is not None:
            self.reduction.advance()

    def give_back(self) -> None:
        if self.reduction is not None:
            packed = self.cell.queries.reduced(self.reduction, self.q.shape[1])
            state, self.reduction = unpack_state(packed, state_dtype(self.q.dtype)), None
            self.state = state if self.state is None else copy_state(self.state, state)


class LocalState:
    """The state of this rank's queries over its keys, which needs no message: of all chunks, computed by the first.

    Chunks merge what other ranks' keys contribute into their heads of it, in place.
    """

    def __init__(self, cell: Cell, spec: AttnSpec, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype):
        self._cell, self._pair = cell, (q, (k, v), cell.queries.local, cell.keys.local, spec, dtype)
        self.state: State | None = None

    def part(self, chunk: HeadChunk) -> State:
        """Views of the chunk's heads."""
        if self.state is None:
            self.state = self._cell.attend(*self._pair)
        return heads_of_state(self.state, chunk.queries)


class CellBackward(Stages):
    """The backward of a head chunk: `grads` of this rank's rows, from the global lse and delta [b, h, s]."""

    def __init__(
        self, cell: Cell, chunk: HeadChunk, dout: Tensor, residuals: Residuals, delta: Tensor, local: LocalGrads
    ):
        self.cell, self.chunk, self.local, self.residuals = cell, chunk, local, residuals.part(chunk)
        self.dout, self.delta = dout[:, :, chunk.queries], delta[:, chunk.queries]
        self.grads: Grads | None = None
        self.reductions: list[tuple] = []
        """Rows, the reduction of their gradients, and this rank's part of them."""

    def gather(self) -> None:
        q, k, v, lse = self.residuals
        keys, of_queries = self.cell.keys.start_gather(k, v), (q, self.dout)
        if self.cell.queries.travel:
            of_queries += (pack_statistics(lse, self.delta, wire=q.dtype),)
        self.arriving = self.cell.queries.start_gather(*of_queries), keys

    def receive(self) -> None:
        self.grads = self.local.part(self.chunk)
        queries, keys = self.arriving
        kv, of_queries = keys.wait(), queries.wait()
        self.arriving, self.arrived = None, (of_queries, kv)

    def attend(self) -> None:
        cell, (dq, *dkv) = self.cell, self.grads
        all_dkv = self._of_local_queries() if cell.keys.travel else dkv
        all_dq = self._of_other_queries(all_dkv) if cell.queries.travel else None
        self.arrived = None  # gathered rows of at most two chunks exist at any time
        reducer = SumReducer(cell.wire, state_dtype(self.dout.dtype))
        if cell.queries.travel:
            reduction = cell.queries.start_reduce(all_dq.to(cell.wire), reducer)
            self.reductions.append((cell.queries, reduction, (dq,)))
        del all_dq
        if cell.keys.travel:
            reduction = cell.keys.start_reduce(torch.cat([x.to(cell.wire) for x in all_dkv], -1), reducer)
            self.reductions.append((cell.keys, reduction, dkv))

    def _of_local_queries(self) -> list[Tensor]:
        """dk and dv of all keys that have arrived, from this rank's queries, whose dq grows in place."""
        cell, (dq, *dkv), (q, *_, lse), (_, kv) = self.cell, self.grads, self.residuals, self.arrived
        if cell.keys.others:
            segments = dict(q_segments=cell.queries.local, k_segments=cell.keys.others, **cell.selection(False))
            call = dict(segments, spec=self.chunk.spec)
            part, *all_dkv = cell.backend.attn_bwd(self.dout, q, *kv, lse, self.delta, **call)
            dq += part
        else:
            all_dkv = [x.new_zeros(keys.shape) for x, keys in zip(dkv, kv)]
        for x, local in zip(all_dkv, dkv):
            cell.keys.put_local(x, local)
        return all_dkv

    def _of_other_queries(self, all_dkv: list[Tensor]) -> Tensor:
        """dq of all queries that have arrived; what the others' add to the keys is added to all_dkv in place."""
        cell, ((q, dout, bits), kv) = self.cell, self.arrived
        lse, delta = unpack_statistics(bits, self.delta, 2)
        segments = dict(q_segments=cell.queries.others, k_segments=cell.keys.arriving, **cell.selection(True))
        all_dq, *parts = cell.backend.attn_bwd(dout, q, *kv, lse, delta, **segments, spec=self.chunk.spec)
        cell.queries.put_local(all_dq, self.grads[0])
        for total, part in zip(all_dkv, parts):
            total += part
        return all_dq

    def advance(self) -> None:
        for _, reduction, _ in self.reductions:
            reduction.advance()

    def give_back(self) -> None:
        for rows, reduction, local in self.reductions:
            rows.put_reduced(reduction, *local)
        self.reductions.clear()


class Residuals(NamedTuple):
    """What the backward needs: of this rank's heads, or of those that it has after an exchange."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    """[b, h, s], with sinks; of dual tensors (lse, mu), [b, h, s, 2]."""

    def part(self, chunk: HeadChunk) -> Residuals:
        """The same of a chunk's heads."""
        q, k, v = self.q[:, :, chunk.queries], self.k[:, :, chunk.kv], self.v[:, :, chunk.kv]
        return Residuals(q, k, v, self.lse[:, chunk.queries])


class LocalGrads:
    """The same for the gradients of the local pair."""

    def __init__(self, cell: Cell, spec: AttnSpec, dout: Tensor, residuals: Residuals, delta: Tensor):
        self._cell, self._spec, self._pair = cell, spec, (dout, *residuals, delta)
        self.grads: Grads | None = None

    def part(self, chunk: HeadChunk) -> Grads:
        if self.grads is None:
            cell = self._cell
            segments = dict(q_segments=cell.queries.local, k_segments=cell.keys.local, **cell.selection(False))
            self.grads = self._cell.backend.attn_bwd(*self._pair, **segments, spec=self._spec)
        dq, dk, dv = self.grads
        return dq[:, :, chunk.queries], dk[:, :, chunk.kv], dv[:, :, chunk.kv]


def sink_grads(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[h]: the gradient of sinks [h], from this rank's lse, with sinks, and delta; dual ones [h, 2] from dual ones."""
    if sinks.dim() == 1:
        return -(weights_of_sinks(sinks, lse) * delta).sum((0, 2)).to(sinks.dtype)  # d2F/dsinks dzeta: (8)
    (score, tangent), (lse, mu), (delta, kappa) = (x.unbind(-1) for x in (sinks, lse, delta))
    seen, change = weights_of_sinks(score, lse), tangent.to(lse.dtype)[:, None] - mu
    grads = [(seen * delta).sum((0, 2)), (seen * (change * delta + kappa)).sum((0, 2))]  # (8) and (15)
    return -torch.stack(grads, -1).to(sinks.dtype)


def weights_of_sinks(sinks: Tensor, lse: Tensor) -> Tensor:
    """[b, h, s], of sinks [h] and lse [b, h, s]."""
    return torch.exp(sinks.to(lse.dtype)[:, None] - torch.where(lse == float("-inf"), float("inf"), lse))


def wire_dtype(dtype: torch.dtype, config: TreeConfig) -> torch.dtype:
    """The dtype in which partial outputs and gradients of inputs of `dtype` are sent."""
    return torch.promote_types(dtype, torch.float32) if config.comm_dtype == "fp32" else dtype
