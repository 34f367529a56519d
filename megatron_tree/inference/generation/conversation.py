"""Answers that every rank has, for `generate` and conversations: rank 0 gets them, and sends them once, at the end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ...core.errors import TreeError
from .requests import Event, Request
from .sampling import SamplingParams
from .scheduler import Scheduler
from .speculation import Speculation, SpeculationCounts


@dataclass
class Answer:
    """One answer, the same on all ranks. Times are rank 0's, in seconds."""

    prompt_tokens: int = 0
    """Of the whole prompt."""
    new_tokens: int = 0
    """Of them, those that the cache did not hold."""
    tokens: list[int] = field(default_factory=list)
    """The answer's, an end token included."""
    text: str = ""
    finish_reason: str = ""
    """"stop", "length" or "cancelled"."""
    prefill_s: float = 0.0
    """Until all prompts had been run and their first tokens were chosen."""
    first_token_s: float = 0.0
    """From the call to the first token."""
    step_s: list[float] = field(default_factory=list)
    """Of every token after that."""
    logits: list[Tensor] = field(default_factory=list)
    """fp32 [vocab] that each token was chosen from, if asked for."""


def answer_all(
    scheduler: Scheduler,
    requests: Sequence[Request],
    *,
    progress: Callable[[int, int], None] | None = None,
    on_text: Callable[[str], None] = lambda text: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Answer requests, each with a kept row of its own, by an idle scheduler. On all ranks, with equal requests.

    Args:
        progress: called as progress(prompt tokens done, all that the cache did not hold), prompts one after the other.
        on_text, cancelled: on the leader: gets the text piece by piece; asked in every turn whether to end here.
    Raises: ValueError as `Scheduler.check`, on all ranks. `TreeError` on all ranks for logits that are not finite.
    """
    start = time.perf_counter()
    scheduler.on_leader(lambda: [len(scheduler.check(request)) for request in requests])
    if progress is not None:
        scheduler.executor.progress = _Progress(scheduler.executor, requests, progress)
    records = [_Record(on_text) for _ in requests] if scheduler.is_leader else []
    numbers = [scheduler.submit(request, one.take) for request, one in zip(requests, records)]
    begun = time.perf_counter()

    def each_turn() -> None:
        for one in records:
            one.end_turn()
        if any(one.error for one in records) or cancelled():
            for number in numbers:
                scheduler.cancel(number)

    scheduler.run_until_idle(each_turn)
    scheduler.executor.progress = None
    for one in records:
        one.end_turn()
    error, answers = scheduler.on_leader(
        lambda: [next((one.error for one in records if one.error), None), _timed(records, start, begun)]
    )
    if error is not None:
        raise TreeError(error)
    answers = [Answer(**answer) for answer in answers]
    for i, (request, answer) in enumerate(zip(requests, answers)):
        if request.keep_logits and answer.tokens:
            logits = torch.stack(records[i].logits) if records else None
            answer.logits = list(scheduler.executor.from_leader(logits, len(answer.tokens)))
    return answers


def _timed(records: Sequence[_Record], start: float, begun: float) -> list[dict]:
    """The answers as JSON has them; requests came at `start`, and were queued at `begun`."""
    prefill_s = max((one.times[0] - begun for one in records if one.times), default=0.0)
    for one in records:
        if one.times:
            one.answer.prefill_s, one.answer.first_token_s = prefill_s, one.times[0] - start
            one.answer.step_s = [after - before for before, after in itertools.pairwise(one.times)]
    return [asdict(one.answer) for one in records]


class _Record:
    """An answer under way, on the leader.

    Attributes: times: when each of its tokens was known; tokens of one step share its time.
    """

    def __init__(self, on_text: Callable[[str], None]):
        self.answer, self.error, self.times, self.logits = Answer(), None, [], []
        self._on_text = on_text

    def take(self, event: Event) -> None:
        """A sink."""
        answer = self.answer
        answer.text += event.text
        if event.text:
            self._on_text(event.text)
        if event.token is not None:
            answer.tokens.append(event.token)
            self.logits += [] if event.logits is None else [event.logits]
        if event.finish_reason is not None:
            answer.finish_reason, self.error = event.finish_reason, event.error
            answer.prompt_tokens = event.usage.prompt_tokens
            answer.new_tokens = answer.prompt_tokens - event.usage.cached_tokens

    def end_turn(self) -> None:
        """Its new tokens are those of this turn."""
        new, now = len(self.answer.tokens) - len(self.times), time.perf_counter()
        before = self.times[-1] if self.times else now
        self.times += [before + (now - before) * n / new for n in range(1, new + 1)]


class _Progress:
    """How far the prompts of some requests with rows of their own have been run, on any rank."""

    def __init__(self, executor, requests: Sequence[Request], tell: Callable[[int, int], None]):
        self._executor, self._tell = executor, tell
        self._prompts = {request.row.handle: len(request.prompt) for request in requests}
        self._first: dict[int, int] | None = None  # what rows held when the first chunk came

    def __call__(self, handle: int, length: int) -> None:
        """A row has so many tokens of its prompt."""
        lengths = {handle: self._executor.length(handle) for handle in self._prompts}
        self._first = self._first or lengths
        held = sum(self._first.values())
        self._tell(sum(lengths.values()) - lengths[handle] + length - held, sum(self._prompts.values()) - held)


class Conversation:
    """A row of a `Runner`'s cache, and what it holds. Create and use it in the same way on all ranks.

    It is a `Scheduler` with one request at a time.

    end_tokens: the model's. group: of all ranks, with the runner's rank 0, for messages of rank 0.
    timeout_s: limit of one broadcast. speculation: see `Scheduler`.
    """

    def __init__(
        self,
        runner,
        tokenizer,
        *,
        end_tokens: Collection[int],
        group,
        timeout_s: float = 600.0,
        speculation: Speculation | None = None,
    ):
        self.runner = runner
        self._scheduler = Scheduler(
            runner,
            tokenizer,
            max_rows=1,
            max_waiting=1,
            end_tokens=end_tokens,
            group=group,
            timeout_s=timeout_s,
            speculation=speculation,
        )
        self._row = self._scheduler.keep()
        self.held: list[int] = []
        """Tokens that the cache holds."""

    @property
    def speculated(self) -> SpeculationCounts:
        """Numbers of drafted tokens of all answers; on rank 0."""
        return self._scheduler.speculated

    def forget(self) -> None:
        """Start again with an empty row."""
        self._scheduler.forget(self._row)
        self._row, self.held = self._scheduler.keep(), []

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        on_text: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        keep_logits: bool = False,
        images: Mapping[str, Tensor] | None = None,
    ) -> Answer:
        """Answer a prompt, the whole conversation in tokens; what the cache holds of it is not run again.

        on_text, cancelled: on rank 0: gets the text piece by piece; asked before every chunk of the prompt and every
            token whether to end here. progress: on this rank, called as progress(tokens prefilled, all of them).
        images: of the whole conversation, see `Request`.
        Raises: ValueError on all ranks for an empty prompt or one that leaves no position for an answer. `TreeError`
            on all ranks when logits are not finite.
        """
        (answer,) = answer_all(
            self._scheduler,
            [Request(prompt=prompt, sampling=params, row=self._row, images=images, keep_logits=keep_logits)],
            progress=progress,
            on_text=on_text,
            cancelled=cancelled,
        )
        self.held = [*prompt, *answer.tokens][: self._scheduler.executor.length(self._row.handle)]
        return answer
