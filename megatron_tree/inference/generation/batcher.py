"""What is run together in a turn of continuous batching, and how the leader chooses the tokens."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ...core.comm import group_size
from ...core.errors import TreeError
from .executor import Executor, Operation
from .images import packed
from .requests import ActiveAnswer, ServedRequest, append_tokens
from .room import Room
from .sampler import Choice, choose_tokens, with_logprobs
from .speculation import Speculation

SHORT = 64  # prompts of up to this many tokens are run together,
TOGETHER = 1024  # up to this many tokens, or to a chunk: it is more, or answers wait meanwhile
LONGER = 256  # longer ones also, up to a chunk, on one rank: several would share the tokens of each
PADDED = 2  # times so many tokens at most with the padding that the cache takes for a turn
SCORED_CHUNK = 128  # tokens of a prompt whose logits are all kept at the same time
PATIENCE_S = 0.05  # in a turn, for masks; an answer whose mask takes longer sits out until it is there


class Batcher:
    """The requests that are served. Only the thread that runs the loop uses it.

    prefill_first: no answer is continued while a prompt is prefilled, so that all answers advance together.
    max_rows, keep_bytes: see `Room`.
    speculation: decides which tokens are drafted; None: none are.
    on_end: called with a request when its last answer has ended, before its last event.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_rows: int,
        prefill_first: bool,
        keep_bytes: int,
        speculation: Speculation | None,
        on_end: Callable[[ServedRequest], None],
    ):
        self._runner, self._prefill_first, self._on_end = executor.runner, prefill_first, on_end
        self._longest = SHORT if group_size(executor.runner.token_group) > 1 else LONGER
        self.room = Room(executor, max_rows=max_rows, keep_bytes=keep_bytes)
        self._speculation = speculation
        self._stepping: list[ActiveAnswer] = []  # whose logits the current turn returns
        self._filling: list[list[tuple[ActiveAnswer, list[int]]]] = []  # whose rows it fills, and with what, by pass
        self._owes_chunk = False  # to a prompt that has waited for shorter ones
        self._late: list[ActiveAnswer] = []  # that have logits, and lack the mask for them
        self._patient_until = 0.0

    @property
    def has_work(self) -> bool:
        room = self.room
        return bool(room.changes or room.served) and not self.only_waits

    @property
    def only_waits(self) -> bool:
        """Whether all answers with rows wait for masks, and nothing else is to be done."""
        if not self._late or self.room.changes:
            return False
        holders = self.room.answers_with_rows()
        return bool(holders) and all(a.logits is not None and a.lacks_mask for a in holders)

    def cancel(self, request: ServedRequest) -> None:
        """End a request that waits or is served."""
        for answer in request.unfinished:
            self._end(answer, None, answer.stopper.flush(), finish_reason="cancelled")

    def passes(self) -> list[Operation]:
        """What to run in this turn: append a token to every row that is ready, and a chunk of a prompt to another.

        Several prompts get a chunk if these have at most runner.chunk_size tokens together. Those that end with their
        chunk go first, in every second turn at least where a longer one waits.
        """
        room, size = self.room, self._runner.chunk_size
        self._take_late()
        to_fill = [answer for answer in room.answers_with_rows() if not answer.filled]
        if not self._owes_chunk:
            to_fill.sort(key=self._is_long)
        room.begin_rows(to_fill)  # before these rows grow
        images = [request.images for request in room.served if request.images is not None]
        room.make_room(max([size, *(x.longest for x in images)]))
        passes: list[Operation] = []
        to_fill = [answer for answer in to_fill if answer.handle is not None and not answer.filled]
        ready = [answer for answer in room.answers_with_rows() if answer.filled and answer.logits is None]
        self._stepping = ready = [] if to_fill and self._prefill_first else ready
        if ready:
            drafted = [] if self._speculation is None else self._draft()
            passes.append(("step", [a.handle for a in ready], [a.token for a in ready], drafted))
            append_tokens(ready)
        return passes + self._fill(to_fill, size if ready else max(size, TOGETHER))

    def _fill(self, to_fill: list[ActiveAnswer], limit: int) -> list[Operation]:
        """Prefill short prompts together, of at most `limit` tokens, and chunks of others as far as they fit."""
        passes: list[Operation] = []
        size = left = self._runner.chunk_size
        long = [answer for answer in to_fill if self._is_long(answer)]
        short, self._filling = [] if to_fill[:1] == long[:1] else self._short_ones(to_fill, limit), []
        if short:
            prompts = [answer.missing_tokens() for answer in short]
            passes.append(("prefill_rows", [answer.handle for answer in short], prompts))
            self._filling.append(list(zip(short, prompts)))
            left -= sum(map(len, prompts))
        for answer in to_fill:
            if answer in short:
                continue
            # chunks don't depend on other requests, so that logits don't
            scored, chunk = self._is_scored(answer), answer.chunk(self._chunk_size(answer))
            if len(chunk) <= left or left == size:  # an image may be longer than a chunk
                if answer.lacks_images and not answer.embedded:
                    request, answer.embedded = answer.request, True
                    passes.append(("embed", answer.handle, request.prompt.tolist(), packed(request.images.inputs)))
                passes.append(("score" if scored else "prefill", answer.handle, chunk, answer.num_known))
                self._filling.append([(answer, chunk)])
                left -= len(chunk)
        filling = [answer for fills in self._filling for answer, _ in fills]
        self._owes_chunk = bool(long) and not any(answer in filling for answer in long)
        return passes

    def _is_scored(self, answer: ActiveAnswer) -> bool:
        return answer.request.scores and not answer.request.begun

    def _chunk_size(self, answer: ActiveAnswer) -> int:
        size = self._runner.chunk_size
        return min(size, SCORED_CHUNK) if self._is_scored(answer) else size

    def _is_long(self, answer: ActiveAnswer) -> bool:
        """Whether a chunk is not enough for what its row lacks."""
        return answer.num_known - answer.length > self._chunk_size(answer)

    def _short_ones(self, to_fill: list[ActiveAnswer], limit: int) -> list[ActiveAnswer]:
        """Those to run in one pass, short ones of at most this many tokens; none if there is only one."""
        chosen, lengths, longest, total, latest = [], [], 0, 0, 0
        positions = self._runner.max_positions or math.inf
        for answer in to_fill:
            before, after, request = answer.length, answer.num_known, answer.request
            missing = after - before
            if request.row is not None or request.scores or answer.lacks_images or missing > self._longest:
                continue
            width, most = max(longest, missing), limit if missing <= SHORT else self._runner.chunk_size
            ends = max(latest, before) + width  # padding, too, has positions
            fits = total + missing <= most and width * (len(chosen) + 1) <= PADDED * most and ends <= positions
            if fits and self.room.can_pad([*lengths, (before, after)], width):
                chosen.append(answer)
                lengths.append((before, after))
                longest, total, latest = width, total + missing, max(latest, before)
        return chosen if len(chosen) > 1 else []

    def _draft(self) -> list[list[int]]:
        """Draft tokens that may be the next ones of the answers that are about to make a step; see `Executor.step`."""
        speculation = self._speculation
        for answer in self._stepping:
            request = answer.request
            if answer.draft_state is None:
                answer.draft_state = speculation.begin_answer(request.prompt, answer.tokens, request.params.max_tokens)
        widest = self.room.widest_step(self._stepping, 1 + speculation.num_tokens)
        drafted = speculation.draft([answer.draft_state for answer in self._stepping], widest)
        for answer, tokens in zip(self._stepping, drafted, strict=True):
            answer.drafted, answer.num_right = tokens, 0
        width = 1 + max(map(len, drafted))
        self.room.widen_step(self._stepping, width)
        speculation.begin_step(len(drafted) * width)
        return drafted if width > 1 else []

    def take_logits(self, logits: list[Tensor]) -> None:
        """Choose tokens from the logits of a turn, and send events."""
        logits, self._patient_until = iter(logits), time.monotonic() + PATIENCE_S
        if self._stepping:
            self._finish_step(next(logits))
        for fills, last in zip(self._filling, logits):
            begin = []  # prompts that are in their rows
            for i, (answer, chunk) in enumerate(fills):
                request = answer.request
                answer.fill(chunk)
                if request.scores and not request.begun:
                    self._score(request, answer.length, len(chunk), last)
                if not request.begun and answer.length == request.num_prompt:
                    begin.append(i)
            if begin:
                last = last[-len(fills) :]
                last = last if len(begin) == len(fills) else last[begin]
                self._begin_answers([fills[i][0] for i in begin], last)

    def _finish_step(self, logits: Tensor) -> None:
        """Choose every answer's next token by logits [rows, n, vocab], and more while they are those drafted."""
        answers = self._stepping
        if self._speculation is None:
            return self._take(answers, logits[:, 0])
        drafted, going = [len(answer.drafted) for answer in answers], list(range(len(answers)))
        for place in range(logits.shape[1]):
            self._take([answers[i] for i in going], logits[going, place])
            going = [i for i in going if answers[i].is_right]
            for i in going:
                answers[i].num_right += 1
            append_tokens([answers[i] for i in going])
            if not going:
                break
        judged = [(answer.draft_state, n, answer.num_right) for answer, n in zip(answers, drafted, strict=True)]
        self._speculation.end_step(judged, alone=not self._filling)
        for answer in answers:
            self._crop_wrong(answer)

    def _crop_wrong(self, answer: ActiveAnswer) -> None:
        """Remove what was drafted and is not right from an answer's row."""
        if answer.handle is not None and answer.num_right < len(answer.drafted):
            self.room.change("crop", answer.handle, answer.length)
        answer.drafted = []

    def _score(self, request: ServedRequest, end: int, num_tokens: int, logits: Tensor) -> None:
        """Note the log-probabilities of the tokens that follow a chunk's, which ends here, by its logits [n, vocab]."""
        following = request.prompt[end - num_tokens + 1 :][:num_tokens].tolist()
        if following:
            request.scored += with_logprobs(logits[: len(following)], following, request.params.prompt_logprobs)

    def _begin_answers(self, firsts: list[ActiveAnswer], logits: Tensor) -> None:
        """Prompts are in their first answers' rows: first tokens by logits [prompts, vocab], and a row for every answer
        that continues."""
        handles = [first.handle for first in firsts]
        for first, handle in zip(firsts, handles):
            self.room.share(first.request, handle, first.request.named_prompt.tolist())
            first.handle, first.filled, first.request.begun = None, False, True
        prompts = [i for i, first in enumerate(firsts) for _ in first.request.answers]
        answers = [answer for first in firsts for answer in first.request.answers]
        self._take(answers, logits if len(answers) == len(firsts) else logits[prompts])
        for first, handle in zip(firsts, handles):
            request = first.request
            if request.unfinished:
                request.unfinished[0].take_row(handle, request.num_prompt)
            else:
                self.room.release(request, handle, request.named_prompt.tolist())

    def _take(self, answers: list[ActiveAnswer], logits: Tensor) -> None:
        """Choose tokens by logits [answers, vocab], and send them; answers whose masks are late keep their logits."""
        masks = [answer.sampler.matcher.mask for answer in answers if answer.sampler.matcher is not None]
        if masks:
            concurrent.futures.wait(masks, max(self._patient_until - time.monotonic(), 0.0))
            late = [i for i, answer in enumerate(answers) if answer.lacks_mask]
            for i in late:
                answers[i].logits = logits[i].clone()
                self._late.append(answers[i])
            there = [i for i in range(len(answers)) if i not in late]
            answers, logits = [answers[i] for i in there], logits[there]
        self._choose(answers, logits)

    def _take_late(self) -> None:
        """Choose tokens whose masks have come."""
        going = [answer for answer in self._late if not answer.finished]
        self._late = [answer for answer in going if answer.lacks_mask]
        there = [answer for answer in going if answer not in self._late]
        if there:
            logits = torch.stack([answer.logits for answer in there])
            for answer in there:
                answer.logits = None
            self._choose(there, logits)

    def _choose(self, answers: list[ActiveAnswer], logits: Tensor) -> None:
        """Choose a token of each answer by logits [answers, vocab], and send it."""
        tokens, reports = choose_tokens([answer.sampler for answer in answers], logits)
        for i, (answer, token, report) in enumerate(zip(answers, tokens, reports, strict=True)):
            if report is not None and isinstance(report, TreeError):
                self._end(answer, None, answer.stopper.flush(), finish_reason="error", error=str(report))
                continue
            text, reason, stop_reason = answer.stopper.add(token)
            more = {"logits": logits[i].clone()} if answer.request.keep_logits else {}
            answer.token = token
            answer.tokens.append(token)
            if answer.draft_state is not None:
                answer.draft_state.add(token)
            if reason is None:
                if answer.sampler.matcher is not None:
                    answer.sampler.matcher.compute()
                answer.send(token, text, report, **more)
            else:
                self._end(answer, token, text, report, finish_reason=reason, stop_reason=stop_reason, **more)

    def _end(self, answer: ActiveAnswer, token: int | None, text: str, report: Choice | None = None, **end) -> None:
        """End an answer: its row goes unless it is its request's own, and the request with its last answer.

        end: the last fields of its last event.
        """
        request = answer.request
        answer.finish()
        if answer.draft_state is not None:
            self._crop_wrong(answer)
        if answer.handle is not None:
            self.room.release(request, answer.handle, [] if "error" in end else answer.row_tokens())
            answer.handle = None
        if not request.unfinished:
            if request in self.room.served:
                self.room.served.remove(request)
            self._on_end(request)
        answer.send(token, text, report, **end)
