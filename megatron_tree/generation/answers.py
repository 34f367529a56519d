"""Answers that every rank has, for `generate` and conversations: a `Scheduler` with a few requests in kept rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import TreeError
from .executor import Executor
from .requests import Event, Request
from .scheduler import Scheduler


@dataclass
class Answer:
    """One answer, the same on all ranks but for the text. Times are this rank's, in seconds."""

    prompt_tokens: int
    """Of the whole prompt."""
    new_tokens: int = 0
    """Of them, those that the cache did not hold."""
    tokens: list[int] = field(default_factory=list)
    """The answer's, an end token included."""
    text: str = ""
    """On rank 0."""
    finish_reason: str = ""
    """"stop", "length" or "cancelled"."""
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From the call to the first token."""
    step_s: list[float] = field(default_factory=list)
    """Of every token after that."""
    logits: list[Tensor] = field(default_factory=list)
    """fp32 [vocab] that each token was chosen from, if asked for."""


class Recorder(Executor):
    """Follows the answers in kept rows on every rank: their tokens are in the plans.

    Attributes of the last call of `begin`: times: by handle, when each token of its answer was known; those of one step
    share its time. prefill_s. error.
    """

    def begin(self, answers: dict[int, Answer], *, keep_logits: bool, progress) -> None:
        """Record the answers in the rows with these handles from now on.

        progress: called as progress(prompt tokens done, all that the cache did not hold), prompts one after the other.
        """
        self._answers, self._keep_logits = answers, keep_logits
        self._last: dict[int, Tensor] = {}  # [n, vocab], the logits of the next tokens
        self._drafted: dict[int, list[int]] = {handle: [] for handle in answers}  # in the row, perhaps to be cropped
        self._done, self._total, self._progress = 0, None, progress
        self.times: dict[int, list[float]] = {handle: [] for handle in answers}
        self.prefill_s, self.error = 0.0, None

    def crop(self, handle: int, length: int) -> None:
        drafted = self._drafted[handle]
        del drafted[max(0, len(drafted) - (self.length(handle) - length)) :]
        super().crop(handle, length)

    def step(self, handles: list[int], tokens: list[int], drafted: list[list[int]]) -> Tensor:
        for handle, token, after in zip(handles, tokens, drafted or [[]] * len(handles), strict=True):
            self._record(handle, [*self._drafted[handle], token])
            self._drafted[handle] = list(after)
        logits = super().step(handles, tokens, drafted)
        if self._keep_logits:
            self._last |= zip(handles, logits, strict=True)
        return logits

    def end(self, handle: int, token: int | None, reason: str, error: str | None) -> None:
        self._record(handle, self._drafted[handle] + [token] * (token is not None))
        self._answers[handle].finish_reason, self.error = reason, self.error or error

    def prefill(self, handle: int, tokens: list[int], row_length: int) -> Tensor:
        if self._total is None:  # the rows are cropped by now
            for number, answer in self._answers.items():
                answer.new_tokens = answer.prompt_tokens - self.length(number)
            self._total = sum(answer.new_tokens for answer in self._answers.values())
        start, before, options = self._now(), self._done, {}
        if self._progress is not None:
            options["progress"] = lambda done, _: self._progress(before + done, self._total)
        logits = super().prefill(handle, tokens, row_length, **options)
        self._done += len(tokens)
        self.prefill_s += self._now() - start
        if self._keep_logits:
            self._last[handle] = logits
        return logits

    def _record(self, handle: int, tokens: list[int]) -> None:
        answer, times, now = self._answers[handle], self.times[handle], time.perf_counter()
        before = times[-1] if times else now
        times += [before + (now - before) * n / len(tokens) for n in range(1, len(tokens) + 1)]
        answer.tokens += tokens
        if self._keep_logits:
            answer.logits += self._last[handle][: len(tokens)]

    def _now(self) -> float:
        if self.runner.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def answer_all(
    scheduler: Scheduler,
    requests: Sequence[Request],
    *,
    keep_logits: bool = False,
    progress: Callable[[int, int], None] | None = None,
    on_text: Callable[[str], None] = lambda text: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Answer requests, each with a kept row of its own, by an idle scheduler with a `Recorder`. On all ranks.

    Args:
        progress: called as progress(prompt tokens done, all that the cache did not hold).
        on_text, cancelled: on the leader: gets the text piece by piece; asked in every turn whether to end here.
    Raises: ValueError as `Scheduler.check`, on all ranks. `TreeError` on all ranks for logits that are not finite.
    """
    start, recorder = time.perf_counter(), scheduler.executor
    lengths = scheduler.on_leader(lambda: [len(scheduler.check(request)) for request in requests])
    answers = [Answer(length) for length in lengths]
    recorder.begin(
        {request.row.handle: answer for request, answer in zip(requests, answers, strict=True)},
        keep_logits=keep_logits,
        progress=progress,
    )
    numbers = []
    if scheduler.is_leader:
        numbers = [scheduler.submit(request, _text_of(answer, on_text)) for request, answer in zip(requests, answers)]

    def each_turn() -> None:
        if recorder.error is not None or cancelled():
            for number in numbers:
                scheduler.cancel(number)

    scheduler.run_until_idle(each_turn)
    if recorder.error is not None:
        raise TreeError(recorder.error)
    for answer, times in zip(answers, recorder.times.values(), strict=True):
        answer.prefill_s = recorder.prefill_s
        answer.first_token_s = times[0] - start if times else 0.0
        answer.step_s = [after - before for before, after in itertools.pairwise(times)]
    return answers


def _text_of(answer: Answer, on_text: Callable[[str], None]) -> Callable[[Event], None]:
    """A sink that writes the text of an answer."""

    def sink(event: Event) -> None:
        answer.text += event.text
        if event.text:
            on_text(event.text)

    return sink
