"""One block of attention, of segments of queries and keys, against the float64 oracle: forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_tree.core import dropout, energy, kernels
from megatron_tree.core.layout import Segment, gathered_segments, positions_of, sequences_of
from megatron_tree.core.spec import AttnSpec
from support.attention import distances
from support.ranks import largest
from support.rounding import rounding
from support.triton_inputs import DEVICE, inputs

NEG_INF = float("-inf")


class Cell(NamedTuple):
    """Segments of queries and keys, and the rows of each."""

    q_segments: tuple[Segment, ...]
    k_segments: tuple[Segment, ...]
    s_q: int
    s_k: int


CELLS = {
    "one": Cell((Segment(0, 0, 40),), (Segment(0, 0, 40),), 40, 40),
    "cell of a grid": Cell(  # padding between the shares
        gathered_segments((1, 2), 48, 3, "zigzag", 18), gathered_segments((0, 2), 48, 3, "zigzag", 17), 36, 34
    ),
    "packed": Cell(  # three documents, one of them absent among the keys
        (Segment(0, 0, 19, 0), Segment(20, 0, 3, 1), Segment(23, 0, 17, 2)),
        (Segment(0, 0, 17, 2), Segment(18, 0, 19, 0)),
        *(40, 37),
    ),
    "offsets": Cell((Segment(3, 30, 21),), (Segment(0, 0, 7), Segment(9, 25, 33)), 24, 45),
}


def masks_of(cell: Cell, spec: AttnSpec, batch: int, num_heads: int, device=DEVICE) -> dict:
    """What the oracle is given of a cell: pairs that are seen, distances, dropout's weights."""
    q_pos, k_pos = (positions_of(s, n, device=device) for s, n in zip(cell[:2], cell[2:]))
    q_seq, k_seq = (sequences_of(s, n, device=device) for s, n in zip(cell[:2], cell[2:]))
    keep = energy.visible(q_pos, k_pos, spec) & (q_seq[:, None] == k_seq) & (k_seq >= 0)
    masks = dict(spec=spec, keep=keep, distance=distances(q_pos, k_pos))
    if spec.dropout:
        at = dict(q_positions=q_pos, k_positions=k_pos, q_sequences=q_seq)
        masks["keep_weights"] = dropout.keep_weights(spec.dropout, batch=batch, num_heads=num_heads, **at)
    return masks


def spoil_padding(cell: Cell, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Write NaN to rows of no segment, which may hold anything."""
    for x, segments in ((q, cell.q_segments), (dout, cell.q_segments), (k, cell.k_segments), (v, cell.k_segments)):
        x[:, positions_of(segments, x.shape[1], device=x.device) < 0] = float("nan")


def check_block(
    backend: str, cell: Cell, options: dict, heads=(4, 2), d=16, d_v=16, *, dtype=torch.float32, batch=1, limit=None
) -> None:
    """out, lse and gradients of one block, with NaN in its padding; gradients may be four times as far off."""
    spec = AttnSpec(**{"softmax_scale": d**-0.5} | options)
    q, k, v, dout = inputs(cell.s_q, cell.s_k, heads, d, d_v, batch=batch, dtype=dtype)
    masks, exact = masks_of(cell, spec, batch, heads[0]), [x.double() for x in (q, k, v, dout)]
    out, lse = energy.attention(*exact[:3], **masks)
    truth = energy.attention_grads(*exact, **masks)
    spoil_padding(cell, q, k, v, dout)
    call = dict(q_segments=cell.q_segments, k_segments=cell.k_segments, spec=spec, backend=backend)
    o, l = kernels.attn_fwd(q, k, v, **call)
    assert torch.equal(l == NEG_INF, lse == NEG_INF)
    gap = torch.where(lse == NEG_INF, 0.0, l - lse)
    if limit is None:  # weights lose digits of logits
        limit = rounding(cell.s_k, dtype) * max(1.0, float(lse[lse.isfinite()].abs().max()))
    assert largest(((o - out).abs().max(), gap.abs().max())) < limit
    delta = kernels.attn_delta(dout, out.to(dout.dtype))
    delta[..., positions_of(cell.q_segments, cell.s_q, device=q.device) < 0] = 0.0
    for ours, t in zip(kernels.attn_bwd(dout, q, k, v, lse.to(l.dtype), delta, **call), truth):
        assert (ours - t).abs().max() < 4 * limit
