"""Tree attention as an autograd function: checks, delta, and the passes of the plan."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import comm, kernels
from ..layout import sequences_of
from . import passes
from .call import AttnCall
from .derivatives import in_torch, once
from .finite import check_finite_shares


class TreeAttention(torch.autograd.Function):
    """Differentiable attention of this rank's queries over the whole sequence: (out, lse) of its shard.

    Without with_lse, lse may be None.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttnCall, with_lse: bool):
        out, lse, kept = passes.forward(q, k, v, sinks, call, with_lse)
        ctx.save_for_backward(*kept, sinks, out, lse)
        ctx.call, ctx.with_lse, ctx.stamp = call, with_lse, comm.call_stamp(call.group)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @comm.outside_graphs
    def backward(ctx, dout, dlse):
        *kept, sinks, out, lse = ctx.saved_tensors
        call, kept = ctx.call, passes.Kept(*kept)
        # every rank takes part in the backward's collectives, even without a gradient
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        local = call.queries.segments((call.rank,))
        if sum(segment.length for segment in local) < out.shape[1]:  # rows of padding: their gradients may be NaN
            padding = sequences_of(local, out.shape[1]).to(out.device) < 0
            dout = dout.masked_fill(padding[:, None, None], 0)
            dlse = None if dlse is None else dlse.masked_fill(padding, 0)
        outside = torch.autocast(dout.device.type, enabled=False)
        with comm.collective_call("the backward of tree attention", call.group, call.config) as backward, outside:
            if call.config.check == "finite":
                check_finite_shares(call.config, call.group, call.queries, call.keys, dout=dout)
                backward.agree()
            else:
                backward.start(ctx.stamp)
            others_flow = ctx.with_lse and call.plan.backward.arrangement.u > 1  # another rank's dlse may be in delta
            if dlse is not None or others_flow:
                backend = kernels.choose(*kept[:3], call.spec, call.config.backend, flowing_lse=True)
                call = dataclasses.replace(call, backend=backend)
            again = torch.is_grad_enabled()  # with create_graph=True
            with torch.set_grad_enabled(again and in_torch(call.group, call.backend)):
                flowing = None if dlse is None else torch.where(lse == float("-inf"), 0.0, dlse)
                delta = kernels.attn_delta(dout, out, flowing)
                *grads, dsinks = passes.backward(dout, delta, kept, sinks, call)  # d2F/dqkv dzeta: (5) to (7)
        grads = [*(x.to(out.dtype) for x in grads), dsinks]
        if again and not in_torch(call.group, call.backend):
            grads = once(grads, (out, dout, dlse), _NO_SECOND.format(call.queries.world, call.backend.name))
        return *grads, None, None


_NO_SECOND = (
    "attention has no second derivatives on {} rank(s) with backend={!r}: compute them on one rank (cp_group=None) "
    "with TreeConfig(backend='reference'), or leave out create_graph=True"
)
