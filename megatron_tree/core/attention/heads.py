"""The heads of a pass, in chunks: where they are, or exchanged for tokens over a team of u ranks (Ulysses).

Before attention, each rank of the team sends away (u - 1) / u of its heads and receives the other ranks' tokens of the
heads it keeps; afterwards results go back. A rank then has a *holder's* rows: the shards of all ranks of the team, one
after another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..plan import HeadSplit
from ..spec import AttnSpec


class HeadChunk(NamedTuple):
    """KV heads and their query heads that go through a pass together."""

    queries: slice
    kv: slice
    spec: AttnSpec
    """The mathematics of these heads."""

    @classmethod
    def all(cls, spec: AttnSpec) -> HeadChunk:
        """All heads of the tensors."""
        return cls(slice(None), slice(None), spec)


def head_chunks(num_heads: int, num_heads_kv: int, n: int, spec: AttnSpec, first: int = 0) -> list[HeadChunk]:
    """Heads in n chunks of equal size; `first`: the number of the first query head among those of spec."""
    queries, kv = num_heads // n, num_heads_kv // n
    return [
        HeadChunk(
            slice(i * queries, (i + 1) * queries),
            slice(i * kv, (i + 1) * kv),
            spec.heads_from(first + i * queries, queries),
        )
        for i in range(n)
    ]


class HeadExchange:
    """Heads exchanged for tokens over a team.

    rows: of queries and of keys, in which each rank's share travels. q, k and v go in one message if they are equal.
    """

    def __init__(self, split: HeadSplit, team: comm.Team, rows: tuple[int, int]):
        self._split, self._team, self._rows = split, team, rows
        self._first = team.index * split.n * split.queries

    @property
    def local(self) -> slice:
        """This rank's query heads among those of the call, with padding."""
        return slice(self._first, self._first + self._split.n * self._split.queries)

    def chunks(self, n: int, spec: AttnSpec) -> list[HeadChunk]:
        """This rank's heads in n chunks; spec is of all heads."""
        return head_chunks(self._split.n * self._split.queries, self._split.n, n, spec, self._first)

    def start_to_tokens(
        self, chunk: HeadChunk, queries: tuple[Tensor, ...], kv: tuple[Tensor, ...] = ()
    ) -> PendingExchange:
        """Start to exchange a chunk of tensors [b, s, h, d_n] and [b, s, h_kv, d_n]; see `PendingExchange.tokens`."""
        of_queries = [self._by_unit(x, self._split.queries)[:, :, :, chunk.kv].flatten(3, 4) for x in queries]
        return self._start(of_queries, [self._kv_heads(x, chunk.kv) for x in kv])

    def start_to_heads(self, queries: tuple[Tensor, ...], kv: tuple[Tensor, ...] = ()) -> PendingExchange:
        """Start to exchange results [b, u * rows, heads, d_n] of a chunk back; see `PendingExchange.heads`."""
        sides = [[x.unflatten(1, (self._team.size, -1)).transpose(1, 2) for x in side] for side in (queries, kv)]
        return self._start(*sides)

    def joined(self, parts: list[Tensor], rows: int) -> Tensor:
        """[b, rows, h, d] of all chunks' query heads, as they came back."""
        return torch.cat(parts, 3).flatten(2, 4)[:, :rows, : self._split.num_heads]

    def kv_joined(self, part: Tensor, rows: int) -> Tensor:
        """[b, rows, h_kv, d] of KV heads, of which several ranks may have had a copy."""
        h_kv, copies = self._split.num_heads_kv, self._split.copies
        return part.flatten(2, 4)[:, :rows, : h_kv * copies : copies]

    def kv_summed(self, parts: list[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
        """[b, rows, h_kv, d]: the gradients of a KV head, which several ranks may have had, added up in `dtype`."""
        h_kv, copies = self._split.num_heads_kv, self._split.copies
        units = torch.cat(parts, 3).flatten(2, 4)[:, :rows, : h_kv * copies].to(dtype)
        return units if copies == 1 else units.unflatten(2, (h_kv, copies)).sum(3)

    def _start(self, queries: list[Tensor], kv: list[Tensor]) -> PendingExchange:
        """Entry w of the third axis of tensors [b, s, u, heads, d_n] goes to rank w."""
        sides = [(queries + kv, self._rows[0])]
        if self._rows[0] != self._rows[1]:
            sides = [(queries, self._rows[0]), (kv, self._rows[1])]
        messages = [self._send(tensors, rows) for tensors, rows in sides if tensors]
        return PendingExchange(messages, [[x.shape[3:] for x in tensors] for tensors, _ in sides if tensors])

    def _send(self, tensors: list[Tensor], rows: int) -> comm.Pending:
        b, s, u = tensors[0].shape[:3]
        widths = [x.shape[3:].numel() for x in tensors]
        packed = tensors[0].new_empty((u, rows, b, sum(widths)))
        packed[:, s:].zero_()
        for x, part in zip(tensors, packed[:, :s].split(widths, -1)):  # each is copied once
            part.unflatten(-1, x.shape[3:]).copy_(x.permute(2, 1, 0, 3, 4))
        return comm.start_all_to_all(packed, self._team)

    def _by_unit(self, x: Tensor, heads: int) -> Tensor:
        """[b, s, u * n * heads or fewer, d] -> [b, s, u, n, heads, d]."""
        missing = self._split.u * self._split.n * heads - x.shape[2]
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return x.unflatten(2, (self._split.u, self._split.n, heads))

    def _kv_heads(self, x: Tensor, kv: slice) -> Tensor:
        """[b, s, h_kv, d] -> a chunk of every rank's KV heads [b, s, u, heads, d]."""
        u, n, copies = self._split.u, self._split.n, self._split.copies
        if copies == 1:
            return self._by_unit(x, 1)[:, :, :, kv].flatten(3, 4)
        units, heads = [w * n + j for w in range(u) for j in range(n)[kv]], x.unbind(2)
        of_units = [heads[min(unit // copies, len(heads) - 1)] for unit in units]  # padding's results are dropped
        return torch.stack(of_units, 2).unflatten(2, (u, -1))


class PendingExchange(NamedTuple):
    """Tensors that a team exchanges, on their way."""

    messages: list[comm.Pending]
    shapes: list[list[tuple[int, int]]]
    """(heads, d_n) of each message's tensors."""

    def tokens(self) -> list[Tensor]:
        """Wait for a chunk's heads of all ranks' tokens, [b, u * rows, heads, d_n] each."""
        return [x.flatten(0, 1).transpose(0, 1) for x in self._wait()]

    def heads(self, num_kv: int) -> list[Tensor]:
        """Wait for this rank's tokens of a chunk with num_kv KV heads on each rank, [b, rows, u, num_kv, heads, d_n]
        each."""
        return [x.permute(2, 1, 0, 3, 4).unflatten(3, (num_kv, -1)) for x in self._wait()]

    def _wait(self) -> list[Tensor]:
        """[u, rows, b, heads, d_n] each, whose entry w came from rank w."""
        arrived = []
        for message, shapes in zip(self.messages, self.shapes):
            parts = message.wait().split([heads * d for heads, d in shapes], -1)
            arrived += [x.unflatten(-1, shape) for x, shape in zip(parts, shapes)]
        return arrived
