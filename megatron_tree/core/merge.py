"""States: what shards leave of a reduction or a scan, and the associative operation that merges them.

Attention's state is (out [b, s, h, d], lse [b, h, s]): attention over some of the keys, and the natural log of their
summed exponentials, fp32 (float64 for float64 inputs). The identity is out 0, lse -inf: a shard with nothing to see.
On the wire a state is packed: one buffer whose last axis holds out and then lse. `ListReducer` has the state of
index-selected attention, the k largest scores.

Everything here is equation (4) of docs/design.md, `energy.merge_by_energy` in closed form: with top = max_i lse_i and
w_i = exp(lse_i - top),

    out = sum_i w_i out_i / sum_i w_i,      lse = top + log sum_i w_i                       (4)

It is divided by the sum of w_i, not by exp(lse): near 1e4 an lse in fp32 is known to 1e-3 only, and so would the
weights be. Triton has the same in kernels/triton/merge.py. Gradients are sums (`SumReducer`).

A recurrent layer's segment leaves an affine map S -> M S + U of its state (`AffineMaps`); maps compose in the order of
positions, (M2, U2) after (M1, U1) is (M2 M1, M2 U1 + U2), so it takes a scan (docs/recurrent.md).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

NEG_INF = float("-inf")
T = TypeVar("T")

State = tuple[Tensor, Tensor]
"""(out, lse)."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states of inputs of this dtype are kept in: float64 for float64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_state(shape, *, dtype: torch.dtype = torch.float32, device=None) -> State:
    """The identity: out zeros of `shape` [..., s, h, d], lse -inf [..., h, s]."""
    *lead, s, h, _ = shape
    out = torch.zeros(shape, dtype=dtype, device=device)
    return out, torch.full((*lead, h, s), NEG_INF, dtype=dtype, device=device)


def round_state(state: State, dtype: torch.dtype) -> State:
    """The same with out in `dtype`."""
    out, lse = state
    return out.to(dtype), lse


def heads_of_state(state: State, heads: slice) -> State:
    """Views of some heads."""
    out, lse = state
    return out[:, :, heads], lse[:, heads]


def join_heads(states: list[State]) -> State:
    """The state of several states' heads, one after another."""
    if len(states) == 1:
        return states[0]
    outs, lses = zip(*states)
    return torch.cat(outs, 2), torch.cat(lses, 1)


def put_rows(state: State, rows: slice, part: State) -> None:
    """Replace these rows of a state by the state `part`, in place."""
    state[0][:, rows], state[1][..., rows] = part


def copy_state(into: State, state: State) -> State:
    """Copy a state into the memory of another, which is returned."""
    for x, new in zip(into, state):
        x.copy_(new)
    return into


def merge_into(acc: State, part: State) -> None:
    """Merge the state `part` into the state `acc`, in place."""
    (acc_out, acc_lse), (out, lse) = acc, part
    kept, joined, merged = _weights_of_two(acc_lse, lse.to(acc_lse.dtype))
    acc_out.mul_(_over_rows(kept))
    acc_out.addcmul_(_over_rows(joined), out.to(acc_out.dtype))
    acc_lse.copy_(merged)


def merge_tree(leaves: Sequence[int], state: Callable[[int], T], merge: Callable[[T, T], T]) -> T:
    """The states of some leaves of a sequence, merged along the balanced binary tree over all of its leaves, lower
    positions first: a node of the tree joins leaves m * 2^i up to (m + 1) * 2^i. So neither what is hidden, nor the
    length of the sequence, nor where it is cut changes a rounding.

    leaves: their rising numbers, at least one; state(leaf) is asked for in this order, and about log2(leaves) states
    are alive at any time.
    """
    first, last = leaves[0], leaves[-1]
    if first == last:
        return state(first)
    level = (first ^ last).bit_length() - 1
    at = bisect.bisect_left(leaves, last >> level << level)
    return merge(merge_tree(leaves[:at], state, merge), merge_tree(leaves[at:], state, merge))


def merged(state: State, part: State) -> Tensor:
    """out of two states together, in the dtype of the first one's."""
    acc = state[0].to(state[1].dtype, copy=True), state[1].clone()
    merge_into(acc, part)
    return acc[0].to(state[0].dtype)


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> State:
    """Add the sink leaf (score sinks [h], value 0), once in the whole tree.

    Of a dual state (`Backend.for_duals`): sinks [h, 2] with their tangents, which the leaf adds to the last column, mu.
    """
    sinks, dual = sinks.to(lse.dtype), sinks.dim() == 2
    kept, joined, merged = _weights_of_two(lse, sinks[:, :1] if dual else sinks[:, None])
    out = out.to(lse.dtype) * _over_rows(kept)
    if dual:
        out[..., -1] += (joined * sinks[:, 1:]).transpose(-1, -2)
    return out, merged


def sinks_of(sinks: Tensor, first: int, count: int) -> Tensor:
    """Those of heads [first, first + count); heads beyond the last are padding."""
    missing = max(0, first + count - len(sinks))
    return F.pad(sinks, (0, 0) * (sinks.dim() - 1) + (0, missing))[first : first + count]


