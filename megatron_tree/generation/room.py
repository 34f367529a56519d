"""Rows of the cache for the answers that are served: given, shared, and taken back where memory runs out.

An answer gets a row when the cache has room for its prompt and SOON more tokens. Where the tokens of a turn don't fit,
kept rows go first, then the latest answers are preempted: their rows are removed, and filled again when there
is room, with the prompt and the tokens that the answer has. Nothing else of an answer changes.
"""

from __future__ import annotations

import itertools
import math

from ..errors import TreeError
from .executor import Executor
from .plans import Add, Crop, End, Fork, Operation, Remove, apply
from .prefixes import Prefixes
from .requests import ActiveAnswer, ServedRequest

SOON = 64  # tokens that every answer with a row should be able to add before memory runs out


class Room:
    """Which answers have rows. On the leader; `operations` is what the next plan begins with.

    max_rows: answers with a row.
    keep_bytes: rows stay when their answers have ended, for prompts that begin alike, while the cache takes at most
        this many bytes on a rank; 0: none stays.
    """

    def __init__(self, executor: Executor, *, max_rows: int, keep_bytes: int):
        self._executor, self._runner = executor, executor.runner
        self._max_rows, self._page_size, self._keep_bytes = max_rows, self._runner.page_size, keep_bytes
        self._prefixes, self._handles = Prefixes(self._page_size), itertools.count()
        self.served: list[ServedRequest] = []
        """Those that were admitted and have not ended, in the order in which they came."""
        self.operations: list[Operation] = []
        self._spare = math.inf  # tokens of the cache that the next turn leaves free
        self.preemptions = 0
        """Answers that lost their rows, since the start."""

    @property
    def keeps_too_much(self) -> bool:
        """Whether kept rows take more than they may."""
        return len(self._prefixes) > 0 and self._runner.used_bytes > self._keep_bytes

    def answers_with_rows(self) -> list[ActiveAnswer]:
        """In the order in which their requests came."""
        return [a for request in self.served for a in request.unfinished if a.handle is not None]

    @property
    def rows_in_use(self) -> int:
        """Of max_rows; a prompt that is being filled counts for all answers to it."""
        requests = [answer.request for answer in self.answers_with_rows()]
        return sum([1 if request.begun else len(request.unfinished) for request in requests])

    def _answers_without(self) -> list[ActiveAnswer]:
        """Those that wait for a row; a prompt that is being filled is one row, whatever the number of its answers."""
        waiting = [a for request in self.served for a in request.unfinished if a.handle is None]
        return [a for a in waiting if a.request.begun or a is a.request.unfinished[0]]

    def admits(self, request: ServedRequest) -> bool:
        """Give a waiting request a row if there is room, and nobody who came before needs it.

        Raises: `TreeError` if there never will be.
        """
        if self._answers_without() or not self._give_row(request.unfinished[0]):
            return False
        self.served.append(request)
        return True

    def resume(self) -> None:
        """Give rows to answers without one, as far as there is room: those that were preempted, and copies."""
        for answer in self._answers_without():
            if not self._give_row(answer):
                return

    def _give_row(self, answer: ActiveAnswer) -> bool:
        """Whether there was room for an answer's row; without a row that it could begin with if it must be so."""
        source = self._beginning(answer)
        return self._give(answer, source) or (source is not None and self._give(answer, None))

    def _give(self, answer: ActiveAnswer, source: tuple[int, int] | None) -> bool:
        """The same with a source of the row's beginning, see `_beginning`."""
        request = answer.request
        kept = None if source is None else self._prefixes.kept_length(source[0])
        takes_over = kept is not None and 2 * source[1] >= kept  # little would be lost
        needed = self._soon(answer)
        if takes_over:
            needed -= self._whole_pages(kept)
        elif source is not None:
            needed -= self._full_pages(source[1])
        elif request.row is not None:
            needed -= self._full_pages(request.row.shared(request.named_prompt))
        if not self._make_room_for(request, needed, None if source is None else source[0]):
            return False
        if request.row is not None:
            self._continue_kept_row(answer)
        elif takes_over:
            self._prefixes.forget(source[0])
            self.operations.append(Crop(*source))
            answer.take_row(*source)
        else:
            handle, length = next(self._handles), 0
            if source is not None and request.begun:
                length = source[1]
                self.operations += [Fork(source[0], handle), Crop(handle, length)]
            else:
                self.operations.append(Add(handle))
            answer.take_row(handle, length)
        return True

    def _continue_kept_row(self, answer: ActiveAnswer) -> None:
        row = answer.request.row
        shared = row.shared(answer.request.named_prompt)
        if not self._executor.can_crop(row.handle, shared):  # layers with a window have dropped what it needs
            self.operations += [Remove(row.handle), Add(row.handle)]
            shared = 0
        elif shared < len(row.tokens):
            self.operations.append(Crop(row.handle, shared))
        del row.tokens[shared:]
        answer.take_row(row.handle, shared)

    def _make_room_for(self, request: ServedRequest, needed: int, spared: int | None) -> bool:
        """Whether rows and memory for a request's row are free, or can be taken from kept rows, but not from the spared
        one; then they are."""
        if request.num_rows + self.rows_in_use > self._max_rows:
            return False
        forecast, evicted = self._forecast(), []
        if forecast is None:
            return True
        holders = self.answers_with_rows()
        needed += sum(map(self._promised, holders))
        for handle, _ in self._prefixes.kept:
            if forecast.free_tokens < needed and handle != spared:
                evicted.append(handle)
                forecast.remove(handle)
        if forecast.free_tokens < needed:
            if not holders and spared is None:
                raise TreeError(
                    f"request {request.id} needs {needed:,} tokens of the cache; no other request is served, but "
                    f"only {forecast.free_tokens:,} are free: rows that the scheduler did not make are in it"
                )
            return False
        for handle in evicted:
            self._remove(handle)
        return True

    def make_room(self, chunk: int) -> None:
        """Let the tokens of the next turn fit: one more of every answer, up to `chunk` of a row that is filled."""
        if self._runner.free_tokens is None:
            return
        while (spare := self._free() - self._due(chunk)) < 0:
            if len(self._prefixes):
                self.evict_one()
                continue
            holders = self.answers_with_rows()
            may_go = [answer for answer in holders if answer.request.row is None]
            if not may_go or len(holders) == 1:
                raise TreeError("the cache is full of rows that the scheduler did not make")
            self._preempt(may_go[-1])
        self._spare = spare

    def evict_one(self) -> None:
        """Remove the kept row that was used least recently."""
        self._remove(self._prefixes.kept[0][0])

    def copy_beginnings(self, to_fill: list[ActiveAnswer]) -> None:
        """Copy rows with the beginning of a prompt whose first chunk is about to be run, in this order."""
        left = self._runner.chunk_size
        for answer in to_fill:
            source = None if answer.length else self._beginning(answer)
            if source is not None and self._whole_pages(source[1]) - self._full_pages(source[1]) > self._free():
                source = None
            done = answer.length if source is None else source[1]
            chunk = min(answer.num_known - done, self._runner.chunk_size)
            if chunk > left:
                continue  # perhaps more of it can be copied in a later turn
            left -= chunk
            if source is not None:
                self.operations += [Remove(answer.handle), Fork(source[0], answer.handle), Crop(answer.handle, done)]
                answer.take_row(answer.handle, done)

    def hold_prompt(self, request: ServedRequest, handle: int) -> None:
        """A row holds a request's prompt: others may copy it."""
        if self._keep_bytes and request.row is None:
            self._prefixes.put(handle, request.named_prompt, request.salt)

    def can_pad(self, lengths: list[tuple[int, int]], width: int) -> bool:
        """Whether rows may take this many tokens each for one turn, in which they go from one length to another."""
        size = self._page_size
        return size * sum([-(-(a + width) // size) - -(-b // size) for a, b in lengths]) <= self._spare

    def widest_step(self, answers: list[ActiveAnswer], most: int) -> int:
        """How many tokens each of these rows may take in the next turn, up to `most`; some are removed again."""
        limits = [limit for a in answers if (limit := self._runner.most_at_once(a.length)) is not None]
        widths = range(min([most, *limits]), 1, -1)
        return next((width for width in widths if self._widening(answers, width) <= self._spare), 1)

    def widen_step(self, answers: list[ActiveAnswer], width: int) -> None:
        self._spare -= self._widening(answers, width)

    def _widening(self, answers: list[ActiveAnswer], width: int) -> int:
        """Tokens of the cache that they take beyond those for one token each."""
        return sum(self._whole_pages(a.length + width) - self._whole_pages(a.length + 1) for a in answers)

    def release(self, request: ServedRequest, handle: int, tokens: list[int]) -> None:
        """A request needs a row no more, which holds these tokens: it goes, or is kept for others."""
        if request.row is not None:
            return
        self._prefixes.forget(handle)
        if not (self._keep_bytes and self._prefixes.keep(handle, tokens, request.salt)):
            self.operations.append(Remove(handle))

    def _beginning(self, answer: ActiveAnswer) -> tuple[int, int] | None:
        """(handle, tokens) of a row that holds the beginning of an answer's: another answer's, or found by its keys."""
        request = answer.request
        if request.row is not None or not (request.begun or self._keep_bytes) or (request.scores and not request.begun):
            return None
        new = {operation[-1] for operation in self.operations if isinstance(operation, Add | Fork)}
        if request.begun:
            others = [a for a in request.unfinished if a.handle is not None and a.length >= request.num_prompt]
            source = next(((a.handle, request.num_prompt) for a in others if a.handle not in new), None)
            if source is not None and self._executor.can_crop(*source):
                return source
        if not self._keep_bytes:
            return None
        if request.prefix_keys is None:
            request.prefix_keys = self._prefixes.keys(request.named_prompt, request.salt)
        source = self._prefixes.find(request.prefix_keys)
        if source is None or source[0] in new:
            return None
        handle, shared = source[0], min(source[1], answer.num_known if request.begun else answer.num_known - 1)
        return (handle, shared) if shared and self._executor.can_crop(handle, shared) else None

    def _preempt(self, answer: ActiveAnswer) -> None:
        self._remove(answer.handle)
        answer.lose_row()
        self.preemptions += 1

    def _remove(self, handle: int) -> None:
        self._prefixes.forget(handle)
        self.operations.append(Remove(handle))

    def _forecast(self):
        """Of the cache once the operations have been carried out; None if it grows. See `RowRunner.forecast`."""
        forecast = self._executor.forecast()
        if forecast is not None:
            for operation in self.operations:
                if not isinstance(operation, End):
                    apply(operation, forecast)
        return forecast

    def _free(self) -> float:
        """Tokens of the cache that are free once they have been carried out; infinity if it grows."""
        forecast = self._forecast()
        return math.inf if forecast is None else forecast.free_tokens

    def _soon(self, answer: ActiveAnswer) -> int:
        """Tokens of the cache that the rows which an answer's stands for will take; they share the prompt's pages."""
        request = answer.request
        shared = (request.num_rows - 1) * self._full_pages(request.num_prompt)
        return request.num_rows * self._whole_pages(answer.length_after(SOON)) - shared

    def _promised(self, answer: ActiveAnswer) -> int:
        """Tokens of the cache that an answer with a row is to find free, besides those that it has."""
        return max(self._soon(answer) - self._whole_pages(answer.length), 0)

    def _due(self, chunk: int) -> int:
        """Tokens of the cache that the rows take in the next turn."""
        pages, size = 0, self._page_size
        for answer in self.answers_with_rows():
            before = answer.length
            after = before + (answer.logits is None) if answer.filled else min(before + chunk, answer.num_known)
            pages += -(-after // size) - -(-before // size)
        return pages * size

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size

    def _full_pages(self, tokens: int) -> int:
        """Of them, those in full pages, which rows can share."""
        return tokens // self._page_size * self._page_size
