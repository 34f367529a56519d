"""The model as the scheduler sees it, and how a rank carries out a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

Progress = Callable[[int, int], None]


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

    def can_crop(self, row: int, length: int) -> bool: ...

    def crop(self, row: int, length: int) -> None: ...

    def fork(self, row: int) -> int: ...

    def remove(self, row: int) -> None: ...

    @property
    def free_tokens(self) -> int | None: ...


class Rows:
    """Carries out plans on one rank. A plan names rows by handles that the leader chose.

    sharded_prefill: see `RowRunner.prefill`.
    """

    def __init__(self, runner: Runner, *, sharded_prefill: bool = True):
        self.runner, self._rows = runner, {}
        self._prefill_options = {} if sharded_prefill else {"sharded": False}
        self.prefill_s = 0.0
        """Seconds spent on prefills so far."""

    def can_crop(self, handle: int, length: int) -> bool:
        """See `RowRunner.can_crop`."""
        return self.runner.can_crop(self._rows[handle], length)

    @torch.no_grad()
    def carry_out(self, steps: list[list], progress: Mapping[int, Progress] | None = None) -> list[Tensor]:
        """Logits of every "step" (fp32 [rows, vocab]) and "prefill" (fp32 [vocab]) of a plan, in its order.

        progress: by handle, what is called during a prefill as progress(tokens done, tokens of this chunk).
        """
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
                    tokens = torch.tensor(tokens, device=runner.device)[:, None]
                    logits.append(runner.step([rows[handle] for handle in handles], tokens)[:, -1])
                case "prefill", [handle, tokens]:
                    options = dict(self._prefill_options)
                    if progress and handle in progress:
                        options["progress"] = progress[handle]
                    start = self._now()
                    tokens = torch.tensor(tokens, device=runner.device)
                    logits.append(runner.prefill(rows[handle], tokens, **options))
                    self.prefill_s += self._now() - start
                case _:
                    raise AssertionError(f"unknown step {name!r}")
        return logits

    def _now(self) -> float:
        if self.runner.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()