def merge_packed(packed: Tensor) -> Tensor:
    """Merge packed states [n, ..., d + 1] of one dtype, in order, to one [..., d + 1]."""
    out, lse = packed[..., :-1], packed[..., -1:]
    top = finite(lse.amax(0))
    return normalized(_sum(numerators(out, lse, top)), top)


class StateReducer:
    """Reduces packed states: `wire` is the dtype in which out travels, `dtype` the one in which states are merged."""

    def __init__(self, wire: torch.dtype, dtype: torch.dtype):
        self.wire, self.dtype = wire, dtype

    def merge(self, parts: Tensor) -> Tensor:
        """Merge [n, ..., d + w] from the wire to [..., d + 1] in `dtype`, in order."""
        out, lse = _split(parts, self.dtype)
        top = finite(lse.amax(0))
        return normalized(_sum(numerators(o, l, top) for o, l in zip(out, lse)), top)  # one by one: they are large

    def narrow(self, state: Tensor) -> Tensor:
        """A merged state [..., d + 1] as it travels, [..., d + w]."""
        if self.wire == self.dtype:
            return state
        return torch.cat((state[..., :-1].to(self.wire), float_bits(state[..., -1:], self.wire)), -1)


class SumReducer:
    """Reduces gradients: narrow on the wire, summed in `dtype`."""

    def __init__(self, wire: torch.dtype, dtype: torch.dtype):
        self.wire, self.dtype = wire, dtype

    def merge(self, parts: Tensor) -> Tensor:
        """Sum [n, ...] in order."""
        total = parts[0].to(self.dtype)
        for part in parts[1:]:
            total = total + part
        return total

    def narrow(self, total: Tensor) -> Tensor:
        """A sum as it travels."""
        return total.to(self.wire)


