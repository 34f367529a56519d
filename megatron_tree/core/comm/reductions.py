"""Reductions of decoding: one state per rank is merged, and every rank gets the same bits (or its share).

`Reduction.start` posts the receives, the caller computes its state meanwhile, and the function that it has returned
sends and merges. Every schedule merges in one fixed order, or merges once and copies (docs/design.md, section 3).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import merge_packed
from ..merge import NO_ENTRY, finite, normalized, numerators
from .collectives import from_next, start_gather, start_reduce_scatter
from .ranks import Ranks
from .shared import SharedMemory
from .symmetric import SymmetricMemory
from .team import Team
from .work import Mail, Transfer, note

Finish = Callable[[Tensor], Tensor]
"""This rank's contiguous state, of the shape announced -> the merged one."""


class PackedReducer:
    """Reduces packed states, [..., d + 1] (out, then lse); they travel as they are."""

    merge = staticmethod(merge_packed)

    @staticmethod
    def narrow(state: Tensor) -> Tensor:
        return state


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Reductions of states of one shape among all ranks, any number of them."""

    ranks: Ranks
    schedule: str
    """"allreduce", "allgather", "butterfly", "scatter", "two_level", or "local_share": each rank gets its rows only."""
    shape: tuple[int, ...]
    """[..., d + 1]; of "local_share" [rows, ..., d + 1]."""
    dtype: torch.dtype
    in_memory: bool = False
    """Whether states go through the memory that the ranks share, or read from one another, if they do, in one round;
    schedules of several rounds are messages."""
    order: tuple[int, ...] = ()
    """The ranks by node (`plan.Placement`); default: every rank is its own node."""
    block: int = 1
    """Ranks of a node."""
    across: str = "direct"
    """How the leaders of "two_level" exchange: "direct" or "butterfly"."""
    shares: tuple[int, ...] = ()
    """Of "local_share": the rows of the state's first dimension that each rank gets."""
    reducer: type = PackedReducer
    """Merges states [n, ...] in order (merge.py); of "allreduce" packed ones only."""

    def start(self) -> Finish:
        """Post the receives. Every rank calls it, then the function that it returns."""
        return self._schedule(self)

    @functools.cached_property
    def _schedule(self) -> Callable[[Reduction], Finish]:
        if self.ranks.size == 1:
            return lambda _: lambda state: state
        return _SCHEDULES.get((self.schedule, self.transport)) or _SCHEDULES[self.schedule, _MESSAGES[self.transport]]

    @property
    def memory(self) -> SharedMemory | SymmetricMemory | None:
        """A group has one of them at most for a type of device."""
        return (self.ranks.memory or self.ranks.symmetric) if self.in_memory else None

    @functools.cached_property
    def transport(self) -> str:
        if isinstance(self.memory, SharedMemory):
            return "shm"
        return "symm_mem" if self.memory is not None and self.merges_in_memory else self.ranks.transport

    @functools.cached_property
    def by_node(self) -> tuple[int, ...]:
        return self.order or tuple(range(self.ranks.size))

    def empty(self, *lead: int, shape=None) -> Tensor:
        return torch.empty((*lead, *(shape or self.shape)), dtype=self.dtype, device=self.ranks.device)

    def merge_shared(self, parts: Tensor) -> Tensor:
        """Merge states [n, ...] that the ranks have handed each other through shared memory."""
        packed = self.reducer is PackedReducer
        return self.ranks.memory.merge(parts) if packed else self.reducer.merge(parts)

    @functools.cached_property
    def merges_in_memory(self) -> bool:
        """Whether the ranks' states are merged as they are read there."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return self.reducer is PackedReducer and self.dtype == torch.float32 and num_bytes <= self.memory.capacity

    @functools.cached_property
    def first(self) -> int:
        """Of "local_share": the first of this rank's rows."""
        return sum(self.shares[: self.ranks.rank])

    def team(self, places: tuple[int, ...], *name) -> Team:
        return Team(self.ranks, (places,), name)


