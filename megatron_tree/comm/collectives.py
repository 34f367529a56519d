"""Gathers and reduce-scatters over teams, in one or two levels; and the plain collectives."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..config import TreeConfig
from ..merge import SumReducer
from .calls import collective_call
from .group import GroupState, group_rank, group_size
from .health.watchdog import Watchdog
from .shared import SUMS, resolve_shared, shared
from .team import Team, from_next, subgroup
from .traffic import note
from .work import Mail, Pending, meet, run, wait_for

SMALL_BYTES = 1 << 16  # sums up to this size are one round of whole messages

# the newer name; the older one warns from torch 2.13 on
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_gather(x: Tensor, team: Team) -> Pending:
    """All-gather x [s, ...], of equal length on all ranks, to [n * s, ...] in the team's order.

    In two levels: each rank first gets the shards of its place from the other nodes, then hands them round its node, so
    that a shard crosses to another node once and not once for every rank there.
    """
    _note("all_gather", team, (team.size - 1) * x.nbytes)
    x = x.contiguous()
    return Pending(GATHERS[team.transport](x, team), x.device, (x,))


def _gather_direct(x: Tensor, team: Team):
    whole = torch.empty((team.inner, team.outer, *x.shape), dtype=x.dtype, device=x.device)
    (i, o), inside, across = team.place, team.inside, team.across
    mail = Mail("all_gather", team.group, team.order, team.timeout_s)
    from_across = [mail.receive(whole[i, n], r) for n, r in enumerate(across) if n != o]
    from_inside = [mail.receive(whole[n], r) for n, r in enumerate(inside) if n != i]
    for r in from_next(across, o):
        mail.send(x, r)
    whole[i, o] = x
    if from_across:
        yield
        mail.wait(*from_across)
    for r in from_next(inside, i):
        mail.send(whole[i], r)
    yield
    mail.wait(*from_inside)
    mail.sent()
    return whole.flatten(0, 2)


def _gather_builtin(x: Tensor, team: Team):
    for ranks in (team.across, team.inside):
        if len(ranks) > 1:
            whole = torch.empty((len(ranks), *x.shape), dtype=x.dtype, device=x.device)
            start = functools.partial(_all_gather_single, whole.flatten(0, 1), x, async_op=True)
            yield from _builtin("all_gather", team, ranks, x.device, start)
            x = _reordered(whole, ranks, rising=False).flatten(0, 1)
    return x


def _gather_shared(x: Tensor, team: Team):
    yield
    return shared(team.group).gather(x, team.group, team.timeout_s).flatten(0, 1)


GATHERS = {"direct": _gather_direct, "builtin": _gather_builtin, "shm": _gather_shared}


def start_reduce_scatter(x: Tensor, team: Team, reducer) -> Pending:
    """Reduce x [n * s, ...], shards in the team's order, so that every rank ends with its shard, complete.

    reducer: `merge(parts [m, s, ...])` in full precision, in order, and `narrow(merged)` for the wire (merge.py).
    In two levels: what is meant for one place is merged inside the node first, then across nodes.
    """
    _note("all_to_all", team, (team.size - 1) * (x.nbytes // team.size))
    x = x.contiguous().unflatten(0, (team.inner, team.outer, x.shape[0] // team.size))
    return Pending(_reduce_scatter(x, team, reducer, _EXCHANGES[team.transport]), x.device, (x,), "reduce")


def _reduce_scatter(x: Tensor, team: Team, reducer, exchange):
    levels = [(team.inside, team.place[0]), (team.across, team.place[1])]
    if 1 in (team.inner, team.outer):
        x, levels = x.flatten(0, 1), [level for level in levels if len(level[0]) > 1]
    merged = None
    for ranks, index in levels:
        x = x if merged is None else reducer.narrow(merged)
        merged = reducer.merge((yield from exchange(x, team, ranks, index)))
    return merged


def start_all_to_all(x: Tensor, team: Team) -> Pending:
    """x [n, ...]: entry i goes to the team's i-th rank; the result's entry i came from it. In one level."""
    _note("all_to_all", team, (team.size - 1) * (x.nbytes // team.size))
    exchange, x = _EXCHANGES[team.transport], x.contiguous()
    return Pending(exchange(x, team, team.order, team.index), x.device, (x,), "exchange")


def start_all_to_all_v(parts: list[Tensor], lengths: Sequence[int], team: Team) -> Pending:
    """parts[i] [n, ...] goes to the team's i-th rank, which expects n rows; returns [sum(lengths), ...], in the team's
    order, of which lengths[i] rows came from its i-th rank. Nothing goes to ranks that expect no rows."""
    note("all_to_all", team.size, sum(x.nbytes for i, x in enumerate(parts) if i != team.index))
    start = _exchange_rows_builtin if team.transport == "builtin" else _exchange_rows_direct
    parts = [x.contiguous() for x in parts]
    return Pending(start(parts, lengths, team), parts[0].device, tuple(parts), "gather")


def _exchange_rows_direct(parts: list[Tensor], lengths: Sequence[int], team: Team):
    arrived = parts[0].new_empty((sum(lengths), *parts[0].shape[1:]))
    mail, by_rank = Mail("all_to_all", team.group, team.order, team.timeout_s), arrived.split(tuple(lengths))
    arriving = [mail.receive(x, r) for i, (x, r) in enumerate(zip(by_rank, team.order)) if len(x) and i != team.index]
    for r in from_next(team.order, team.index):
        if len(part := parts[team.order.index(r)]):
            mail.send(part, r)
    by_rank[team.index].copy_(parts[team.index])
    yield
    mail.wait(*arriving)
    mail.sent()
    return arrived


def _exchange_rows_builtin(parts: list[Tensor], lengths: Sequence[int], team: Team):
    ranks = team.order
    rising = sorted(range(len(ranks)), key=ranks.__getitem__)
    arrived = parts[0].new_empty((sum(lengths), *parts[0].shape[1:]))
    sizes = [lengths[i] for i in rising], [len(parts[i]) for i in rising]
    start = functools.partial(
        dist.all_to_all_single, arrived, torch.cat([parts[i] for i in rising]), *sizes, async_op=True
    )
    yield from _builtin("all_to_all", team, ranks, arrived.device, start)
    if rising == list(range(len(ranks))):
        return arrived
    by_rank = dict(zip(rising, arrived.split(sizes[0])))
    return torch.cat([by_rank[i] for i in range(len(ranks))])


def _exchange_direct(x: Tensor, team: Team, ranks: tuple[int, ...], index: int):
    """x[n] goes to ranks[n]; returns [n, ...] whose entry n came from ranks[n]. ranks[index] is this rank."""
    arrived = torch.empty_like(x)
    mail = Mail("all_to_all", team.group, team.order, team.timeout_s)
    arriving = [mail.receive(arrived[n], r) for n, r in enumerate(ranks) if n != index]
    for r in from_next(ranks, index):
        mail.send(x[ranks.index(r)], r)
    arrived[index] = x[index]
    yield
    mail.wait(*arriving)
    mail.sent()
    return arrived


def _exchange_builtin(x: Tensor, team: Team, ranks: tuple[int, ...], index: int):
    arrived, x = torch.empty_like(x), _reordered(x, ranks, rising=True).contiguous()
    start = functools.partial(dist.all_to_all_single, arrived, x, async_op=True)
    yield from _builtin("all_to_all", team, ranks, x.device, start)
    return _reordered(arrived, ranks, rising=False)


def _exchange_shared(x: Tensor, team: Team, ranks: tuple[int, ...], index: int):
    yield
    return shared(team.group).exchange(x, team.group, team.timeout_s)


_EXCHANGES = {"direct": _exchange_direct, "builtin": _exchange_builtin, "shm": _exchange_shared}


def _note(op: str, team: Team, num_bytes: int) -> None:
    if team.transport != "shm":  # which takes note itself
        note(op, team.size, num_bytes)


def _reordered(x: Tensor, ranks: tuple[int, ...], *, rising: bool) -> Tensor:
    """x [n, ...] from the order of `ranks` to rising ranks, which is a sub-group's order, or back."""
    if list(ranks) == sorted(ranks):
        return x
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    return x[order] if rising else x[[order.index(i) for i in range(len(ranks))]]


