"""Cutting masked attention over segments into blocks that plain flash kernels support.

Under a causal mask a pair of segments gives fully visible blocks and at most one square block on the diagonal (row i
sees column j iff j <= i); hidden parts are skipped. A sliding window adds strips that need an explicit mask. Everything
is integer arithmetic on the host.
"""

from __future__ import annotations

from typing import NamedTuple

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
