"""Plans of continuous batching: how the leader makes them and chooses the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from ..errors import TreeError
from .executor import Executor
from .prefixes import Prefixes
from .requests import ActiveAnswer, ServedRequest
from .sampling import Choice, choose_tokens, with_logprobs

SHORT = 64  # prompts of up to this many tokens are run together,
TOGETHER = 1024  # up to this many tokens with their padding, or to a chunk where answers wait meanwhile
SCORED_CHUNK = 128  # tokens of a prompt whose logits are all kept at the same time


class Planner:
    """The requests that are served. Only the thread that runs the loop uses it.

    prefill_first: no answer is continued while a prompt is prefilled, so that all answers advance together.
    keep_bytes: rows stay when their requests have ended, for prompts that begin alike, while the cache takes at most
        this many bytes on a rank; 0: none stays.
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
        on_end: Callable[[ServedRequest], None],
    ):
        self._executor, self._runner, self._prefill_first = executor, executor.runner, prefill_first
        self._max_rows, self._page, self._on_end = max_rows, page, on_end
        self._keep_bytes, self._prefixes = keep_bytes, Prefixes(page)
        self.served: list[ServedRequest] = []
        self._handles = itertools.count()
        self._steps: list[list] = []  # what the next plan begins with
        self._running: list[tuple[ServedRequest, ActiveAnswer]] = []  # whose logits the current plan returns
        self._prefilled: list[tuple[ServedRequest, int]] = []  # and the chunks, in tokens

    @property
    def has_work(self) -> bool:
        return bool(self._steps or self.served or self._keeps_too_much)

    @property
    def _keeps_too_much(self) -> bool:
        return len(self._prefixes) > 0 and self._runner.used_bytes > self._keep_bytes

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
        if free - promised < needed and len(self._prefixes):
            own = self._reusable(serving)
            held = 0 if own is None else -(-self._prefixes.kept_length(own[0]) // self._page) * self._page
            if free - promised + held < needed:
                self._steps.append(["remove", self._prefixes.evict()])
                return False
            needed -= held  # it takes that row's place
        if free - promised < needed and not self.served and not self._steps:
            raise TreeError(
                f"request {serving.id} needs {needed:,} tokens of the cache; no other request is served, but "
                f"only {free:,} are free: rows that the scheduler did not make are in it"
            )
        return free - promised >= needed

    def admit(self, serving: ServedRequest) -> None:
        """Give a request's prompt a row: a new one, or its own."""
        self.served.append(serving)
        if (row := serving.row) is None:
            if (found := self._reusable(serving)) is not None:
                serving.handle, serving.num_prefilled = found
                serving.num_cached = found[1]
                self._prefixes.forget(serving.handle)
                self._steps.append(["crop", serving.handle, serving.num_prefilled])
                return
            serving.handle = next(self._handles)
            self._steps.append(["add", serving.handle])
            return
        shared = row.shared(serving.prompt)
        if not self._executor.can_crop(row.handle, shared):  # layers with a window have dropped what it needs
            self._steps += [["remove", row.handle], ["add", row.handle]]
            shared = 0
        elif shared < len(row.tokens):
            self._steps.append(["crop", row.handle, shared])
        del row.tokens[shared:]
        serving.handle, serving.num_prefilled, serving.num_cached = row.handle, shared, shared

    def _shared(self, serving: ServedRequest) -> tuple[int, int] | None:
        """(handle, tokens) of a row that holds the beginning of a prompt: all but its last token at most."""
        if not self._keep_bytes or serving.row is not None or serving.params.prompt_logprobs is not None:
            return None
        if serving.digests is None:
            serving.digests = self._prefixes.digests(serving.prompt)
        found = self._prefixes.find(serving.digests)
        if found is None:
            return None
        handle, shared = found[0], min(found[1], len(serving.prompt) - 1)
        return (handle, shared) if shared and self._executor.can_crop(handle, shared) else None

    def _reusable(self, serving: ServedRequest) -> tuple[int, int] | None:
        """The same, for a kept row of which little would be lost: the request takes it over."""
        found = self._shared(serving)
        kept = None if found is None else self._prefixes.kept_length(found[0])
        return None if kept is None or 2 * found[1] < kept else found

    def _reuse(self) -> list[list]:
        """Steps that copy rows with the beginning of a prompt whose first chunk is about to be run."""
        steps, left = [], self._runner.chunk_size
        for serving in self.served:
            if serving.handle is None:
                continue
            found = None if serving.num_prefilled else self._shared(serving)
            done = serving.num_prefilled if found is None else found[1]
            chunk = min(len(serving.prompt) - done, self._runner.chunk_size)
            if chunk > left:
                continue  # perhaps more of it can be copied in a later turn
            left -= chunk
            if found is not None:
                steps += [["remove", serving.handle], ["fork", found[0], serving.handle]]
                steps.append(["crop", serving.handle, done])
                serving.num_prefilled = serving.num_cached = done
        return steps

    def cancel(self, serving: ServedRequest) -> None:
        """End a request that waits or is served."""
        for answer in serving.unfinished:
            self._end(serving, answer, None, answer.stopper.flush(), "cancelled")

    def plan(self) -> list[list]:
        """The steps of this turn, for `Executor.run`: a token for every active row, and a chunk of a prompt.

        Several prompts get a chunk if these have at most runner.chunk_size tokens together.
        """
        if self._keeps_too_much:
            self._steps.append(["remove", self._prefixes.evict()])
        steps, self._steps = self._steps, []
        steps += self._reuse()  # before these rows grow
        self._running, self._prefilled = [], []
        if not (self._prefill_first and any(serving.handle is not None for serving in self.served)):
            self._running = [(s, a) for s in self.served for a in s.unfinished if a.handle is not None]
        if self._running:
            answers = [answer for _, answer in self._running]
            steps.append(["step", [a.handle for a in answers], [a.token for a in answers]])
            for serving, answer in self._running:
                answer.length += 1
                if serving.row is not None:
                    serving.row.tokens.append(answer.token)
                answer.token = None
        size = left = self._runner.chunk_size
        together = self._short_prompts(min(size, TOGETHER) if self._running else TOGETHER)
        if together:
            prompts = [serving.prompt[serving.num_prefilled :] for serving in together]
            steps.append(["prefill_rows", [s.handle for s in together], [prompt.tolist() for prompt in prompts]])
            self._prefilled += [(serving, len(prompt)) for serving, prompt in zip(together, prompts, strict=True)]
            left -= len(together) * max(map(len, prompts))
        for serving in self.served:
            if serving.handle is None or serving in together:
                continue
            # chunks don't depend on other requests, so that logits don't
            scored = serving.params.prompt_logprobs is not None
            chunk = serving.prompt[serving.num_prefilled :][: min(size, SCORED_CHUNK) if scored else size]
            if len(chunk) <= left:
                steps.append(["score" if scored else "prefill", serving.handle, chunk.tolist(), len(serving.prompt)])
                self._prefilled.append((serving, len(chunk)))
                left -= len(chunk)
        return steps

    def _short_prompts(self, most: int) -> list[ServedRequest]:
        """Prompts to run in one pass, padded to at most this many tokens together; none if there is only one."""
        found, longest = [], 0
        for serving in self.served:
            if serving.handle is None or serving.row is not None or serving.params.prompt_logprobs is not None:
                continue
            left = len(serving.prompt) - serving.num_prefilled
            if left > SHORT:
                continue
            longer = max(longest, left)
            # the padding needs no more room than its answer will
            room = all(longer <= n + s.params.max_tokens for s, n in [*found, (serving, left)])
            if room and longer * (len(found) + 1) <= most:
                found.append((serving, left))
                longest = longer
        return [serving for serving, _ in found] if len(found) > 1 else []

    def digest(self, logits: list[Tensor]) -> None:
        """Choose tokens from the logits of a plan, send events, and record what the next plan has to do first."""
        logits = iter(logits)
        if self._running:
            rows = next(logits)
            choices = choose_tokens([answer.sampler for _, answer in self._running], rows)
            for (serving, answer), choice in zip(self._running, choices):
                self._take(serving, answer, choice)
        for (serving, num_tokens), last in zip(self._prefilled, logits):
            if serving.row is not None:
                serving.row.tokens += serving.prompt[serving.num_prefilled :][:num_tokens].tolist()
            serving.num_prefilled += num_tokens
            if serving.params.prompt_logprobs is not None:
                self._score(serving, num_tokens, last)
                last = last[-1]
            if serving.num_prefilled == len(serving.prompt):
                self._begin(serving, last)

    def _score(self, serving: ServedRequest, num_tokens: int, logits: Tensor) -> None:
        """Note the log-probabilities of the tokens that follow a chunk's, by its logits [n, vocab]."""
        following = serving.prompt[serving.num_prefilled - num_tokens + 1 :][:num_tokens].tolist()
        if following:
            serving.scored += with_logprobs(logits[: len(following)], following, serving.params.prompt_logprobs)

    def _begin(self, serving: ServedRequest, logits: Tensor) -> None:
        """The prompt is in the cache: first tokens, and a row for every answer that continues."""
        choices = choose_tokens([a.sampler for a in serving.answers], logits.expand(len(serving.answers), -1))
        going = [a for a, c in zip(serving.answers, choices) if not isinstance(c, TreeError)]
        for answer, choice in zip(serving.answers, choices):
            self._take(serving, answer, choice)
        going = [answer for answer in going if not answer.finished]
        handle, serving.handle = serving.handle, None
        if self._keep_bytes and serving.row is None:
            self._prefixes.put(handle, serving.prompt)
        for answer in going:
            answer.length, answer.forked = len(serving.prompt), answer is not going[0]
            answer.handle = next(self._handles) if answer.forked else handle
            if answer.forked:
                self._steps.append(["fork", handle, answer.handle])
        if not going:
            self._remove(serving, handle, serving.prompt.tolist())

    def _take(self, serving: ServedRequest, answer: ActiveAnswer, choice: Choice | TreeError) -> None:
        if isinstance(choice, TreeError):
            self._end(serving, answer, None, answer.stopper.flush(), "error", error=str(choice))
            return
        piece = answer.stopper.add(choice.token)
        answer.token = choice.token
        answer.tokens.append(choice.token)
        if piece.finish_reason is None:
            serving.send(answer, choice, piece.text, None)
        else:
            self._end(serving, answer, choice, piece.text, piece.finish_reason, stop_reason=piece.stop_reason)

    def _end(
        self, serving: ServedRequest, answer: ActiveAnswer, choice: Choice | None, text: str, reason: str, **more
    ) -> None:
        """End an answer: its row goes with the next plan unless it is kept, and the request with its last answer."""
        answer.finished = True
        if serving.row is not None:
            self._steps.append(["end", serving.row.handle, answer.token, reason, more.get("error")])
        if answer.handle is not None:
            self._remove(serving, answer.handle, [] if reason == "error" else answer.row_tokens(serving.prompt))
            answer.handle = None
        if not serving.unfinished:
            if serving.handle is not None and serving.num_prefilled < len(serving.prompt):
                self._remove(serving, serving.handle, serving.prompt[: serving.num_prefilled].tolist())
                serving.handle = None
            if serving in self.served:
                self.served.remove(serving)
            self._on_end(serving)
        serving.send(answer, choice, text, reason, **more)

    def _remove(self, serving: ServedRequest, handle: int, tokens: list[int]) -> None:
        """A request needs a row no more, which holds these tokens: it goes, or is kept for others."""
        if serving.row is not None:
            return
        self._prefixes.forget(handle)
        if not (self._keep_bytes and self._prefixes.keep(handle, tokens)):
            self._steps.append(["remove", handle])
