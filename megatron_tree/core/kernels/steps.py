"""Gradients of keys as integers: their sums have the same bits in any order, so each rank adds up those of its queries.

What a leaf of queries adds to dk and dv (leaves.py) is rounded to a whole number of steps, a power of two that follows
from exact maxima: it depends neither on who computes it nor on other documents, rows of the batch and heads. With |x|
the largest entry of a vector, and n_i the keys that query i sees, of which one has a p_ia of 1 / n_i or more,

    dv: e = max_i |dout_i| / n_i      dk: e = softmax_scale max_i (max_a |v_a| |dout_i| + |delta_i|) |q_i| / n_i

are about what one query adds at least; a step is 2^-30 of e for dk and 2^-28 for dv, of inputs in bf16 and fp16 2^-24:
relative to a document's largest gradients, errors stay those of dense attention in the same dtype (the last keys of a
long causal one have small gradients, which are less exact), and sums mostly fit into 32 bits. With p <= 1, equations
(5) to (7) of docs/design.md bound the sums of all n queries of a document that share a KV head:

    |dv_a| <= n max_i |dout_i|      |dk_a| <= n softmax_scale max_i (d_v |dout_i| max_a |v_a| + |delta_i|) |q_i|

A step is 2^-60 of that at least, so that int64 does not overflow where rounding makes p larger than 1. On the wire a
sum has as many bytes as the largest one of all ranks needs (`IntegerReducer`), 4 or more.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..layout import Segment, by_document
from ..merge import state_dtype
from ..spec import AttnSpec

BITS = 60  # of the bound
ACCURACY = {torch.float32: (30, 28), torch.float16: (24, 24), torch.bfloat16: (24, 24)}
"""Bits of e of dk and of dv, by dtype of inputs."""


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
        of_v = _by_document(_entries(v), k_segments, self.numbers)
        of_queries, of_even = largest.unbind(-1)
        bounds = _of_keys(of_queries, v.shape[-1] * of_v, spec) * n[:, None, None, None]
        exponents = BITS - torch.frexp(bounds).exponent
        if v.dtype in ACCURACY:
            bits = torch.tensor(ACCURACY[v.dtype], device=v.device)
            accurate = bits - torch.frexp(_of_keys(of_even, of_v, spec)).exponent
            exponents = torch.minimum(exponents, accurate)
        exponents = exponents.clamp(-126, 126)
        if dtype == torch.float64:
            exponents = torch.zeros_like(exponents)
        ones = torch.ones_like(bounds, dtype=dtype)
        self._sizes = torch.ldexp(ones, -exponents).masked_fill(~bounds.isfinite().all(-1, keepdim=True), torch.nan)
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


def largest_of(
    dout: Tensor, q: Tensor, delta: Tensor, num_heads_kv: int, *, q_segments, all_segments, k_segments, spec: AttnSpec
) -> Tensor:
    """float64 [documents, b, h_kv, 3, 2], of some ranks' queries: the largest |dout|, |dout| |q| and |delta| |q|, and
    the largest of each divided by n_i, infinite if one is not finite. Of several ranks' the maximum counts.
    all_segments: of all queries. k_segments: of all keys."""
    of_dout, of_q, of_delta = _entries(dout), _entries(q), _entries(delta.transpose(1, 2)[..., None])
    of_queries = torch.stack((of_dout, of_dout * of_q, of_delta * of_q), -1)
    seen = _seen(tuple(q_segments), tuple(k_segments), q.shape[1], (spec.left, spec.right)).to(q.device)
    of_queries = torch.stack((of_queries, of_queries / seen[:, None, None]), -1)
    of_groups = of_queries.unflatten(2, (num_heads_kv, -1)).amax(3)
    return _by_document(of_groups, q_segments, _numbers(all_segments))


def _of_keys(of_queries: Tensor, of_v: Tensor, spec: AttnSpec) -> Tensor:
    """[documents, b, h_kv, 2]: what the largest query adds to dk, and to dv."""
    dout, dout_q, delta_q = of_queries.unbind(-1)
    return torch.stack((abs(spec.softmax_scale) * (of_v * dout_q + delta_q), dout), -1)


@functools.lru_cache(maxsize=64)
def _seen(q_segments: tuple[Segment, ...], k_segments: tuple[Segment, ...], num_rows: int, window: tuple) -> Tensor:
    """float64 [s]: how many keys the query of a row sees, at least 1. window: (left, right) of `AttnSpec`."""
    (left, right), seen = window, torch.ones(num_rows, dtype=torch.float64)
    counts = {seq: sum(s.length for s in of_document) for seq, of_document in by_document(k_segments).items()}
    for s in q_segments:
        at, count = torch.arange(s.pos, s.pos + s.length), counts.get(s.seq, 0)
        first = 0 if left is None else (at - left).clamp(min=0)
        last = count - 1 if right is None else (at + right).clamp(max=count - 1)
        seen[s.row : s.row + s.length] = (last - first + torch.ones_like(at)).clamp(min=1)
    return seen


def _entries(x: Tensor) -> Tensor:
    """float64 [b, s, h]: the largest |entry| of the vectors of x [b, s, h, d]. Products of them do not overflow."""
    return x.abs().amax(-1).double()


def _numbers(segments: tuple[Segment, ...]) -> dict[int, int]:
    """Documents, numbered."""
    return {seq: i for i, seq in enumerate(sorted({s.seq for s in segments}))}


def _by_document(x: Tensor, segments: tuple[Segment, ...], numbers: dict[int, int]) -> Tensor:
    """[documents, b, ...]: the largest of x [b, s, ...] over the rows of each document."""
    x = x.nan_to_num(torch.inf, torch.inf)
    found = x.new_zeros(len(numbers), x.shape[0], *x.shape[2:])
    for s in segments:
        if s.seq in numbers:
            into = found[numbers[s.seq]]
            torch.maximum(into, x[:, s.row : s.row + s.length].amax(1), out=into)
    return found
