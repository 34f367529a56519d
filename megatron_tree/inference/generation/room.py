"""Rows of the cache for the answers that are served: given, shared, and taken back where memory runs out.

An answer gets a row when the cache has room for its prompt and SOON more tokens. Its row begins with pages that are
shared already, and shares its own. Where the tokens of a turn don't fit, shared pages that no row has are evicted;
where that is not enough, the latest answers are preempted: their rows are removed, and filled again when there is room,
with the prompt and the tokens that the answer has. Nothing else of an answer changes.
"""

from __future__ import annotations

import itertools
import math

from ...core.cache.prefixes import page_keys
from ...core.errors import TreeError
from .executor import Executor, Operation, runs_of_numbers
from .requests import ActiveAnswer, ServedRequest

SOON = 64  # tokens that every answer with a row should be able to add before memory runs out


class Room:
    """Which answers have rows. On the leader, which changes rows at once; `take_changes` is what the others have to do.

    max_rows: answers with a row.
    keep_bytes: shared pages stay when their rows have gone, for prompts with the same prefix, while the cache takes at
        most this many bytes on a rank; 0: none are shared.
    """

    def __init__(self, executor: Executor, *, max_rows: int, keep_bytes: int):
        self._executor, self._runner, self._prefixes = executor, executor.runner, executor.book.prefixes
        self._max_rows, self._page_size, self._keep_bytes = max_rows, self._runner.page_size, keep_bytes
        self._handles = itertools.count()
        self.served: list[ServedRequest] = []
        """Those that were admitted and have not ended, in the order in which they came."""
        self.changes: list[Operation] = []
        """What the others have to do before the next passes."""
        self._due = 0  # tokens of the cache that the next turn takes
        self.preemptions = 0
        """Answers that lost their rows, since the start."""

    def change(self, *operation) -> None:
        """Carry out an operation on rows here, and in the next turn elsewhere."""
        self._executor.change([operation])
        self.changes.append(operation)

    def take_changes(self) -> list[Operation]:
        """What the others have to do, once."""
        changes, self.changes = self.changes, []
        return changes

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
        """Whether there was room for an answer's row: it is a copy of another answer's to the same prompt, the one that
        its request names, or a new one that begins with shared pages."""
        request, held, pages = answer.request, 0, []
        source = next((a.handle for a in request.unfinished if self._can_copy(a)), None) if request.begun else None
        if source is not None:
            held = request.num_prompt
        elif request.row is not None:
            held = request.row.shared(request.named_prompt)
        else:
            pages = self._find(answer)
            held = self._page_size * sum(page not in self._prefixes.unused for page in pages)
        if not self._has_room_for(request, self._soon(answer) - self._full_pages(held)):
            return False
        if request.row is not None:
            self._continue_kept_row(answer)
        elif source is not None:
            answer.take_row(next(self._handles), request.num_prompt)
            self.change("fork", source, answer.handle)
            self.change("crop", answer.handle, request.num_prompt)
        else:
            answer.take_row(next(self._handles))
            self.change("add", answer.handle)
            self._begin(answer, pages)
        return True

    def _can_copy(self, answer: ActiveAnswer) -> bool:
        """Whether its row holds the prompt, and a copy can go back to that."""
        num_prompt = answer.request.num_prompt
        has_prompt = answer.handle is not None and answer.length >= num_prompt
        return has_prompt and self._executor.can_crop(answer.handle, num_prompt)

    def _continue_kept_row(self, answer: ActiveAnswer) -> None:
        row = answer.request.row
        shared = row.shared(answer.request.named_prompt)
        if not self._executor.can_crop(row.handle, shared):  # layers with a window have dropped what it needs
            shared = 0
        if shared < len(row.tokens):
            self.change("crop", row.handle, shared)
        del row.tokens[shared:]
        answer.take_row(row.handle, shared)

    def _has_room_for(self, request: ServedRequest, needed: int) -> bool:
        """Whether rows, and memory for a request's row, are free."""
        if request.num_rows + self.rows_in_use > self._max_rows:
            return False
        if self._free == math.inf:
            return True
        holders = self.answers_with_rows()
        if self._free - sum(map(self._promised, holders)) >= needed:
            return True
        if not holders:
            raise TreeError(
                f"request {request.id} needs {needed:,} tokens of the cache; no other request is served, but "
                f"only {self._free:,} are free: rows that the scheduler did not make are in it"
            )
        return False

    def make_room(self, chunk: int) -> None:
        """Let the tokens of the next turn fit: one more of every answer, up to `chunk` of a row that is filled."""
        self._evict_beyond_budget()
        if self._free == math.inf:
            return
        while self._free < (due := self._tokens_of_turn(chunk)):
            holders = self.answers_with_rows()
            may_go = [answer for answer in holders if answer.request.row is None]
            if not may_go or len(holders) == 1:
                raise TreeError("the cache is full of rows that the scheduler did not make")
            self._preempt(may_go[-1])
        self._due = 0
        self._take(due)

    def _take(self, tokens: int) -> None:
        """The next turn takes these, too: pages that no row has are evicted for them."""
        self._due += tokens
        unused = len(self._prefixes.unused)
        if unused and (lacking := self._due - self._free + unused * self._page_size) > 0:
            self.change("evict", -(-lacking // self._page_size))

    def _evict_beyond_budget(self) -> None:
        unused, before = self._prefixes.unused, len(self._prefixes.unused)
        while unused and self._runner.used_bytes > self._keep_bytes:
            self._executor.evict(1)
        if len(unused) < before:
            self.changes.append(("evict", before - len(unused)))

    def begin_rows(self, to_fill: list[ActiveAnswer]) -> None:
        """Let rows whose first chunk is about to be run, in this order, begin with pages that are shared by now."""
        left = self._runner.chunk_size
        for answer in to_fill:
            pages = [] if answer.length else self._find(answer)
            missing = answer.num_known - answer.length - len(pages) * self._page_size
            chunk = min(missing, self._runner.chunk_size)
            if chunk > left:
                continue  # perhaps more of it is shared in a later turn
            left -= chunk
            self._begin(answer, pages)

    def _begin(self, answer: ActiveAnswer, pages: list[int]) -> None:
        """Let an answer's empty row begin with shared pages, if there are any."""
        if pages:
            self.change("begin", answer.handle, runs_of_numbers(pages))
            answer.take_row(answer.handle, len(pages) * self._page_size)

    def _find(self, answer: ActiveAnswer) -> list[int]:
        """Numbers of shared pages that an answer's row can begin with; the prompt's last token is run where the answer
        has none."""
        request = answer.request
        if not self._keep_bytes or request.row is not None or (request.scores and not request.begun):
            return []
        if request.prefix_keys is None:
            request.prefix_keys = page_keys(request.named_prompt, self._page_size, request.salt)
        most = answer.num_known if request.begun else answer.num_known - 1
        return self._prefixes.find(request.prefix_keys[: most // self._page_size])

    def share(self, request: ServedRequest, handle: int, tokens: list[int]) -> None:
        """Others may begin with the full pages of a row, which holds these tokens."""
        if not self._keep_bytes or request.row is not None:
            return
        keys = page_keys(tokens, self._page_size, request.salt)
        pages = runs_of_numbers(self._executor.pages_to_share(handle, keys))
        if pages:
            self._executor.share(handle, pages, keys)
            self.changes.append(("share", handle, pages))

    def release(self, request: ServedRequest, handle: int, tokens: list[int]) -> None:
        """A request is done with a row, which holds these tokens."""
        if request.row is None:
            self.share(request, handle, tokens)
            self.change("remove", handle)

    def can_pad(self, lengths: list[tuple[int, int]], width: int) -> bool:
        """Whether rows may take this many tokens each for one turn, in which they go from one length to another; if so,
        there is memory for them."""
        size = self._page_size
        tokens = size * sum([-(-(a + width) // size) - -(-b // size) for a, b in lengths])
        fits = self._due + tokens <= self._free
        if fits:
            self._take(tokens)
            self._due -= tokens  # rows that are run together are padded to one width
        return fits

    def widest_step(self, answers: list[ActiveAnswer], most: int) -> int:
        """How many tokens each of these rows may take in the next turn, up to `most`; some are removed again."""
        limits = [limit for a in answers if (limit := self._runner.most_at_once(a.length)) is not None]
        widths = range(min([most, *limits]), 1, -1)
        return next((width for width in widths if self._due + self._widening(answers, width) <= self._free), 1)

    def widen_step(self, answers: list[ActiveAnswer], width: int) -> None:
        self._take(self._widening(answers, width))

    def _widening(self, answers: list[ActiveAnswer], width: int) -> int:
        """Tokens of the cache that they take beyond those for one token each."""
        return sum(self._whole_pages(a.length + width) - self._whole_pages(a.length + 1) for a in answers)

    def _preempt(self, answer: ActiveAnswer) -> None:
        self.change("remove", answer.handle)
        answer.lose_row()
        self.preemptions += 1

    @property
    def _free(self) -> float:
        """Tokens of the cache that are free, or in shared pages that no row has; infinity if it grows."""
        free = self._runner.free_tokens
        return math.inf if free is None else free

    def _soon(self, answer: ActiveAnswer) -> int:
        """Tokens of the cache that the rows which an answer's stands for will take; they share the prompt's pages."""
        request = answer.request
        shared = (request.num_rows - 1) * self._full_pages(request.num_prompt)
        return request.num_rows * self._whole_pages(answer.length_after(SOON)) - shared

    def _promised(self, answer: ActiveAnswer) -> int:
        """Tokens of the cache that an answer with a row is to find free, besides those that it has."""
        return max(self._soon(answer) - self._whole_pages(answer.length), 0)

    def _tokens_of_turn(self, chunk: int) -> int:
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
