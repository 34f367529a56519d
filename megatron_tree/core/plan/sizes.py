"""What one attention call moves and computes, in words, bytes and floating-point operations."""

from __future__ import annotations

from typing import NamedTuple

from .arrangement import HeadSplit
from .plans import Shape
from .topology import Topology

STATISTIC = 4  # bytes of lse or delta of one query and head
DUAL_PRODUCTS = 3  # of x y: itself, and the two terms of its tangent
ROWS = (1, 10)  # how often a GPU's kernel moves its queries and results: forward, backward; fitted to published.yaml
MERGE = 6  # how often a merge on a GPU moves the fp32 result of a call; fitted likewise


class CallSizes(NamedTuple):
    """Bytes of one rank's shard in an attention call, with tangents if it is of dual tensors, and its compute."""

    q: float
    o: float
    statistic: float
    """Of lse or delta, without tangents."""
    kv: float
    flops: float
    """Floating-point operations of one rank's forward."""
    widening: float
    """Bytes of the kernels' fp32 results per byte of what travels."""
    mu: float = 0.0
    """Of the tangent of lse, a column of dual states; 0 without tangents."""
    with_lse: bool = False
    """Whether an exchange of heads returns lse with out."""

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
        with_lse: bool = False,
        dual: bool = False,
    ) -> CallSizes:
        h, h_kv, d, d_v = shape
        seq_len_kv = seq_len if seq_len_kv is None else seq_len_kv
        tokens, tokens_kv = (batch * -(-s // world) for s in (seq_len, seq_len_kv))
        pairs = visible_fraction * tokens * seq_len_kv * h / (2 if causal else 1)
        numbers = 2 if dual else 1
        return cls(
            q=tokens * h * d * bytes_per_word * numbers,
            o=tokens * h * d_v * bytes_per_word * numbers,
            statistic=tokens * h * max(STATISTIC, bytes_per_word),
            kv=tokens_kv * h_kv * (d + d_v) * bytes_per_word * numbers,
            flops=2 * pairs * (d + d_v) * (DUAL_PRODUCTS if dual else 1),
            widening=max(1.0, 4 / bytes_per_word),
            mu=tokens * h * bytes_per_word if dual else 0.0,
            with_lse=with_lse,
        )

    def split(self, split: HeadSplit) -> CallSizes:
        """The sizes after an exchange of heads, which adds padding and copies of KV heads."""
        return self._replace(
            q=self.q * split.padding,
            o=self.o * split.padding,
            statistic=self.statistic * split.padding,
            mu=self.mu * split.padding,
            kv=self.kv * split.kv_padding,
            flops=self.flops * split.padding,
        )

    @property
    def out(self) -> float:
        """Of a state without lse: of the kernels' results."""
        return self.o + self.mu

    @property
    def _backward_statistics(self) -> float:
        """Of lse and delta, or of lse, mu, delta and kappa."""
        return self.statistic * (4 if self.mu else 2)

    def exchanged(self, backward: bool) -> tuple[float, float]:
        """Bytes of a shard that are exchanged before and after attention; each of u ranks sends (u - 1) / u of them."""
        if backward:
            return self.o + self._backward_statistics / 2, self.q + self.kv  # delta alone: lse is there
        return self.q + self.kv, self.out + self.statistic * self.with_lse

    def in_query_team(self, backward: bool) -> tuple[float, float]:
        """(gathered, reduced) bytes of a shard that a query team exchanges."""
        if backward:
            return self.q + self.o + self._backward_statistics, self.q
        return self.q, self.out + self.statistic

    def in_key_team(self, backward: bool) -> tuple[float, float]:
        """(gathered, reduced) bytes of a shard that a key team exchanges."""
        return self.kv, self.kv if backward else 0

    def seconds(self, topology: Topology, backward: bool) -> float:
        """Seconds of a rank's attention: two matrix products forward, five backward, or of dual tensors six and 15."""
        return self.flops * (2.5 if backward else 1) / topology.flops

    def beside_products(
        self, topology: Topology, backward: bool, *, calls: float, merged: float, merged_keys: float
    ) -> float:
        """Seconds in which a GPU's attention runs through memory beside its matrix products.

        calls: of kernels, each with the queries of one shard. merged, merged_keys: how many partial results of a
        shard's queries, and gradients of a shard's keys, are added to others.
        """
        queries = self.q if backward else self.out
        results = merged * queries + merged_keys * self.kv * backward
        moved = calls * ROWS[backward] * (self.q + self.o) + MERGE * self.widening * results
        return moved / topology.memory_bandwidth
