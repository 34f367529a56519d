"""The leader's side of continuous batching: from requests to plans, and from a plan's logits to tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from ..errors import TreeError
from .requests import Answer, Serving
from .rows import Runner
from .sampling import Choice, choose_tokens


class Planner:
    """Knows the requests that are served; used by the thread that runs the loop alone.

    on_end: called with a request when its last answer has ended, before its last event.
    """

    def __init__(self, runner: Runner, *, max_rows: int, page: int, on_end: Callable[[Serving], None]):
        self._runner, self._max_rows, self._page, self._on_end = runner, max_rows, page, on_end
        self.served: list[Serving] = []
        self._handles = itertools.count()
        self._steps: list[list] = []  # what the next plan begins with
        self._running: list[tuple[Serving, Answer]] = []  # whose logits the plan under way brings
        self._prefilled: list[tuple[Serving, int]] = []  # and the chunks, in tokens

    @property
    def has_work(self) -> bool:
        return bool(self._steps or self.served)

    def has_room(self, serving: Serving) -> bool:
        """Whether rows and cache suffice for all that a request may come to. Raises: `TreeError` if they never will."""
        rows = sum(len(s.unfinished) for s in self.served)
        if rows + len(serving.answers) > self._max_rows:
            return False
        free = self._runner.free_tokens
        if free is None:
            return True
        promised = sum(s.reserved(self._page) - s.held(self._page) for s in self.served)
        needed = serving.reserved(self._page)
        if free - promised < needed and not self.served and not self._steps:
            raise TreeError(
                f"request {serving.id} needs {needed:,} tokens of the cache; it serves nobody, but only {free:,} "
                "are free: something else has left rows in it"
            )
        return free - promised >= needed

    def admit(self, serving: Serving) -> None:
        """Give a request's prompt a row."""
        serving.admit(next(self._handles))
        self.served.append(serving)
        self._steps.append(["add", serving.handle])

    def cancel(self, serving: Serving) -> None:
        """End a request that waits or is served."""
        for answer in serving.unfinished:
            self._end(serving, answer, None, answer.stopper.flush(), "cancelled")

    def plan(self) -> list[list]:
        """The steps of this turn, for `Rows.carry_out`: a token for every row under way, and a chunk of a prompt.

        More than one prompt gets a chunk where they have no more than runner.chunk_size tokens together.
        """
        steps, self._steps = self._steps, []
        self._running = [(serving, a) for serving in self.served for a in serving.unfinished if a.handle is not None]
        self._prefilled = []
        if self._running:
            answers = [answer for _, answer in self._running]
            steps.append(["step", [a.handle for a in answers], [a.token for a in answers]])
            for answer in answers:
                answer.length += 1
        size = left = self._runner.chunk_size
        for serving in self.served:
            # prompts are cut the same way whoever else is there, so that their logits are the same
            chunk = serving.prompt[serving.num_prefilled :][:size]
            if serving.handle is not None and len(chunk) <= left:
                steps.append(["prefill", serving.handle, chunk.tolist()])
                self._prefilled.append((serving, len(chunk)))
                left -= len(chunk)
        return steps

    def digest(self, logits: list[Tensor]) -> None:
        """Choose tokens by what a plan brought, tell of them, and note what the next plan has to do first."""
        logits = iter(logits)
        if self._running:
            choices = choose_tokens([answer.sampler for _, answer in self._running], next(logits))
            for (serving, answer), choice in zip(self._running, choices):
                self._take(serving, answer, choice)
        for (serving, num_tokens), last in zip(self._prefilled, logits):
            serving.num_prefilled += num_tokens
            if serving.num_prefilled == len(serving.prompt):
                self._begin(serving, last)

    def _begin(self, serving: Serving, logits: Tensor) -> None:
        """The prompt is in the cache: first tokens, and a row for every answer that goes on."""
        choices = choose_tokens([a.sampler for a in serving.answers], logits.expand(len(serving.answers), -1))
        going = [a for a, c in zip(serving.answers, choices) if not isinstance(c, TreeError)]
        for answer, choice in zip(serving.answers, choices):
            self._take(serving, answer, choice)
        going = [answer for answer in going if not answer.finished]
        handle, serving.handle = serving.handle, None
        for answer in going:
            answer.length, answer.forked = len(serving.prompt), answer is not going[0]
            answer.handle = next(self._handles) if answer.forked else handle
            if answer.forked:
                self._steps.append(["fork", handle, answer.handle])
        if not going:
            self._steps.append(["remove", handle])

    def _take(self, serving: Serving, answer: Answer, choice: Choice | TreeError) -> None:
        if isinstance(choice, TreeError):
            self._end(serving, answer, None, answer.stopper.flush(), "error", error=str(choice))
            return
        piece = answer.stopper.add(choice.token)
        answer.token = choice.token
        if piece.finish_reason is None:
            serving.tell(answer, choice, piece.text, None)
        else:
            self._end(serving, answer, choice, piece.text, piece.finish_reason, stop_reason=piece.stop_reason)

    def _end(self, serving: Serving, answer: Answer, choice: Choice | None, text: str, reason: str, **more) -> None:
        """End an answer: its row goes with the next plan, and the request with its last answer."""
        answer.finished = True
        if answer.handle is not None:
            self._steps.append(["remove", answer.handle])
            answer.handle = None
        if not serving.unfinished:
            if serving.handle is not None and serving.num_prefilled < len(serving.prompt):
                self._steps.append(["remove", serving.handle])
                serving.handle = None
            if serving in self.served:
                self.served.remove(serving)
            self._on_end(serving)
        serving.tell(answer, choice, text, reason, **more)
