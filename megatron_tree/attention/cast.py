"""The cast: a rank is sent only the keys that its queries can see, as with sliding windows, and its queries stay.

Under a window that is the end of the chunk before each of its own: the bytes don't depend on the sequence's length.
The functions compute one group of KV heads, as those of the grid (`grid.py`) do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from .. import comm
from ..config import AttnSpec
from ..merge import merge_into
from .call import AttnCall, Cast, Cell


def cast_fwd(
    q: Tensor, k: Tensor, v: Tensor, own: Callable, cell: Cell, call: AttnCall, spec: AttnSpec
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """(out [b, s, h, d_v], lse [b, h, s]), fp32; arguments as of `grid_fwd`."""
    arriving = _start(k, v, cell.cast)
    yield
    out, lse = own()
    keys, values = _arrived(arriving, k, v)
    yield
    if cell.cast.arrived:
        segments = dict(q_segments=cell.own_queries, k_segments=cell.cast.arrived)
        merge_into((out, lse), call.backend.attn_fwd(q, keys, values, **segments, spec=spec))
    return out, lse


def cast_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    own: Callable,
    cell: Cell,
    call: AttnCall,
    spec: AttnSpec,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """dq, dk, dv, fp32: keys are sent once more; their gradients come back to their rank, which adds them up."""
    cast = cell.cast
    arriving = _start(k, v, cast)
    yield
    dq, dk, dv = own()
    keys, values = _arrived(arriving, k, v)
    yield
    dkv = dq.new_zeros((keys.shape[1], *k.shape[:1], k.shape[2], k.shape[3] + v.shape[3]))
    if cast.arrived:
        segments = dict(q_segments=cell.own_queries, k_segments=cast.arrived)
        dq_part, *parts = call.backend.attn_bwd(dout, q, keys, values, lse, delta, **segments, spec=spec)
        dq += dq_part
        dkv = torch.cat(parts, -1).transpose(0, 1)
    lengths = [sum(s.length for s in segments) for segments in cast.sent]
    returning = comm.start_all_to_all_v(list(dkv.to(call.wire_dtype).split(cast.lengths)), lengths, cast.team)
    del keys, values, dkv
    yield
    returning.advance()
    yield
    grads = returning.wait().transpose(0, 1).to(dk.dtype).split((k.shape[-1], v.shape[-1]), -1)
    for total, came in zip((dk, dv), grads):
        row = 0
        for s in (s for segments in cast.sent for s in segments):  # in the team's order
            total[:, s.row : s.row + s.length] += came[:, row : row + s.length]
            row += s.length
    return dq, dk, dv


def _start(k: Tensor, v: Tensor, cast: Cast) -> comm.Pending:
    packed = torch.cat((k, v), -1).transpose(0, 1)  # [s, b, h_kv, d + d_v]
    rows = [[packed[s.row : s.row + s.length] for s in segments] for segments in cast.sent]
    return comm.start_all_to_all_v([torch.cat(x) if x else packed[:0] for x in rows], cast.lengths, cast.team)


def _arrived(arriving: comm.Pending, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return arriving.wait().transpose(0, 1).split((k.shape[-1], v.shape[-1]), -1)
