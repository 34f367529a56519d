"""Merging partial results: the associative operation that lets attention be reduced over a tree.

A state is (out, lse): out [..., d] the attention output over some keys, lse [...] the natural log of their summed
exponentials, fp32 (float64 for float64 inputs). The identity is out = 0, lse = -inf: a shard with nothing to see.
The rule is `energy.merge_by_energy` in closed form: weights exp(lse_i - max), summed; two identities merge to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states of inputs of this dtype are kept in: float64 for float64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_state(shape, *, dtype: torch.dtype = torch.float32, device=None) -> tuple[Tensor, Tensor]:
    """The identity: out zeros of `shape` [..., d], lse -inf [...]."""
    out = torch.zeros(shape, dtype=dtype, device=device)
    return out, torch.full(shape[:-1], NEG_INF, dtype=dtype, device=device)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge n states at once: outs [n, ..., d], lses [n, ...] -> out [..., d], lse [...]; sums in the order given."""
    dtype = state_dtype(lses.dtype)
    lses = lses.to(dtype)
    m = lses.amax(0)
    m = torch.where(m == NEG_INF, 0.0, m)
    weights = torch.exp(lses - m)  # [n, ...]; 0 for empty states
    den = weights.sum(0)
    num = torch.zeros(outs.shape[1:], dtype=dtype, device=outs.device)
    for w, o in zip(weights, outs):
        num = num + w[..., None] * o.to(dtype)
    safe = torch.where(den == 0, 1.0, den)
    return num / safe[..., None], torch.where(den == 0, NEG_INF, m + torch.log(safe))


def merge_state(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two states (out, lse). Commutative to the last bit, associative up to rounding."""
    return merge_states(torch.stack((a[0], b[0])), torch.stack((a[1], b[1])))


def merge_into(acc: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor]) -> None:
    """Merge `part` into the accumulator `acc` in place; out [..., d] and lse [...] of both line up."""
    (acc_out, acc_lse), (out, lse) = acc, part
    kept, joined, new = _weights(acc_lse, lse.to(acc_lse.dtype))
    acc_out.mul_(kept[..., None])
    acc_out.addcmul_(joined[..., None], out.to(acc_out.dtype))
    acc_lse.copy_(new)


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sink leaf (score sinks, value 0), once in the whole tree.

    out [..., d], lse [...], sinks broadcastable to lse, fp32.
    """
    kept, _, new = _weights(lse, sinks.to(lse.dtype))
    return out * kept[..., None], new


def _weights(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What two states of lse a and b weigh in their merge, and its lse. Divided by their sum, not by exp(lse): near 1e4
    an lse in fp32 is known to 1e-3 only, and so would the weights be."""
    m = torch.maximum(a, b)
    m = torch.where(m == NEG_INF, 0.0, m)
    of_a, of_b = torch.exp(a - m), torch.exp(b - m)
    den = of_a + of_b
    safe = torch.where(den == 0, 1.0, den)
    return of_a / safe, of_b / safe, m + torch.log(den)


def pack_state(out: Tensor, lse: Tensor, wire: torch.dtype) -> Tensor:
    """One buffer [..., d + w] for the wire: out in dtype `wire`, then lse bit for bit (w = 1, 2 or 4 words of it)."""
    return torch.cat((out.to(wire), float_bits(lse[..., None], wire)), -1)


def unpack_state(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) of a buffer made by `pack_state` from an lse of `dtype`; out keeps the wire's dtype."""
    words = bit_words(dtype, packed.dtype)
    return packed[..., :-words], bits_float(packed[..., -words:], dtype)[..., 0]


def bit_words(dtype: torch.dtype, wire: torch.dtype) -> int:
    """How many elements of dtype `wire` hold one element of `dtype`."""
    return max(dtype.itemsize // wire.itemsize, 1)


def float_bits(x: Tensor, wire: torch.dtype) -> Tensor:
    """x [..., n] reinterpreted, not rounded, as [..., n * bit_words] elements of dtype `wire`."""
    return x.to(wire) if x.dtype.itemsize <= wire.itemsize else x.contiguous().view(wire)


def bits_float(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `float_bits`."""
    return (
        x.to(dtype)
        if dtype.itemsize <= x.dtype.itemsize
        else x.clone(memory_format=torch.contiguous_format).view(dtype)
    )
