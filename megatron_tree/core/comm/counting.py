"""The k-th largest integer of all ranks' lists by counting: a few sums over the ranks instead of the lists."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..merge import NO_ENTRY
from .ranks import Ranks


def kth_largest(lists: Tensor, k: int, bits: int, ranks: Ranks) -> Tensor:
    """A threshold [rows] for every row of this rank's lists int64 [rows, m]: exactly k entries of all ranks are at
    least as large, or all of them are, where there are fewer. Collective.

    Entries are those of `merge.ranked`, of which a rank needs to list its k largest only. Every round counts by the
    next `bits` bits of the score; by those of the position, too, if more entries than fit have the k-th score.
    """
    exists, ordered = lists != NO_ENTRY, lists ^ NO_ENTRY  # now in the order of unsigned integers
    found = ordered.new_zeros(len(lists))
    missing = torch.full_like(found, k)
    few = torch.zeros_like(found, dtype=torch.bool)
    for top in (64, 32):  # bits of the score, then of the position
        for low, high in _digits(top, bits):
            digit = (ordered >> low) & ((1 << high - low) - 1)
            counted = exists if high == 64 else exists & ((ordered >> high) == (found >> high)[:, None])
            counts = lists.new_zeros((len(lists), 1 << high - low), dtype=torch.int32)
            counts.scatter_add_(1, digit, counted.to(torch.int32))
            counts = ranks.sum(counts)
            at_least = counts.flip(1).cumsum(1).flip(1)
            if high == 64:
                few = at_least[:, 0] < k
            at = ((at_least >= missing[:, None]).sum(1) - 1).clamp(min=0)
            in_digit = counts.gather(1, at[:, None])[:, 0]
            missing -= at_least.gather(1, at[:, None])[:, 0] - in_digit
            found |= at << low
        if lists.device.type == "cpu" and bool((few | (in_digit == missing)).all()):
            break  # on an accelerator nobody looks: it would stall
    return torch.where(few, NO_ENTRY, found ^ NO_ENTRY)


def _digits(top: int, bits: int) -> Iterator[tuple[int, int]]:
    """(low, high): the 32 bits below bit `top`, in pieces of at most `bits`, the highest first."""
    bottom = top - 32
    while top > bottom:
        yield max(top - bits, bottom), top
        top = max(top - bits, bottom)
