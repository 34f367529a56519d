"""Answers over one row of a sharded cache that is kept from turn to turn: only what is new is prefilled."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..comm.wire import share
from ..errors import TreeError
from .requests import Event, KeptRow, Request
from .sampling import SamplingParams
from .scheduler import Scheduler


@dataclass
class Answer:
    """One answer. Times are in seconds, rank 0's but for prefill_s."""

    prompt_tokens: int
    """Of the whole prompt."""
    new_tokens: int = 0
    """Of them, those that the cache did not hold."""
    tokens: list[int] = field(default_factory=list)
    """The answer's, an end token included; the same on all ranks."""
    text: str = ""
    """On rank 0."""
    finish_reason: str = ""
    """"stop", "length" or "cancelled"."""
    prefill_s: float = 0.0
    """On this rank."""
    first_token_s: float = 0.0
    """From the call to the first token."""
    step_s: list[float] = field(default_factory=list)
    """Of every token after that."""
    logits: list[Tensor] = field(default_factory=list)
    """fp32 [vocab] of every token, if asked for, on rank 0."""


class Conversation:
    """A row of a `Runner`'s cache, and what it holds. Create and use it in the same way on all ranks.

    It is a `Scheduler` with one request at a time.

    end_tokens: those of the model. group: of all ranks, with the runner's rank 0, for messages of rank 0.
    sharded: every rank runs its share of a prompt; otherwise all of it. timeout_s: limit of one broadcast.
    """

    def __init__(
        self, runner, tokenizer, *, end_tokens: Collection[int], group, sharded: bool = True, timeout_s: float = 600.0
    ):
        self.runner, self._group, self._timeout_s = runner, group, timeout_s
        self._scheduler = Scheduler(
            runner,
            tokenizer,
            max_rows=1,
            max_waiting=1,
            end_tokens=end_tokens,
            plan_group=group,
            timeout_s=timeout_s,
            sharded_prefill=sharded,
        )
        self.is_leader = self._scheduler.is_leader
        self._row = KeptRow()
        self.held: list[int] = []
        """Tokens that the cache holds."""

    def forget(self) -> None:
        """Start again with an empty row."""
        self._scheduler.forget(self._row)
        self._scheduler.run_until_idle()
        self.held = []

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        on_text: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        keep_logits: bool = False,
    ) -> Answer:
        """Answer a prompt, the whole conversation in tokens; what the cache holds of it is not run again.

        on_text, progress, cancelled: on rank 0: gets the text piece by piece; called as progress(tokens prefilled, all
            of them); asked before every chunk of the prompt and every token whether to end here.
        Raises: ValueError on all ranks for an empty prompt or one that leaves no position for an answer. `TreeError`
            on all ranks when logits are not finite.
        """
        request = Request(prompt=prompt, sampling=params, row=self._row, progress=progress, keep_logits=keep_logits)
        scheduler, outcome, before = self._scheduler, {}, self._scheduler.executor.prefill_s
        scheduler.check(request)
        result = Answer(len(prompt))
        if self.is_leader:
            collected = _Collected(result, on_text)
            number = scheduler.submit(request, collected)
            scheduler.run_until_idle(lambda: scheduler.cancel(number) if cancelled() else None)
            outcome = {name: getattr(result, name) for name in SHARED}
            outcome |= {"error": collected.error, "held": len(self._row.tokens)}
        else:
            scheduler.run_until_idle()
        outcome = share(outcome, self._group, device=self.runner.device, timeout_s=self._timeout_s)
        for name in SHARED:
            setattr(result, name, outcome[name])
        self.held = [*prompt, *result.tokens][: outcome["held"]]
        result.prefill_s = scheduler.executor.prefill_s - before
        if outcome["error"] is not None:
            raise TreeError(outcome["error"])
        return result


SHARED = ("new_tokens", "tokens", "finish_reason", "first_token_s", "step_s")


class _Collected:
    """The sink of a request: its events become an `Answer`."""

    def __init__(self, answer: Answer, on_text: Callable[[str], None] | None):
        self._answer, self._on_text, self._last = answer, on_text, time.perf_counter()
        self.error: str | None = None

    def __call__(self, event: Event) -> None:
        answer, now = self._answer, time.perf_counter()
        if event.token is not None:
            if answer.tokens:
                answer.step_s.append(now - self._last)
            else:
                answer.first_token_s = now - self._last
            self._last = now
            answer.tokens.append(event.token)
        if event.logits is not None:
            answer.logits.append(event.logits)
        answer.text += event.text
        if event.text and self._on_text is not None:
            self._on_text(event.text)
        if event.usage is not None:
            answer.finish_reason, self.error = event.finish_reason, event.error
            answer.new_tokens = event.usage.prompt_tokens - event.usage.cached_tokens
