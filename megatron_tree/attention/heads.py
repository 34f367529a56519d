"""Ulysses' differentiable exchanges before and after attention: all-to-alls of tokens and heads.

Before attention, each of u neighbouring ranks sends away (u - 1) / u of its heads and receives the other ranks' tokens
of the heads it keeps. After attention the exchange is reversed. The backward of each exchange is the other one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import comm


def heads_to_tokens(team: comm.Team, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[b, s, h, d] of this rank's tokens -> [b, u * s, h / u, d]: the team's tokens, this rank's part of the heads."""
    return _HeadsToTokens.apply(team, *tensors)


def tokens_to_heads(team: comm.Team, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[b, u * s, h / u, d] -> [b, s, h, d]: the inverse of `heads_to_tokens`."""
    return _TokensToHeads.apply(team, *tensors)


def _to_tokens(team: comm.Team, tensors) -> tuple[Tensor, ...]:
    n = team.size
    started = [comm.start_all_to_all(x.unflatten(2, (n, -1)).permute(2, 1, 0, 3, 4), team) for x in tensors]
    return tuple(pending.wait().flatten(0, 1).transpose(0, 1) for pending in started)  # of [u, s, b, h / u, d]


def _to_heads(team: comm.Team, tensors) -> tuple[Tensor, ...]:
    started = [comm.start_all_to_all(x.transpose(0, 1).unflatten(0, (team.size, -1)), team) for x in tensors]
    return tuple(pending.wait().permute(2, 1, 0, 3, 4).flatten(2, 3) for pending in started)


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, team, *tensors):
        ctx.team = team
        return _to_tokens(team, tensors)

    @staticmethod
    def backward(ctx, *grads):
        return None, *_to_heads(ctx.team, grads)


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, team, *tensors):
        ctx.team = team
        return _to_heads(team, tensors)

    @staticmethod
    def backward(ctx, *grads):
        return None, *_to_tokens(ctx.team, grads)
