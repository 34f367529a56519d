"""Rows of the cache for the answers that are served: given, shared, and taken back where memory runs out.

An answer gets a row when the cache has room for its prompt and SOON more tokens. Where the tokens of a turn don't fit,
kept rows go first, then the least important answers are preempted: their rows are removed, and filled again when there
is room, with the prompt and the tokens that the answer has. Nothing else of an answer changes.
"""

from __future__ import annotations

import bisect
import itertools
import math

from ..errors import TreeError
from .executor import Executor
from .prefixes import Prefixes
from .requests import ActiveAnswer, ServedRequest

SOON = 64  # tokens that every answer with a row should be able to add before memory runs out


class Room:
    """Which answers have rows. On the leader; `steps` is what the next plan begins with, see `Executor.run`.

    max_rows: answers with a row. page: tokens of a block.
    keep_bytes: rows stay when their answers have ended, for prompts that begin alike, while the cache takes at most
        this many bytes on a rank; 0: none stays.
    """

    def __init__(self, executor: Executor, *, max_rows: int, page: int, keep_bytes: int):
        self._executor, self._runner = executor, executor.runner
        self._max_rows, self._page, self._keep_bytes = max_rows, page, keep_bytes
        self._prefixes, self._handles = Prefixes(page), itertools.count()
        self.served: list[ServedRequest] = []
        """Those that were admitted and have not ended, the most important first."""
        self.steps: list[list] = []
        self._spare = math.inf  # tokens of the cache that the next turn leaves free
        self.preemptions = 0
        """Answers that lost their rows, since the start."""

    @property
    def keeps_too_much(self) -> bool:
        """Whether kept rows take more than they may."""
        return len(self._prefixes) > 0 and self._runner.used_bytes > self._keep_bytes

    def filling_and_ready(self) -> tuple[list[tuple[ServedRequest, ActiveAnswer]], ...]:
        """Answers whose rows lack tokens that are known, of the prompt, or also their own after a preemption; and those
        whose rows hold all but their last token."""
        filling, ready = [], []
        for serving, answer in self._held():
            (filling if answer.length < serving.num_known(answer) else ready).append((serving, answer))
        return filling, ready

    def _held(self) -> list[tuple[ServedRequest, ActiveAnswer]]:
        """Answers with rows, the most important first."""
        return [(s, a) for s in self.served for a in s.unfinished if a.handle is not None]

    def admits(self, serving: ServedRequest) -> bool:
        """Give a waiting request a row if there is room, at the cost of less important answers if need be.

        Raises: `TreeError` if there never will be.
        """
        if any(other.priority <= serving.priority for other, _ in self._waiting_for_rows()):
            return False
        if not self._gives_row(serving, serving.answers[0]):
            return False
        bisect.insort(self.served, serving, key=lambda s: s.importance)
        return True

    def resume(self) -> None:
        """Give rows to answers without one, as far as there is room: those that were preempted, and copies."""
        for serving, answer in self._waiting_for_rows():
            if not self._gives_row(serving, answer):
                return

    def _waiting_for_rows(self) -> list[tuple[ServedRequest, ActiveAnswer]]:
        """A prompt that is being filled is one row, whatever the number of its answers."""
        found = [(s, a) for s in self.served for a in s.unfinished if a.handle is None]
        return [(s, a) for s, a in found if s.begun or a is s.unfinished[0]]

    def _gives_row(self, serving: ServedRequest, answer: ActiveAnswer) -> bool:
        """Whether there was room for an answer's row; without a row that it could begin with if it must be so."""
        source = self._beginning(serving, answer)
        return self._gives(serving, answer, source) or (source is not None and self._gives(serving, answer, None))

    def _gives(self, serving: ServedRequest, answer: ActiveAnswer, source: tuple[int, int] | None) -> bool:
        """The same with a source of the row's beginning, see `_beginning`."""
        kept = None if source is None else self._prefixes.kept_length(source[0])
        takes_over = kept is not None and 2 * source[1] >= kept  # little would be lost
        needed = self._soon(serving, answer)
        if takes_over:
            needed -= self._whole(kept)
        elif source is not None:
            needed -= self._full(source[1])
        elif serving.row is not None:
            needed -= self._full(serving.row.shared(serving.prompt))
        if not self._makes_room(serving, needed, None if source is None else source[0]):
            return False
        if serving.row is not None:
            self._continue_own_row(serving, answer)
        elif takes_over:
            answer.handle, answer.length = source
            self._prefixes.forget(answer.handle)
            self.steps.append(["crop", answer.handle, answer.length])
        elif source is not None and serving.begun:
            answer.handle, answer.length = next(self._handles), source[1]
            self.steps += [["fork", source[0], answer.handle], ["crop", answer.handle, answer.length]]
        else:
            answer.handle, answer.length = next(self._handles), 0
            self.steps.append(["add", answer.handle])
        serving.note_cached(answer)
        return True

    def _continue_own_row(self, serving: ServedRequest, answer: ActiveAnswer) -> None:
        row = serving.row
        shared = row.shared(serving.prompt)
        if not self._executor.can_crop(row.handle, shared):  # layers with a window have dropped what it needs
            self.steps += [["remove", row.handle], ["add", row.handle]]
            shared = 0
        elif shared < len(row.tokens):
            self.steps.append(["crop", row.handle, shared])
        del row.tokens[shared:]
        answer.handle, answer.length = row.handle, shared

    def _makes_room(self, serving: ServedRequest, needed: int, spared: int | None) -> bool:
        """Whether rows and memory for a request's row are free, or can be taken from kept rows and from less important
        answers, but not from the spared row; then they are."""
        rows = self._max_rows - serving.num_rows - sum(s.num_rows_held for s in self.served)
        forecast, evicted, preempted = self._forecast(), [], []
        if forecast is not None:
            needed += sum(self._promised(s, a) for s, a in self._held())
        lacks = lambda: forecast is not None and forecast.free_tokens < needed  # noqa: E731
        for handle, _ in self._prefixes.kept:
            if lacks() and handle != spared:
                evicted.append(handle)
                forecast.remove(handle)
        for other, answer in reversed(self._held()):
            takeable = other.priority > serving.priority and other.row is None and answer.handle != spared
            if (lacks() or rows < 0) and takeable:
                preempted.append((other, answer))
                rows += other.num_rows
                needed -= self._promised(other, answer)
                if forecast is not None:
                    forecast.remove(answer.handle)
        if lacks() and not self._held() and spared is None:
            raise TreeError(
                f"request {serving.id} needs {needed:,} tokens of the cache; no other request is served, but "
                f"only {forecast.free_tokens:,} are free: rows that the scheduler did not make are in it"
            )
        if lacks() or rows < 0:
            return False
        for handle in evicted:
            self._evict(handle)
        for other, answer in preempted:
            self._preempt(other, answer)
        return True

    def make_room(self, chunk: int) -> None:
        """Let the tokens of the next turn fit: one more of every answer, up to `chunk` of a row that is filled."""
        if self._runner.free_tokens is None:
            return
        while (spare := self._free() - sum(self._due(*each, chunk) for each in self._held())) < 0:
            if len(self._prefixes):
                self.evict_one()
                continue
            takeable = [(s, a) for s, a in self._held() if s.row is None]
            if not takeable or len(self._held()) == 1:
                raise TreeError("the cache is full of rows that the scheduler did not make")
            self._preempt(*takeable[-1])
        self._spare = spare

    def evict_one(self) -> None:
        """Remove the kept row that was used least recently."""
        self._evict(self._prefixes.kept[0][0])

    def copy_beginnings(self) -> None:
        """Copy rows with the beginning of a prompt whose first chunk is about to be run."""
        if all(answer.length for _, answer in self._held()):
            return
        left = self._runner.chunk_size
        for serving, answer in self.filling_and_ready()[0]:
            found = None if answer.length else self._beginning(serving, answer)
            if found is not None and self._whole(found[1]) - self._full(found[1]) > self._free():
                found = None
            done = answer.length if found is None else found[1]
            chunk = min(serving.num_known(answer) - done, self._runner.chunk_size)
            if chunk > left:
                continue  # perhaps more of it can be copied in a later turn
            left -= chunk
            if found is not None:
                self.steps += [["remove", answer.handle], ["fork", found[0], answer.handle]]
                self.steps.append(["crop", answer.handle, done])
                answer.length = done
                serving.note_cached(answer)

    def filled(self, serving: ServedRequest, handle: int) -> None:
        """A row holds a request's prompt: others may copy it."""
        if self._keep_bytes and serving.row is None:
            self._prefixes.put(handle, serving.prompt)

    def can_pad(self, answers: list[tuple[ServedRequest, ActiveAnswer]], width: int) -> bool:
        """Whether rows may take this many tokens each for one turn, in which they are filled."""
        most = all(a.length + width <= s.num_prompt + s.params.max_tokens for s, a in answers)
        padding = sum(self._whole(a.length + width) - self._whole(s.num_known(a)) for s, a in answers)
        return most and padding <= self._spare

    def widest_step(self, answers: list[tuple[ServedRequest, ActiveAnswer]], most: int) -> int:
        """How many tokens each of these rows may take in the next turn, up to `most`; some are removed again."""
        limits = [limit for _, a in answers if (limit := self._runner.most_at_once(a.length)) is not None]
        widths = range(min([most, *limits]), 1, -1)
        return next((width for width in widths if self._widening(answers, width) <= self._spare), 1)

    def widen_step(self, answers: list[tuple[ServedRequest, ActiveAnswer]], width: int) -> None:
        """They take so many."""
        self._spare -= self._widening(answers, width)

    def _widening(self, answers: list[tuple[ServedRequest, ActiveAnswer]], width: int) -> int:
        """Tokens of the cache that they take beyond those for one token each."""
        return sum(self._whole(a.length + width) - self._whole(a.length + 1) for _, a in answers)

    def release(self, serving: ServedRequest, handle: int, tokens: list[int]) -> None:
        """A request needs a row no more, which holds these tokens: it goes, or is kept for others."""
        if serving.row is not None:
            return
        self._prefixes.forget(handle)
        if not (self._keep_bytes and self._prefixes.keep(handle, tokens)):
            self.steps.append(["remove", handle])

    def _beginning(self, serving: ServedRequest, answer: ActiveAnswer) -> tuple[int, int] | None:
        """(handle, tokens) of a row that holds the beginning of an answer's: another answer's, or found by hash."""
        if serving.row is not None:
            return None
        known, new = serving.num_known(answer), self._new_handles()
        if serving.begun:
            others = [a for a in serving.unfinished if a.handle is not None and a.length >= serving.num_prompt]
            found = next(((a.handle, serving.num_prompt) for a in others if a.handle not in new), None)
            if found is not None and self._executor.can_crop(*found):
                return found
        elif serving.scores:
            return None
        if not self._keep_bytes:
            return None
        if serving.digests is None:
            serving.digests = self._prefixes.digests(serving.prompt)
        found = self._prefixes.find(serving.digests)
        if found is None or found[0] in new:
            return None
        handle, shared = found[0], min(found[1], known if serving.begun else known - 1)
        return (handle, shared) if shared and self._executor.can_crop(handle, shared) else None

    def _new_handles(self) -> set[int]:
        """Of rows that the next plan makes."""
        return {step[-1] for step in self.steps if step[0] in ("add", "fork")}

    def _preempt(self, serving: ServedRequest, answer: ActiveAnswer) -> None:
        self._prefixes.forget(answer.handle)
        self.steps.append(["remove", answer.handle])
        serving.preempt(answer)
        self.preemptions += 1

    def _evict(self, handle: int) -> None:
        self._prefixes.forget(handle)
        self.steps.append(["remove", handle])

    def _forecast(self):
        """Of the cache once the steps have been carried out; None if it grows. See `RowRunner.forecast`."""
        forecast = self._executor.forecast()
        if forecast is not None:
            for name, *arguments in self.steps:
                if name != "end":
                    getattr(forecast, name)(*arguments)
        return forecast

    def _free(self) -> float:
        """Tokens of the cache that are free once the steps have been carried out; infinity if it grows."""
        forecast = self._forecast()
        return math.inf if forecast is None else forecast.free_tokens

    def _soon(self, serving: ServedRequest, answer: ActiveAnswer) -> int:
        """Tokens of the cache that the rows which an answer's stands for will take; they share the prompt's blocks."""
        shared = (serving.num_rows - 1) * self._full(serving.num_prompt)
        return serving.num_rows * self._whole(serving.soon(answer, SOON)) - shared

    def _promised(self, serving: ServedRequest, answer: ActiveAnswer) -> int:
        """Tokens of the cache that an answer with a row is to find free, besides those that it has."""
        return max(self._soon(serving, answer) - self._whole(answer.length), 0)

    def _due(self, serving: ServedRequest, answer: ActiveAnswer, chunk: int) -> int:
        """Tokens of the cache that a row takes in the next turn."""
        known = serving.num_known(answer)
        after = min(answer.length + chunk, known) if answer.length < known else answer.length + 1
        return self._whole(after) - self._whole(answer.length)

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def _full(self, tokens: int) -> int:
        """Of them, those in blocks that are full, which rows can share."""
        return tokens // self._page * self._page
