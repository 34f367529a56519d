"""What torch's flash backward is given for `out`, from which it only forms delta = rowsum(dout * out)."""

from __future__ import annotations

import torch
from torch import Tensor


def out_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """Some out [b, s, h, d_v] with rowsum(dout * out) = delta [b, h, s]: delta dout / |dout|^2.

    In half precision: delta / dout at dout's largest entry. What rounding leaves goes to the second largest entry,
    unless dout is too small there: rows that see few keys have dout.v - delta near 0, and need delta to more digits
    than a half-precision number has. The entry is at most sqrt(d_v) |true out|: where that is too much for fp16 all
    entries share delta.
    """
    if dout.dtype == delta.dtype:
        norm = torch.linalg.vector_norm(dout, dim=-1, keepdim=True, dtype=torch.float64)  # squares stay above 0
        norm = torch.where(norm == 0, 1.0, norm)
        largest = torch.finfo(dout.dtype).max
        return dout * (delta.transpose(1, 2)[..., None] / norm / norm).clamp(-largest, largest).to(dout.dtype)
    where = _two_largest(dout)
    top = dout.gather(-1, where).to(delta.dtype)
    divisor = torch.where(top == 0, 1.0, top)
    rest, entries = delta.transpose(1, 2)[..., None], []
    for i in range(top.shape[-1]):
        entry = torch.where(top[..., i : i + 1] == 0, 0.0, rest / divisor[..., i : i + 1])
        if entries:
            entry = torch.where(entry.abs() <= entries[0].abs(), entry, 0.0)
        entries.append(entry.to(dout.dtype))
        rest = rest - entries[-1].to(rest.dtype) * top[..., i : i + 1]
    out = torch.zeros_like(dout).scatter_(-1, where, torch.cat(entries, -1))
    delta = delta.transpose(1, 2)[..., None]
    too_large = delta.abs() > torch.finfo(dout.dtype).max * top[..., :1].abs()
    if dout.dtype == torch.float16 and too_large.any():
        share = delta / dout.abs().sum(-1, keepdim=True, dtype=delta.dtype)
        out = torch.where(too_large, dout.sign() * share.to(dout.dtype), out)
    return out


def _two_largest(x: Tensor) -> Tensor:
    """Indices [..., 2] of the entries with the largest magnitudes, or [..., 1]. topk(2) takes thrice as long."""
    size = x.abs()
    first = size.max(-1, keepdim=True).indices
    if x.shape[-1] == 1:
        return first
    return torch.cat((first, size.scatter_(-1, first, -1.0).max(-1, keepdim=True).indices), -1)