def _builtin(op: str, team: Team, ranks, device: torch.device, start):
    meet(op, team.group, device, team.timeout_s)
    try:
        group = subgroup(team, ranks)
        work = start(group=group)
        yield
        wait_for(work, team.group, device, team.timeout_s, on=group)
    except RuntimeError as error:
        raise Watchdog.of(team.group).operation_failed(op, team.timeout_s, error, ranks) from error


def gather_sequence(x: Tensor, group, *, transport: str = "auto", timeout_s: float = 600.0) -> Tensor:
    """All-gather x [s, ...], of equal length on all ranks, to [n * s, ...] in rank order."""
    if group_size(group) == 1:
        return x.contiguous()
    transport = resolve_shared(group, x.device, transport, timeout_s=timeout_s)
    if transport == "shm":
        return shared(group).gather(x.contiguous(), group, timeout_s).flatten(0, 1)
    return start_gather(x, Team.flat(group, transport=transport, timeout_s=timeout_s)).wait()


def gather_rows(
    x: Tensor,
    counts: tuple[int, ...],
    group,
    *,
    transport: str = "auto",
    timeout_s: float = 600.0,
    exchanged: bool = False,
) -> Tensor:
    """x [counts[rank], ...], contiguous, of every rank -> [sum(counts), ...], in rank order.

    exchanged: built-in, by an all-to-all: more messages than those of an all-gather, but all at once.
    """
    state = GroupState.of(group)
    if state.size == 1:
        return x
    known = state.transports.get((x.device.type, transport))
    transport = known or resolve_shared(group, x.device, transport, timeout_s=timeout_s)
    if transport == "shm":
        return state.shared.gather_rows(x, counts, group, timeout_s)
    if transport == "builtin" and exchanged:
        team = Team.flat(group, transport=transport, timeout_s=timeout_s)
        return start_all_to_all_v([x] * state.size, counts, team).wait()
    longest = max(counts)  # messages are of one size
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, longest - len(x))) if len(x) < longest else x
    whole = gather_sequence(padded, group, transport=transport, timeout_s=timeout_s)
    if min(counts) == longest:
        return whole
    return torch.cat([part[:n] for part, n in zip(whole.split(longest), counts)])


