"""Speculation: a step of a row also runs tokens that are likely to come next, and keeps those that are right.

The token at every place is chosen from the model's logits with the same random number as without speculation. A
proposal is right if it is that token; the first wrong one and all after it are removed from the cache again. So answers
are the same, whatever is proposed; only the number of steps differs, and what a step costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

NO_SPECULATION = (
    "speculation (--num-speculative-tokens): the model has recurrent layers, whose state can't go back when a proposal "
    "is wrong: leave it out"
)
MOST = 16  # proposals in a step; more rarely all hold, and a pass of many tokens is no longer a decoding step
GAIN = 1.1  # a wider step has to give this many times as many tokens per second as one without proposals
FIRST_RATE = 0.5  # how often a proposal is right, before anything is known
RATE_WEIGHT, USUAL_WEIGHT, DRIFT = 0.25, 0.05, 0.01  # of the last proposal, step, and step without proposals
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256  # steps
TRY_AFTER = 100  # steps without proposals: then one with them tells what it takes now
COST_WEIGHT = 0.05  # of the last step, in the estimate of a step's seconds


class Guess:
    """What speculation knows of one answer: its text in tokens, and `rate`, how often proposals are right."""

    def __init__(self, prompt: Tensor, tokens: Sequence[int], max_tokens: int, rate: float = FIRST_RATE):
        self._text = np.empty(len(prompt) + max_tokens, dtype=np.int64)
        self.length = len(prompt) + len(tokens)
        self._text[: self.length] = [*prompt.tolist(), *tokens]
        self.rate, self._rest, self._pause = rate, SHORTEST_PAUSE, 0
        self.match = 0  # of `PromptLookup`: see `last_match`
        self.row: int | None = None  # of `DraftModel`, ...
        self.drafted: list[int] = []  # ... and the proposals in it

    @property
    def text(self) -> np.ndarray:
        """The prompt and the answer so far, int64 [length]."""
        return self._text[: self.length]

    @property
    def left(self) -> int:
        """Tokens that the answer may still get."""
        return len(self._text) - self.length

    def add(self, token: int) -> None:
        """The answer continues with this token."""
        self._text[self.length] = token
        self.length += 1

    def rests(self) -> bool:
        """Whether nothing is proposed in this step; a pause is a step shorter then. After it there is new hope."""
        if self._pause == 0:
            return False
        self._pause -= 1
        if self._pause == 0:
            self.rate = max(self.rate, FIRST_RATE)
        return True

    def pause(self) -> None:
        """Proposals lose: none for a while, twice as long as the last time if none was right since."""
        self._pause, self._rest = self._rest, min(2 * self._rest, LONGEST_PAUSE)

    def gain(self, count: int) -> float:
        """Tokens that so many proposals are expected to add."""
        return sum(self.rate**n for n in range(1, count + 1))

    def learn(self, proposed: int, right: int) -> None:
        """So many of the tokens that were proposed for a step were right."""
        self.rate = 1 - (1 - self.rate) * (1 - RATE_WEIGHT) ** right
        if right < proposed:
            self.rate *= 1 - RATE_WEIGHT
        if right:
            self._rest, self._pause = SHORTEST_PAUSE, 0


class StepCost:
    """Seconds of a step by its number of tokens: the line through those that were measured, the last ones above all."""

    def __init__(self):
        self._count = 0
        self._tokens = self._seconds = self._variance = self._covariance = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step took so long."""
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


class Proposer(Protocol):
    """Where proposals come from."""

    def ready(self, guesses: Sequence[Guess]) -> list[bool]:
        """For which answers it can propose tokens now."""

    def propose(self, guesses: Sequence[Guess], count: int) -> list[list[int]]:
        """`count` tokens for each of these answers, which are ready."""

    def seconds(self, count: int) -> float:
        """What `propose` of so many tokens is expected to take."""

    def forget(self, guess: Guess) -> None:
        """An answer has ended."""


