"""Where speculation takes its tokens from: the text so far, or a smaller model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cache.runner import RowRunner
from .prefixes import Prefixes
from .speculation import COST_WEIGHT, MOST, Guess

LONGEST_MATCH = 4  # tokens at the end of a text that are looked up in it
FEW = 2 * MOST  # tokens that a draft model runs together with those of other rows


class PromptLookup:
    """The tokens that came after the last ones when these stood in the text before; costs no model."""

    def ready(self, guesses: Sequence[Guess]) -> list[bool]:
        """See `Proposer`."""
        for guess in guesses:
            guess.match = last_match(guess.text)
        return [guess.match > 0 for guess in guesses]

    def propose(self, guesses: Sequence[Guess], count: int) -> list[list[int]]:
        """See `Proposer`. A match near the end goes on with what it has proposed: a text that repeats itself."""
        found = []
        for guess in guesses:
            tokens = guess.text[guess.match :][:count]
            found.append(np.resize(tokens, count).tolist())
        return found

    def seconds(self, count: int) -> float:
        """See `Proposer`."""
        return 0.0

    def forget(self, guess: Guess) -> None:
        """See `Proposer`."""


def last_match(text: np.ndarray) -> int:
    """Where a text int64 [n] went on the last time that its last tokens stood in it before, as many of LONGEST_MATCH as
    ever did; 0: not even two."""
    ends, found = np.flatnonzero(text[:-1] == text[-1]), 0
    for length in range(2, min(LONGEST_MATCH, len(text)) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[text[ends - length + 1] == text[-length]]
        if not len(ends):
            break
        found = int(ends[-1]) + 1
    return found


class DraftModel:
    """The most likely tokens by a smaller model with the same tokens. It runs on the leader alone, with its own cache.

    A text is prefilled in chunks of runner.chunk_size, one in a turn, before anything is proposed.

    runner: of one rank, over a cache of its own. vocab_size: of the model that is served. keep_bytes: rows stay when
        their answers have ended, for texts that begin alike, while the cache takes at most this many bytes.
    """

    def __init__(self, runner: RowRunner, *, vocab_size: int, keep_bytes: int = 0):
        if runner.has_states:
            raise ValueError("--draft-model has recurrent layers, whose state can't go back when a proposal is wrong")
        self._runner, self._keep_bytes = runner, keep_bytes
        self._vocab_size = min(vocab_size, runner.vocab_size)  # they may be padded differently
        self._prefixes = Prefixes(runner.page_size)
        self._seconds = 0.0  # for a token of every row
        runner.store.book.spare = MOST  # wrong proposals are removed from layers with windows, too

    def ready(self, guesses: Sequence[Guess]) -> list[bool]:
        """See `Proposer`. Runs at most a chunk of the texts that the cache does not hold."""
        left, limit, found = self._runner.chunk_size, self._runner.max_positions, []
        for guess in guesses:
            if limit is not None and guess.length + MOST > limit:
                found.append(False)
                continue
            missing = self._missing(guess) if guess.row is not None or left else None
            if missing is not None and len(missing) > FEW and left:
                chunk = missing[:-1][:left]
                left -= len(chunk)
                self._runner.prefill(guess.row, chunk, row_length=guess.length)
                missing = missing[len(chunk) :]
                if len(missing) <= FEW:
                    self._prefixes.put(guess.row, guess.text[: -len(missing)])
            found.append(missing is not None and len(missing) <= FEW)
        return found

    @torch.no_grad()
    def propose(self, guesses: Sequence[Guess], count: int) -> list[list[int]]:
        """See `Proposer`."""
        begun, rows = time.perf_counter(), [guess.row for guess in guesses]
        logits = self._runner.prefill_rows(rows, [self._missing(guess) for guess in guesses])
        tokens = [self._likeliest(logits)]
        while len(tokens) < count:
            tokens.append(self._likeliest(self._runner.step(rows, tokens[-1][:, None])[:, -1]))
        found = torch.stack(tokens, 1).tolist()
        for guess, own in zip(guesses, found, strict=True):
            guess.drafted = own[:-1]  # the last one was not run
        self._seconds += COST_WEIGHT * ((time.perf_counter() - begun) / count - self._seconds)
        return found

    def seconds(self, count: int) -> float:
        """See `Proposer`."""
        return self._seconds * count

    def forget(self, guess: Guess) -> None:
        """See `Proposer`."""
        if guess.row is None:
            return
        held = guess.length - len(self._missing(guess))
        self._prefixes.forget(guess.row)
        if not (self._keep_bytes and self._prefixes.keep(guess.row, guess.text[:held])):
            self._runner.remove(guess.row)
        for row, _ in self._prefixes.kept:
            if self._runner.used_bytes > self._keep_bytes:
                self._prefixes.forget(row)
                self._runner.remove(row)
        guess.row = None

    def _likeliest(self, logits: Tensor) -> Tensor:
        """int64 [b], by logits [b, vocab]."""
        return logits[:, : self._vocab_size].argmax(-1)

    def _missing(self, guess: Guess) -> Tensor:
        """The end of a text that its row does not hold, int64 [n]. Wrong proposals are removed from the row before."""
        if guess.row is None:
            guess.row = self._new_row(guess)
        length = self._runner.length(guess.row)
        first = length - len(guess.drafted)
        now = guess.text[first:length].tolist()
        right = next((i for i, token in enumerate(now) if token != guess.drafted[i]), len(now))
        if right < len(guess.drafted):
            length = first + right
            self._runner.crop(guess.row, length)
        guess.drafted = []
        return torch.from_numpy(guess.text[length:]).clamp(max=self._vocab_size - 1)

    def _new_row(self, guess: Guess) -> int:
        """A copy of what another row holds of a text, or an empty one."""
        found = self._prefixes.find(self._prefixes.digests(guess.text[:-1]))
        if found is None or not self._runner.can_crop(*found):
            return self._runner.add()
        row = self._runner.fork(found[0])
        self._runner.crop(row, found[1])
        return row