def all_reduce(x: Tensor, group, *, op: str = "sum", timeout_s: float = 600.0) -> Tensor:
    """Reduce x in place over the group: op "sum" or "max"."""
    n = group_size(group)
    if n > 1:
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        start = functools.partial(dist.all_reduce, op=reduce_op, group=group, async_op=True)
        run("all_reduce", group, 2 * (n - 1) * x.nbytes // n, timeout_s, start, x)
    return x


def sum_over_ranks(x: Tensor, group, *, transport: str = "auto", timeout_s: float = 600.0) -> Tensor:
    """The sum of x, of equal shape, over all ranks: the same bits everywhere. It may be x itself.

    Unless the transport is builtin floats are added up in rank order, in fp32 at least, so a row's bits don't depend on
    the batch either.
    """
    state = GroupState.of(group)
    if (n := state.size) == 1:
        return x
    known = state.transports.get((x.device.type, transport))
    transport = known or resolve_shared(group, x.device, transport, timeout_s=timeout_s)
    if transport == "shm" and x.dtype in SUMS:
        return state.shared.sum(x.contiguous(), group, timeout_s)
    if transport == "builtin":
        return all_reduce(x.contiguous(), group, timeout_s=timeout_s)
    team = Team.flat(group, transport=transport, timeout_s=timeout_s)
    reducer = SumReducer(x.dtype, torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype)
    if n == 2 or x.nbytes <= SMALL_BYTES:  # one round of whole tensors, or two of shares
        return reducer.merge(start_gather(x[None], team).wait()).to(x.dtype)
    rows = F.pad(x.flatten(), (0, -x.numel() % n))
    mine = reducer.narrow(start_reduce_scatter(rows, team, reducer).wait())
    return start_gather(mine, team).wait()[: x.numel()].view(x.shape)


def all_arrive(name: str, group, *, timeout_s: float = 600.0) -> None:
    """Wait until all ranks of the group are here, in a call of this name; with NCCL, for which the host does not wait,
    nobody does. For collectives of other libraries that come next, without a limit of ours.

    Raises: `CommError` naming the ranks that don't come within timeout_s; ``ValueError`` if they make another call.
    """
    with collective_call(name, group, TreeConfig(timeout_s=timeout_s)) as call:
        call.start()
        if GroupState.of(group).backends.get("cpu") == "gloo":
            meet(name, group, torch.device("cpu"), timeout_s)


def broadcast(x: Tensor, group, src: int, *, transport: str = "auto", timeout_s: float = 600.0) -> Tensor:
    """x, contiguous, of group rank `src` on all ranks, in place."""
    n = group_size(group)
    if n == 1:
        return x
    transport = resolve_shared(group, x.device, transport, timeout_s=timeout_s)
    if transport == "shm":
        shared(group).broadcast(x, src, group, timeout_s)
    elif transport == "direct":
        _broadcast_direct(x, group, src, timeout_s)
    else:
        sent = x.nbytes if group_rank(group) == src else 0
        start = functools.partial(dist.broadcast, group=group, group_src=src, async_op=True)
        run("broadcast", group, sent, timeout_s, start, x)
    return x


def _broadcast_direct(x: Tensor, group, src: int, timeout_s: float) -> None:
    """A binomial tree: in round k the first 2^k ranks, counted from src, send to the next 2^k."""
    n, at = group_size(group), (group_rank(group) - src) % group_size(group)
    mail, rounds = Mail("broadcast", group, range(n), timeout_s), range(at.bit_length(), (n - 1).bit_length())
    if at:
        parent = at - (1 << at.bit_length() - 1)
        mail.wait(mail.receive(x, (src + parent) % n))
    children = [at + (1 << k) for k in rounds if at + (1 << k) < n]
    note("broadcast", n, len(children) * x.nbytes)
    for child in children:
        mail.send(x, (src + child) % n)
    mail.sent()
