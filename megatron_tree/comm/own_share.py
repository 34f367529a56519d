"""What the ranks of a reduction have in common; and its form in which each rank gets its own entry of the state."""

from __future__ import annotations

import functools
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import merge_packed
from .collectives import start_reduce_scatter
from .group import group_rank, group_size
from .shared import shared
from .team import Team, from_next
from .traffic import note
from .work import Mail

Steps = Generator[None, Tensor, Tensor]  # posts receives, yields once for this rank's state, returns the merged one


@dataclass(frozen=True, kw_only=True)
class ReduceArgs:
    """What the ranks reduce: states of one shape [..., d + 1] (out, then lse), and among whom."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: object
    transport: str
    timeout_s: float
    order: tuple[int, ...]
    block: int
    across: str

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

    def team(self, ranks: tuple[int, ...], *name) -> Team:
        return Team(self.group, (ranks,), self.transport, self.timeout_s, name)


class _Packed:
    """How `start_reduce_scatter` merges packed states; they travel as they are."""

    merge = staticmethod(merge_packed)

    @staticmethod
    def narrow(state: Tensor) -> Tensor:
        return state


def own_share_shared(args: ReduceArgs) -> Steps:
    """Through shared memory."""
    state = yield
    memory = shared(args.group)
    return memory.merge(memory.exchange(state, args.group, args.timeout_s))


def own_share_builtin(args: ReduceArgs) -> Steps:
    """In one collective of the backend."""
    state = yield
    return start_reduce_scatter(state.flatten(0, 1), args.team(args.ranks), _Packed).wait().view(args.shape[1:])


def own_share_direct(args: ReduceArgs) -> Steps:
    """Entry i of the state goes to rank i, which merges the entries of all ranks in rank order."""
    parts, mail, r = args.empty(), args.mail("all_to_all"), args.rank
    arriving = [mail.receive(parts[s], s) for s in args.ranks if s != r]
    state = yield
    note("all_to_all", len(args.ranks), (len(args.ranks) - 1) * state[0].nbytes)
    for s in from_next(args.ranks, r):
        mail.send(state[s], s)
    parts[r] = state[r]
    mail.wait(*arriving)
    merged = merge_packed(parts)
    mail.sent()
    return merged
