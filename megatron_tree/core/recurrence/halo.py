"""`tree_halo`, the rows before every segment, and `tree_convolution`, which needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..attention.sequences import layouts_of
from ..config import TreeConfig, check_positive
from ..duals import goes_backward, has_tangents
from ..layout import Layout
from .layer import joined
from .scan import Chains, Link, Route, depending_on, exchange


@comm.public_call
def tree_halo(
    x: Tensor,
    count: int,
    *,
    cp_group,
    layout: Layout = "zigzag",
    before: Tensor | None = None,
    return_final: bool = False,
    config: TreeConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The rows before each of this rank's segments, as a short convolution over the sequence needs them. Collective,
    differentiable.

    Args:
        x: [b, s_local, ...], this rank's shard.
        count: how many rows; a convolution's kernel size - 1. They may lie in several segments.
        cp_group: the process group over which the sequence is sharded, or a 1-D DeviceMesh; None for one rank.
        layout: as in `tree_attn_func`, or of packed documents, or of a prefix tree, whose segments end where rows part.
        before: [b, count, ...], the rows before the sequence, equal on all ranks; default: zeros. Not with several
            documents, which begin with zeros.
        return_final: whether to return the last rows of the sequence. Not with several documents.
        config: `check`, `timeout_s`, `transport` and `topology` are used.

    Returns: (rows [b, n, count, ...] before each of the n segments, in the order of its rows; the last `count` rows
        [b, count, ...] of the sequence with those before it, on every rank, or None). Gradients of `before` are those
        of this rank's segments: their sum over the ranks is the whole.
    Raises: ``ValueError`` on every rank for shapes that don't fit, or calls that differ between ranks.
    """
    ranks = comm.Ranks.of(cp_group, x.device, config)
    (layout,) = layouts_of(layout, ranks, "tree_halo", x=x)
    with ranks.call("tree_halo", differentiable=True) as call:
        count = check_positive("count", count)
        if x.dim() < 2:
            raise ValueError(f"x must be [b, s_local, ...], got {list(x.shape)}")
        chains = Chains.of(x, "x", ranks, layout)
        chains.check_sequence(before=before, return_final=return_final)
        outer = (x.shape[0], count, *x.shape[2:])
        if before is not None and tuple(before.shape) != outer:
            raise ValueError(f"before must be {list(outer)} like x {list(x.shape)}, got {list(before.shape)}")
        call.agree(
            shape=outer,
            dtype=x.dtype,
            layout=layout,
            tokens=x.shape[1] if isinstance(layout, str) else None,
            before=before is not None,
            return_final=return_final,
            tangents=has_tangents(x, before),
            goes_backward=goes_backward(x, before),
            config=config,
        )
        plan = halo_plan(chains, ranks.rank, count, return_final)
        return _halo(x, before, plan, Route("tree_halo", ranks, plan.sent, plan.received))


