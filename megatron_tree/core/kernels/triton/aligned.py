"""The kernels with tiles aligned to positions: the bits of a row depend neither on the other rows nor on who has them.

Rows are copied into the order of (document, position), leaf by leaf (leaves.py), with zeros where there is no row. So
every tile of queries is whole, begins at a multiple of its length, and has products of one shape; which tiles of keys
it goes through, from the first to the last, depends on positions only. Every head lies by itself, so that the machine
code does not depend on the number of heads. All keys that a query sees must be here, and in the backward all queries
that see a key (attention/gather.py). The tiles of configs.py divide a leaf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...merge import NEG_INF
from ...spec import AttnSpec
from ..leaves import Leaves
from .host import accumulate_bwd, write_state


def attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None
) -> tuple[Tensor, Tensor]:
    """See `Backend.attn_fwd`; out_dtype changes nothing."""
    queries, keys = Leaves.of(tuple(q_segments), q.shape[1]), Leaves.of(tuple(k_segments), k.shape[1])
    q, k, v = _in_order(q, queries), _in_order(k, keys), _in_order(v, keys)
    out = _zeros(*q.shape[:3], v.shape[-1], device=q.device)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), NEG_INF)
    write_state(out, lse, q, k, v, q_segments=queries.whole(), k_segments=keys.segments, spec=spec)
    return queries.back(out), queries.back(lse.transpose(1, 2), NEG_INF).transpose(1, 2).contiguous()


def attn_bwd(
    dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, own: tuple[slice, slice] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.attn_bwd`, and own of leaves.py."""
    queries, keys = Leaves.of(tuple(q_segments), q.shape[1]), Leaves.of(tuple(k_segments), k.shape[1])
    dout, q, k, v = _in_order(dout, queries), _in_order(q, queries), _in_order(k, keys), _in_order(v, keys)
    lse = _by_head(queries.in_order(lse.transpose(1, 2), NEG_INF))
    delta = _by_head(queries.in_order(delta.transpose(1, 2)))
    grads = [_zeros(*x.shape, device=q.device) for x in (q, k, v)]
    of_queries, of_keys = own or (slice(None),) * 2
    segments = dict(q_segments=queries.whole(), k_segments=keys.segments)
    parts = queries.whole(of_queries), keys.whole(of_keys)
    accumulate_bwd(dout, q, k, v, lse, delta, grads, **segments, spec=spec, own=parts)
    return queries.back(grads[0]), keys.back(grads[1]), keys.back(grads[2])


def _in_order(x: Tensor, leaves: Leaves) -> Tensor:
    """[b, positions of the leaves, h, d] of x [b, s, h, d]."""
    return _by_head(leaves.in_order(x)).transpose(1, 2)


def _by_head(x: Tensor) -> Tensor:
    """[b, h, s, ...] of x [b, s, h, ...]; also the strides of an axis of one entry are those of a new tensor."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _zeros(b: int, s: int, h: int, d: int, device) -> Tensor:
    """fp32 [b, s, h, d], of which every head lies by itself."""
    return torch.zeros(b, h, s, d, device=device).transpose(1, 2)