class IntegerReducer:
    """Reduces sums of int64 [..., n]: on the wire the lower halves of all, then the rest in as few bytes as do."""

    def __init__(self, largest: int, n: int):
        """largest: what no sum's absolute value exceeds, on any rank or of all ranks together."""
        self._n, fits = n, (d for d in (torch.int8, torch.int16) if largest < (1 << 8 * d.itemsize + 31) - HALF)
        self._rest = None if largest < HALF else next(fits, torch.int32)

    def narrow(self, *sums: Tensor) -> Tensor:
        """int32 [..., words], of tensors that are the sums one after another, and are overwritten."""
        num_bytes = self._n * (4 if self._rest is None else 4 + self._rest.itemsize)
        packed = sums[0].new_empty(*sums[0].shape[:-1], -(-num_bytes // 4), dtype=torch.int32)
        sizes = [x.shape[-1] for x in sums]
        for x, lower in zip(sums, packed[..., : self._n].split(sizes, -1)):
            lower.copy_(x)  # modulo 2^32
        if self._rest is not None:
            for x, rest in zip(sums, self._rest_of(packed).split(sizes, -1)):
                rest.copy_(x.add_(HALF).bitwise_right_shift_(32))
        return packed

    def merge(self, parts: Tensor) -> Tensor:
        """Sum [m, ..., words] to int64 [..., n]."""
        total = parts[0, ..., : self._n].to(torch.int64)
        for part in parts[1:]:  # one by one: torch's sum would copy all of them to int64 first
            total += part[..., : self._n]
        if self._rest is not None:
            for rest in self._rest_of(parts):
                total.add_(rest, alpha=1 << 32)
        return total

    def _rest_of(self, packed: Tensor) -> Tensor:
        return packed[..., self._n :].view(self._rest)[..., : self._n]


HALF = 1 << 31


@dataclass(frozen=True)
class AffineMaps:
    """Maps S -> M S + U of recurrent states [d, d_v], packed: M, then U. A state is packed as U alone: its M is 0."""

    head_dim: int
    head_dim_v: int
    transition_shape: tuple[int, ...]
    """Of M: (d, d), or (d,) where it is diagonal, or ()."""

    @property
    def transition_numbers(self) -> int:
        return math.prod(self.transition_shape)

    @property
    def state_numbers(self) -> int:
        return self.head_dim * self.head_dim_v

    def pack(self, transition: Tensor, update: Tensor) -> Tensor:
        """[n, b * h, numbers of both] of transition [n, b, h, ...] and update [n, b, h, d, d_v]."""
        n, b, h = update.shape[:3]
        transition = transition.reshape(n, b * h, self.transition_numbers)
        return torch.cat((transition, update.reshape(n, b * h, self.state_numbers)), -1)

    def merge(self, state: Tensor, packed: Tensor) -> Tensor:
        """The state [rows, d * d_v] after a segment: state [rows, d * d_v] before it, and its map."""
        transition, update = packed.split((self.transition_numbers, self.state_numbers), -1)
        before = state.unflatten(-1, (self.head_dim, self.head_dim_v))
        if len(self.transition_shape) == 2:
            after = transition.unflatten(-1, self.transition_shape) @ before
        else:
            after = transition[..., None] * before
        return after.flatten(-2) + update


NO_ENTRY = torch.iinfo(torch.int64).min
"""What a list holds beyond its last entry."""


def ranked(scores: Tensor, positions: Tensor) -> Tensor:
    """Entries of lists, int64 [...], in the order of scores fp32 [...]; of equal ones the earlier position is larger.

    positions: int64 [...], from 0 to 2^32 - 2. An entry is the score's bits, in the order of integers, then the
    position's complement, so that no two keys have the same one.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 equals 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(torch.int64) << 32) + (0xFFFFFFFF - positions)


def positions_of(entries: Tensor) -> Tensor:
    """The positions of `ranked` entries, int64 [...]; -1 of `NO_ENTRY`."""
    return (0xFFFFFFFF - (entries & 0xFFFFFFFF)).where(entries != NO_ENTRY, -1)


class ListReducer:
    """Reduces lists of the largest entries: int64 [..., k] of `ranked`, falling, then `NO_ENTRY`."""

    @staticmethod
    def merge(parts: Tensor) -> Tensor:
        """The k largest of n lists [n, ..., k]: [..., k]. In any order."""
        return parts.movedim(0, -2).flatten(-2).topk(parts.shape[-1]).values

    @staticmethod
    def narrow(merged: Tensor) -> Tensor:
        """Lists travel as they are."""
        return merged


def finite(top: Tensor) -> Tensor:
    """The largest lse, finite even where nothing was seen: exp(-inf - top) is then 0."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def numerators(out: Tensor, lse: Tensor, top: Tensor) -> Tensor:
    """(w out, w) [..., d + 1] with w = exp(lse - top): out [..., d] of any dtype, lse and top [..., 1]."""
    terms = lse.new_empty((*out.shape[:-1], out.shape[-1] + 1))
    weights = torch.sub(lse, top, out=terms[..., -1:]).exp_()
    torch.mul(out, weights, out=terms[..., :-1])
    return terms


def normalized(total: Tensor, top: Tensor) -> Tensor:
    """The packed state [..., d + 1] of summed numerators, in place."""
    num, den = total[..., :-1], total[..., -1:]
    num.div_(den.clamp(min=torch.finfo(total.dtype).tiny))
    torch.add(top, den.log(), out=den)
    return total


def _sum(terms) -> Tensor:
    """Their sum, in the first one's memory. One by one: in torch's sum the order would depend on the row's index."""
    return functools.reduce(Tensor.add_, terms)


def _weights_of_two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What two states of lse a and b weigh in their merge, and its lse."""
    top = finite(torch.maximum(a, b))
    of_a, of_b = torch.exp(a - top), torch.exp(b - top)
    total = of_a + of_b
    den = total.clamp(min=torch.finfo(total.dtype).tiny)
    return of_a / den, of_b / den, top + torch.log(total)


def _over_rows(weights: Tensor) -> Tensor:
    """Weights [..., h, s] as factors of out [..., s, h, d]."""
    return weights.transpose(-1, -2)[..., None]


def pack_state(out: Tensor, lse: Tensor, wire: torch.dtype) -> Tensor:
    """One buffer [b, s, h, d + w] for the wire: out in dtype `wire`, then lse bit for bit in w = 1, 2 or 4 words."""
    return torch.cat((out.to(wire), float_bits(_over_rows(lse), wire)), -1)


def unpack_state(packed: Tensor, dtype: torch.dtype) -> State:
    """(out [b, s, h, d], lse [b, h, s]) of what `pack_state` made of an lse of `dtype`; out keeps its dtype."""
    out, lse = _split(packed, dtype)
    return out, lse[..., 0].transpose(-1, -2)


def _split(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out [..., d], lse [..., 1]) of packed states."""
    words = bit_words(dtype, packed.dtype)
    return packed[..., :-words], bits_float(packed[..., -words:], dtype)


def bit_words(dtype: torch.dtype, wire: torch.dtype) -> int:
    """How many elements of dtype `wire` hold one element of `dtype`."""
    return max(dtype.itemsize // wire.itemsize, 1)


def float_bits(x: Tensor, wire: torch.dtype) -> Tensor:
    """x [..., n] reinterpreted, not rounded, as [..., n * bit_words] elements of dtype `wire`."""
    return x.to(wire) if x.dtype.itemsize <= wire.itemsize else x.contiguous().view(wire)


def pack_statistics(*statistics: Tensor, wire: torch.dtype) -> Tensor:
    """[b, s, h, words] of dtype `wire`: statistics [b, h, s] or [b, h, s, n] of rows, bit for bit."""
    rows = [x.transpose(1, 2) if x.dim() == 4 else x.transpose(1, 2)[..., None] for x in statistics]
    return float_bits(torch.cat(rows, -1), wire)


def unpack_statistics(packed: Tensor, like: Tensor, count: int = 1) -> list[Tensor]:
    """The `count` statistics that `pack_statistics` packed, each of the dtype and the last axes of `like`."""
    parts = bits_float(packed, like.dtype).transpose(1, 2).chunk(count, -1)
    return [part if like.dim() == 4 else part[..., 0] for part in parts]


def bits_float(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `float_bits`."""
    if dtype.itemsize <= x.dtype.itemsize:
        return x.to(dtype)
    return x.clone(memory_format=torch.contiguous_format).view(dtype)
