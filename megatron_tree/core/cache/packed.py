"""Several rows' new tokens one after another in a batch of one row, so that a model does not compute padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pages import on_device


class PackedRows:
    """Tokens of b rows, `counts` of them each: [1, sum(counts), ...], or padded at the end [b, max(counts), ...].

    Attributes: ends: list[int], the last token of each row among the packed ones. inside: bool [b, max(counts)], False
        for padding.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        numbers = torch.tensor(counts)
        self.ends = (numbers.cumsum(0) - 1).tolist()
        inside = torch.arange(max(counts)) < numbers[:, None]
        self.inside = on_device(inside, device)
        self._places = on_device(inside.flatten().nonzero()[:, 0], device)  # of the tokens, among the padded ones

    def pack(self, x: Tensor) -> Tensor:
        """[1, tokens, ...] of x [b, n, ...], or [b, 1, ...] for what a row's tokens have in common."""
        return x.expand(-1, self.inside.shape[1], *x.shape[2:]).flatten(0, 1)[self._places][None]

    def pad(self, x: Tensor) -> Tensor:
        """[b, n, ...] of x [1, tokens, ...]; zeros for padding."""
        padded = x.new_zeros(self.inside.numel(), *x.shape[2:])
        padded[self._places] = x[0]
        return padded.unflatten(0, self.inside.shape)
