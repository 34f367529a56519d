"""What the ranks do in a turn of continuous batching, and how each of them does it.

Operations are JSON arrays: the name of a method of `Executor`, and what it takes. Rows are named by handles that the
leader chose; kept rows have negative ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.cache.runner import RowRunner
from .images import unpacked

CHANGES = frozenset(("add", "fork", "crop", "remove", "share", "begin", "evict"))
"""Operations on rows that no rank waits in: the leader carries them out as soon as it has decided them, and so always
knows what the cache holds."""
PASSES = frozenset(("step", "embed", "prefill", "prefill_rows", "score"))
"""Operations that all ranks carry out together."""

Operation = Sequence[Any]


class Turn(NamedTuple):
    """One turn, as the leader sends it to all ranks."""

    changes: Sequence[Operation] = ()
    passes: Sequence[Operation] = ()
    stop: bool = False
    """The loop ends with this turn."""
    idle: bool = False
    """No request is left."""
    failed: str | None = None
    """Why the leader gives up: there is nothing else in the turn."""


class Executor:
    """Carries out operations on one rank.

    prefill_options: of `RowRunner.prefill`, for every chunk.
    """

    def __init__(self, runner: RowRunner, **prefill_options):
        self.runner, self.book = runner, runner.store.book
        self._rows, self._prefill_options = {}, prefill_options
        self._num_kept = 0
        self._embedded: dict[int, object] = {}  # by handle, of prompts with images until these are in their rows
        self.progress: Callable[[int, int], None] | None = None
        """Called while prompts are run, as progress(handle, tokens that its row has)."""

    def change(self, operations: Iterable[Operation]) -> None:
        """Carry out operations of `CHANGES`."""
        for name, *arguments in operations:
            assert name in CHANGES, name
            getattr(self, name)(*arguments)

    @torch.no_grad()
    def run(self, operations: Iterable[Operation]) -> list[Tensor]:
        """Carry out operations of `PASSES`. Returns the logits of those that have some, in their order."""
        outputs = []
        for name, *arguments in operations:
            assert name in PASSES, name
            outputs.append(getattr(self, name)(*arguments))
        return [logits for logits in outputs if logits is not None]

    def add(self, handle: int) -> None:
        """A new, empty row."""
        self._rows[handle] = self.runner.add()

    def fork(self, handle: int, copy: int) -> None:
        """A copy of a row."""
        self._rows[copy] = self.runner.fork(self._rows[handle])

    def crop(self, handle: int, length: int) -> None:
        """Forget a row's tokens from position `length` on."""
        self.runner.crop(self._rows[handle], length)

    def remove(self, handle: int) -> None:
        self.runner.remove(self._rows.pop(handle))
        self._embedded.pop(handle, None)

    def share(self, handle: int, pages: Sequence[tuple[int, int]], keys: Sequence[bytes] = ()) -> None:
        """Let new rows begin with full pages of this row. pages: runs [first, stop] of their indices. keys: of all of
        the row's full pages, on the leader only."""
        self.book.share(self._rows[handle], list(numbers_of(pages)), keys)

    def begin(self, handle: int, pages: Sequence[tuple[int, int]]) -> None:
        """Let an empty row begin with shared pages. pages: runs [first, stop] of their numbers."""
        self.book.begin(self._rows[handle], list(numbers_of(pages)))

    def evict(self, count: int) -> None:
        """Free this many of the shared pages that no row has."""
        self.book.evict(count)

    def step(self, handles: list[int], tokens: list[int], drafted: list[list[int]]) -> Tensor:
        """Append a token to each row, and those drafted after it, as they may come next; drafted empty: none to any.

        Returns: logits fp32 [rows, n, vocab] for up to n tokens of each row; those with fewer are padded for this pass.
        """
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
        """Embed a prompt with images, what the model's processor returned by `packed`, before the first `prefill` that
        has a part of one."""
        self._embedded[handle] = self.runner.embed(self._tensor(tokens), unpacked(images))

    def prefill(self, handle: int, tokens: list[int], row_length: int) -> Tensor:
        """Append a chunk of a prompt to a row, which will have row_length tokens with the rest of it.

        Returns: logits fp32 [1, vocab] of the last of these tokens.
        """
        options, before = dict(self._prefill_options), self.length(handle)
        if self.progress is not None:
            self.progress(handle, before)
            options["progress"] = lambda done, _: self.progress(handle, before + done)
        if (embedded := self._embedded.get(handle)) is not None:
            options["embedded"] = embedded
            if before + len(tokens) >= embedded.num_tokens:
                del self._embedded[handle]
        return self.runner.prefill(self._rows[handle], self._tensor(tokens), row_length=row_length, **options)[None]

    def prefill_rows(self, handles: list[int], prompts: list[list[int]]) -> Tensor:
        """Append several short prompts to their rows in one pass: logits fp32 [rows, vocab] of the last tokens."""
        return self.runner.prefill_rows([self._rows[handle] for handle in handles], list(map(self._tensor, prompts)))

    def score(self, handle: int, tokens: list[int], row_length: int) -> Tensor:
        """As `prefill`, with the logits of all tokens: fp32 [tokens, vocab]."""
        return self.runner.step([self._rows[handle]], self._tensor([tokens]), row_length=row_length)[0]

    def keep(self, row: int | None = None) -> int:
        """The handle of a row that no turn adds or removes, a new one by default. On all ranks, in the same order."""
        self._num_kept += 1
        self._rows[-self._num_kept] = self.runner.add() if row is None else row
        return -self._num_kept

    def from_leader(self, logits: Tensor | None, num_tokens: int) -> Tensor:
        """The leader's logits fp32 [num_tokens, vocab], on all ranks; others pass None."""
        if logits is None:
            logits = torch.empty(num_tokens, self.runner.vocab_size, device=self.runner.device)
        return self.runner.token_ranks.broadcast(logits, 0)

    def pages_to_share(self, handle: int, keys: Sequence[bytes]) -> list[int]:
        """See `RowBook`."""
        return self.book.pages_to_share(self._rows[handle], keys)

    def length(self, handle: int) -> int:
        return self.runner.length(self._rows[handle])

    def can_crop(self, handle: int, length: int) -> bool:
        return self.runner.can_crop(self._rows[handle], length)

    def _tensor(self, tokens: list) -> Tensor:
        return torch.tensor(tokens, device=self.runner.device)


def runs_of_numbers(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as runs (first, one past the last) of neighbours."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def numbers_of(runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The numbers of `runs_of_numbers`."""
    return (number for first, stop in runs for number in range(first, stop))
