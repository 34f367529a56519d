"""The ring, the baseline, in its best form: the KV shards circulate while the current one is computed.

Grouped KV heads are not repeated, two buffers are enough, gradients travel in the inputs' dtype, and ranks follow one
another node by node, so that one rank of a node sends to another node. With zigzag shares every step costs the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..kernels import merge_into
from ..merge import empty_state, state_dtype
from ..plan import PassPlan, Stages
from ..spec import AttnSpec
from .call import PlannedAttention
from .cell import Residuals


class _Ring:
    def __init__(self, call: PlannedAttention, plan: PassPlan):
        self.call = call
        self.order, self.holders = call.neighbours(plan).ring, call.neighbours(plan).ring_holders
        self.size, self.at = len(self.order), self.order.index(call.rank)
        self.local = call.queries.segments(self.holders[self.at])
        self.rows = len(self.holders[self.at]) * call.keys.rows

    def shift(self, x: Tensor, into: Tensor) -> comm.Transfer:
        return comm.start_shift(x, into, self.order, self.call.ranks)

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        """[rows, b, h_kv, d + d_v], padded to the longest shard."""
        kv = torch.cat((k, v), -1).transpose(0, 1)
        return F.pad(kv, (0, 0) * 3 + (0, self.rows - kv.shape[0])).contiguous()

    def segments(self, step: int) -> dict:
        """This rank's queries against the shard that is here at this step."""
        selected = {} if self.call.selected is None else {"selected": self.call.selected_keys}
        return dict(q_segments=self.local, k_segments=self.call.keys.segments(self.holders[self.at - step]), **selected)


class RingForward(Stages):
    """All heads of a pass in one chunk: `state`, fp32, of this rank's queries over the whole sequence; p - 1 shifts."""

    def __init__(self, call: PlannedAttention, spec: AttnSpec, q: Tensor, k: Tensor, v: Tensor):
        self.call, self.spec, self.qkv = call, spec, (q, k, v)

    def attend(self) -> None:
        call, (q, k, v), ring = self.call, self.qkv, _Ring(self.call, self.call.plan.forward)
        kv, widths = ring.packed(k, v), (k.shape[-1], v.shape[-1])
        other = torch.empty_like(kv)
        self.state = empty_state((*q.shape[:3], call.backend.out_dim(v)), dtype=state_dtype(q.dtype), device=q.device)
        for step in range(ring.size):
            transfer = ring.shift(kv, other) if step < ring.size - 1 else None
            keys, values = kv.transpose(0, 1).split(widths, -1)
            part = call.backend.attn_fwd(q, keys, values, **ring.segments(step), spec=self.spec)
            merge_into(self.state, part)
            if transfer:
                kv, other = transfer.wait(), kv


class RingBackward(Stages):
    """All heads of a pass in one chunk: `grads` of this rank's rows.

    KV goes round again; its gradient follows one step behind, grows at every rank, and comes home.
    """

    def __init__(self, call: PlannedAttention, spec: AttnSpec, dout: Tensor, residuals: Residuals, delta: Tensor):
        self.call, self.spec, self.dout, self.residuals, self.delta = call, spec, dout, residuals, delta

    def attend(self) -> None:
        call, (q, k, v, lse), ring = self.call, self.residuals, _Ring(self.call, self.call.plan.backward)
        kv, widths, dq, going_home = ring.packed(k, v), (k.shape[-1], v.shape[-1]), 0, None
        other, home = torch.empty_like(kv), torch.empty_like(kv, dtype=call.wire_dtype)
        for step in range(ring.size):
            transfer = ring.shift(kv, other) if step < ring.size - 1 else None
            keys, values = kv.transpose(0, 1).split(widths, -1)
            segments = dict(ring.segments(step), spec=self.spec)
            dq_part, dk, dv = call.backend.attn_bwd(self.dout, q, keys, values, lse, self.delta, **segments)
            dq = dq_part + dq
            dkv = torch.cat((dk, dv), -1).transpose(0, 1).contiguous()
            if going_home:
                dkv += going_home.wait()
            if ring.size > 1:
                going_home = ring.shift(dkv.to(call.wire_dtype), home)
            if transfer:
                kv, other = transfer.wait(), kv
        dkv = (going_home.wait() if going_home else dkv).transpose(0, 1)[:, : k.shape[1]]
        self.grads = dq, *dkv.split(widths, -1)
