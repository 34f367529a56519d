"""Rows sent to ranks and back, differentiable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import comm
from ..attention.derivatives import signed
from ..attention.topology import GroupTopology
from ..config import TreeConfig


@dataclass(frozen=True)
class Route:
    """Who sends how many rows to whom, in one collective call."""

    name: str
    group: object
    config: TreeConfig
    sent: tuple[int, ...]
    """Rows for every rank."""
    received: tuple[int, ...]
    """Rows from every rank."""

    @property
    def back(self) -> Route:
        name = f"the backward of {self.name.removeprefix('the backward of ')}"
        return Route(name, self.group, self.config, self.received, self.sent)

    def send(self, x: Tensor) -> Tensor:
        transport = GroupTopology.of(self.group, x.device, self.config).topology.transport
        team = comm.Team.flat(self.group, transport=transport, timeout_s=self.config.timeout_s)
        return comm.start_all_to_all_v(list(x.split(self.sent)), self.received, team).wait()


def exchange(x: Tensor, route: Route) -> Tensor:
    """x [sum(sent), ...], rows for each rank one after another -> [sum(received), ...], rows from each rank.

    Collective; so are its derivatives.
    """
    return x if comm.group_size(route.group) == 1 else Exchange.apply(x, route, None)


class Exchange(torch.autograd.Function):
    """`exchange`. after: the stamp of the forward's call, where this is part of its backward."""

    @staticmethod
    @signed
    def forward(x: Tensor, route: Route, after: int | None):
        if after is None:
            return route.send(x)
        with comm.collective_call(route.name, route.group, route.config) as call:
            call.start(after)
            return route.send(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.route, _ = inputs
        ctx.stamp = comm.call_stamp(ctx.route.group)

    @staticmethod
    @comm.outside_graphs
    def backward(ctx, dx):
        return Exchange.apply(dx, ctx.route.back, ctx.stamp), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return Exchange.apply(tangent, ctx.route, None)


class _Tied(torch.autograd.Function):
    @staticmethod
    @signed
    def forward(x: Tensor, *others: Tensor):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.others = [(x.shape, dict(dtype=x.dtype, device=x.device)) for x in inputs[1:]]  # not kept for their shapes

    @staticmethod
    def backward(ctx, dx):
        return dx, *(torch.zeros((), **kind).expand(shape) for shape, kind in ctx.others)

    @staticmethod
    def jvp(ctx, tangent, *_):
        return tangent.view_as(tangent)


def tied(x: Tensor, *others: Tensor) -> Tensor:
    """x, with gradients of 0 for the others: a rank whose x does not depend on an exchange is in its backward, too."""
    return _Tied.apply(x, *others)
