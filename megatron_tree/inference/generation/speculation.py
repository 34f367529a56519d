"""Speculation: a step of a row also runs drafted tokens, likely to come next, and keeps those that are right.

The token at every place is chosen from the model's logits with the same random number as without speculation. A drafted
token is right if it is that token; the first wrong one and all after it are removed from the cache again. So answers
are the same, whatever is drafted; only the number of steps differs, and what a step costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

NO_SPECULATION = (
    "speculation (--num-speculative-tokens): the model has recurrent layers, whose state can't go back when a drafted "
    "token is wrong: leave it out"
)
LONGEST_MATCH = 4  # tokens at the end of a text that are looked up in it
MOST = 16  # drafted tokens in a step; more rarely all hold, and a pass of many tokens is no longer a decoding step
GAIN = 1.1  # a wider step has to give this many times as many tokens per second as one without drafted tokens
FIRST_RATE = 0.5  # how often a drafted token is right, before anything is known
RATE_WEIGHT, USUAL_WEIGHT, DRIFT = 0.25, 0.05, 0.01  # of the last token, step, and step without drafted tokens
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256  # steps
TRY_AFTER = 100  # steps without drafted tokens: then one with them tells what it takes now
COST_WEIGHT = 0.05  # of the last step, in the estimate of a step's seconds


class DraftState:
    """What speculation knows of one answer: its text in tokens, and `rate`, how often drafted tokens are right."""

    def __init__(self, prompt: Tensor, tokens: Sequence[int], max_tokens: int, rate: float = FIRST_RATE):
        self._text = np.empty(len(prompt) + max_tokens, dtype=np.int64)
        self.length = len(prompt) + len(tokens)
        self._text[: self.length] = [*prompt.tolist(), *tokens]
        self.rate, self._rest, self._pause = rate, SHORTEST_PAUSE, 0
        self.match = 0  # see `last_match`

    @property
    def text(self) -> np.ndarray:
        """The prompt and the answer so far, int64 [length]."""
        return self._text[: self.length]

    @property
    def left(self) -> int:
        """Tokens that the answer may still get."""
        return len(self._text) - self.length

    def add(self, token: int) -> None:
        self._text[self.length] = token
        self.length += 1

    def rests(self) -> bool:
        """Whether nothing is drafted in this step; a pause is a step shorter then. After it there is new hope."""
        if self._pause == 0:
            return False
        self._pause -= 1
        if self._pause == 0:
            self.rate = max(self.rate, FIRST_RATE)
        return True

    def pause(self) -> None:
        """Drafting loses: none for a while, twice as long as the last time if no token was right since."""
        self._pause, self._rest = self._rest, min(2 * self._rest, LONGEST_PAUSE)

    def gain(self, count: int) -> float:
        """Tokens that so many drafted ones are expected to add."""
        return sum(self.rate**n for n in range(1, count + 1))

    def learn(self, drafted: int, right: int) -> None:
        """So many of the tokens that were drafted for a step were right."""
        self.rate = 1 - (1 - self.rate) * (1 - RATE_WEIGHT) ** right
        if right < drafted:
            self.rate *= 1 - RATE_WEIGHT
        if right:
            self._rest, self._pause = SHORTEST_PAUSE, 0


class DraftCost:
    """Seconds of a step by its number of tokens: the line through those that were measured, the last ones above all."""

    def __init__(self):
        self._count = 0
        self._tokens = self._seconds = self._variance = self._covariance = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._count += 1
        weight = max(COST_WEIGHT, 1 / self._count)
        d_tokens, d_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += weight * d_tokens
        self._seconds += weight * d_seconds
        self._variance = (1 - weight) * (self._variance + weight * d_tokens * d_tokens)
        self._covariance = (1 - weight) * (self._covariance + weight * d_tokens * d_seconds)

    def seconds(self, tokens: int) -> float:
        """What a step of so many tokens is expected to take; more of them take no less, and at most in proportion."""
        if not self._count:
            return 1.0
        slope = self._covariance / self._variance if self._variance else 0.0
        slope = min(max(slope, 0.0), self._seconds / self._tokens)
        return self._seconds + slope * (tokens - self._tokens)


class PromptLookup:
    """Drafts the tokens that came after the last ones when these stood in the text before; costs no model."""

    def ready(self, states: Sequence[DraftState]) -> list[bool]:
        """For which answers it can draft tokens now."""
        for state in states:
            state.match = last_match(state.text)
        return [state.match > 0 for state in states]

    def draft(self, states: Sequence[DraftState], count: int) -> list[list[int]]:
        """`count` tokens for each of these answers, which are ready.

        A match near the end goes on with what it has drafted: a text that repeats itself.
        """
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


class SpeculationCounts(NamedTuple):
    """Numbers since the start."""

    drafted: int = 0
    accepted: int = 0
    """Drafted tokens that were right."""
    steps: int = 0
    """Steps of answers: one of three rows counts three times. So answers got (steps + accepted) / steps tokens in a
    step."""


class Speculation:
    """Decides in every step how many tokens are drafted. On the leader, in the thread of the loop.

    num_tokens: for a row in a step, at most. drafter: where they come from; default `PromptLookup`.
    Raises: ValueError for num_tokens outside of 1 to MOST.
    """

    def __init__(self, num_tokens: int, drafter: PromptLookup | None = None):
        if not isinstance(num_tokens, int) or not 1 <= num_tokens <= MOST:
            raise ValueError(f"num_speculative_tokens={num_tokens!r} must be from 1 to {MOST}")
        self.num_tokens, self.drafter, self.cost = num_tokens, drafter or PromptLookup(), DraftCost()
        self.numbers = SpeculationCounts()
        self._usual_rate, self._num_without = FIRST_RATE, 0
        self._began = self._num_tokens = 0

    def begin_answer(self, prompt: Tensor, tokens: Sequence[int], max_tokens: int) -> DraftState:
        """For an answer that has these tokens; drafted ones are expected to be right as often as usual."""
        return DraftState(prompt, tokens, max_tokens, self._usual_rate)

    def draft(self, states: Sequence[DraftState], widest: int) -> list[list[int]]:
        """Drafted tokens for every row of the next step, whose rows may take `widest` tokens each."""
        most, drafted = min(self.num_tokens, widest - 1), [[] for _ in states]
        tries, self._num_without = self._num_without >= TRY_AFTER, self._num_without + 1
        awake = [i for i, state in enumerate(states) if (not state.rests() or tries) and state.left > 1]
        if most < 1 or not awake:
            return drafted
        ready = self.drafter.ready([states[i] for i in awake])
        chosen = [i for i, is_ready in zip(awake, ready, strict=True) if is_ready]
        if not chosen:
            return drafted
        count = self._best([states[i] for i in chosen], len(states), most) or most * tries
        if not count:
            self._usual_rate += DRIFT * (FIRST_RATE - self._usual_rate)
            for i in chosen:
                states[i].pause()
            return drafted
        self._num_without = 0
        for i, tokens in zip(chosen, self.drafter.draft([states[i] for i in chosen], count), strict=True):
            drafted[i] = tokens[: states[i].left - 1]
        return drafted

    def _best(self, states: Sequence[DraftState], num_rows: int, most: int) -> int:
        """The number of drafted tokens with the most tokens per second, for some of the rows of a step; 0: none.

        Rows without drafted tokens are padded, so they cost as much as the others.
        """
        best, best_rate = 0, GAIN * num_rows / self.cost.seconds(num_rows)
        for count in range(1, most + 1):
            seconds = self.cost.seconds(num_rows * (1 + count))
            rate = (num_rows + sum(state.gain(min(count, state.left - 1)) for state in states)) / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def begin_step(self, num_tokens: int) -> None:
        """A step of all ranks begins, with so many tokens of all rows, padding included."""
        self._began, self._num_tokens = time.perf_counter(), num_tokens

    def end_step(self, judged: Sequence[tuple[DraftState, int, int]], *, alone: bool) -> None:
        """Its tokens are chosen: (answer, drafted, right) of every row. alone: nothing else was run in this turn."""
        if alone:
            self.cost.add(self._num_tokens, time.perf_counter() - self._began)
        for state, drafted, right in judged:
            state.learn(drafted, right)
            if drafted:
                self._usual_rate += USUAL_WEIGHT * (right / (right + (right < drafted)) - self._usual_rate)
        total = self.numbers
        self.numbers = SpeculationCounts(
            total.drafted + sum(drafted for _, drafted, _ in judged),
            total.accepted + sum(right for *_, right in judged),
            total.steps + len(judged),
        )
