"""The forward and the backward of a call by its plan, on the grid, the cast or the ring.

`forward` and `backward` leave every rank its heads: a chunk is a slice of its tensors, and the local pair of all chunks
is computed at once, while the first chunk's rows are on their way.

`forward_exchanged` and `backward_exchanged` exchange heads for tokens over a team of u ranks (Ulysses,
`TreeConfig.ulysses_size`). Before attention, each rank of the team sends away (u - 1) / u of its heads and receives the
other ranks' tokens of the heads it keeps; afterwards results go back. A rank then has a *holder's* rows: the shards of
all ranks of the team, one after another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm, kernels
from ..merge import bits_float, join_heads, merge_sinks, pack_statistics, sinks_of, state_dtype, unpack_statistics
from ..plan import HeadSplit, PassPlan, Stages, run_stages
from ..spec import AttnSpec
from .call import PlannedAttention
from .cell import CellBackward, CellForward, HeadChunk, LocalGrads, LocalState, Residuals, head_chunks, sink_grads
from .gather import BACKWARDS, GatherForward
from .ring import RingBackward, RingForward
from .tuning import Stopwatch


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: PlannedAttention, with_lse: bool
) -> tuple[Tensor, Tensor | None, Residuals]:
    """(out, lse) of this rank's share, out not rounded to its dtype, and what the backward needs. Without with_lse, lse
    may be None.

    Dual tensors (duals.py; sinks [h, 2]) take the same way, if call.backend is for them.
    """
    plan = call.plan.forward
    if plan.ulysses_size > 1:
        return forward_exchanged(q, k, v, sinks, call, with_lse)
    streams = comm.on_streams(q.device)
    if plan.schedule == "ring":
        run_stages([ring := RingForward(call, call.spec, q, k, v)], streams=streams)
        state = ring.state
    elif plan.schedule == "gather":
        parts = head_chunks(q.shape[2], k.shape[2], plan.head_chunks, call.spec)
        chunks = [GatherForward(call.cell(plan), chunk, q, (k, v)) for chunk in parts]
        run_stages(chunks, streams=streams)
        state = join_heads([chunk.state for chunk in chunks])
    else:
        cell = call.cell(plan)
        local = LocalState(cell, call.spec, q, k, v, cell.local_dtype(q.dtype, sinks is not None))
        chunks = head_chunks(q.shape[2], k.shape[2], plan.head_chunks, call.spec)
        run_stages([CellForward(cell, chunk, q, (k, v), local) for chunk in chunks], streams=streams)
        state = local.state
    if sinks is not None:  # merged once, after the whole tree
        state = merge_sinks(*state, sinks)  # one more term of F: (4)
    out, lse = state[0], state[1].contiguous()
    return out, lse, Residuals(q, k, v, call.backend.statistics(out, lse))


def backward(
    dout: Tensor, delta: Tensor, residuals: Residuals, sinks: Tensor | None, call: PlannedAttention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, fp32, and dsinks. dout [b, s, h, d_v] and delta [b, h, s] are of this rank's share; of dual tensors
    delta and kappa, [b, h, s, 2]."""
    plan = call.plan.backward
    if plan.ulysses_size > 1:
        return backward_exchanged(dout, delta, residuals, sinks, call)
    streams = comm.on_streams(dout.device)
    if plan.schedule == "ring":
        run_stages([ring := RingBackward(call, call.spec, dout, residuals, delta)], streams=streams)
        grads = ring.grads
    elif plan.schedule in BACKWARDS:
        parts, run = head_chunks(*call.shape[:2], plan.head_chunks, call.spec), BACKWARDS[plan.schedule]
        chunks = [run(call.cell(plan), x, dout, residuals, delta, sinks) for x in parts]
        run_stages(chunks, streams=streams)
        grads = tuple(torch.cat(parts, 2) for parts in zip(*(chunk.grads for chunk in chunks)))
        return *grads, None if sinks is None else torch.cat([chunk.dsinks for chunk in chunks])
    else:
        cell = call.cell(plan)
        local = LocalGrads(cell, call.spec, dout, residuals, delta)
        chunks = head_chunks(residuals.q.shape[2], residuals.k.shape[2], plan.head_chunks, call.spec)
        run_stages([CellBackward(cell, chunk, dout, residuals, delta, local) for chunk in chunks], streams=streams)
        grads = local.grads
    return *grads, None if sinks is None else sink_grads(sinks, residuals.lse, delta)


