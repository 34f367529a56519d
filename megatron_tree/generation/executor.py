"""Plans of continuous batching: how every rank carries one out."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.runner import RowRunner


class Executor:
    """Carries out plans on one rank. A plan names rows by handles that the leader chose; kept rows have negative ones.

    prefill_options: of `RowRunner.prefill`, for every chunk.
    """

    def __init__(self, runner: RowRunner, **prefill_options):
        self.runner, self._rows, self._prefill_options = runner, {}, prefill_options
        self._kept = 0

    def keep(self, row: int | None = None) -> int:
        """The handle of a row that no plan adds or removes, a new one by default. On all ranks, in the same order."""
        self._kept += 1
        self._rows[-self._kept] = self.runner.add() if row is None else row
        return -self._kept

    def forget(self, handle: int) -> None:
        """Remove a kept row. On all ranks."""
        self.runner.remove(self._rows.pop(handle))

    def length(self, handle: int) -> int:
        """Tokens that the cache holds of a row."""
        return self.runner.length(self._rows[handle])

    def can_crop(self, handle: int, length: int) -> bool:
        """See `RowRunner.can_crop`."""
        return self.runner.can_crop(self._rows[handle], length)

    def forecast(self):
        """See `RowRunner.forecast`; rows by handle."""
        return self.runner.forecast(self._rows)

    @torch.no_grad()
    def run(self, steps: list[list]) -> list[Tensor]:
        """Logits of every "step" (fp32 [rows, n, vocab] for up to n tokens of each row), "prefill" (fp32 [vocab]) and
        "score" (fp32 [tokens, vocab]) of a plan, in its order."""
        runner, rows, logits = self.runner, self._rows, []
        for name, *arguments in steps:
            match name, arguments:
                case "add", [handle]:
                    rows[handle] = runner.add()
                case "fork", [handle, copy]:
                    rows[copy] = runner.fork(rows[handle])
                case "remove", [handle]:
                    runner.remove(rows.pop(handle))
                case "crop", [handle, length]:
                    runner.crop(rows[handle], length)
                case "step", [handles, tokens]:
                    logits.append(self._step([rows[handle] for handle in handles], tokens))
                case "prefill", [handle, tokens, row_length]:
                    tokens = torch.tensor(tokens, device=runner.device)
                    logits.append(self.prefill(handle, tokens, row_length=row_length))
                case "prefill_rows", [handles, prompts]:
                    prompts = [torch.tensor(tokens, device=runner.device) for tokens in prompts]
                    logits += runner.prefill_rows([rows[handle] for handle in handles], prompts)
                case "score", [handle, tokens, row_length]:
                    tokens = torch.tensor(tokens, device=runner.device)[None]
                    logits.append(runner.step([rows[handle]], tokens, row_length=row_length)[0])
                case "end", _:
                    pass  # for those who follow the answers in kept rows
                case _:
                    raise AssertionError(f"unknown step {name!r}")
        return logits

    def _step(self, rows: list[int], tokens: list[list[int]]) -> Tensor:
        """Rows with fewer tokens than others are padded for this pass."""
        runner, longest = self.runner, max(map(len, tokens))
        padded = [(row, own) for row, own in zip(rows, tokens, strict=True) if len(own) < longest]
        ends = [(row, runner.length(row) + len(own)) for row, own in padded]
        if padded:
            tokens = [own + own[-1:] * (longest - len(own)) for own in tokens]
        logits = runner.step(rows, torch.tensor(tokens, device=runner.device))
        for row, end in ends:
            runner.crop(row, end)
        return logits

    def prefill(self, handle: int, tokens: Tensor, **options) -> Tensor:
        """Logits fp32 [vocab] of the last of these tokens; see `RowRunner.prefill`."""
        return self.runner.prefill(self._rows[handle], tokens, **self._prefill_options, **options)
