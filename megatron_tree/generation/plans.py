"""Plans of continuous batching: how the leader makes them and chooses the tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..comm import group_size
from ..errors import TreeError
from .executor import Executor
from .requests import ActiveAnswer, ServedRequest
from .room import Room
from .sampling import Choice, choose_tokens, with_logprobs
from .speculation import Speculation

SHORT = 64  # prompts of up to this many tokens are run together,
TOGETHER = 1024  # up to this many tokens, or to a chunk: it is more, or answers wait meanwhile
LONGER = 256  # longer ones also, up to a chunk, on one rank: several would share the tokens of each
PADDED = 2  # times so many tokens at most with the padding that the cache takes for a turn
SCORED_CHUNK = 128  # tokens of a prompt whose logits are all kept at the same time


class Planner:
    """The requests that are served. Only the thread that runs the loop uses it.

    prefill_first: no answer is continued while a prompt is prefilled, so that all answers advance together.
    max_rows, page, keep_bytes: see `Room`.
    speculation: decides which tokens are proposed; None: none are.
    on_end: called with a request when its last answer has ended, before its last event.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_rows: int,
        page: int,
        prefill_first: bool,
        keep_bytes: int,
        speculation: Speculation | None,
        on_end: Callable[[ServedRequest], None],
    ):
        self._runner, self._prefill_first, self._on_end = executor.runner, prefill_first, on_end
        self._longest = SHORT if group_size(executor.runner.token_group) > 1 else LONGER
        self.room = Room(executor, max_rows=max_rows, page=page, keep_bytes=keep_bytes)
        self._speculation = speculation
        self._running: list[tuple[ServedRequest, ActiveAnswer]] = []  # whose logits the current plan returns
        self._filled: list[tuple[ServedRequest, ActiveAnswer, list[int]]] = []  # and the chunks

    @property
    def has_work(self) -> bool:
        return bool(self.room.steps or self.room.served or self.room.keeps_too_much)

    def cancel(self, serving: ServedRequest) -> None:
        """End a request that waits or is served."""
        for answer in serving.unfinished:
            self._end(serving, answer, None, answer.stopper.flush(), "cancelled")

    def plan(self) -> list[list]:
        """The steps of this turn, for `Executor.run`: a token for every active row, and a chunk of a prompt.

        Several prompts get a chunk if these have at most runner.chunk_size tokens together.
        """
        room, size = self.room, self._runner.chunk_size
        if room.keeps_too_much:
            room.evict_one()
        room.copy_beginnings()  # before these rows grow
        room.make_room(size)
        steps, room.steps = room.steps, []
        filling, ready = room.filling_and_ready()
        self._running = [] if self._prefill_first and filling else ready
        if self._running:
            self._propose()
            answers = [answer for _, answer in self._running]
            steps.append(["step", [a.handle for a in answers], [[a.token, *a.proposed] for a in answers]])
            for serving, answer in self._running:
                answer.hold(serving.row)
        self._filled = []
        together = self._short_ones(filling, size if self._running else max(size, TOGETHER))
        left = size
        if together:
            known = [serving.known(answer) for serving, answer in together]
            steps.append(["prefill_rows", [answer.handle for _, answer in together], known])
            self._filled += [(*each, tokens) for each, tokens in zip(together, known, strict=True)]
            left -= sum(map(len, known))
        for serving, answer in filling:
            if (serving, answer) in together:
                continue
            # chunks don't depend on other requests, so that logits don't
            scored = serving.scores and not serving.begun
            chunk = serving.known(answer)[: min(size, SCORED_CHUNK) if scored else size]
            if len(chunk) <= left:
                steps.append(["score" if scored else "prefill", answer.handle, chunk, serving.num_known(answer)])
                self._filled.append((serving, answer, chunk))
                left -= len(chunk)
        return steps

    def _short_ones(self, filling: list[tuple[ServedRequest, ActiveAnswer]], most: int) -> list:
        """Those to run in one pass, short ones of at most this many tokens; none if there is only one."""
        found, longest, total = [], 0, 0
        for serving, answer in filling:
            left = serving.num_known(answer) - answer.length
            if serving.row is not None or serving.scores or left > self._longest:
                continue
            longer, limit = max(longest, left), most if left <= SHORT else self._runner.chunk_size
            fits = total + left <= limit and longer * (len(found) + 1) <= PADDED * limit
            if fits and self.room.can_pad([*found, (serving, answer)], longer):
                found.append((serving, answer))
                longest, total = longer, total + left
        return found if len(found) > 1 else []

    def _propose(self) -> None:
        """Find tokens that may be the next ones of the answers that are about to make a step."""
        if (speculation := self._speculation) is None:
            return
        for serving, answer in self._running:
            answer.guess = answer.guess or speculation.guess(serving.prompt, answer.tokens, serving.params.max_tokens)
        widest = self.room.widest_step(self._running, 1 + speculation.num_tokens)
        found = speculation.propose([answer.guess for _, answer in self._running], widest)
        for (_, answer), proposed in zip(self._running, found, strict=True):
            answer.proposed, answer.num_right = proposed, 0
        width = 1 + max(map(len, found))
        self.room.widen_step(self._running, width)
        speculation.begin(len(found) * width)

    def digest(self, logits: list[Tensor]) -> None:
        """Choose tokens from the logits of a plan, send events, and record what the next plan has to do first."""
        logits = iter(logits)
        if self._running:
            self._digest_step(next(logits))
        for (serving, answer, chunk), last in zip(self._filled, logits):
            answer.length += len(chunk)
            if serving.row is not None:
                serving.row.tokens += chunk
            if serving.begun:
                continue
            if serving.scores:
                self._score(serving, answer.length, len(chunk), last)
                last = last[-1]
            if answer.length == serving.num_prompt:
                self._begin(serving, answer, last)

    def _digest_step(self, logits: Tensor) -> None:
        """Choose every answer's next token by logits [rows, n, vocab], and more while they are those proposed."""
        proposed, going = [len(answer.proposed) for _, answer in self._running], list(range(len(logits)))
        for place in range(logits.shape[1]):
            rows = logits[:, place] if len(going) == len(logits) else logits[going, place]
            choices = choose_tokens([self._running[i][1].sampler for i in going], rows)
            for i, choice in zip(going, choices, strict=True):
                self._take(*self._running[i], choice)
            going = [i for i in going if self._running[i][1].is_right]
            for serving, answer in map(self._running.__getitem__, going):
                answer.num_right += 1
                answer.hold(serving.row)
            if not going:
                break
        if self._speculation is not None:
            judged = [(a.guess, n, a.num_right) for (_, a), n in zip(self._running, proposed, strict=True)]
            self._speculation.end(judged, alone=not self._filled)
            for _, answer in self._running:
                self._trim(answer)

    def _trim(self, answer: ActiveAnswer) -> None:
        """Remove what was proposed and is not right from an answer's row."""
        if answer.handle is not None and answer.num_right < len(answer.proposed):
            self.room.steps.append(["crop", answer.handle, answer.length])
        answer.proposed = []

    def _score(self, serving: ServedRequest, end: int, num_tokens: int, logits: Tensor) -> None:
        """Note the log-probabilities of the tokens that follow a chunk's, which ends here, by its logits [n, vocab]."""
        following = serving.prompt[end - num_tokens + 1 :][:num_tokens].tolist()
        if following:
            serving.scored += with_logprobs(logits[: len(following)], following, serving.params.prompt_logprobs)

    def _begin(self, serving: ServedRequest, first: ActiveAnswer, logits: Tensor) -> None:
        """The prompt is in the first answer's row: first tokens, and a row for every answer that continues."""
        choices = choose_tokens([a.sampler for a in serving.answers], logits.expand(len(serving.answers), -1))
        handle, first.handle = first.handle, None
        self.room.filled(serving, handle)
        serving.begun = True
        for answer, choice in zip(serving.answers, choices):
            self._take(serving, answer, choice)
        if serving.unfinished:
            heir = serving.unfinished[0]
            heir.handle, heir.length = handle, serving.num_prompt
        else:
            self.room.release(serving, handle, serving.prompt.tolist())

    def _take(self, serving: ServedRequest, answer: ActiveAnswer, choice: Choice | TreeError) -> None:
        if isinstance(choice, TreeError):
            self._end(serving, answer, None, answer.stopper.flush(), "error", error=str(choice))
            return
        piece = answer.stopper.add(choice.token)
        answer.token = choice.token
        answer.tokens.append(choice.token)
        if answer.guess is not None:
            answer.guess.add(choice.token)
        if piece.finish_reason is None:
            serving.send(answer, choice, piece.text, None)
        else:
            self._end(serving, answer, choice, piece.text, piece.finish_reason, stop_reason=piece.stop_reason)

    def _end(
        self, serving: ServedRequest, answer: ActiveAnswer, choice: Choice | None, text: str, reason: str, **more
    ) -> None:
        """End an answer: its row goes with the next plan unless it is kept, and the request with its last answer."""
        serving.finish(answer)
        if answer.guess is not None:
            self._speculation.forget(answer.guess)
            self._trim(answer)
        if serving.row is not None:
            self.room.steps.append(["end", serving.row.handle, answer.token, reason, more.get("error")])
        if answer.handle is not None:
            self.room.release(serving, answer.handle, [] if reason == "error" else serving.held(answer))
            answer.handle = None
        if not serving.unfinished:
            if serving in self.room.served:
                self.room.served.remove(serving)
            self._on_end(serving)
        serving.send(answer, choice, text, reason, **more)
