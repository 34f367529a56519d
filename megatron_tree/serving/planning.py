"""Plans of continuous batching: how every rank carries one out, and how the leader makes it and chooses the tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..cache.runner import RowRunner
from ..errors import TreeError
from .requests import ActiveAnswer, KeptRow, ServedRequest
from .sampling import Choice, choose_tokens

Progress = Callable[[int, int], None]


class Executor:
    """Carries out plans on one rank. A plan names rows by handles that the leader chose.

    sharded_prefill: see `RowRunner.prefill`.
    """

    def __init__(self, runner: RowRunner, *, sharded_prefill: bool = True):
        self.runner, self._rows = runner, {}
        self._prefill_options = {} if sharded_prefill else {"sharded": False}
        self.prefill_s = 0.0
        """Seconds spent on prefills so far."""

    def can_crop(self, handle: int, length: int) -> bool:
        """See `RowRunner.can_crop`."""
        return self.runner.can_crop(self._rows[handle], length)

    @torch.no_grad()
    def run(self, steps: list[list], progress: Mapping[int, Progress] | None = None) -> list[Tensor]:
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


class Planner:
    """The requests that are served. Only the thread that runs the loop uses it.

    on_end: called with a request when its last answer has ended, before its last event.
    """

    def __init__(self, executor: Executor, *, max_rows: int, page: int, on_end: Callable[[ServedRequest], None]):
        self._executor, self._runner = executor, executor.runner
        self._max_rows, self._page, self._on_end = max_rows, page, on_end
        self.served: list[ServedRequest] = []
        self._handles = itertools.count()
        self._steps: list[list] = []  # what the next plan begins with
        self._running: list[tuple[ServedRequest, ActiveAnswer]] = []  # whose logits the current plan returns
        self._prefilled: list[tuple[ServedRequest, int]] = []  # and the chunks, in tokens

    @property
    def has_work(self) -> bool:
        return bool(self._steps or self.served)

    def has_room(self, serving: ServedRequest) -> bool:
        """Whether rows and cache suffice for all that a request may need. Raises: `TreeError` if they never will."""
        rows = sum(len(s.unfinished) for s in self.served)
        if rows + len(serving.answers) > self._max_rows:
            return False
        free = self._runner.free_tokens
        if free is None:
            return True
        promised = sum(s.reserved(self._page) - s.held(self._page) for s in self.served)
        needed = serving.reserved(self._page)
        if serving.row is not None:
            needed -= serving.row.shared(serving.prompt) // self._page * self._page
        if free - promised < needed and not self.served and not self._steps:
            raise TreeError(
                f"request {serving.id} needs {needed:,} tokens of the cache; no other request is served, but "
                f"only {free:,} are free: rows that the scheduler did not make are in it"
            )
        return free - promised >= needed

    def admit(self, serving: ServedRequest) -> None:
        """Give a request's prompt a row: a new one, or its own."""
        row, shared = serving.row or KeptRow(), 0
        if row.handle is None:
            row.handle = next(self._handles)
            self._steps.append(["add", row.handle])
        else:
            shared = row.shared(serving.prompt)
            if not self._executor.can_crop(row.handle, shared):  # layers with a window have dropped what it needs
                self._steps += [["remove", row.handle], ["add", row.handle]]
                shared = 0
            elif shared < len(row.tokens):
                self._steps.append(["crop", row.handle, shared])
        del row.tokens[shared:]
        serving.admit(row.handle, shared)
        self.served.append(serving)

    def forget(self, row: KeptRow) -> None:
        """Remove a kept row by the next plan."""
        if row.handle is not None:
            self._steps.append(["remove", row.handle])
        row.handle, row.tokens = None, []

    def cancel(self, serving: ServedRequest) -> None:
        """End a request that waits or is served."""
        for answer in serving.unfinished:
            self._end(serving, answer, None, answer.stopper.flush(), "cancelled")

    def plan(self) -> list[list]:
        """The steps of this turn, for `Executor.run`: a token for every active row, and a chunk of a prompt.

        Several prompts get a chunk if these have at most runner.chunk_size tokens together.
        """
        steps, self._steps = self._steps, []
        self._running = [(serving, a) for serving in self.served for a in serving.unfinished if a.handle is not None]
        self._prefilled = []
        if self._running:
            answers = [answer for _, answer in self._running]
            steps.append(["step", [a.handle for a in answers], [a.token for a in answers]])
            for serving, answer in self._running:
                answer.length += 1
                if serving.row is not None:
                    serving.row.tokens.append(answer.token)
        size = left = self._runner.chunk_size
        for serving in self.served:
            # chunks don't depend on other requests, so that logits don't
            chunk = serving.prompt[serving.num_prefilled :][:size]
            if serving.handle is not None and len(chunk) <= left:
                steps.append(["prefill", serving.handle, chunk.tolist()])
                self._prefilled.append((serving, len(chunk)))
                left -= len(chunk)
        return steps

    def progress(self) -> dict[int, Progress]:
        """For `Executor.run`, of the prefills in this plan."""
        found = {}
        for serving, _ in self._prefilled:
            if serving.progress is not None:
                before = serving.num_prefilled - serving.num_reused
                total = len(serving.prompt) - serving.num_reused
                found[serving.handle] = lambda done, _, tell=serving.progress, before=before, total=total: tell(
                    before + done, total
                )
        return found

    def digest(self, logits: list[Tensor]) -> None:
        """Choose tokens from the logits of a plan, send events, and record what the next plan has to do first."""
        logits = iter(logits)
        if self._running:
            rows = next(logits)
            choices = choose_tokens([answer.sampler for _, answer in self._running], rows)
            for (serving, answer), choice, row in zip(self._running, choices, rows):
                self._take(serving, answer, choice, row)
        for (serving, num_tokens), last in zip(self._prefilled, logits):
            if serving.row is not None:
                serving.row.tokens += serving.prompt[serving.num_prefilled :][:num_tokens].tolist()
            serving.num_prefilled += num_tokens
            if serving.num_prefilled == len(serving.prompt):
                self._begin(serving, last)

    def _begin(self, serving: ServedRequest, logits: Tensor) -> None:
        """The prompt is in the cache: first tokens, and a row for every answer that continues."""
        choices = choose_tokens([a.sampler for a in serving.answers], logits.expand(len(serving.answers), -1))
        going = [a for a, c in zip(serving.answers, choices) if not isinstance(c, TreeError)]
        for answer, choice in zip(serving.answers, choices):
            self._take(serving, answer, choice, logits)
        going = [answer for answer in going if not answer.finished]
        handle, serving.handle = serving.handle, None
        for answer in going:
            answer.length, answer.forked = len(serving.prompt), answer is not going[0]
            answer.handle = next(self._handles) if answer.forked else handle
            if answer.forked:
                self._steps.append(["fork", handle, answer.handle])
        if not going and serving.row is None:
            self._steps.append(["remove", handle])

    def _take(self, serving: ServedRequest, answer: ActiveAnswer, choice: Choice | TreeError, logits: Tensor) -> None:
        if isinstance(choice, TreeError):
            self._end(serving, answer, None, answer.stopper.flush(), "error", error=str(choice))
            return
        more = {"logits": logits} if serving.keep_logits else {}
        piece = answer.stopper.add(choice.token)
        answer.token = choice.token
        if piece.finish_reason is None:
            serving.tell(answer, choice, piece.text, None, **more)
        else:
            more["stop_reason"] = piece.stop_reason
            self._end(serving, answer, choice, piece.text, piece.finish_reason, **more)

    def _end(
        self, serving: ServedRequest, answer: ActiveAnswer, choice: Choice | None, text: str, reason: str, **more
    ) -> None:
        """End an answer: its row goes with the next plan unless it is kept, and the request with its last answer."""
        answer.finished = True
        if answer.handle is not None:
            self._remove(serving, answer.handle)
            answer.handle = None
        if not serving.unfinished:
            if serving.handle is not None and serving.num_prefilled < len(serving.prompt):
                self._remove(serving, serving.handle)
                serving.handle = None
            if serving in self.served:
                self.served.remove(serving)
            self._on_end(serving)
        serving.tell(answer, choice, text, reason, **more)

    def _remove(self, serving: ServedRequest, handle: int) -> None:
        if serving.row is None:
            self._steps.append(["remove", handle])
