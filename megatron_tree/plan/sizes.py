"""What one attention call moves and computes, in words, bytes and floating-point operations."""

from __future__ import annotations

from typing import NamedTuple

from .arrangement import HeadSplit
from .plans import Shape
from .topology import Topology

STATISTIC = 4  # bytes of lse or delta of one query and head


class CallSizes(NamedTuple):
    """Bytes of one rank's shard in an attention call, and its compute."""

    q: float
    o: float
    statistic: float
    kv: float
    flops: float
    """Floating-point operations of one rank's forward."""
    widening: float
    """Bytes of the kernels' fp32 results per byte of what travels."""

    @classmethod
    def of(
        cls,
        world: int,
        shape: Shape,
        *,
        batch: int,
        seq_len: int,
        bytes_per_word: int,
        causal: bool,
        seq_len_kv: int | None = None,
        visible_fraction: float = 1.0,
    ) -> CallSizes:
        h, h_kv, d, d_v = shape
        seq_len_kv = seq_len if seq_len_kv is None else seq_len_kv
        tokens, tokens_kv = (batch * -(-s // world) for s in (seq_len, seq_len_kv))
        pairs = visible_fraction * tokens * seq_len_kv * h / (2 if causal else 1)
        return cls(
            q=tokens * h * d * bytes_per_word,
            o=tokens * h * d_v * bytes_per_word,
            statistic=tokens * h * STATISTIC,
            kv=tokens_kv * h_kv * (d + d_v) * bytes_per_word,
            flops=2 * pairs * (d + d_v),
            widening=max(1.0, 4 / bytes_per_word),
        )

    def split(self, split: HeadSplit) -> CallSizes:
        """The sizes after an exchange of heads, which adds padding and copies of KV heads."""
        return self._replace(
            q=self.q * split.padding,
            o=self.o * split.padding,
            statistic=self.statistic * split.padding,
            kv=self.kv * split.kv_padding,
            flops=self.flops * split.padding,
        )

    def exchanged(self, backward: bool) -> tuple[float, float]:
        """Bytes of a shard that are exchanged before and after attention; each of u ranks sends (u - 1) / u of them."""
        return (self.o + self.statistic, self.q + self.kv) if backward else (self.q + self.kv, self.o)

    def in_query_team(self, backward: bool) -> tuple[int, int]:
        """(gathered, reduced) bytes of a shard that a query team exchanges."""
        return (self.q + self.o + 2 * self.statistic, self.q) if backward else (self.q, self.o + self.statistic)

    def in_key_team(self, backward: bool) -> tuple[int, int]:
        """(gathered, reduced) bytes of a shard that a key team exchanges."""
        return self.kv, self.kv if backward else 0

    def seconds(self, topology: Topology, backward: bool) -> float:
        """Seconds of a rank's attention: two matrix products forward, five backward."""
        return self.flops * (2.5 if backward else 1) / topology.flops
