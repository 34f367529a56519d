"""The schedule of `TreeConfig(deterministic="ranks")`: rows are gathered, and ranks merge no partial results.

In the forward a rank has all keys, and attends with its own queries. In the backward it has all queries, too: it
computes dq of its own queries, and dk and dv of its own keys. So every row of a result is computed on one rank, from
all that it depends on (kernels/leaves.py). A tree over ranks would send partial states and fp32 gradients of every
subtree of leaves that a rank has; this sends queries in their dtype instead, and computes the blocks of other ranks'
queries and own keys on both ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import sum_rows
from ..merge import State, pack_statistics, unpack_statistics
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


class GatherBackward(Stages):
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
            self.dsinks = torch.zeros_like(self.sinks)
            if cell.queries.team.index == 0:
                terms = weights_of_sinks(self.sinks, lse) * delta
                self.dsinks -= sum_rows(terms, cell.queries.arriving).to(self.dsinks.dtype)  # d2F/dsinks dzeta: (8)
        self.arrived = None
