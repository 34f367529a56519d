"""Decode's reductions: one state per rank is merged, and every rank gets the same bits (or its share).

`Reducer.start` posts the receives, the caller computes its state meanwhile, and `finish` sends and merges. Every
schedule merges in one fixed order, or merges once and copies (docs/design.md, section 3).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merge import finite, normalized, numerators
from .collectives import all_reduce, start_gather
from .group import group_size
from .local_share import (
    PackedReducer,
    ReduceArgs,
    Steps,
    local_share_builtin,
    local_share_direct,
    local_share_in_memory,
    local_share_shared,
)
from .team import from_next
from .traffic import note
from .work import Mail, Transfer


class Reduction:
    """A reduction whose receives are posted; `finish` merges this rank's state with all others."""

    def __init__(self, steps: Steps):
        self._steps = steps
        next(steps)

    def finish(self, state: Tensor) -> Tensor:
        """The merged state, the same bits on every rank. state: of the shape announced."""
        return _finish(self._steps, state.contiguous())


class AtOnce:
    """A `Reduction` that posts nothing beforehand, so that one will do for any number of states."""

    def __init__(self, finish: Callable[[Tensor], Tensor]):
        self.finish = finish


def _finish(steps: Steps, state: Tensor) -> Tensor:
    try:
        steps.send(state)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a reduction takes one state")


class Reducer:
    """Reductions of states of one shape, see `prepare_reduction`; `start` begins one."""

    def __init__(self, steps: Callable[[], Steps] | None, at_once: AtOnce | None = None):
        self._steps, self._at_once = steps, at_once

    def start(self) -> Reduction | AtOnce:
        """Post the receives. Every rank calls it, then `Reduction.finish`."""
        return self._at_once or Reduction(self._steps())


def prepare_reduction(
    shape,
    dtype: torch.dtype,
    device: torch.device,
    group,
    schedule: str,
    *,
    transport: str,
    timeout_s: float,
    order: tuple[int, ...] = (),
    block: int = 1,
    across: str = "direct",
    shares: tuple[int, ...] = (),
    reducer: type = PackedReducer,
) -> Reducer:
    """Reductions over the group of states of `shape` [..., d + 1], any number of them.

    Args: schedule "allreduce", "allgather", "butterfly", "scatter" or "two_level", or "local_share": `shape` is then
    [rows, ..., d + 1], and each rank gets only its rows back, shares[rank] of them; transport "direct" or "builtin", or
    "shm": then schedules of several rounds of messages are direct; order, block: the ranks by node and how many a node
    has (`plan.Placement`), default: every rank is its own node; across: how two_level's leaders exchange, "direct" or
    "butterfly"; reducer: merges other states than (out, lse), in any schedule but "allreduce" (merge.py).
    """
    n = group_size(group)
    if n == 1:
        return Reducer(None, AtOnce(lambda state: state))
    args = ReduceArgs(
        shares=shares,
        shape=tuple(shape),
        dtype=dtype,
        device=device,
        group=group,
        transport=transport,
        timeout_s=timeout_s,
        order=order or tuple(range(n)),
        block=block,
        across=across,
        reducer=reducer,
    )
    if transport == "shm" and schedule in _IN_MEMORY:
        return Reducer(None, AtOnce(functools.partial(_IN_MEMORY[schedule], args)))
    steps = _SCHEDULES.get((schedule, transport)) or _SCHEDULES[schedule, "direct"]
    return Reducer(functools.partial(steps, args))


def _allreduce(args: ReduceArgs) -> Steps:
    """The paper's Algorithm 3: the maximum of lse, then one sum of numerators and denominators."""
    state = yield
    out, lse = state[..., :-1], state[..., -1:]
    top = finite(all_reduce(lse.clone(), args.group, op="max", timeout_s=args.timeout_s))
    total = all_reduce(numerators(out, lse, top), args.group, timeout_s=args.timeout_s)
    return normalized(total, top)


def _allgather_builtin(args: ReduceArgs) -> Steps:
    state = yield
    return args.reducer.merge(start_gather(state[None], args.team(args.ranks)).wait())


def _allgather_in_memory(args: ReduceArgs, state: Tensor) -> Tensor:
    state = state.contiguous()
    if args.merges_in_memory:
        return args.memory.merge_rows(state, 0, len(state), args.group, args.timeout_s)
    return args.merge_shared(args.memory.gather(state, args.group, args.timeout_s))


def _to_all(args: ReduceArgs, mail: Mail, ranks: tuple[int, ...]) -> Steps:
    """All ranks send to all others, and merge in the order of `ranks`: one latency."""
    at = ranks.index(args.rank)
    parts = args.empty(len(ranks))
    arriving = [mail.receive(parts[i], r) for i, r in enumerate(ranks) if i != at]
    state = yield
    note("all_gather", len(ranks), (len(ranks) - 1) * state.nbytes)
    for r in from_next(ranks, at):
        mail.send(state, r)
    parts[at] = state
    mail.wait(*arriving)
    merged = args.reducer.merge(parts)
    mail.sent()
    return merged


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


def _double(args: ReduceArgs, mail: Mail, ranks: tuple[int, ...]) -> Steps:
    """Recursive doubling, all receives posted beforehand; the state of the lower half is merged first."""
    at = ranks.index(args.rank)
    plan = _butterfly_plan(len(ranks), at)
    buffers = {peer: args.empty() for peer, _, receives in plan if receives}
    arriving = {peer: mail.receive(buffer, ranks[peer]) for peer, buffer in buffers.items()}
    state = yield
    folded = any(not sends for _, sends, _ in plan[1:])  # this rank only gets the result
    for peer, sends, receives in plan:
        if sends:
            note("send", len(ranks), state.nbytes)
            mail.send(state, ranks[peer])
        if receives:
            mail.wait(arriving[peer])
            state = buffers[peer] if folded else _merge_two(args, at, state, peer, buffers[peer])
    mail.sent()
    return state


