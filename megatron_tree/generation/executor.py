"""Plans of continuous batching: how every rank carries one out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.runner import RowRunner
from .images import unpacked
from .plans import Operation, apply


class Executor:
    """Carries out plans on one rank: a method for each kind of operation. Handles of kept rows are negative.

    prefill_options: of `RowRunner.prefill`, for every chunk.
    """

    def __init__(self, runner: RowRunner, **prefill_options):
        self.runner, self._rows, self._prefill_options = runner, {}, prefill_options
        self._num_kept = 0
        self._embedded: dict[int, object] = {}  # by handle, of prompts with images until these are in their rows

    @torch.no_grad()
    def run(self, operations: Sequence[Operation]) -> list[Tensor]:
        """The logits of those that have some, in their order."""
        outputs = []
        for operation in operations:
            logits = apply(operation, self)
            if logits is not None:
                outputs.append(logits)
        return outputs

    def add(self, handle: int) -> None:
        self._rows[handle] = self.runner.add()

    def fork(self, handle: int, copy: int) -> None:
        self._rows[copy] = self.runner.fork(self._rows[handle])

    def crop(self, handle: int, length: int) -> None:
        self.runner.crop(self._rows[handle], length)

    def remove(self, handle: int) -> None:
        self.runner.remove(self._rows.pop(handle))
        self._embedded.pop(handle, None)

    def end(self, handle: int, token: int | None, reason: str, error: str | None) -> None:
        """The answer in a kept row has ended."""

    def step(self, handles: list[int], tokens: list[int], drafted: list[list[int]]) -> Tensor:
        """Logits fp32 [rows, n, vocab] for up to n tokens of each row; those with fewer are padded for this pass."""
        runner, rows = self.runner, [self._rows[handle] for handle in handles]
        if not drafted:
            return runner.step(rows, self._tensor(tokens)[:, None])
        news = [[token, *after] for token, after in zip(tokens, drafted, strict=True)]
        longest = max(map(len, news))
        short = [(row, runner.length(row) + len(new)) for row, new in zip(rows, news) if len(new) < longest]
        logits = runner.step(rows, self._tensor([new + new[-1:] * (longest - len(new)) for new in news]))
        for row, end in short:
            runner.crop(row, end)
        return logits

    def embed(self, handle: int, tokens: list[int], images: dict[str, list]) -> None:
        self._embedded[handle] = self.runner.embed(self._tensor(tokens), unpacked(images))

    def prefill(self, handle: int, tokens: list[int], row_length: int, **options) -> Tensor:
        """Logits fp32 [1, vocab] of the last of these tokens."""
        options |= self._prefill_options
        if (embedded := self._embedded.get(handle)) is not None:
            options["embedded"] = embedded
            if self.length(handle) + len(tokens) >= embedded.num_tokens:
                del self._embedded[handle]
        return self.runner.prefill(self._rows[handle], self._tensor(tokens), row_length=row_length, **options)[None]

    def prefill_rows(self, handles: list[int], prompts: list[list[int]]) -> Tensor:
        """Logits fp32 [rows, vocab] of the last tokens."""
        return self.runner.prefill_rows([self._rows[handle] for handle in handles], list(map(self._tensor, prompts)))

    def score(self, handle: int, tokens: list[int], row_length: int) -> Tensor:
        """Logits fp32 [tokens, vocab]."""
        return self.runner.step([self._rows[handle]], self._tensor([tokens]), row_length=row_length)[0]

    def keep(self, row: int | None = None) -> int:
        """The handle of a row that no plan adds or removes, a new one by default. On all ranks, in the same order."""
        self._num_kept += 1
        self._rows[-self._num_kept] = self.runner.add() if row is None else row
        return -self._num_kept

    def length(self, handle: int) -> int:
        return self.runner.length(self._rows[handle])

    def can_crop(self, handle: int, length: int) -> bool:
        return self.runner.can_crop(self._rows[handle], length)

    def forecast(self):
        return self.runner.forecast(self._rows)

    def _tensor(self, tokens: list) -> Tensor:
        return torch.tensor(tokens, device=self.runner.device)