def _allreduce(of: Reduction) -> Finish:
    """The paper's Algorithm 3: the maximum of lse, then one sum of numerators and denominators."""

    def finish(state: Tensor) -> Tensor:
        out, lse = state[..., :-1], state[..., -1:]
        top = finite(of.ranks.reduce(lse.clone(), "max"))
        return normalized(of.ranks.reduce(numerators(out, lse, top)), top)

    return finish


def _allgather_builtin(of: Reduction) -> Finish:
    return lambda state: of.reducer.merge(start_gather(state[None], of.ranks.everyone).wait())


def _allgather_in_memory(of: Reduction) -> Finish:
    memory = of.memory
    if of.merges_in_memory:
        return lambda state: memory.merge_rows(state, 0, len(state), of.ranks)
    return lambda state: of.merge_shared(memory.gather(state, of.ranks))


def _allgather_direct(of: Reduction) -> Finish:
    return _to_all(of, Mail("all_gather", of.ranks), tuple(range(of.ranks.size)))


def _to_all(of: Reduction, mail: Mail, among: tuple[int, ...]) -> Finish:
    """These ranks send to all others of them, and merge in this order: one latency."""
    at = among.index(of.ranks.rank)
    parts = of.empty(len(among))
    arriving = [mail.receive(parts[i], r) for i, r in enumerate(among) if i != at]

    def finish(state: Tensor) -> Tensor:
        note("all_gather", len(among), (len(among) - 1) * state.nbytes)
        for r in from_next(among, at):
            mail.send(state, r)
        parts[at] = state
        mail.wait(*arriving)
        merged = of.reducer.merge(parts)
        mail.sent()
        return merged

    return finish


def _butterfly_plan(n: int, at: int) -> list[tuple[int, bool, bool]]:
    """(peer, send, receive) of each step of recursive doubling among 0 .. n-1, for any n.

    Those beyond the largest power of two fold in first and get the result last.
    """
    core = 1 << (n.bit_length() - 1)
    if at >= core:
        return [(at - core, True, False), (at - core, False, True)]
    steps = [(at ^ (1 << bit), True, True) for bit in range(core.bit_length() - 1)]
    if at + core < n:
        return [(at + core, False, True), *steps, (at + core, True, False)]
    return steps


def _butterfly_direct(of: Reduction) -> Finish:
    return _double(of, Mail("butterfly", of.ranks), of.by_node)


def _double(of: Reduction, mail: Mail, among: tuple[int, ...]) -> Finish:
    """Recursive doubling, all receives posted beforehand; the state of the lower half is merged first."""
    at = among.index(of.ranks.rank)
    plan = _butterfly_plan(len(among), at)
    buffers = {peer: of.empty() for peer, _, receives in plan if receives}
    arriving = {peer: mail.receive(buffer, among[peer]) for peer, buffer in buffers.items()}
    folded = any(not sends for _, sends, _ in plan[1:])  # this rank only gets the result

    def finish(state: Tensor) -> Tensor:
        for peer, sends, receives in plan:
            if sends:
                note("send", len(among), state.nbytes)
                mail.send(state, among[peer])
            if receives:
                mail.wait(arriving[peer])
                state = buffers[peer] if folded else _merge_two(of, at, state, peer, buffers[peer])
        mail.sent()
        return state

    return finish


def _butterfly_builtin(of: Reduction) -> Finish:
    """Recursive doubling with the backend's own pairs of send and receive."""
    among = of.by_node
    at = among.index(of.ranks.rank)
    plan = _butterfly_plan(len(among), at)
    folded = any(not sends for _, sends, _ in plan[1:])

    def finish(state: Tensor) -> Tensor:
        for peer, sends, receives in plan:
            other, to = of.empty() if receives else None, among[peer]
            Transfer(state if sends else None, to, other, to, of.ranks).wait()
            if receives:
                state = other if folded else _merge_two(of, at, state, peer, other)
        return state

    return finish


