"""The mathematics of one attention call: `AttnSpec`, with its mask and dropout. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Dropout(NamedTuple):
    """Attention dropout whose mask depends only on (seed, sequence, head, query position, key position).

    So every rank, block and backend that computes a (query, key) pair makes the same decision.
    """

    p: float
    """Probability of dropping a weight, 0 < p < 1; the others are scaled by 1 / (1 - p)."""
    seed: int
    """0 <= seed < 2**63, the same on every rank."""
    first_head: int = 0
    """Global index of the tensors' head 0."""


SLICES = ("full", "causal", "inverse", "bidirectional")


class AttnSlice(NamedTuple):
    """A part of an attention mask: queries at positions q_range see keys at positions k_range.

    Ranges are (first, one past the last). Positions count from the start of the whole sequence.
    """

    q_range: tuple[int, int]
    k_range: tuple[int, int]
    kind: str = "full"
    """"full": every query sees every key. "causal": aligned at the ends, as in flash-attn: the last query sees the last
    key, the one before it all but the last. "inverse": aligned at the beginnings: the first query sees all keys, the
    second all but the first. "bidirectional": both, a band. (MagiAttention's AttnMaskType names the same four.)"""

    @property
    def left(self) -> int | None:
        """Query i sees keys from i - left on; None: from the first on."""
        return self.q_range[0] - self.k_range[0] if self.kind in ("inverse", "bidirectional") else None

    @property
    def right(self) -> int | None:
        """Query i sees keys up to i + right; None: up to the last."""
        return self.k_range[1] - self.q_range[1] if self.kind in ("causal", "bidirectional") else None

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        queries, keys = (last - first for first, last in (self.q_range, self.k_range))
        if self.kind == "full":
            return queries * keys
        if self.kind == "bidirectional":
            return queries * max(0, keys - queries + 1)
        rows = min(queries, keys)
        return rows * keys - rows * (rows - 1) // 2

    def touches(self, other: AttnSlice) -> bool:
        """Whether both have a query, or both have a key."""
        return any(a[0] < b[1] and b[0] < a[1] for a, b in zip(self[:2], other[:2]))


class MaskBounds(NamedTuple):
    """Which keys a query sees, by their positions."""

    left: int | None = None
    """Positions before the query's that it sees; None: all."""
    right: int | None = None
    """Positions after the query's that it sees; None: all."""
    slices: tuple[AttnSlice, ...] | None = None
    """If given, the mask is the union of these instead."""


@dataclass(frozen=True, kw_only=True)
class AttnSpec:
    """The mathematics of one attention call, identical on every rank and for every block of it."""

    softmax_scale: float
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    """(left, right): query i sees keys i-left .. i+right; -1 = unbounded. Causal implies right = 0."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap); 0 disables it."""
    alibi_slopes: tuple[tuple[float, ...], ...] | None = None
    """[1 or batch][num_heads]: afterwards, slope * |query position - key position| is taken off a logit (ALiBi)."""
    dropout: Dropout | None = None
    deterministic: bool | str = False
    """As `TreeConfig.deterministic`."""
    ranges: tuple[AttnSlice, ...] | None = None
    """The mask as slices that don't overlap; then causal is False and there is no window."""
    first_head: int = 0
    """Number of the tensors' head 0 among the query heads of the whole call."""

    @property
    def mask_bounds(self) -> MaskBounds:
        return MaskBounds(self.left, self.right, self.ranges)

    def heads_from(self, first: int, count: int) -> AttnSpec:
        """The same call for tensors with `count` query heads, of which head 0 is this call's `first`; what lies beyond
        its heads is padding."""
        spec = replace(self, first_head=self.first_head + first) if first else self
        if self.dropout is not None and first:
            spec = replace(spec, dropout=self.dropout._replace(first_head=self.dropout.first_head + first))
        if self.alibi_slopes is not None and (first or count != len(self.alibi_slopes[0])):
            rows = (row[first : first + count] for row in self.alibi_slopes)
            spec = replace(spec, alibi_slopes=tuple(row + (0.0,) * (count - len(row)) for row in rows))
        return spec

    def batch_row(self, i: int) -> AttnSpec:
        """The same call for row i of the batch alone."""
        if self.alibi_slopes is None or len(self.alibi_slopes) == 1:
            return self
        return replace(self, alibi_slopes=self.alibi_slopes[i : i + 1])

    @property
    def by_position(self) -> bool:
        """Whether the distance between a query and a key counts: both are of one sequence then."""
        return self.left is not None or self.right is not None or self.alibi_slopes is not None

    @property
    def left(self) -> int | None:
        return None if self.window_size[0] < 0 else self.window_size[0]

    @property
    def right(self) -> int | None:
        if self.causal:
            return 0
        return None if self.window_size[1] < 0 else self.window_size[1]
