"""The model as the scheduler sees it, and how a rank carries out a plan."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Runner(Protocol):
    """A model with a cache of rows. All ranks of token_group call it in the same order with the same arguments.

    A runner whose cache is cut into pages says in `page_size` how many tokens one has (default 1); the scheduler then
    reserves whole pages.
    """

    device: torch.device
    max_positions: int | None
    vocab_size: int
    token_group: Any
    chunk_size: int

    def add(self) -> int: ...

    def prefill(self, row: int, tokens: Tensor) -> Tensor: ...

    def step(self, rows: list[int], tokens: Tensor) -> Tensor: ...

    def length(self, row: int) -> int: ...

    def crop(self, row: int, length: int) -> None: ...

    def fork(self, row: int) -> int: ...

    def remove(self, row: int) -> None: ...

    @property
    def free_tokens(self) -> int | None: ...


class Rows:
    """Carries out plans on one rank. A plan names rows by handles that the leader chose."""

    def __init__(self, runner: Runner):
        self._runner, self._rows = runner, {}

    @torch.no_grad()
    def carry_out(self, steps: list[list]) -> list[Tensor]:
        """Logits of every "step" (fp32 [rows, vocab]) and "prefill" (fp32 [vocab]) of a plan, in its order."""
        runner, rows, logits = self._runner, self._rows, []
        for name, *arguments in steps:
            match name, arguments:
                case "add", [handle]:
                    rows[handle] = runner.add()
                case "fork", [handle, copy]:
                    rows[copy] = runner.fork(rows[handle])
                case "remove", [handle]:
                    runner.remove(rows.pop(handle))
                case "step", [handles, tokens]:
                    tokens = torch.tensor(tokens, device=runner.device)[:, None]
                    logits.append(runner.step([rows[handle] for handle in handles], tokens)[:, -1])
                case "prefill", [handle, tokens]:
                    logits.append(runner.prefill(rows[handle], torch.tensor(tokens, device=runner.device)))
                case _:
                    raise AssertionError(f"unknown step {name!r}")
        return logits