def _merge_two(of: Reduction, at: int, state: Tensor, peer: int, other: Tensor) -> Tensor:
    return of.reducer.merge(torch.stack((state, other) if at < peer else (other, state)))


def _scatter_builtin(of: Reduction) -> Finish:
    """Each rank merges its share of the rows, and sends it to all."""
    share, in_memory = _share_of_rows(of), of.transport == "shm"
    finish_share = _local_share_in_memory(share) if in_memory else _local_share_builtin(share)
    team = of.ranks.everyone_in_memory if in_memory else of.ranks.everyone

    def finish(state: Tensor) -> Tensor:
        mine = finish_share(_padded(state, share.shape[0]))
        return _whole_rows(start_gather(mine, team).wait(), of.shape)

    return finish


def _scatter_direct(of: Reduction) -> Finish:
    """The same; the receives of both halves are posted at once."""
    n, r = of.ranks.size, of.ranks.rank
    share = _share_of_rows(of)
    finish_share = _local_share_direct(share)
    whole, mail = of.empty(shape=(n, share.shares[0], of.shape[-1])), Mail("all_gather", of.ranks)
    arriving = [mail.receive(whole[s], s) for s in range(n) if s != r]

    def finish(state: Tensor) -> Tensor:
        whole[r] = finish_share(_padded(state, share.shape[0]))
        note("all_gather", n, (n - 1) * whole[r].nbytes)
        for s in from_next(tuple(range(n)), r):
            mail.send(whole[r], s)
        mail.wait(*arriving)
        mail.sent()
        return _whole_rows(whole.flatten(0, 1), of.shape)

    return finish