def rehearse(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: PlannedAttention, watch: Stopwatch) -> None:
    """The passes of a call on its tensors, whose results nobody sees."""
    q, k, v, sinks = (x if x is None else x.detach() for x in (q, k, v, sinks))
    out, _, residuals = watch.timed(lambda: forward(q, k, v, sinks, call, call.return_lse))
    if call.goes_backward:
        dout = out.to(q.dtype)
        delta = kernels.attn_delta(dout, dout, None)
        watch.timed(lambda: backward(dout, delta, residuals, sinks, call))


def forward_exchanged(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: PlannedAttention, with_lse: bool
) -> tuple[Tensor, Tensor | None, Residuals]:
    """As `forward`; what the backward needs is of the heads that this rank has after the exchange."""
    run = _Pass(call, call.plan.forward)
    chunks = [_ForwardChunk(run, chunk, q, k, v, sinks, with_lse) for chunk in run.chunks]
    run_stages(chunks, streams=comm.on_streams(q.device))
    out, *lse = (run.exchange.joined(list(parts), q.shape[1]) for parts in zip(*(chunk.results for chunk in chunks)))
    lse = bits_float(lse[0], state_dtype(q.dtype))[..., 0].transpose(1, 2).contiguous() if lse else None
    parts = zip(zip(*(chunk.residuals for chunk in chunks)), (2, 2, 2, 1))
    residuals = (tensors[0] if len(tensors) == 1 else torch.cat(tensors, axis) for tensors, axis in parts)
    return out, lse, Residuals(*residuals)


