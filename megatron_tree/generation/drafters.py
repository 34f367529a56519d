"""Where speculation takes its tokens from: the text so far, or a smaller model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cache.runner import RowRunner
from .prefixes import Prefixes
from .speculation import COST_WEIGHT, MOST, Drafter, DraftState

LONGEST_MATCH = 4  # tokens at the end of a text that are looked up in it
FEW = 2 * MOST  # tokens that a draft model runs together with those of other rows


class PromptLookup(Drafter):
    """The tokens that came after the last ones when these stood in the text before; costs no model."""

    def ready(self, states: Sequence[DraftState]) -> list[bool]:
        for state in states:
            state.match = last_match(state.text)
        return [state.match > 0 for state in states]

    def draft(self, states: Sequence[DraftState], count: int) -> list[list[int]]:
        """A match near the end goes on with what it has drafted: a text that repeats itself."""
        return [np.resize(state.text[state.match :][:count], count).tolist() for state in states]


def last_match(text: np.ndarray) -> int:
    """Where a text int64 [n] went on the last time that its last tokens stood in it before, as many of LONGEST_MATCH as
    ever did; 0: not even two."""
    ends, match = np.flatnonzero(text[:-1] == text[-1]), 0
    for length in range(2, min(LONGEST_MATCH, len(text)) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[text[ends - length + 1] == text[-length]]
        if not len(ends):
            break
        match = int(ends[-1]) + 1
    return match


class DraftModel(Drafter):
    """The most likely tokens by a smaller model with the same tokens. It runs on the leader alone, with its own cache.

    A text is prefilled in chunks of runner.chunk_size, one in a turn, before anything is drafted.

    runner: of one rank, over a cache of its own. vocab_size: of the model that is served. keep_bytes: rows stay when
        their answers have ended, for texts that begin alike, while the cache takes at most this many bytes.
    """

    def __init__(self, runner: RowRunner, *, vocab_size: int, keep_bytes: int = 0):
        if runner.has_states:
            raise ValueError(
                "--draft-model has recurrent layers, whose state can't go back when a drafted token is wrong"
            )
        self._runner, self._keep_bytes = runner, keep_bytes
        self._vocab_size = min(vocab_size, runner.vocab_size)  # they may be padded differently
        self._prefixes = Prefixes(runner.page_size)
        self._seconds = 0.0  # for a token of every row
        runner.store.book.spare = MOST  # wrong tokens are removed from layers with windows, too

    def ready(self, states: Sequence[DraftState]) -> list[bool]:
        """Runs at most a chunk of the texts that the cache does not hold."""
        left, limit, ready = self._runner.chunk_size, self._runner.max_positions, []
        for state in states:
            if limit is not None and state.length + MOST > limit:
                ready.append(False)
                continue
            missing = self._missing(state) if state.row is not None or left else None
            if missing is not None and len(missing) > FEW and left:
                chunk = missing[:-1][:left]
                left -= len(chunk)
                self._runner.prefill(state.row, chunk, row_length=state.length)
                missing = missing[len(chunk) :]
                if len(missing) <= FEW:
                    self._prefixes.put(state.row, state.text[: -len(missing)])
            ready.append(missing is not None and len(missing) <= FEW)
        return ready

    @torch.no_grad()
    def draft(self, states: Sequence[DraftState], count: int) -> list[list[int]]:
        begun, rows = time.perf_counter(), [state.row for state in states]
        logits = self._runner.prefill_rows(rows, [self._missing(state) for state in states])
        columns = [self._likeliest(logits)]
        while len(columns) < count:
            columns.append(self._likeliest(self._runner.step(rows, columns[-1][:, None])[:, -1]))
        drafted = torch.stack(columns, 1).tolist()
        for state, tokens in zip(states, drafted, strict=True):
            state.in_row = tokens[:-1]  # the last one was not run
        self._seconds += COST_WEIGHT * ((time.perf_counter() - begun) / count - self._seconds)
        return drafted

    def seconds(self, count: int) -> float:
        return self._seconds * count

    def forget(self, state: DraftState) -> None:
        if state.row is None:
            return
        held = state.length - len(self._missing(state))
        self._prefixes.forget(state.row)
        if not (self._keep_bytes and self._prefixes.keep(state.row, state.text[:held])):
            self._runner.remove(state.row)
        for row, _ in self._prefixes.kept:
            if self._runner.used_bytes > self._keep_bytes:
                self._prefixes.forget(row)
                self._runner.remove(row)
        state.row = None

    def _likeliest(self, logits: Tensor) -> Tensor:
        """int64 [b], by logits [b, vocab]."""
        return logits[:, : self._vocab_size].argmax(-1)

    def _missing(self, state: DraftState) -> Tensor:
        """The end of a text that its row does not hold, int64 [n]. Wrong tokens are removed from the row before."""
        if state.row is None:
            state.row = self._new_row(state)
        length = self._runner.length(state.row)
        first = length - len(state.in_row)
        now = state.text[first:length].tolist()
        right = next((i for i, token in enumerate(now) if token != state.in_row[i]), len(now))
        if right < len(state.in_row):
            length = first + right
            self._runner.crop(state.row, length)
        state.in_row = []
        return torch.from_numpy(state.text[length:]).clamp(max=self._vocab_size - 1)

    def _new_row(self, state: DraftState) -> int:
        """A copy of what another row holds of a text, or an empty one."""
        source = self._prefixes.find(self._prefixes.keys(state.text[:-1]))
        if source is None or not self._runner.can_crop(*source):
            return self._runner.add()
        row = self._runner.fork(source[0])
        self._runner.crop(row, source[1])
        return row
