"""Cutting masked attention over segments into blocks that plain flash kernels support.

Under a causal mask a pair of segments gives fully visible blocks and at most one square block on the diagonal (row i
sees column j iff j <= i); hidden parts are skipped. A sliding window adds strips that need an explicit mask. Everything
is integer arithmetic on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Segment
from ..spec import AttnSpec

FULL, DIAGONAL, MASKED = "full", "diagonal", "masked"
STRIP = 512  # query rows per masked block: bounds the mask's memory


class Block(NamedTuple):
    """Query rows [q_row, q_row + q_len) against key rows [k_row, k_row + k_len); positions of the first row of each."""

    kind: str
    q_row: int
    q_len: int
    k_row: int
    k_len: int
    q_pos: int
    k_pos: int

    @property
    def q_rows(self) -> slice:
        return slice(self.q_row, self.q_row + self.q_len)

    @property
    def k_rows(self) -> slice:
        return slice(self.k_row, self.k_row + self.k_len)


def split(q_segments, k_segments, spec: AttnSpec) -> list[Block]:
    """All visible (query, key) pairs of the segments, each in exactly one block."""
    by_sequence: dict[int, list[Segment]] = {}
    for k in k_segments:
        by_sequence.setdefault(k.seq, []).append(k)
    blocks = []
    for q in q_segments:
        per_q = []
        for k in by_sequence.get(q.seq, ()):
            if spec.left is None and spec.right in (None, 0):
                per_q += _full_or_causal(q, k, causal=spec.right == 0)
            else:
                per_q += _windowed(q, k, spec)
        blocks += _fuse(per_q)
    return blocks


def _block(kind: str, q: Segment, k: Segment, q_from=0, q_to=None, k_from=0, k_to=None) -> list[Block]:
    q_len = (q.length if q_to is None else q_to) - q_from
    k_len = (k.length if k_to is None else k_to) - k_from
    if q_len <= 0 or k_len <= 0:
        return []
    return [Block(kind, q.row + q_from, q_len, k.row + k_from, k_len, q.pos + q_from, k.pos + k_from)]


def _full_or_causal(q: Segment, k: Segment, causal: bool) -> list[Block]:
    if not causal or k.pos + k.length - 1 <= q.pos:
        return _block(FULL, q, k)
    shift = q.pos - k.pos
    before = max(shift, 0)  # keys that every query sees
    skip = max(-shift, 0)  # queries that see nothing
    square = min(q.length - skip, k.length - before)
    if square <= 0:  # skip >= q.length; before >= k.length was handled as wholly visible
        return []
    return (
        _block(FULL, q, k, k_to=before)
        + _block(DIAGONAL, q, k, skip, skip + square, before, before + square)
        + _block(FULL, q, k, skip + square, None, before, before + square)
    )


def _windowed(q: Segment, k: Segment, spec: AttnSpec) -> list[Block]:
    blocks = []
    for q_from in range(0, q.length, STRIP):
        q_to = min(q_from + STRIP, q.length)
        first, last = q.pos + q_from, q.pos + q_to - 1
        lo = 0 if spec.left is None else max(first - spec.left - k.pos, 0)
        hi = k.length if spec.right is None else min(last + spec.right - k.pos + 1, k.length)
        if lo >= hi:
            continue
        all_left = spec.left is None or last - spec.left <= k.pos + lo
        all_right = spec.right is None or first + spec.right >= k.pos + hi - 1
        blocks += _block(FULL if all_left and all_right else MASKED, q, k, q_from, q_to, lo, hi)
    return blocks


def _fuse(blocks: list[Block]) -> list[Block]:
    """Join fully visible blocks of the same query rows whose key rows are adjacent."""
    done: list[Block] = []
    for b in sorted(blocks, key=lambda b: (b.kind, b.q_row, b.q_len, b.k_row)):
        last = done[-1] if done else None
        if last and b.kind == FULL == last.kind and last[1:3] == b[1:3] and last.k_row + last.k_len == b.k_row:
            done[-1] = last._replace(k_len=last.k_len + b.k_len)
        else:
            done.append(b)
    return done


# which keys a query sees, for the backends in torch; the oracle, energy.py, has its own implementation


def window_mask(q_positions: Tensor, k_positions: Tensor, spec: AttnSpec) -> Tensor:
    """The window of `spec`: bool [..., s_q, s_k] from integer positions [..., s_q] and [..., s_k]."""
    q, k = q_positions[..., :, None], k_positions[..., None, :]
    if spec.left is None and spec.right is None:  # not torch.broadcast_shapes, which imports sympy: seconds
        return torch.ones_like(torch.broadcast_tensors(q, k)[0], dtype=torch.bool)
    seen = True if spec.left is None else k >= q - spec.left
    return seen if spec.right is None else seen & (k <= q + spec.right)


def alibi_bias(spec: AttnSpec, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What ALiBi adds to logits: [1 or b, h, s_q, s_k] in `dtype`, from positions [s_q] or [b, s_q], and of keys."""
    distance = (q_positions[..., :, None] - k_positions[..., None, :]).abs()
    slopes = torch.tensor(spec.alibi_slopes, dtype=dtype, device=distance.device)[..., None, None]
    return -slopes * (distance[:, None] if distance.dim() == 3 else distance)


class SelectedKeys:
    """Which keys each query has selected, by position in its sequence, as a mask of rows.

    Args:
        selected: int32 [b, s_q, m]: positions; -1, and those that aren't among the keys, select nothing.
        q_seq, k_seq: int64 [s_q] and [s_k]: each row's sequence, -1 for padding. k_pos: int64 [s_k], positions.
    """

    def __init__(self, selected: Tensor, q_seq: Tensor, k_seq: Tensor, k_pos: Tensor):
        self._selected, self._q_seq = selected, q_seq
        self._length = int(k_pos.max()) + 1 if len(k_pos) else 0
        numbers = torch.where(k_seq < 0, -1, k_seq * self._length + k_pos)  # one number for sequence and position
        self._numbers, self._rows = numbers.sort()

    def mask(self, rows: slice) -> Tensor:
        """bool [b, rows, s_k]."""
        at, count = self._selected[:, rows].long(), len(self._rows)
        mask = at.new_zeros((*at.shape[:2], count + 1), dtype=torch.bool)
        if count == 0:
            return mask[..., :0]
        number = self._q_seq[rows, None] * self._length + at
        number = torch.where((at < 0) | (at >= self._length) | (self._q_seq[rows, None] < 0), -2, number)
        found = torch.searchsorted(self._numbers, number.contiguous()).clamp(max=count - 1)
        mask.scatter_(-1, torch.where(self._numbers[found] == number, self._rows[found], count), True)
        return mask[..., :count]