def backward_exchanged(
    dout: Tensor, delta: Tensor, residuals: Residuals, sinks: Tensor | None, call: PlannedAttention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `backward`; dout and delta are of this rank's tokens, with all heads."""
    run = _Pass(call, call.plan.backward)
    chunks = [_BackwardChunk(run, chunk, dout, delta, residuals, sinks) for chunk in run.chunks]
    run_stages(chunks, streams=comm.on_streams(dout.device))
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
        self.gathers = plan.schedule in BACKWARDS
        self.backward = BACKWARDS.get(plan.schedule)
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
            self.inner = self.run.backward(cell, HeadChunk.all(self.chunk.spec), *args, self.local_sinks)
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


class HeadExchange:
    """Heads exchanged for tokens over a team.

    rows: of queries and of keys, in which each rank's share travels. q, k and v go in one message if they are equal.
    """

    def __init__(self, split: HeadSplit, team: comm.Team, rows: tuple[int, int]):
        self._split, self._team, self._rows = split, team, rows
        self._first = team.index * split.n * split.queries

    @property
    def local(self) -> slice:
        """This rank's query heads among the call's, with padding."""
        return slice(self._first, self._first + self._split.n * self._split.queries)

    def chunks(self, n: int, spec: AttnSpec) -> list[HeadChunk]:
        """This rank's heads in n chunks; spec is of all heads."""
        return head_chunks(self._split.n * self._split.queries, self._split.n, n, spec, self._first)

    def start_to_tokens(
        self, chunk: HeadChunk, queries: tuple[Tensor, ...], kv: tuple[Tensor, ...] = ()
    ) -> PendingExchange:
        """Start to exchange a chunk of tensors [b, s, h, d_n] and [b, s, h_kv, d_n]; see `PendingExchange.tokens`."""
        of_queries = [self._by_unit(x, self._split.queries)[:, :, :, chunk.kv].flatten(3, 4) for x in queries]
        return self._start(of_queries, [self._kv_heads(x, chunk.kv) for x in kv])

    def start_to_heads(self, queries: tuple[Tensor, ...], kv: tuple[Tensor, ...] = ()) -> PendingExchange:
        """Start to exchange results [b, u * rows, heads, d_n] of a chunk back; see `PendingExchange.heads`."""
        sides = [[x.unflatten(1, (self._team.size, -1)).transpose(1, 2) for x in side] for side in (queries, kv)]
        return self._start(*sides)

    def joined(self, parts: list[Tensor], rows: int) -> Tensor:
        """[b, rows, h, d] of all chunks' query heads, as they came back."""
        return torch.cat(parts, 3).flatten(2, 4)[:, :rows, : self._split.num_heads]

    def kv_joined(self, part: Tensor, rows: int) -> Tensor:
        """[b, rows, h_kv, d] of KV heads, of which several ranks may have had a copy."""
        h_kv, copies = self._split.num_heads_kv, self._split.copies
        return part.flatten(2, 4)[:, :rows, : h_kv * copies : copies]

    def kv_summed(self, parts: list[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
        """[b, rows, h_kv, d]: the gradients of a KV head, which several ranks may have had, added up in `dtype`."""
        h_kv, copies = self._split.num_heads_kv, self._split.copies
        units = torch.cat(parts, 3).flatten(2, 4)[:, :rows, : h_kv * copies].to(dtype)
        return units if copies == 1 else units.unflatten(2, (h_kv, copies)).sum(3)

    def _start(self, queries: list[Tensor], kv: list[Tensor]) -> PendingExchange:
        """Entry w of the third axis of tensors [b, s, u, heads, d_n] goes to rank w."""
        sides = [(queries + kv, self._rows[0])]
        if self._rows[0] != self._rows[1]:
            sides = [(queries, self._rows[0]), (kv, self._rows[1])]
        messages = [self._send(tensors, rows) for tensors, rows in sides if tensors]
        return PendingExchange(messages, [[x.shape[3:] for x in tensors] for tensors, _ in sides if tensors])

    def _send(self, tensors: list[Tensor], rows: int) -> comm.Pending:
        b, s, u = tensors[0].shape[:3]
        widths = [x.shape[3:].numel() for x in tensors]
        packed = tensors[0].new_empty((u, rows, b, sum(widths)))
        packed[:, s:].zero_()
        for x, part in zip(tensors, packed[:, :s].split(widths, -1)):  # each is copied once
            part.unflatten(-1, x.shape[3:]).copy_(x.permute(2, 1, 0, 3, 4))
        return comm.start_all_to_all(packed, self._team)

    def _by_unit(self, x: Tensor, heads: int) -> Tensor:
        """[b, s, u * n * heads or fewer, d] -> [b, s, u, n, heads, d]."""
        missing = self._split.u * self._split.n * heads - x.shape[2]
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return x.unflatten(2, (self._split.u, self._split.n, heads))

    def _kv_heads(self, x: Tensor, kv: slice) -> Tensor:
        """[b, s, h_kv, d] -> a chunk of every rank's KV heads [b, s, u, heads, d]."""
        u, n, copies = self._split.u, self._split.n, self._split.copies
        if copies == 1:
            return self._by_unit(x, 1)[:, :, :, kv].flatten(3, 4)
        units, heads = [w * n + j for w in range(u) for j in range(n)[kv]], x.unbind(2)
        of_units = [heads[min(unit // copies, len(heads) - 1)] for unit in units]  # padding's results are dropped
        return torch.stack(of_units, 2).unflatten(2, (u, -1))


class PendingExchange(NamedTuple):
    """Tensors that a team exchanges, on their way."""

    messages: list[comm.Pending]
    shapes: list[list[tuple[int, int]]]
    """(heads, d_n) of each message's tensors."""

    def tokens(self) -> list[Tensor]:
        """Wait for a chunk's heads of all ranks' tokens, [b, u * rows, heads, d_n] each."""
        return [x.flatten(0, 1).transpose(0, 1) for x in self._wait()]

    def heads(self, num_kv: int) -> list[Tensor]:
        """Wait for this rank's tokens of a chunk with num_kv KV heads on each rank, [b, rows, u, num_kv, heads, d_n]
        each."""
        return [x.permute(2, 1, 0, 3, 4).unflatten(3, (num_kv, -1)) for x in self._wait()]

    def _wait(self) -> list[Tensor]:
        """[u, rows, b, heads, d_n] each, whose entry w came from rank w."""
        arrived = []
        for message, shapes in zip(self.messages, self.shapes):
            parts = message.wait().split([heads * d for heads, d in shapes], -1)
            arrived += [x.unflatten(-1, shape) for x, shape in zip(parts, shapes)]
        return arrived
