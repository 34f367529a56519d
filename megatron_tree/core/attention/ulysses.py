"""Passes that exchange heads for tokens before they attend, and results back after it (`TreeConfig.ulysses_size`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..merge import bits_float, merge_sinks, pack_statistics, sinks_of, state_dtype, unpack_statistics
from ..plan import HeadSplit, PassPlan, Stages, run_stages
from .call import PlannedAttention
from .cell import CellBackward, CellForward, LocalGrads, LocalState, Residuals, sink_grads
from .gather import GatherBackward, GatherForward
from .heads import HeadChunk, HeadExchange
from .ring import RingBackward, RingForward


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: PlannedAttention, with_lse: bool
) -> tuple[Tensor, Tensor | None, Residuals]:
    """As `passes.forward`; what the backward needs is of the heads that this rank has after the exchange."""
    run = _Pass(call, call.plan.forward)
    chunks = [_ForwardChunk(run, chunk, q, k, v, sinks, with_lse) for chunk in run.chunks]
    run_stages(chunks)
    out, *lse = (run.exchange.joined(list(parts), q.shape[1]) for parts in zip(*(chunk.results for chunk in chunks)))
    lse = bits_float(lse[0], state_dtype(q.dtype))[..., 0].transpose(1, 2).contiguous() if lse else None
    parts = zip(zip(*(chunk.residuals for chunk in chunks)), (2, 2, 2, 1))
    residuals = (tensors[0] if len(tensors) == 1 else torch.cat(tensors, axis) for tensors, axis in parts)
    return out, lse, Residuals(*residuals)


def backward(
    dout: Tensor, delta: Tensor, residuals: Residuals, sinks: Tensor | None, call: PlannedAttention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `passes.backward`; dout and delta are of this rank's tokens, with all heads."""
    run = _Pass(call, call.plan.backward)
    chunks = [_BackwardChunk(run, chunk, dout, delta, residuals, sinks) for chunk in run.chunks]
    run_stages(chunks)
    dq, dk, dv = (list(parts) for parts in zip(*(chunk.results for chunk in chunks)))
    dsinks = None
    if sinks is not None:  # of this rank's heads only
        local, dsinks = run.exchange.local, torch.zeros_like(sinks)
        if run.gathers:
            grads = torch.cat([chunk.dsinks for chunk in chunks])
        else:
            local_sinks = sinks_of(sinks, local.start, local.stop - local.start)
            grads = sink_grads(local_sinks, residuals.lse, torch.cat([chunk.delta for chunk in chunks], 1))
        dsinks[local] = grads[: len(dsinks[local])]
    dtype = state_dtype(dout.dtype)
    q_rows, k_rows = (x.rows_of((call.rank,)).stop for x in (call.queries, call.keys))
    dk, dv = (run.exchange.kv_summed(parts, k_rows, dtype) for parts in (dk, dv))
    return run.exchange.joined(dq, q_rows), dk, dv, dsinks


def restore_inputs(residuals: Residuals, call: PlannedAttention) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of this rank's tokens, from those of the heads that it has after the exchange."""
    run = _Pass(call, call.plan.forward)
    q, k, v = run.exchange.start_to_heads((residuals.q,), (residuals.k, residuals.v)).heads(residuals.k.shape[2])
    q_rows, k_rows = (x.rows_of((call.rank,)).stop for x in (call.queries, call.keys))
    return run.exchange.joined([q], q_rows), *(run.exchange.kv_joined(x, k_rows) for x in (k, v))


class _Pass:
    """What the chunks of a pass share."""

    def __init__(self, call: PlannedAttention, plan: PassPlan):
        team = call.head_team(plan)
        self.gathers = plan.schedule == "gather"
        split = HeadSplit.of(*call.shape[:2], team.size, whole=self.gathers)
        self.exchange = HeadExchange(split, team, (call.queries.rows, call.keys.rows))
        self.call, self.chunks = call, self.exchange.chunks(plan.head_chunks, call.spec)
        self.cell = None if plan.schedule == "ring" else call.cell(plan)


