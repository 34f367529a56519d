"""Decoding in fixed point: sums of integers have the same bits in any order, so any rank may hold any slot.

This is the paper's Algorithm 3 (arXiv 2408.04093), the maximum of logits over ranks and then the sum of numerators and
denominators, with weights and values as integers. A weight is exp(logit - largest logit) in steps of 2^-42, a value is
in steps of 2^-21 of the largest one of its column: fp32's accuracy relative to these. Products and the sums of a chunk
are exact in float64, and sums of 2^21 slots fit into int64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..merge import NEG_INF, finite
from ..spec import AttnSpec
from .blocks import alibi_bias
from .kv_cache import KVCache

BITS = 21  # of a value, and of each half of a weight
CHUNK = 512  # slots at a time; sums of up to 2048 products below 2^42 are exact in float64


class FixedPoint:
    """The part of a decode call of one rank: q [b, s_q, h, d] over its slots.

    `largest` is to be reduced by its maximum over the ranks, then `terms` by its sum. A NaN becomes a NaN of its query,
    or of its column.
    """

    def __init__(self, q: Tensor, cache: KVCache, spec: AttnSpec):
        self._shape = *q.shape[:3], cache.values.shape[-1]
        if cache.selected is not None:  # every query is a row
            q, cache = q.flatten(0, 1)[:, None], cache.with_selected(slice(None), q.dtype)
        self._parts: list[list[tuple[Tensor, Tensor]]] = []
        """Of each row, by chunk: logits [h_kv, g * s_q, n] and values [h_kv, n, d_v], fp32."""
        h_kv, columns = cache.k.shape[2], q.shape[2] // cache.k.shape[2] * q.shape[1]
        self.largest = q.new_full((q.shape[0], h_kv, columns + self._shape[-1]), NEG_INF, dtype=torch.float32)
        """[rows, h_kv, g * s_q + d_v]: of the logits of each query, and of the values of each column."""
        for i in range(q.shape[0]):
            row = cache.row(i, q.dtype).without_padding()
            self._parts.append(list(_parts(q[i : i + 1].float(), row, spec.batch_row(i))))
            for s, v in self._parts[-1]:
                largest = torch.cat((s.amax(-1), v.abs().amax(1)), 1)
                torch.maximum(self.largest[i], largest, out=self.largest[i])
        # infinite where one is NaN, which the maximum over ranks may lose
        self.largest.nan_to_num_(torch.inf, torch.inf, NEG_INF)

    def terms(self, largest: Tensor) -> Tensor:
        """int64 [rows, h_kv, g * s_q, 2 * d_v + 1]: both halves of the numerator, and the denominator."""
        d_v = self._shape[-1]
        terms = torch.zeros((*largest.shape[:2], largest.shape[2] - d_v, 2 * d_v + 1), dtype=torch.int64)
        terms = terms.to(largest.device)
        for row, parts, of_row in zip(terms, self._parts, largest):
            top, columns = finite(of_row[:, :-d_v, None]), _sizes(of_row[:, None, -d_v:])
            for s, v in parts:
                weights = (torch.exp(s - top).double() * 2.0 ** (2 * BITS)).round()
                high = (weights * 2.0**-BITS).floor()
                low, v = weights - high * 2.0**BITS, (v / columns * 2.0**BITS).round().double()
                row += torch.cat((high @ v, low @ v, weights.sum(-1, keepdim=True)), -1).long()
        return terms

    def state(self, largest: Tensor, terms: Tensor) -> Tensor:
        """The packed state [b, s_q, h, d_v + 1] of the sums over all ranks."""
        b, s_q, h, d_v = self._shape
        high, low, den = terms.double().split((d_v, d_v, 1), -1)
        columns, top = _sizes(largest[:, :, None, -d_v:]).double(), largest[:, :, :-d_v, None].double()
        out = (high * 2.0**BITS + low) * 2.0**-BITS / den.clamp(min=1) * columns
        out = out.masked_fill(columns.isinf() | top.isposinf(), torch.nan)
        lse = (top + torch.log(den * 2.0 ** (-2 * BITS))).masked_fill(top.isposinf(), torch.nan)
        packed = torch.cat((out, lse), -1).float()  # [rows, h_kv, g * s_q, d_v + 1], or with selected slots s_q rows
        queries = h // packed.shape[1]  # of a KV head
        packed = packed.unflatten(2, (queries, packed.shape[2] // queries)).permute(0, 3, 1, 2, 4)
        return packed.reshape(b, s_q, h, d_v + 1)


def _parts(q: Tensor, cache: KVCache, spec: AttnSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits, values) of a row's slots, chunk by chunk. A logit is a sum over one query and one key, whatever other
    ones there are, so it is no matrix product."""
    h_kv = cache.k.shape[2]
    queries, keep = (
        q[0].unflatten(1, (h_kv, -1)).permute(1, 2, 0, 3).flatten(1, 2),
        cache.mask(spec),
    )  # [h_kv, g * s_q, d]
    for first in range(0, cache.k.shape[1], CHUNK):
        at = slice(first, first + CHUNK)
        k, v = (x[0, at].float().transpose(0, 1).contiguous() for x in (cache.k, cache.values))
        s = torch.stack([(k * of_query[:, None]).sum(-1) for of_query in queries.unbind(1)], 1) * spec.softmax_scale
        if spec.softcap:
            s = spec.softcap * torch.tanh(s / spec.softcap)
        s = s.unflatten(1, (-1, q.shape[1]))  # [h_kv, g, s_q, n]
        if spec.alibi_slopes is not None:
            bias = alibi_bias(spec, cache.q_positions, cache.k_positions[:, at], torch.float32)
            s = s + bias[0].unflatten(0, s.shape[:2])
        if keep is not None:
            s = s.masked_fill(~keep[0][..., at], NEG_INF)
        yield s.flatten(1, 2), v


def _sizes(x: Tensor) -> Tensor:
    """By what values are divided: the largest of a column, 1 where there is none but 0."""
    return torch.where(x <= 0, 1.0, x)
