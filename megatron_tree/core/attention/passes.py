"""The forward and the backward of a call by its plan, on the grid, the cast or the ring, or by gathering all rows.

Here every rank keeps its heads: a chunk is a slice of its tensors, and the local pair of all chunks is computed at
once, while the first chunk's rows are on their way. ulysses.py has the passes that exchange heads before and after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..merge import join_heads, merge_sinks
from ..plan import run_stages
from . import ulysses
from .call import PlannedAttention
from .cell import CellBackward, CellForward, LocalGrads, LocalState, Residuals, sink_grads
from .gather import GatherBackward, GatherForward
from .heads import head_chunks
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
        return ulysses.forward(q, k, v, sinks, call, with_lse)
    if plan.schedule == "ring":
        run_stages([ring := RingForward(call, call.spec, q, k, v)])
        state = ring.state
    elif plan.schedule == "gather":
        parts = head_chunks(q.shape[2], k.shape[2], plan.head_chunks, call.spec)
        run_stages(chunks := [GatherForward(call.cell(plan), chunk, q, (k, v)) for chunk in parts])
        state = join_heads([chunk.state for chunk in chunks])
    else:
        cell = call.cell(plan)
        local = LocalState(cell, call.spec, q, k, v, cell.local_dtype(q.dtype, sinks is not None))
        chunks = head_chunks(q.shape[2], k.shape[2], plan.head_chunks, call.spec)
        run_stages([CellForward(cell, chunk, q, (k, v), local) for chunk in chunks])
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
        return ulysses.backward(dout, delta, residuals, sinks, call)
    if plan.schedule == "ring":
        run_stages([ring := RingBackward(call, call.spec, dout, residuals, delta)])
        grads = ring.grads
    elif plan.schedule == "gather":
        parts = head_chunks(residuals.q.shape[2], residuals.k.shape[2], plan.head_chunks, call.spec)
        run_stages(chunks := [GatherBackward(call.cell(plan), x, dout, residuals, delta, sinks) for x in parts])
        grads = tuple(torch.cat(parts, 2) for parts in zip(*(chunk.grads for chunk in chunks)))
        return *grads, None if sinks is None else torch.cat([chunk.dsinks for chunk in chunks])
    else:
        cell = call.cell(plan)
        local = LocalGrads(cell, call.spec, dout, residuals, delta)
        chunks = head_chunks(residuals.q.shape[2], residuals.k.shape[2], plan.head_chunks, call.spec)
        run_stages([CellBackward(cell, chunk, dout, residuals, delta, local) for chunk in chunks])
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
