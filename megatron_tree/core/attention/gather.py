"""The schedules of `TreeConfig(deterministic="ranks")`: rows are gathered, and ranks merge no partial states.

In the forward a rank has all keys, and attends with its own queries: every row of a result is computed on one rank,
from all that it depends on (kernels/leaves.py). The backward has two forms with the same bits:

- "integers", where every leaf of queries lies on one rank: a rank computes its queries and all keys, dq and its part of
  dk and dv. These parts are integers (kernels/steps.py), which are reduced as other gradients are, in as many bytes as
  the largest one needs.
- "gather": a rank has all queries, too, and computes dq of its own queries, dk and dv of its own keys. Blocks of one
  rank's queries and another's keys are computed on both, and queries travel; nothing is reduced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import comm
from ..kernels import Steps, largest_of, sum_rows
from ..merge import IntegerReducer, State, pack_statistics, unpack_statistics
from ..plan import Stages
from .cell import Cell, Grads, HeadChunk, Residuals, weights_of_sinks


class GatherForward(Stages):
    """The forward of a head chunk: `state`, of this rank's queries over the whole sequence."""

    def __init__(self, cell: Cell, chunk: HeadChunk, q: Tensor, kv: tuple[Tensor, ...]):
        self.cell, self.chunk = cell, chunk
        self.q, self.kv = q[:, :, chunk.queries], tuple(x[:, :, chunk.kv] for x in kv)
        self.state: State | None = None

    def gather(self) -> None:
        self.arriving = self.cell.keys.start_gather(*self.kv)

    def receive(self) -> None:
        self.arriving, self.arrived = None, self.arriving.wait()

    def attend(self) -> None:
        cell, kv, self.arrived = self.cell, self.arrived, None
        self.state = cell.attend(self.q, kv, cell.queries.local, cell.keys.arriving, self.chunk.spec)


class _Backward(Stages):
    """The backward of a head chunk: `grads` of this rank's rows, from the global lse and delta [b, h, s], and `dsinks`
    [heads]: of all queries on the first rank, 0 on the others."""

    def __init__(
        self, cell: Cell, chunk: HeadChunk, dout: Tensor, residuals: Residuals, delta: Tensor, sinks: Tensor | None
    ):
        self.cell, self.chunk, self.residuals = cell, chunk, residuals.part(chunk)
        self.dout, self.delta = dout[:, :, chunk.queries], delta[:, chunk.queries]
        self.sinks = None if sinks is None else sinks[chunk.queries]
        self.grads: Grads | None = None
        self.dsinks: Tensor | None = None


class GatherBackward(_Backward):
    """With the queries of all ranks."""

    def gather(self) -> None:
        q, k, v, lse = self.residuals
        statistics = pack_statistics(lse, self.delta, wire=q.dtype)
        self.arriving = self.cell.keys.start_gather(k, v), self.cell.queries.start_gather(q, self.dout, statistics)

    def receive(self) -> None:
        (kv, queries), self.arriving = self.arriving, None
        self.arrived = kv.wait(), queries.wait()

    def attend(self) -> None:
        cell, (kv, (q, dout, bits)) = self.cell, self.arrived
        lse, delta = unpack_statistics(bits, self.delta, 2)
        segments = dict(q_segments=cell.queries.arriving, k_segments=cell.keys.arriving, spec=self.chunk.spec)
        own = cell.queries.at, cell.keys.at
        grads = cell.backend.attn_bwd(dout, q, *kv, lse, delta, **segments, own=own)
        self.grads = tuple(x[:, rows].clone() for x, rows in zip(grads, (own[0], own[1], own[1])))
        if self.sinks is not None:
            self.dsinks = grads_of_sinks(self.sinks, lse, delta, cell)
        self.arrived = None


class IntegersBackward(_Backward):
    """With gradients of keys that are added up as integers."""

    def gather(self) -> None:
        q, k, v, lse = self.residuals
        queries, keys = self.cell.queries, self.cell.keys
        segments = dict(q_segments=queries.local, all_segments=queries.arriving, k_segments=keys.arriving)
        largest = largest_of(self.dout, q, self.delta, k.shape[2], **segments, spec=self.chunk.spec)
        self.arriving = [keys.start_gather(k, v), comm.start_gather(largest, queries.team)]
        if self.sinks is not None:
            self.arriving.append(queries.start_gather(pack_statistics(lse, self.delta, wire=q.dtype)))

    def receive(self) -> None:
        self.arrived, self.arriving = [x.wait() for x in self.arriving], None

    def attend(self) -> None:
        cell, (q, *_, lse), ((k, v), largest, *bits) = self.cell, self.residuals, self.arrived
        keys, spec, self.arrived = dict(k_segments=cell.keys.arriving), self.chunk.spec, None
        largest = largest.unflatten(0, (cell.queries.team.size, -1)).amax(0)
        group = q.shape[2] // k.shape[2]
        self.steps = Steps(largest, v, q_segments=cell.queries.arriving, **keys, spec=spec, group=group)
        block = dict(q_segments=cell.queries.local, **keys, spec=spec, steps=self.steps)
        dq, *sums = cell.backend.attn_bwd(self.dout, q, k, v, lse, self.delta, **block)
        del k, v  # room for copies of the sums
        self.grads, team = (dq,), cell.keys.team
        sums = [x.transpose(0, 1).reshape(team.size, -1) for x in sums]
        reducer = IntegerReducer(self._largest(sums), sum(x.shape[1] for x in sums))
        packed = reducer.narrow(*sums)
        del sums
        self.reduction = comm.start_reduce_scatter(packed, team, reducer)
        if self.sinks is not None:
            statistics = unpack_statistics(bits[0][0], self.delta, 2)
            self.dsinks = grads_of_sinks(self.sinks, *statistics, cell)

    def _largest(self, sums: list[Tensor]) -> int:
        """What no sum exceeds, of all ranks together."""
        ends = torch.stack([end for x in sums for end in (x.aminmax() if x.numel() else x.new_zeros(2))])
        by_rank = comm.start_gather(ends[None], self.cell.keys.team).wait().tolist()
        return sum(max(map(abs, of_rank)) for of_rank in by_rank)

    def advance(self) -> None:
        self.reduction.advance()

    def give_back(self) -> None:
        _, k, v, _ = self.residuals
        (sums,), self.reduction = self.reduction.wait(), None
        (b, s, h, d), d_v = k.shape, v.shape[3]
        rows = self.cell.keys.num_rows
        of_keys = zip(sums.split((rows * b * h * d, rows * b * h * d_v)), (d, d_v))
        parts = (x.view(rows, b, h, width)[:s].transpose(0, 1) for x, width in of_keys)
        self.grads += self.steps.values(*parts, self.cell.keys.at)


def grads_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor, cell: Cell) -> Tensor:
    """[heads]: from lse and delta [b, h, s] of all queries on the first rank; 0 on the others."""
    if cell.queries.team.index:
        return torch.zeros_like(sinks)
    terms = weights_of_sinks(sinks, lse) * delta
    return -sum_rows(terms, cell.queries.arriving).to(sinks.dtype)  # d2F/dsinks dzeta: (8)


BACKWARDS = {"gather": GatherBackward, "integers": IntegersBackward}
"""By schedule."""
