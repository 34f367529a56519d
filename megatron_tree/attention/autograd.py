"""Tree attention as an autograd function: forward and backward by the plan's schedules, and sinks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import comm, kernels
from ..layout import sequences_of
from ..merge import merge_sinks
from .call import AttnCall
from .finite import check_finite_shares
from .grid import grid_bwd, grid_fwd
from .ring import ring_bwd, ring_fwd


def tree_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttnCall) -> tuple[Tensor, Tensor]:
    """Differentiable attention of this rank's queries over the whole sequence: (out, lse) of its shard."""
    return _TreeAttention.apply(q, k, v, sinks, call)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, call: AttnCall):
        run = ring_fwd if call.plan.forward.schedule == "ring" else grid_fwd
        out, lse = run(q, k, v, call)
        if sinks is not None:  # merged once, after the whole tree
            out, lse = merge_sinks(out, lse, sinks)  # one more term of F: (4)
        out, lse = out.to(q.dtype), lse.contiguous()
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call = ctx.call
        # every rank takes part in the backward's collectives, even without a gradient
        dout = torch.zeros_like(out) if dout is None else dout.to(q.dtype)
        own = call.queries.segments([call.rank])
        if sum(segment.length for segment in own) < q.shape[1]:  # rows of padding: their gradients may be NaN
            padding = sequences_of(own, q.shape[1]).to(q.device) < 0
            dout = dout.masked_fill(padding[:, None, None], 0)
            dlse = None if dlse is None else dlse.masked_fill(padding, 0)
        with comm.collective_call("the backward of tree attention", call.group, call.config) as backward:
            if call.config.check == "finite":
                check_finite_shares(call.config, call.group, call.queries, call.keys, dout=dout)
                backward.agree()
            else:
                backward.start()
            flowing = None if dlse is None else torch.where(lse == float("-inf"), 0.0, dlse)
            delta = kernels.attn_delta(dout, out, flowing)
            if flowing is not None:
                backend = kernels.choose(q, k, v, call.spec, call.config.backend, flowing_lse=True)
                call = dataclasses.replace(call, backend=backend)
            run = ring_bwd if call.plan.backward.schedule == "ring" else grid_bwd
            dq, dk, dv = run(dout, q, k, v, lse, delta, call)  # d2F/dqkv dzeta: (5) to (7)
        dsinks = None
        if sinks is not None:
            seen = torch.exp(sinks.to(lse.dtype)[:, None] - torch.where(lse == float("-inf"), float("inf"), lse))
            dsinks = -(seen * delta).sum((0, 2)).to(sinks.dtype)  # d2F/dsinks dzeta: (8)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None
