"""The forward and the backward of a call by its plan: exchange heads, attend on the grid or the ring, exchange back.

The KV heads go in groups (`plan/pipeline.py`). Without an exchange, a group is a slice of this rank's tensors; the own
pair of all groups is then computed at once, while the first group is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import AttnSpec
from ..merge import bits_float, float_bits, merge_sinks, state_dtype
from ..plan import HeadSplit, PassPlan
from ..plan.pipeline import run_chunks
from .call import AttnCall
from .cast import cast_bwd, cast_fwd
from .grid import grid_bwd, grid_fwd
from .heads import HeadExchange, Heads
from .ring import ring_bwd, ring_fwd


class Kept(NamedTuple):
    """What the backward needs, for this rank's heads: its own ones, or those that it has after the exchange."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    """[b, h, s], with sinks."""

    def part(self, queries: slice, kv: slice) -> Kept:
        """The same of some query heads and their KV heads."""
        return Kept(self.q[:, :, queries], self.k[:, :, kv], self.v[:, :, kv], self.lse[:, queries])


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttnCall, with_lse: bool
) -> tuple[Tensor, Tensor | None, Kept]:
    """(out, lse) of this rank's share, and what the backward needs. Without with_lse, lse may be None."""
    run = _Forward(call, call.plan.forward, sinks)
    if run.exchange is None:
        out, lse = run.of_slices(q, k, v)
        if sinks is not None:  # merged once, after the whole tree
            out, lse = merge_sinks(out, lse, sinks)  # one more term of F: (4)
        out, lse = out.to(q.dtype), lse.contiguous()
        return out, lse, Kept(q, k, v, lse)
    groups = run_chunks([run.exchanged(i, q, k, v, sinks, with_lse) for i in range(run.heads.groups)])
    results, kept = zip(*groups)
    out, *lse = (run.exchange.joined(list(parts), q.shape[1]) for parts in zip(*results))
    lse = bits_float(lse[0], state_dtype(q.dtype))[..., 0].transpose(1, 2).contiguous() if lse else None
    joined = (parts[0] if len(parts) == 1 else torch.cat(parts, axis) for parts, axis in zip(zip(*kept), (2, 2, 2, 1)))
    return out.to(q.dtype), lse, Kept(*joined)