class Speculated(NamedTuple):
    """Numbers since the start."""

    proposed: int = 0
    accepted: int = 0
    """Proposals that were right."""
    steps: int = 0
    """Steps of answers: one of three rows counts three times. So answers got (steps + accepted) / steps tokens in a
    step."""


class Speculation:
    """Decides in every step how many tokens are proposed. On the leader, in the thread of the loop.

    num_tokens: proposals for a row in a step, at most. proposer: where they come from, `PromptLookup` or `DraftModel`.
    Raises: ValueError for num_tokens outside of 1 to MOST.
    """

    def __init__(self, num_tokens: int, proposer: Proposer):
        if not isinstance(num_tokens, int) or not 1 <= num_tokens <= MOST:
            raise ValueError(f"num_speculative_tokens={num_tokens!r} must be from 1 to {MOST}")
        self.num_tokens, self.proposer, self.cost = num_tokens, proposer, StepCost()
        self.numbers = Speculated()
        self._usual_rate, self._num_without = FIRST_RATE, 0
        self._began = self._num_tokens = 0

    def guess(self, prompt: Tensor, tokens: Sequence[int], max_tokens: int) -> Guess:
        """For an answer that has these tokens; proposals are as often right as usual."""
        return Guess(prompt, tokens, max_tokens, self._usual_rate)

    def propose(self, guesses: Sequence[Guess], widest: int) -> list[list[int]]:
        """Proposals for every row of the next step, whose rows may take `widest` tokens each."""
        most, found = min(self.num_tokens, widest - 1), [[] for _ in guesses]
        tries, self._num_without = self._num_without >= TRY_AFTER, self._num_without + 1
        awake = [i for i, guess in enumerate(guesses) if (not guess.rests() or tries) and guess.left > 1]
        if most < 1 or not awake:
            return found
        ready = self.proposer.ready([guesses[i] for i in awake])
        chosen = [i for i, is_ready in zip(awake, ready, strict=True) if is_ready]
        if not chosen:
            return found
        count = self._best([guesses[i] for i in chosen], len(guesses), most) or most * tries
        if not count:
            self._usual_rate += DRIFT * (FIRST_RATE - self._usual_rate)
            for i in chosen:
                guesses[i].pause()
            return found
        self._num_without = 0
        for i, tokens in zip(chosen, self.proposer.propose([guesses[i] for i in chosen], count), strict=True):
            found[i] = tokens[: guesses[i].left - 1]
        return found

    def _best(self, guesses: Sequence[Guess], num_rows: int, most: int) -> int:
        """The number of proposals with the most tokens per second, for some of the rows of a step; 0: none.

        Rows without proposals are padded, so they cost as much as the others.
        """
        best, best_rate = 0, GAIN * num_rows / self.cost.seconds(num_rows)
        for count in range(1, most + 1):
            seconds = self.cost.seconds(num_rows * (1 + count)) + self.proposer.seconds(count)
            rate = (num_rows + sum(guess.gain(min(count, guess.left - 1)) for guess in guesses)) / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def forget(self, guess: Guess) -> None:
        """An answer has ended."""
        self.proposer.forget(guess)

    def begin(self, num_tokens: int) -> None:
        """A step of all ranks begins, with so many tokens of all rows, padding included."""
        self._began, self._num_tokens = time.perf_counter(), num_tokens

    def end(self, judged: Sequence[tuple[Guess, int, int]], *, alone: bool) -> None:
        """Its tokens are chosen: (answer, proposed, right) of every row. alone: nothing else was run in this turn."""
        if alone:
            self.cost.add(self._num_tokens, time.perf_counter() - self._began)
        for guess, proposed, right in judged:
            guess.learn(proposed, right)
            if proposed:
                self._usual_rate += USUAL_WEIGHT * (right / (right + (right < proposed)) - self._usual_rate)
        total = self.numbers
        self.numbers = Speculated(
            total.proposed + sum(proposed for _, proposed, _ in judged),
            total.accepted + sum(right for *_, right in judged),
            total.steps + len(judged),
        )