@comm.public_call
def tree_convolution(
    kernel: Callable[[Tensor], Tensor],
    x: Tensor,
    count: int,
    *,
    cp_group,
    layout: Layout = "zigzag",
    before: Tensor | None = None,
    return_final: bool = False,
    config: TreeConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A function of every row and the `count` rows before it, over a sequence that is sharded across ranks. Collective,
    differentiable.

    Args:
        kernel: a causal function of rows, [b, t, ...] -> [b, t, ...], whose result for a row depends on this row and
            the `count` before it alone. It is called once, with the segments' rows behind those before them, whose
            results are dropped.
        Others as in `tree_halo`.

    Returns: (kernel's result for this rank's rows [b, s_local, ...], 0 in rows of padding; the sequence's last rows, as
        `tree_halo`).
    Raises: as `tree_halo`.
    """
    ranks = comm.Ranks.of(cp_group, x.device, config)
    (layout,) = layouts_of(layout, ranks, "tree_convolution", x=x)
    options = dict(cp_group=cp_group, layout=layout, config=config)
    halos, final = tree_halo(x, count, before=before, return_final=return_final, **options)
    segments = Chains.of(x, "x", ranks, layout).segments[ranks.rank]
    rows = [part for i, s in enumerate(segments) for part in (halos[:, i], x[:, s.row : s.row + s.length])]
    out = kernel(torch.cat(rows or [x.new_zeros(len(x), 1, *x.shape[2:])], 1))
    ends = list(accumulate(count + s.length for s in segments))
    outs = {i: out[:, end - s.length : end] for i, (end, s) in enumerate(zip(ends, segments))}
    return joined(segments, outs, out.new_empty(*x.shape[:2], *out.shape[2:]), out, halos, x), final


class HaloPlan(NamedTuple):
    """Which rows a rank sends, and how its halos are made of those that arrive."""

    count: int
    rows: tuple[int, ...]
    """This rank's rows that are sent, for each rank one after another."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    taken: tuple[tuple[int, ...], ...]
    """For every segment the numbers of its rows among: a row of zeros, the rows that arrive, the rows before the
    sequence."""
    final: tuple[int, ...] | None
    """The same of the sequence's end, if it is asked for."""


@functools.lru_cache(maxsize=256)
def halo_plan(chains: Chains, rank: int, count: int, with_final: bool) -> HaloPlan:
    """The plan of one rank."""
    wanted: list[dict[int, list]] = [{} for _ in chains.segments]
    for (holder, index), _, before in chains.links:
        wanted[holder][index] = _until(chains.links, before, count)
    if with_final:
        for of_rank in wanted:
            of_rank[-1] = _until(chains.links, len(chains.links) - 1, count)
    needed = [sorted({x for halo in of_rank.values() for x in halo if isinstance(x, tuple)}) for of_rank in wanted]
    sent = [[row for holder, row in of_rank if holder == rank] for of_rank in needed]
    numbers = {x: 1 + i for i, x in enumerate(needed[rank])}
    numbers |= {i - count: 1 + len(needed[rank]) + i for i in range(count)}
    taken = {i: tuple(numbers[x] for x in halo) for i, halo in wanted[rank].items()}
    return HaloPlan(
        count=count,
        rows=tuple(row for rows in sent for row in rows),
        sent=tuple(map(len, sent)),
        received=tuple(sum(holder == r for holder, _ in needed[rank]) for r in range(len(wanted))),
        taken=tuple(taken.get(i, (0,) * count) for i in range(len(chains.segments[rank]))),
        final=taken.get(-1),
    )


def _until(links: Sequence[Link], last: int, count: int) -> list[tuple[int, int] | int]:
    """Where the last `count` rows up to the end of a link are: (rank, row), or a position below 0; last: its number, -1
    before all."""
    found: list[tuple[int, int]] = []
    while last >= 0 and len(found) < count:
        (rank, _), segment, last = links[last]
        end = segment.row + segment.length
        found = [(rank, row) for row in range(max(segment.row, end - count + len(found)), end)] + found
    return [*range(len(found) - count, 0), *found]


def _halo(x: Tensor, before: Tensor | None, plan: HaloPlan, route: Route) -> tuple[Tensor, Tensor | None]:
    """The halos [b, n, count, ...] of the plan, and the sequence's last rows."""
    by_row, given = x.transpose(0, 1), (x,) if before is None else (x, before)
    arrived = exchange(depending_on(by_row[list(plan.rows)], *given), route)
    zeros = arrived.new_zeros(1, *arrived.shape[1:])
    before = zeros.expand(plan.count, *zeros.shape[1:]) if before is None else before.transpose(0, 1)
    pool = torch.cat((zeros, arrived, before))

    def rows(*taken: Sequence[int]) -> Tensor:
        numbers = torch.tensor(taken, dtype=torch.int64, device=x.device).view(-1, plan.count)
        return depending_on(pool[numbers].transpose(1, 2), arrived, *given)

    return rows(*plan.taken).transpose(0, 1), None if plan.final is None else rows(plan.final)[0]