def _share_of_rows(of: Reduction) -> Reduction:
    """The first half of "scatter": equally many rows [rows, d + 1] for each rank."""
    n = of.ranks.size
    share = -(-math.prod(of.shape[:-1]) // n)
    return dataclasses.replace(of, shape=(n * share, of.shape[-1]), shares=(share,) * n)


def _padded(state: Tensor, num_rows: int) -> Tensor:
    """state [..., d + 1] as [num_rows, d + 1], padded with zeros."""
    rows = state.flatten(0, -2)
    return F.pad(rows, (0, 0, 0, num_rows - len(rows)))


def _whole_rows(rows: Tensor, shape) -> Tensor:
    return rows[: math.prod(shape[:-1])].view(shape)


def _two_level_direct(of: Reduction) -> Finish:
    """States are merged on the first rank of each node; these leaders exchange and send the result to their node."""
    node, place = divmod(of.by_node.index(of.ranks.rank), of.block)
    members = of.by_node[node * of.block :][: of.block]
    mail = Mail("two_level", of.ranks)
    if place:
        result = of.empty()
        arriving = [mail.receive(result, members[0])]
    else:
        parts = of.empty(of.block)
        arriving = [mail.receive(parts[i], r) for i, r in enumerate(members) if i]
        exchange = {"direct": _to_all, "butterfly": _double}[of.across](of, mail, of.by_node[:: of.block])

    def finish_member(state: Tensor) -> Tensor:
        note("send", of.block, state.nbytes)
        mail.send(state, members[0])
        mail.wait(*arriving)
        mail.sent()
        return result

    def finish_leader(state: Tensor) -> Tensor:
        parts[0] = state
        mail.wait(*arriving)
        result = exchange(of.reducer.merge(parts))
        note("send", of.block, (of.block - 1) * result.nbytes)
        for r in members[1:]:
            mail.send(result, r)
        mail.sent()
        return result

    return finish_member if place else finish_leader


def _two_level_builtin(of: Reduction) -> Finish:
    """All-gather inside the node, then among the ranks of one place on all nodes: every rank merges in one order."""
    node, place = divmod(of.by_node.index(of.ranks.rank), of.block)
    inside, across = of.by_node[node * of.block :][: of.block], of.by_node[place :: of.block]

    def finish(state: Tensor) -> Tensor:
        for name, among in (("inside", inside), ("across", across)):
            if len(among) > 1:
                team = of.team(among, name, of.by_node, of.block)
                state = of.reducer.merge(start_gather(state[None], team).wait())
        return state

    return finish


def _local_share_in_memory(of: Reduction) -> Finish:
    """Each rank merges its rows from there."""
    memory, count = of.memory, of.shares[of.ranks.rank]
    if of.merges_in_memory:
        return lambda state: memory.merge_rows(state, of.first, count, of.ranks)
    return lambda state: of.merge_shared(memory.exchange(_by_rank(of, state), of.ranks))[:count]


def _local_share_builtin(of: Reduction) -> Finish:
    """In one collective of the backend."""

    def finish(state: Tensor) -> Tensor:
        parts = _by_rank(of, state).flatten(0, 1)
        return start_reduce_scatter(parts, of.ranks.everyone, of.reducer).wait()[: of.shares[of.ranks.rank]]

    return finish


def _local_share_direct(of: Reduction) -> Finish:
    """Each rank is sent its rows of all states, and merges them in rank order."""
    n, r = of.ranks.size, of.ranks.rank
    parts, mail = of.empty(shape=(n, max(of.shares), *of.shape[1:])), Mail("all_to_all", of.ranks)
    arriving = [mail.receive(parts[s], s) for s in range(n) if s != r]

    def finish(state: Tensor) -> Tensor:
        state = _by_rank(of, state)
        note("all_to_all", n, (n - 1) * state[0].nbytes)
        for s in from_next(tuple(range(n)), r):
            mail.send(state[s], s)
        parts[r] = state[r]
        mail.wait(*arriving)
        merged = of.reducer.merge(parts)
        mail.sent()
        return merged[: of.shares[r]]

    return finish


def _by_rank(of: Reduction, state: Tensor) -> Tensor:
    return by_owner(state, of.shares, tuple(range(of.ranks.size)))


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


_MESSAGES = {"shm": "direct", "symm_mem": "builtin"}  # of schedules of several rounds
_SCHEDULES = {
    ("allreduce", "direct"): _allreduce,  # the paper's schedule is made of the backend's collectives
    ("allreduce", "builtin"): _allreduce,
    ("allgather", "builtin"): _allgather_builtin,
    ("allgather", "direct"): _allgather_direct,
    ("allgather", "shm"): _allgather_in_memory,
    ("allgather", "symm_mem"): _allgather_in_memory,
    ("butterfly", "builtin"): _butterfly_builtin,
    ("butterfly", "direct"): _butterfly_direct,
    ("scatter", "builtin"): _scatter_builtin,
    ("scatter", "direct"): _scatter_direct,
    ("scatter", "shm"): _scatter_builtin,
    ("local_share", "builtin"): _local_share_builtin,
    ("local_share", "direct"): _local_share_direct,
    ("local_share", "shm"): _local_share_in_memory,
    ("local_share", "symm_mem"): _local_share_in_memory,
    ("two_level", "builtin"): _two_level_builtin,
    ("two_level", "direct"): _two_level_direct,
}


# the k-th largest of all ranks' integers, by counting: a few sums over the ranks instead of the lists


def kth_largest(lists: Tensor, k: int, bits: int, ranks: Ranks) -> Tensor:
    """A threshold [rows] for every row of this rank's lists int64 [rows, m]: exactly k entries of all ranks are at
    least as large, or all of them are, where there are fewer. Collective.

    Entries are those of `merge.ranked`, of which a rank needs to list its k largest only. Every round counts by the
    next `bits` bits of the score; by those of the position, too, if more entries than fit have the k-th score.
    """
    exists, ordered = lists != NO_ENTRY, lists ^ NO_ENTRY  # now in the order of unsigned integers
    found = ordered.new_zeros(len(lists))  # the threshold's digits so far, the others 0
    missing = torch.full_like(found, k)  # of the k largest: those that begin with these digits
    few = torch.zeros_like(found, dtype=torch.bool)  # rows of fewer than k entries
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