def backward(
    dout: Tensor, delta: Tensor, kept: Kept, sinks: Tensor | None, call: AttnCall
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, fp32, and dsinks. dout [b, s, h, d_v] and delta [b, h, s] are of this rank's share."""
    run = _Backward(call, call.plan.backward)
    if run.exchange is None:
        grads = run.of_slices(dout, delta, kept)
        return *grads, None if sinks is None else _sink_grads(sinks, kept.lse, delta)
    exchange = run.exchange
    grads, deltas = zip(*run_chunks([run.exchanged(i, dout, delta, kept) for i in range(exchange.groups)]))
    dq, dk, dv = (list(parts) for parts in zip(*grads))
    own, dtype = exchange.own, state_dtype(dout.dtype)
    dsinks = None
    if sinks is not None:  # of this rank's heads only
        padded = F.pad(sinks, (0, max(0, own.stop - len(sinks))))
        dsinks = torch.zeros_like(padded)
        dsinks[own] = _sink_grads(padded[own], kept.lse, torch.cat(deltas, 1))
        dsinks = dsinks[: len(sinks)]
    q_rows, k_rows = (x.rows_of((call.rank,)).stop for x in (call.queries, call.keys))
    dk, dv = (exchange.kv_summed(parts, k_rows, dtype) for parts in (dk, dv))
    return exchange.joined(dq, q_rows), dk, dv, dsinks


def _sink_grads(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    seen = torch.exp(sinks.to(lse.dtype)[:, None] - torch.where(lse == float("-inf"), float("inf"), lse))
    return -(seen * delta).sum((0, 2)).to(sinks.dtype)  # d2F/dsinks dzeta: (8)


class _Pass:
    """One pass on this rank: its cell, and its heads."""

    def __init__(self, call: AttnCall, plan: PassPlan):
        self.call, self.cell, self.is_ring = call, call.cell(plan), plan.schedule == "ring"
        self.exchange: HeadExchange | None = None
        h, h_kv, *_ = call.shape
        if self.cell.heads is None:
            self.heads = Heads(h, h_kv, plan.head_chunks)
        else:
            split, rows = HeadSplit.of(h, h_kv, self.cell.heads.size), (call.queries.rows, call.keys.rows)
            self.heads = self.exchange = HeadExchange(split, plan.head_chunks, self.cell.heads, rows)
        self.own_pair = dict(q_segments=self.cell.own_queries, k_segments=self.cell.own_keys)

    def spec(self, i: int) -> AttnSpec:
        """The mathematics of group i's heads."""
        return self.heads.spec(i, self.call.spec)


class _Forward(_Pass):
    def __init__(self, call: AttnCall, plan: PassPlan, sinks: Tensor | None):
        super().__init__(call, plan)
        parts = self.cell.row.size * self.cell.column.size
        self.merges = parts > 1 or self.cell.cast is not None or sinks is not None

    @property
    def attend(self) -> Callable[..., Generator]:
        """The schedule, unless it is the ring."""
        return grid_fwd if self.cell.cast is None else cast_fwd

    def own(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        """The state of the own queries over the own keys; in q's dtype if nothing is merged into it."""
        dtype = state_dtype(q.dtype) if self.merges else q.dtype
        out, lse = self.call.backend.attn_fwd(q, k, v, **self.own_pair, spec=spec, out_dtype=dtype)
        return out.to(dtype), lse

    def of_slices(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) where every rank keeps its heads."""
        call, heads = self.call, self.heads
        if self.is_ring:
            return ring_fwd(q, k, v, call, call.spec)
        whole = functools.cache(lambda: self.own(q, k, v, call.spec))

        def group(i: int) -> Generator:
            queries, kv = heads.queries(i), heads.kv(i)
            yield
            shares = q[:, :, queries], k[:, :, kv], v[:, :, kv]
            own = lambda: (whole()[0][:, :, queries], whole()[1][:, queries])  # noqa: E731
            yield from self.attend(*shares, own, self.cell, call, self.spec(i))

        run_chunks([group(i) for i in range(heads.groups)])
        return whole()

    def exchanged(self, i: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, with_lse: bool) -> Generator:
        """Group i: what `to_heads` returns of out and, with_lse, of lse; and what is kept of the group."""
        call, spec = self.call, self.spec(i)
        q, k, v = yield from self.exchange.to_tokens(i, (q,), (k, v))
        if self.is_ring:
            out, lse = ring_fwd(q, k, v, call, spec)
        else:
            out, lse = yield from self.attend(q, k, v, lambda: self.own(q, k, v, spec), self.cell, call, spec)
        if sinks is not None:
            first = self.heads.first(i)
            of_group = F.pad(sinks, (0, max(0, first + q.shape[2] - len(sinks))))[first : first + q.shape[2]]
            out, lse = merge_sinks(out, lse, of_group)  # one more term of F: (4)
        results = (out.to(call.wire_dtype),)
        if with_lse:
            results += (float_bits(lse.transpose(1, 2)[..., None], call.wire_dtype),)
        return (yield from self.exchange.to_heads(results)), Kept(q, k, v, lse)


class _Backward(_Pass):
    @property
    def attend(self) -> Callable[..., Generator]:
        """The schedule, unless it is the ring."""
        return grid_bwd if self.cell.cast is None else cast_bwd

    def own(self, dout: Tensor, share: Kept, delta: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the own queries over the own keys: (5) to (7)."""
        return self.call.backend.attn_bwd(dout, *share, delta, **self.own_pair, spec=spec)

    def of_slices(self, dout: Tensor, delta: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv where every rank keeps its heads."""
        call, heads = self.call, self.heads
        if self.is_ring:
            return ring_bwd(dout, *kept, delta, call, call.spec)
        whole = functools.cache(lambda: self.own(dout, kept, delta, call.spec))

        def group(i: int) -> Generator:
            queries, kv = heads.queries(i), heads.kv(i)
            yield
            own = lambda: [x[:, :, n] for x, n in zip(whole(), (queries, kv, kv))]  # noqa: E731
            share = kept.part(queries, kv)
            yield from self.attend(dout[:, :, queries], *share, delta[:, queries], own, self.cell, call, self.spec(i))

        run_chunks([group(i) for i in range(heads.groups)])
        return whole()

    def exchanged(self, i: int, dout: Tensor, delta: Tensor, kept: Kept) -> Generator:
        """Group i: what `to_heads` returns of dq, dk and dv, and delta of the group's heads."""
        call, spec, share = self.call, self.spec(i), kept.part(self.heads.queries(i), self.heads.kv(i))
        bits = float_bits(delta.transpose(1, 2)[..., None], dout.dtype)
        dout, bits = yield from self.exchange.to_tokens(i, (dout, bits))
        delta = bits_float(bits, delta.dtype)[..., 0].transpose(1, 2)
        if self.is_ring:
            grads = ring_bwd(dout, *share, delta, call, spec)
        else:
            own = functools.partial(self.own, dout, share, delta, spec)
            grads = yield from self.attend(dout, *share, delta, own, self.cell, call, spec)
        dq, dk, dv = (x.to(call.wire_dtype) for x in grads)
        return (yield from self.exchange.to_heads((dq,), (dk, dv))), delta
