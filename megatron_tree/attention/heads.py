"""The heads of a pass, in groups: where they are, or exchanged for tokens over a team of u ranks (Ulysses).

Before attention, each rank of the team sends away (u - 1) / u of its heads and receives the other ranks' tokens of the
heads it keeps; afterwards results go back. A rank then has a *holder's* rows: the shards of all ranks of the team, one
after another.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..config import AttnSpec
from ..plan import HeadSplit


class Heads:
    """KV heads with their query heads, in groups of equal size that are computed one after another."""

    def __init__(self, num_heads: int, num_heads_kv: int, groups: int, first: int = 0):
        self.groups, self._first = groups, first
        self._queries, self._kv = num_heads // groups, num_heads_kv // groups

    def queries(self, i: int) -> slice:
        """The query heads of group i."""
        return slice(i * self._queries, (i + 1) * self._queries)

    def kv(self, i: int) -> slice:
        """The KV heads of group i."""
        return slice(i * self._kv, (i + 1) * self._kv)

    def first(self, i: int) -> int:
        """Number of the group's first query head among those of the call."""
        return self._first + i * self._queries

    def spec(self, i: int, call: AttnSpec) -> AttnSpec:
        """The mathematics of group i's heads."""
        return call.heads_from(self.first(i), self._queries)


class HeadExchange(Heads):
    """Heads exchanged for tokens over a team.

    rows: of queries and of keys, in which each rank's share travels. q, k and v go in one message if they are equal.
    """

    def __init__(self, split: HeadSplit, groups: int, team: comm.Team, rows: tuple[int, int]):
        at = team.order.index(comm.group_rank(team.group)) * split.n * split.queries
        super().__init__(split.n * split.queries, split.n, groups, first=at)
        self._split, self._team, self._rows = split, team, rows

    @property
    def own(self) -> slice:
        """This rank's query heads among those of the call, with padding."""
        return slice(self._first, self._first + self.groups * self._queries)

    def to_tokens(self, i: int, queries: tuple[Tensor, ...], kv: tuple[Tensor, ...] = ()) -> Generator:
        """Exchange group i of tensors [b, s, h, d_n] and [b, s, h_kv, d_n]; returns them as [b, u * rows, heads, d_n].

        A generator that yields once, after the exchange has started.
        """
        of_queries = [self._by_unit(x, self._split.queries)[:, :, :, self.kv(i)].flatten(3, 4) for x in queries]
        of_kv = [self._kv_heads(x, i) for x in kv]
        arrived = yield from self._exchange(of_queries, of_kv)  # [u, rows, b, heads, d_n] each
        return [x.flatten(0, 1).transpose(0, 1) for x in arrived]

    def to_heads(self, queries: tuple[Tensor, ...], kv: tuple[Tensor, ...] = ()) -> Generator:
        """Exchange results [b, u * rows, heads, d_n] of a group back; returns [b, rows, u, units, heads, d_n] each.

        A generator that yields once, after the exchange has started.
        """
        sides = [[x.unflatten(1, (self._team.size, -1)).transpose(1, 2) for x in side] for side in (queries, kv)]
        arrived = yield from self._exchange(*sides)
        return [x.permute(2, 1, 0, 3, 4).unflatten(3, (self._kv, -1)) for x in arrived]

    def joined(self, parts: list[Tensor], rows: int) -> Tensor:
        """[b, rows, h, d] of what `to_heads` returned of all groups' query heads."""
        return torch.cat(parts, 3).flatten(2, 4)[:, :rows, : self._split.num_heads]

    def kv_summed(self, parts: list[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
        """[b, rows, h_kv, d]: the gradients of a KV head, which several ranks may have had, added up in `dtype`."""
        h_kv, copies = self._split.num_heads_kv, self._split.copies
        units = torch.cat(parts, 3).flatten(2, 4)[:, :rows, : h_kv * copies].to(dtype)
        return units if copies == 1 else units.unflatten(2, (h_kv, copies)).sum(3)

    def _exchange(self, queries: list[Tensor], kv: list[Tensor]) -> Generator:
        """Entry w of the third axis of tensors [b, s, u, heads, d_n] goes to rank w; returns [u, rows, b, heads, d_n]
        each, whose entry w came from rank w."""
        sides = [(queries + kv, self._rows[0])]
        if self._rows[0] != self._rows[1]:
            sides = [(queries, self._rows[0]), (kv, self._rows[1])]
        started = [self._start(tensors, rows) for tensors, rows in sides if tensors]
        shapes = [[x.shape[3:] for x in tensors] for tensors, _ in sides if tensors]
        del queries, kv, sides
        yield
        return [x for pending, of_one in zip(started, shapes) for x in _unpacked(pending.wait(), of_one)]

    def _start(self, tensors: list[Tensor], rows: int) -> comm.Pending:
        b, s, u = tensors[0].shape[:3]
        widths = [x.shape[3:].numel() for x in tensors]
        packed = tensors[0].new_empty((u, rows, b, sum(widths)))
        packed[:, s:] = 0
        for x, part in zip(tensors, packed[:, :s].split(widths, -1)):  # each is copied once
            part.unflatten(-1, x.shape[3:]).copy_(x.permute(2, 1, 0, 3, 4))
        return comm.start_all_to_all(packed, self._team)

    def _by_unit(self, x: Tensor, heads: int) -> Tensor:
        """[b, s, u * n * heads or fewer, d] -> [b, s, u, n, heads, d]."""
        missing = self._split.u * self._split.n * heads - x.shape[2]
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return x.unflatten(2, (self._split.u, self._split.n, heads))

    def _kv_heads(self, x: Tensor, i: int) -> Tensor:
        """[b, s, h_kv, d] -> group i of every rank's KV heads [b, s, u, heads, d]."""
        u, n, copies = self._split.u, self._split.n, self._split.copies
        if copies == 1:
            return self._by_unit(x, 1)[:, :, :, self.kv(i)].flatten(3, 4)
        units = [w * n + j for w in range(u) for j in range(n)[self.kv(i)]]
        heads = [min(unit // copies, x.shape[2] - 1) for unit in units]  # what is computed for padding is dropped
        return x[:, :, heads].unflatten(2, (u, -1))


def _unpacked(arrived: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    parts = arrived.split([heads * d for heads, d in shapes], -1)
    return [x.unflatten(-1, shape) for x, shape in zip(parts, shapes)]
