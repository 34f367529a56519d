"""The ring, the baseline, in its best form: the KV shards circulate while the current one is computed.

Grouped KV heads are not repeated, two buffers are enough, gradients travel in the inputs' dtype, and ranks follow one
another node by node, so that one rank of a node sends to another node. With zigzag shares every step costs the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..config import AttnSpec
from ..merge import empty_state, merge_into, state_dtype
from ..plan import PassPlan
from .call import AttnCall
from .cell import Kept


class _Ring:
    def __init__(self, call: AttnCall, plan: PassPlan):
        self.call = call
        self.order, self.holders = call.ring(plan)
        self.size, self.at = len(self.order), self.order.index(call.rank)
        self.local = call.queries.segments(self.holders[self.at])
        self.rows = len(self.holders[self.at]) * call.keys.rows

    def shift(self, x: Tensor, into: Tensor) -> comm.Transfer:
        return comm.start_shift(x, into, self.call.group, self.order, timeout_s=self.call.config.timeout_s)

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        """[rows, b, h_kv, d + d_v], padded to the longest shard."""
        kv = torch.cat((k, v), -1).transpose(0, 1)
        return F.pad(kv, (0, 0) * 3 + (0, self.rows - kv.shape[0])).contiguous()

    def segments(self, step: int) -> dict:
        """This rank's queries against the shard that is here at this step."""
        return dict(q_segments=self.local, k_segments=self.call.keys.segments(self.holders[self.at - step]))


class RingForward(comm.Stages):
    """All heads of a pass in one chunk: `state`, of this rank's queries over the whole sequence."""

    def __init__(self, call: AttnCall, spec: AttnSpec, q: Tensor, k: Tensor, v: Tensor):
        self.args = q, k, v, call, spec

    def attend(self) -> None:
        self.state = ring_fwd(*self.args)


class RingBackward(comm.Stages):
    """All heads of a pass in one chunk: `grads` of this rank's rows."""

    def __init__(self, call: AttnCall, spec: AttnSpec, dout: Tensor, kept: Kept, delta: Tensor):
        self.args = dout, *kept, delta, call, spec

    def attend(self) -> None:
        self.grads = ring_bwd(*self.args)


def ring_fwd(q: Tensor, k: Tensor, v: Tensor, call: AttnCall, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """(out [b, s, h, d_v], lse [b, h, s]), fp32, of this rank's queries: p - 1 shifts of KV."""
    ring, widths = _Ring(call, call.plan.forward), (k.shape[-1], v.shape[-1])
    kv = ring.packed(k, v)
    other = torch.empty_like(kv)
    out, lse = empty_state((*q.shape[:3], v.shape[-1]), dtype=state_dtype(q.dtype), device=q.device)
    for step in range(ring.size):
        transfer = ring.shift(kv, other) if step < ring.size - 1 else None
        keys, values = kv.transpose(0, 1).split(widths, -1)
        merge_into((out, lse), call.backend.attn_fwd(q, keys, values, **ring.segments(step), spec=spec))
        if transfer:
            kv, other = transfer.wait(), kv
    return out, lse


def ring_bwd(dout, q, k, v, lse, delta, call: AttnCall, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: KV goes round again; its gradient follows one step behind, grows at every rank, and comes home."""
    ring, widths = _Ring(call, call.plan.backward), (k.shape[-1], v.shape[-1])
    kv, dq, going_home = ring.packed(k, v), 0, None
    other, home = torch.empty_like(kv), torch.empty_like(kv, dtype=call.wire_dtype)
    for step in range(ring.size):
        transfer = ring.shift(kv, other) if step < ring.size - 1 else None
        keys, values = kv.transpose(0, 1).split(widths, -1)
        segments = ring.segments(step)
        dq_part, dk, dv = call.backend.attn_bwd(dout, q, keys, values, lse, delta, **segments, spec=spec)
        dq = dq_part + dq
        dkv = torch.cat((dk, dv), -1).transpose(0, 1).contiguous()
        if going_home:
            dkv += going_home.wait()
        if ring.size > 1:
            going_home = ring.shift(dkv.to(call.wire_dtype), home)
        if transfer:
            kv, other = transfer.wait(), kv
    dkv = (going_home.wait() if going_home else dkv).transpose(0, 1)[:, : k.shape[1]]
    return dq, *dkv.split(widths, -1)
