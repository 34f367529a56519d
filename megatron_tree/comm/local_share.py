"""What the ranks of a reduction have in common; and the reduction that gives each rank its local rows of the state."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import merge_packed
from .collectives import start_reduce_scatter
from .group import group_rank, group_size
from .shared import CAPACITY, SharedMemory, shared
from .team import Team, from_next
from .traffic import note
from .work import Mail

Steps = Generator[None, Tensor, Tensor]  # posts receives, yields once for this rank's state, returns the merged one


class PackedReducer:
    """Reduces packed states, [..., d + 1] (out, then lse); they travel as they are."""

    merge = staticmethod(merge_packed)

    @staticmethod
    def narrow(state: Tensor) -> Tensor:
        return state


@dataclass(frozen=True, kw_only=True)
class ReduceArgs:
    """What the ranks reduce: states of one shape, rows of one width, and among whom."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: object
    transport: str
    timeout_s: float
    order: tuple[int, ...]
    block: int
    across: str
    shares: tuple[int, ...] = ()
    """Of "local_share": the rows of the state's first dimension that each rank gets."""
    reducer: type = PackedReducer
    """Merges states [n, ...] in order."""

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(group_size(self.group)))

    @functools.cached_property
    def rank(self) -> int:
        return group_rank(self.group)

    def empty(self, *lead: int, shape=None) -> Tensor:
        return torch.empty((*lead, *(shape or self.shape)), dtype=self.dtype, device=self.device)

    def mail(self, op: str) -> Mail:
        return Mail(op, self.group, self.ranks, self.timeout_s)

    def merge_shared(self, parts: Tensor) -> Tensor:
        """Merge states [n, ...] that the ranks have handed each other through shared memory."""
        return self.memory.merge(parts) if self.reducer is PackedReducer else self.reducer.merge(parts)

    @functools.cached_property
    def memory(self) -> SharedMemory:
        return shared(self.group)

    @functools.cached_property
    def merges_in_memory(self) -> bool:
        """Whether memory.c merges the ranks' states as it reads them."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return self.reducer is PackedReducer and self.dtype == torch.float32 and num_bytes <= CAPACITY

    @functools.cached_property
    def first(self) -> int:
        """Of "local_share": the first of this rank's rows."""
        return sum(self.shares[: self.rank])

    def team(self, ranks: tuple[int, ...], *name) -> Team:
        return Team(self.group, (ranks,), self.transport, self.timeout_s, name)


def local_share_in_memory(args: ReduceArgs, state: Tensor) -> Tensor:
    """Through shared memory, from which each rank merges its rows."""
    if args.merges_in_memory:
        count = args.shares[args.rank]
        return args.memory.merge_rows(state.contiguous(), args.first, count, args.group, args.timeout_s)
    parts = args.memory.exchange(by_owner(state, args.shares, args.ranks), args.group, args.timeout_s)
    return _unpadded(args, args.merge_shared(parts))


def local_share_shared(args: ReduceArgs) -> Steps:
    return local_share_in_memory(args, (yield))


def local_share_builtin(args: ReduceArgs) -> Steps:
    """In one collective of the backend."""
    parts = by_owner((yield), args.shares, args.ranks)
    return _unpadded(args, start_reduce_scatter(parts.flatten(0, 1), args.team(args.ranks), args.reducer).wait())


def local_share_direct(args: ReduceArgs) -> Steps:
    """Each rank is sent its rows of all states, and merges them in rank order."""
    shape = (len(args.ranks), max(args.shares), *args.shape[1:])
    parts, mail, r = args.empty(shape=shape), args.mail("all_to_all"), args.rank
    arriving = [mail.receive(parts[s], s) for s in args.ranks if s != r]
    state = by_owner((yield), args.shares, args.ranks)
    note("all_to_all", len(args.ranks), (len(args.ranks) - 1) * state[0].nbytes)
    for s in from_next(args.ranks, r):
        mail.send(state[s], s)
    parts[r] = state[r]
    mail.wait(*arriving)
    merged = args.reducer.merge(parts)
    mail.sent()
    return _unpadded(args, merged)


def by_owner(state: Tensor, shares: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """state [rows, ...], each rank's rows one after another, as [ranks, longest share, ...] in `order`, padded by rows
    that repeat."""
    longest = max(shares)
    if not len(state):
        return state.new_zeros(len(order), longest, *state.shape[1:])
    if min(shares) < longest or list(order) != sorted(order):
        state = state.index_select(0, _padded_rows(shares, order, state.device))
    return state.reshape(len(order), longest, *state.shape[1:])


@functools.lru_cache(maxsize=64)
def _padded_rows(shares: tuple[int, ...], order: tuple[int, ...], device: torch.device) -> Tensor:
    longest, first, firsts = max(shares), 0, {}
    for r in sorted(order):
        firsts[r] = first
        first += shares[r]
    rows = [min(firsts[r] + max(min(i, shares[r] - 1), 0), first - 1) for r in order for i in range(longest)]
    return torch.tensor(rows, device=device)


def _unpadded(args: ReduceArgs, merged: Tensor) -> Tensor:
    """This rank's rows, without the padding."""
    return merged[: args.shares[args.rank]]