class _Chunk(Stages):
    """`inner` attends to a chunk of heads once they are exchanged; `results` come back."""

    inner: Stages

    def __init__(self, run: _Pass, chunk: HeadChunk, sinks: Tensor | None):
        self.run, self.chunk, self.sinks = run, chunk, sinks

    @property
    def local_sinks(self) -> Tensor | None:
        """Of the chunk's heads."""
        first, queries = self.run.exchange.local.start, self.chunk.queries
        return None if self.sinks is None else sinks_of(self.sinks, first + queries.start, queries.stop - queries.start)

    def receive(self) -> None:
        self.inner.receive()

    def attend(self) -> None:
        self.inner.attend()

    def advance(self) -> None:
        self.inner.advance()

    def collect(self) -> None:
        self.results, self.leaving = self.leaving.heads(self.chunk.kv.stop - self.chunk.kv.start), None


class _ForwardChunk(_Chunk):
    def __init__(self, run: _Pass, chunk: HeadChunk, q: Tensor, k: Tensor, v: Tensor, sinks, with_lse: bool):
        super().__init__(run, chunk, sinks)
        self.qkv, self.with_lse = (q, k, v), with_lse

    def exchange(self) -> None:
        q, k, v = self.qkv
        self.arriving = self.run.exchange.start_to_tokens(self.chunk, (q,), (k, v))

    def gather(self) -> None:
        self.qkv, self.arriving = self.arriving.tokens(), None
        (q, k, v), cell = self.qkv, self.run.cell
        if cell is None:
            self.inner = RingForward(self.run.call, self.chunk.spec, q, k, v)
        elif self.run.gathers:
            self.inner = GatherForward(cell, HeadChunk.all(self.chunk.spec), q, (k, v))
        else:
            dtype = cell.local_dtype(q.dtype, self.sinks is not None)
            local = LocalState(cell, self.chunk.spec, q, k, v, dtype)
            self.inner = CellForward(cell, HeadChunk.all(self.chunk.spec), q, (k, v), local)
        self.inner.gather()

    def give_back(self) -> None:
        self.inner.give_back()
        out, lse = self.inner.state
        if self.sinks is not None:
            out, lse = merge_sinks(out, lse, self.local_sinks)  # one more term of F: (4)
        call = self.run.call
        results = (out.to(call.wire_dtype),)
        if self.with_lse:
            results += (pack_statistics(lse, wire=call.wire_dtype),)
        self.residuals, self.inner = Residuals(*self.qkv, call.backend.statistics(out, lse)), None
        self.leaving = self.run.exchange.start_to_heads(results)


class _BackwardChunk(_Chunk):
    def __init__(self, run: _Pass, chunk: HeadChunk, dout: Tensor, delta: Tensor, residuals: Residuals, sinks):
        super().__init__(run, chunk, sinks)
        self.dsinks: Tensor | None = None
        self.dout, self.delta, self.residuals = dout, delta, residuals.part(chunk)

    def exchange(self) -> None:
        bits = pack_statistics(self.delta, wire=self.dout.dtype)
        self.arriving = self.run.exchange.start_to_tokens(self.chunk, (self.dout, bits))

    def gather(self) -> None:
        (self.dout, bits), self.arriving = self.arriving.tokens(), None
        (self.delta,) = unpack_statistics(bits, self.delta)
        cell, args = self.run.cell, (self.dout, self.residuals, self.delta)
        if cell is None:
            self.inner = RingBackward(self.run.call, self.chunk.spec, *args)
        elif self.run.gathers:
            self.inner = GatherBackward(cell, HeadChunk.all(self.chunk.spec), *args, self.local_sinks)
        else:
            self.inner = CellBackward(
                cell, HeadChunk.all(self.chunk.spec), *args, LocalGrads(cell, self.chunk.spec, *args)
            )
        self.inner.gather()

    def give_back(self) -> None:
        self.inner.give_back()
        dq, dk, dv = (x.to(self.run.call.wire_dtype) for x in self.inner.grads)
        self.dsinks = self.inner.dsinks if self.run.gathers else None
        self.dout = self.residuals = self.inner = None
        self.leaving = self.run.exchange.start_to_heads((dq,), (dk, dv))
