"""Gradients of keys as integers: their sums have the same bits in any order, so each rank adds up those of its queries.

What a leaf of queries adds to dk and dv (leaves.py) is rounded to a whole number of steps. With `n` the queries of a
document that share a KV head, equations (5) to (7) of docs/design.md and p <= 1 bound every sum:

    |dv_a| <= n max_i |dout_i|      |dk_a| <= n softmax_scale max_i (d_v |dout_i| max_a |v_a| + |delta_i|) |q_i|

where |x| is the largest entry of a vector. A step is a power of two, 2^-60 of the bound, so that int64 does not
overflow where rounding makes p larger than 1. A maximum is exact, too: steps depend neither on who computes them nor on
other documents, rows of the batch and heads. Of a million queries, steps are 2^-40 of what one query adds at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import Segment, by_document
from ..merge import state_dtype
from ..spec import AttnSpec

BITS = 60


class Steps:
    """The steps of dk and dv of every document, row and KV head.

    Args:
        largest: of `largest_of` all queries.
        q_segments: of all queries. v, k_segments: of all keys.

    float64 is added up as it is: its steps are 1, its sums no integers.
    """

    def __init__(self, largest: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, group: int):
        self.numbers, dtype = _numbers(q_segments), state_dtype(v.dtype)
        self.dtype = torch.float64 if dtype == torch.float64 else torch.int64
        """Of sums."""
        dropped = 1 / (1 - spec.dropout.p) if spec.dropout else 1.0
        counts = {seq: sum(s.length for s in of_document) for seq, of_document in by_document(q_segments).items()}
        n = torch.tensor([counts[seq] * group * dropped for seq in self.numbers], dtype=torch.float64, device=v.device)
        (of_v,) = _by_document([_entries(v)], k_segments, self.numbers).unbind(-1)
        dout, dout_q, delta_q = largest.unbind(-1)
        of_k = abs(spec.softmax_scale) * (v.shape[-1] * of_v * dout_q + delta_q)
        bounds = torch.stack((of_k, dout), -1) * n[:, None, None, None]  # [documents, b, h_kv, 2]
        exponents = (BITS - torch.frexp(bounds).exponent).clamp(-126, 126)
        if dtype == torch.float64:
            exponents = torch.zeros_like(exponents)
        ones = torch.ones_like(bounds, dtype=dtype)
        self._sizes = torch.ldexp(ones, -exponents).masked_fill(~bounds.isfinite(), torch.nan)
        self.per_unit = torch.ldexp(ones, exponents).tolist()
        """[number of the document][row][KV head]: steps of dk, and of dv, in 1."""
        self._segments, self._num_rows = k_segments, v.shape[1]

    def add(self, total: Tensor, part: Tensor, per_unit: float) -> None:
        """Add a part of a gradient, which is overwritten, to its sum."""
        total += part.mul_(per_unit).to(self.dtype)

    def values(self, dk: Tensor, dv: Tensor, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """dk and dv of sums [b, rows, h_kv, d] of some rows of keys."""
        sizes = self._sizes.new_zeros(self._num_rows, *self._sizes.shape[1:])
        for s in self._segments:
            if s.seq in self.numbers:
                sizes[s.row : s.row + s.length] = self._sizes[self.numbers[s.seq]]
        of_k, of_v = sizes[rows].transpose(0, 1).split(1, -1)
        return dk.to(sizes.dtype) * of_k, dv.to(sizes.dtype) * of_v


def largest_of(dout: Tensor, q: Tensor, delta: Tensor, num_heads_kv: int, *, q_segments, all_segments) -> Tensor:
    """float64 [documents, b, h_kv, 3], of some ranks' queries: the largest |dout|, |dout| |q| and |delta| |q|, infinite
    if one is not finite. Of several ranks' the maximum counts. all_segments: of all queries."""
    of_dout, of_q, of_delta = _entries(dout), _entries(q), _entries(delta.transpose(1, 2)[..., None])
    of_queries = [of_dout, of_dout * of_q, of_delta * of_q]
    of_groups = [x.unflatten(2, (num_heads_kv, -1)).amax(-1) for x in of_queries]
    return _by_document(of_groups, q_segments, _numbers(all_segments))


def _entries(x: Tensor) -> Tensor:
    """float64 [b, s, h]: the largest |entry| of the vectors of x [b, s, h, d]. Products of them do not overflow."""
    return x.abs().amax(-1).double()


def _numbers(segments: tuple[Segment, ...]) -> dict[int, int]:
    """Documents, numbered."""
    return {seq: i for i, seq in enumerate(sorted({s.seq for s in segments}))}


def _by_document(of_rows: list[Tensor], segments: tuple[Segment, ...], numbers: dict[int, int]) -> Tensor:
    """[documents, b, h, n]: the largest of n tensors [b, s, h] over the rows of each document."""
    stacked = torch.stack(of_rows, -1).nan_to_num(torch.inf, torch.inf)
    found = stacked.new_zeros(len(numbers), stacked.shape[0], *stacked.shape[2:])
    for s in segments:
        if s.seq in numbers:
            into = found[numbers[s.seq]]
            torch.maximum(into, stacked[:, s.row : s.row + s.length].amax(1), out=into)
    return found
