"""Rows sent to ranks and back, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import comm
from ..attention.derivatives import with_signature


@dataclass(frozen=True)
class Route:
    """Who sends how many rows to whom, in one collective call."""

    name: str
    ranks: comm.Ranks
    sent: tuple[int, ...]
    """Rows for every rank."""
    received: tuple[int, ...]
    """Rows from every rank."""

    @property
    def back(self) -> Route:
        name = f"the backward of {self.name.removeprefix('the backward of ')}"
        return Route(name, self.ranks, self.received, self.sent)

    def send(self, x: Tensor) -> Tensor:
        return comm.start_all_to_all_v(list(x.split(self.sent)), self.received, self.ranks.everyone).wait()


def exchange(x: Tensor, route: Route) -> Tensor:
    """x [sum(sent), ...], rows for each rank one after another -> [sum(received), ...], rows from each rank.

    Collective; so are its derivatives.
    """
    return x if route.ranks.size == 1 else Exchange.apply(x, route, None)


class Exchange(torch.autograd.Function):
    """`exchange`. after: the stamp of the forward's call, where this is a call of its own, as part of a backward."""

    @staticmethod
    @with_signature
    def forward(x: Tensor, route: Route, after: int | None):
        if after is None:
            return route.send(x)
        with route.ranks.call(route.name) as call:
            call.start(after)
            return route.send(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.route, ctx.after = inputs
        ctx.stamp = comm.call_stamp(ctx.route.ranks.group)

    @staticmethod
    @comm.derivative
    def backward(ctx, dx):
        return Exchange.apply(dx, ctx.route.back, ctx.stamp), None, None

    @staticmethod
    @comm.derivative
    def jvp(ctx, tangent, *_):
        return Exchange.apply(tangent, ctx.route, ctx.after)


def nothing(like: Tensor, shape: Sequence[int], *others: Tensor) -> Tensor:
    """A tensor of this shape, which has no elements, in the dtype of `like`. To autograd it depends on all others
    (none: on `like`), and so do its derivatives of every order.

    Joined to whatever a call sends and returns, it makes all ranks take part in the same exchanges in every derivative
    of the call, in the same order, also a rank without tokens or whose own rows depend on no other's.
    """
    # exp: the gradient of what is not linear depends on the others as well. [0, 1]: torch.cat would give [0] a gradient
    # that depends on nothing.
    return torch.cat([x[:0].reshape(0, 1) for x in others or (like,)]).exp().to(like.dtype).view(shape)


def depending_on(x: Tensor, *others: Tensor) -> Tensor:
    """A copy of x that depends on the others as `nothing` does."""
    return torch.cat((x, nothing(x, (0, *x.shape[1:]), *others)))