def _butterfly_builtin(args: ReduceArgs) -> Steps:
    """Recursive doubling with the backend's own pairs of send and receive."""
    state, at = (yield), args.order.index(args.rank)
    plan = _butterfly_plan(len(args.order), at)
    folded = any(not sends for _, sends, _ in plan[1:])
    for peer, sends, receives in plan:
        other = args.empty() if receives else None
        to = args.order[peer]
        Transfer(state if sends else None, to, other, to, args.group, args.timeout_s).wait()
        if receives:
            state = other if folded else _merge_two(args, at, state, peer, other)
    return state


def _merge_two(args: ReduceArgs, at: int, state: Tensor, peer: int, other: Tensor) -> Tensor:
    return args.reducer.merge(torch.stack((state, other) if at < peer else (other, state)))


def _scatter_builtin(args: ReduceArgs) -> Steps:
    """Each rank merges its share of the rows, and sends it to all."""
    first, rows, _ = _share_rows(args, local_share_shared if args.transport == "shm" else local_share_builtin)
    mine = _finish(first, _padded((yield), rows))
    return _whole_rows(start_gather(mine, args.team(args.ranks)).wait(), args.shape)


def _scatter_direct(args: ReduceArgs) -> Steps:
    """The same; the receives of both halves are posted at once."""
    n, r = len(args.ranks), args.rank
    first, rows, share = _share_rows(args, local_share_direct)
    whole, mail = args.empty(shape=(n, share, args.shape[-1])), args.mail("all_gather")
    arriving = [mail.receive(whole[s], s) for s in args.ranks if s != r]
    whole[r] = _finish(first, _padded((yield), rows))
    note("all_gather", n, (n - 1) * whole[r].nbytes)
    for s in from_next(args.ranks, r):
        mail.send(whole[r], s)
    mail.wait(*arriving)
    mail.sent()
    return _whole_rows(whole.flatten(0, 1), args.shape)


def _share_rows(args: ReduceArgs, local_share) -> tuple[Steps, int, int]:
    """The first half of "scatter", its receives posted; the rows [rows, d + 1] that it takes, and those of a rank."""
    n = len(args.ranks)
    share = -(-math.prod(args.shape[:-1]) // n)
    steps = local_share(dataclasses.replace(args, shape=(n * share, args.shape[-1]), shares=(share,) * n))
    next(steps)
    return steps, n * share, share


def _padded(state: Tensor, num_rows: int) -> Tensor:
    """state [..., d + 1] as [num_rows, d + 1], padded with zeros."""
    rows = state.flatten(0, -2)
    return F.pad(rows, (0, 0, 0, num_rows - len(rows)))


def _whole_rows(rows: Tensor, shape) -> Tensor:
    return rows[: math.prod(shape[:-1])].view(shape)


def _two_level_direct(args: ReduceArgs) -> Steps:
    """States are merged on the first rank of each node; these leaders exchange and send the result to their node."""
    node, place = divmod(args.order.index(args.rank), args.block)
    members = args.order[node * args.block :][: args.block]
    mail = args.mail("two_level")
    if place:
        result = args.empty()
        arriving = mail.receive(result, members[0])
        state = yield
        note("send", args.block, state.nbytes)
        mail.send(state, members[0])
        mail.wait(arriving)
        mail.sent()
        return result
    parts = args.empty(args.block)
    arriving = [mail.receive(parts[i], r) for i, r in enumerate(members) if i]
    exchange = {"direct": _to_all, "butterfly": _double}[args.across](args, mail, args.order[:: args.block])
    next(exchange)
    parts[0] = yield
    mail.wait(*arriving)
    result = _finish(exchange, args.reducer.merge(parts))
    note("send", args.block, (args.block - 1) * result.nbytes)
    for r in members[1:]:
        mail.send(result, r)
    mail.sent()
    return result


def _two_level_builtin(args: ReduceArgs) -> Steps:
    """All-gather inside the node, then among the ranks of one place on all nodes: every rank merges in one order."""
    node, place = divmod(args.order.index(args.rank), args.block)
    inside, across = args.order[node * args.block :][: args.block], args.order[place :: args.block]
    state = yield
    for name, ranks in (("inside", inside), ("across", across)):
        if len(ranks) > 1:
            team = args.team(ranks, name, args.order, args.block)
            state = args.reducer.merge(start_gather(state[None], team).wait())
    return state


_IN_MEMORY = {"allgather": _allgather_in_memory, "local_share": local_share_in_memory}
_SCHEDULES = {
    ("allreduce", "builtin"): _allreduce,
    ("allreduce", "direct"): _allreduce,  # the paper's schedule is made of the backend's collectives
    ("allgather", "builtin"): _allgather_builtin,
    ("allgather", "direct"): lambda args: _to_all(args, args.mail("all_gather"), args.ranks),
    ("butterfly", "builtin"): _butterfly_builtin,
    ("butterfly", "direct"): lambda args: _double(args, args.mail("butterfly"), args.order),
    ("scatter", "builtin"): _scatter_builtin,
    ("scatter", "direct"): _scatter_direct,
    ("scatter", "shm"): _scatter_builtin,
    ("local_share", "builtin"): local_share_builtin,
    ("local_share", "direct"): local_share_direct,
    ("two_level", "builtin"): _two_level_builtin,
    ("two_level", "direct"): _two_level_direct,
}
