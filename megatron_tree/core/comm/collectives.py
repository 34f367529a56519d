"""Collectives of a team: gathers and reduce-scatters, in one or two levels, and exchanges."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .team import Team, subgroup
from .work import Mail, Pending, meet, nccl_limit, note, wait_for

# the newer name; the older one warns from torch 2.13 on
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def from_next(ranks: tuple[int, ...], index: int) -> tuple[int, ...]:
    """All ranks but ranks[index], starting with the next one, so that not all ranks send to the same rank first."""
    return ranks[index + 1 :] + ranks[:index]


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
    mail = Mail("all_gather", team.ranks, team.order)
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
            yield from _builtin("all_gather", team, ranks, start)
            x = _reordered(whole, ranks, rising=False).flatten(0, 1)
    return x


def _gather_shared(x: Tensor, team: Team):
    yield
    return team.ranks.memory.gather(x, team.ranks).flatten(0, 1)


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
    mail, by_rank = Mail("all_to_all", team.ranks, team.order), arrived.split(tuple(lengths))
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
    yield from _builtin("all_to_all", team, ranks, start)
    if rising == list(range(len(ranks))):
        return arrived
    by_rank = dict(zip(rising, arrived.split(sizes[0])))
    return torch.cat([by_rank[i] for i in range(len(ranks))])


def _exchange_direct(x: Tensor, team: Team, ranks: tuple[int, ...], index: int):
    """x[n] goes to ranks[n]; returns [n, ...] whose entry n came from ranks[n]. ranks[index] is this rank."""
    arrived = torch.empty_like(x)
    mail = Mail("all_to_all", team.ranks, team.order)
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
    yield from _builtin("all_to_all", team, ranks, start)
    return _reordered(arrived, ranks, rising=False)


def _exchange_shared(x: Tensor, team: Team, ranks: tuple[int, ...], index: int):
    yield
    return team.ranks.memory.exchange(x, team.ranks)


_EXCHANGES = {"direct": _exchange_direct, "builtin": _exchange_builtin, "shm": _exchange_shared}


def _note(op: str, team: Team, num_bytes: int) -> None:
    if team.transport != "shm":  # which takes note itself
        note(op, team.size, num_bytes)


def _reordered(x: Tensor, ranks: tuple[int, ...], *, rising: bool) -> Tensor:
    """x [n, ...] from the order of `ranks` to rising ranks, which is a sub-group's order, or back."""
    if list(ranks) == sorted(ranks):
        return x
    order, parts = sorted(range(len(ranks)), key=ranks.__getitem__), x.unbind()
    return torch.stack([parts[i] for i in (order if rising else map(order.index, range(len(ranks))))])


def _builtin(op: str, team: Team, places: tuple[int, ...], start):
    ranks = team.ranks
    meet(op, ranks)
    try:
        group = subgroup(team, places)
        with nccl_limit(op, group, ranks):
            work = start(group=group)
        yield
        wait_for(work, ranks, on=group)
    except RuntimeError as error:
        raise ranks.watchdog.operation_failed(op, ranks.timeout_s, error, places) from error
