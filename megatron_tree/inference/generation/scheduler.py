"""Continuous batching: requests come and go while the model runs; every answer has a row of the cache.

Only rank 0, the leader, knows the requests. In every turn it decides what is run, and broadcasts that as a short list
of operations; all ranks carry it out. The tokens that the leader chose in one turn travel in the next one, so that a
decoding step costs one broadcast for any number of rows.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ...core.cache.runner import RowRunner
from ...core.comm import Ranks
from ...core.comm.group import wait_limit
from ...core.comm.wire import share, share_check
from ...core.config import default_config
from ...core.errors import TreeError
from ...core.log import logger
from .batcher import Batcher
from .executor import Executor, Turn
from .grammars import Grammars
from .requests import EventSink, OwnRow, Request, ServedRequest, check_request, prompt_images
from .speculation import NO_SPECULATION, Speculation, SpeculationCounts


class QueueFull(TreeError):
    """The queue of waiting requests is full: try again later."""


class Load(NamedTuple):
    """The load of the scheduler."""

    waiting: int
    """Requests without a row."""
    served: int
    """Requests that are prefilled or decoded."""


class Scheduler:
    """Serves requests in the order in which they come. Create it on all ranks of its token_group.

    `submit`, `cancel` and `stop` are for rank 0 of the group, from any thread; `run` or `run_once` for all ranks.
    A request is admitted when rows are free for all its answers and the cache has room for its prompt and what follows
    soon. Answers that find no room later are preempted: they pause. A long
    prompt is prefilled a chunk per turn, and the active answers get a token per turn.

    Args:
        runner: the model and its rows.
        tokenizer: a Transformers tokenizer; used in the thread that runs the loop only, so don't share it with others.
            None: events carry no text.
        max_rows: answers generated at the same time.
        max_waiting: requests that may wait; one more raises `QueueFull`.
        end_tokens: the model's end tokens; None: the tokenizer's.
        group: the same ranks, same rank 0, for the turns, for instance a gloo group next to NCCL; default
            the runner's token_group.
        heartbeat_s: seconds after which an idle leader sends an empty turn, so that waiting ranks don't time out, or a
            quarter of their `monitored` region's limit; None: 10, or a quarter of timeout_s where that is less.
        timeout_s: seconds that one broadcast may take.
        transport: of the broadcasts, as in `TreeConfig`; None: that of `default_config()`.
        executor: what carries out the turns; default an `Executor` of the runner.
        prefill_first: no answer is continued while a prompt is prefilled, so that all answers advance together.
        keep_bytes: full pages stay in the cache when their rows have gone, for later prompts with the same prefix, as
            long as it takes at most this many bytes on rank 0; those used least recently go first. 0: none stays.
        speculation: on rank 0, decides which tokens are drafted in steps; None: none are. Answers don't depend on it.
    Raises: ValueError.
    """

    def __init__(
        self,
        runner: RowRunner,
        tokenizer=None,
        *,
        max_rows: int,
        max_waiting: int,
        end_tokens: Collection[int] | None = None,
        group=None,
        heartbeat_s: float | None = None,
        timeout_s: float = 600.0,
        transport: str | None = None,
        executor: Executor | None = None,
        prefill_first: bool = False,
        keep_bytes: int = 0,
        speculation: Speculation | None = None,
    ):
        for name, value in (("max_rows", max_rows), ("max_waiting", max_waiting)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if heartbeat_s is None:
            heartbeat_s = min(10.0, timeout_s / 4)
        if not 0 < heartbeat_s < timeout_s:
            raise ValueError(f"heartbeat_s={heartbeat_s!r} must be more than 0 and less than timeout_s={timeout_s!r}")
        if speculation is not None and runner.has_states:
            raise ValueError(NO_SPECULATION)
        if end_tokens is None:
            end = getattr(tokenizer, "eos_token_id", None)
            end_tokens = () if end is None else (end,)
        self._runner, self._tokenizer, self._end_tokens = runner, tokenizer, frozenset(end_tokens)
        options = {"end_tokens": self._end_tokens, "on_mask": self._wake}
        self.grammars = Grammars(tokenizer, vocab_size=runner.vocab_size, **options)
        self.max_rows, self.max_waiting = max_rows, max_waiting
        config = default_config()
        config = replace(config, timeout_s=timeout_s, transport=transport or config.transport)
        self._ranks = Ranks.of(runner.token_group if group is None else group, config=config)
        self.is_leader, self._heartbeat_s = self._ranks.rank == 0, heartbeat_s
        self._capacity = runner.free_tokens
        self.executor, self._ended = executor or Executor(runner), False
        self._speculation = speculation
        # what threads share, under the lock
        self._changed = threading.Condition()
        self._open: dict[int, ServedRequest] = {}
        self._waiting: deque[ServedRequest] = deque()
        self._cancels: set[int] = set()
        self._is_news = False  # something that the next turn has to heed
        self._deadline: float | None = None  # of open requests, once the loop is to end
        self._failure: str | None = None
        self._numbers = itertools.count()
        self._batcher = Batcher(
            self.executor,
            max_rows=max_rows,
            prefill_first=prefill_first,
            keep_bytes=keep_bytes,
            speculation=speculation,
            on_end=self._forget,
        )

    def check(self, request: Request) -> Tensor:
        """The request's prompt, int64 [n], if it can be served once there is room. From any thread.

        Raises: ``ValueError`` that says what is wrong: tokens that the model lacks, too long for the model's positions
            or for the whole cache, more answers than rows, stop texts without a tokenizer, a JSON schema that no answer
            can keep to.
        """
        prompt = self._check(request)
        if request.sampling.json_schema is not None:
            self.grammars.check(request.sampling.json_schema)
        return prompt

    def _check(self, request: Request) -> Tensor:
        """At once: what a JSON schema says is left out."""
        return check_request(request, self._runner, self._capacity, self.max_rows, self._tokenizer, self.grammars)

    def submit(self, request: Request, sink: EventSink) -> int:
        """Queue a request; returns its number. On the leader, from any thread.

        sink: called with every `Event` of the request by the thread that runs the loop; it should be quick and must
            not raise: that would end the loop on all ranks.
        Raises: ValueError as `check`, but for a JSON schema, which may take seconds: answers that can't keep to it end
            with "error"; `QueueFull`; `TreeError` after `stop` or a failure.
        """
        if not self.is_leader:
            raise ValueError("submit: only rank 0 of the runner's token_group takes requests")
        prompt = self._check(request)
        more = self.grammars.grammar(request.sampling.json_schema), prompt_images(request, prompt, self._runner)
        served = ServedRequest(request, prompt, self._tokenizer, self._end_tokens, sink, *more)
        with self._changed:
            if self._deadline is not None or self._failure is not None:
                raise TreeError(f"the scheduler takes no more requests: {self._failure or 'it is stopping'}")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"max_waiting={self.max_waiting} requests wait already: try again later")
            served.id = next(self._numbers)
            self._open[served.id] = served
            self._waiting.append(served)
            self._wake()
        return served.id

    def cancel(self, number: int) -> bool:
        """End a request; its rows are free by the next turn. False where it has ended already. From any thread."""
        with self._changed:
            if number in self._open:
                self._cancels.add(number)
                self._wake()
            return number in self._open

    def stop(self, *, grace_s: float = 0.0) -> None:
        """End the loop on all ranks. No request is taken any more; after grace_s seconds, open ones are cancelled.

        From any thread, and in a signal handler. Another call can only shorten the time.
        """
        with self._changed:  # its lock is reentrant
            deadline = time.monotonic() + grace_s
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            self._wake()

    @property
    def preemptions(self) -> int:
        """Answers that lost their rows for a while, since the start. From any thread of the leader."""
        return self._batcher.room.preemptions

    @property
    def rows_in_use(self) -> int:
        """Of max_rows. From any thread of the leader."""
        return self._batcher.room.rows_in_use

    @property
    def load(self) -> Load:
        """From any thread of the leader."""
        with self._changed:
            return Load(len(self._waiting), len(self._open) - len(self._waiting))

    @property
    def speculated(self) -> SpeculationCounts:
        """Numbers of drafted tokens. From any thread of the leader."""
        return SpeculationCounts() if self._speculation is None else self._speculation.numbers

    def run(self) -> None:
        """Serve until `stop`. On all ranks."""
        while self.run_once():
            pass

    def run_until_idle(self, each_turn: Callable[[], None] = lambda: None) -> None:
        """Serve what has been submitted. On all ranks; afterwards the loop may go on.

        each_turn: called on the leader before every turn; what it raises ends the loop on all ranks.
        Raises: as `run_once`.
        """
        while not self._ended and not self._turn(each_turn, wait=False).idle:
            pass

    def keep(self, row: int | None = None, tokens: Sequence[int] = ()) -> OwnRow:
        """A row for requests that leave it in the cache. On all ranks, in the same order, in the thread of the loop.

        row: the runner's, which holds these tokens; None: a new one.
        """
        return OwnRow(handle=self.executor.keep(row), tokens=list(tokens))

    def forget(self, row: OwnRow) -> None:
        """Remove a kept row that no request uses. On all ranks, in the thread of the loop."""
        self.executor.remove(row.handle)

    def run_once(self) -> bool:
        """One turn, on all ranks; an idle leader waits up to heartbeat_s for requests. False once the loop has ended.

        Raises: whatever fails on this rank; a failure of the leader's own is a `TreeError` on the other ranks. The
            leader's open requests then end with "error".
        """
        if not self._ended:
            self._turn(lambda: None, wait=True)
        return not self._ended

    def _turn(self, each_turn: Callable[[], None], *, wait: bool) -> Turn:
        """Returns the turn that was carried out."""
        if not self.is_leader:
            turn = Turn(*self._share(None))
            if turn.failed is not None:
                self._ended = True
                raise TreeError(f"rank 0 of the scheduler failed: {turn.failed}")
            self.executor.change(turn.changes)
            self.executor.run(turn.passes)
            self._ended = turn.stop
            return turn
        with self._giving_up(broadcast=True):
            each_turn()
            if wait or self._batcher.only_waits:
                self._wait()
            turn = self._next_turn()
        with self._giving_up(broadcast=False):  # the others fail, too, or notice that this rank is gone
            self._share(turn)
            logits = self.executor.run(turn.passes)
        with self._giving_up(broadcast=True):
            self._batcher.take_logits(logits)
        self._ended = turn.stop
        return turn

    def fail(self, error: BaseException) -> None:
        """Make the other ranks, which wait in `run_once`, fail too. The leader calls it in the thread of its loop."""
        if self._ended:
            return
        with contextlib.suppress(type(error)), self._giving_up(broadcast=True):
            raise error

    def on_leader(self, check: Callable[[], Any]) -> Any:
        """What `check()` returns on the leader, on all ranks, outside of the loop; see `share_check`."""
        return share_check(check, self._ranks)

    def _share(self, turn: Turn | None):
        return share(turn, self._ranks)

    @contextlib.contextmanager
    def _giving_up(self, *, broadcast: bool):
        try:
            yield
        except BaseException as error:
            self._ended = True
            text = f"{type(error).__name__}: {error}"
            with self._changed:
                self._failure = text
                open_requests = list(self._open.values())
                self._open.clear()
                self._waiting.clear()
            for request in open_requests:
                for answer in request.unfinished:
                    try:
                        answer.send(None, "", finish_reason="error", error=text)
                    except Exception:
                        logger.exception("the sink of request %d failed", request.id)
            if broadcast:
                self._share(Turn(failed=text))
            raise

    def _wake(self) -> None:
        """The next turn is to heed something. From any thread."""
        with self._changed:
            self._is_news = True
            self._changed.notify()

    def _wait(self) -> None:
        """For something to do."""
        with self._changed:
            end = time.monotonic() + min(self._heartbeat_s, wait_limit() / 4)
            if self._deadline is not None:
                end = min(end, self._deadline) if self._open else 0.0
            if not self._batcher.has_work:
                self._changed.wait_for(lambda: self._is_news, max(end - time.monotonic(), 0.0))

    def _next_turn(self) -> Turn:
        with self._changed:
            self._is_news = False
            stop = self._deadline is not None and (not self._open or time.monotonic() >= self._deadline)
            if stop and self._open:
                logger.info("the time to finish is over: %d requests are cancelled", len(self._open))
            numbers = sorted(self._open) if stop else sorted(self._cancels & set(self._open))
            cancelled = [self._open[number] for number in numbers]
            self._cancels = set()
        for request in cancelled:
            self._batcher.cancel(request)
        with self._changed:
            self._batcher.room.resume()
            while self._waiting and self._batcher.room.admits(self._waiting[0]):
                self._waiting.popleft().has_row()
            idle = not self._open
        passes = self._batcher.passes()
        return Turn(self._batcher.room.take_changes(), passes, stop, idle)

    def _forget(self, request: ServedRequest) -> None:
        with self._changed:
            del self._open[request.id]
            if request in self._waiting:
                self._waiting.remove(request)
