"""Between the HTTP server's event loop and the scheduler's loop, which runs in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....core import comm
from ....core.errors import TreeError
from ....core.log import logger
from ...generation.grammars import PREFIX, Grammars
from ...generation.requests import Event, Request
from ...generation.sampling import SamplingParams
from ...generation.scheduler import QueueFull, Scheduler
from .errors import RETRY_AFTER_S, ApiError, bad_value, busy, failed, restarting, stopping
from .metrics import Metrics
from .ranks import Ranks, RanksError, RestartError

MOST_IMAGE_BYTES = 1 << 30  # of the images of all requests under way, as the model takes them
LONG_WAIT_S = 30.0  # for a row: the log says so,
TOLD_EVERY_S = 300.0  # this often at most
CHECKED_AT_ONCE, MAX_CHECKED = 4, 64  # JSON schemas, and with those that wait for it


class Ticket:
    """What one HTTP request waits for: the events of all its choices. Used in the event loop only.

    choices: answers in all: n for every prompt, prompt by prompt. unfinished: how many are not complete yet.
    usage: right when nothing is unfinished.
    """

    def __init__(
        self,
        choices: int,
        prompt_tokens: int,
        cancel: Callable[[int], Any],
        metrics: Metrics,
        on_close: Callable[[], None],
    ):
        self.choices = self.unfinished = choices
        self.numbers: list[int] = []
        """The scheduler's, one for every prompt."""
        self._prompt_tokens, self._tokens, self._cached = prompt_tokens, 0, 0
        self._cancel, self._on_close = cancel, on_close
        self._metrics, self._since, self._last = metrics, time.monotonic(), {}
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers."""
        prompt, completion = self._prompt_tokens, self._tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def put(self, first: int, event: Event) -> None:
        """Hand over an event of the prompt whose choices begin at `first`."""
        choice = first + event.answer
        self._metrics.heard(event, self._since, self._last.get(choice))
        self._last[choice] = time.monotonic()
        self._events.put_nowait((first, event))

    async def next(self) -> tuple[int, Event]:
        """(choice, its next event). Raises: ApiError when the answer will never be complete."""
        first, event = await self._events.get()
        if event.finish_reason == "cancelled":  # by the server: nobody waits on a closed ticket
            raise stopping()
        if event.finish_reason == "error" and event.error.startswith(PREFIX):
            raise ApiError(400, event.error, code="invalid_value")
        if event.finish_reason == "error":
            raise failed(f"the model failed: {event.error}")
        if event.usage is not None:
            self._tokens += event.usage.completion_tokens
            self._cached += 0 if event.answer else event.usage.cached_tokens  # once for every prompt
        if event.finish_reason is not None:
            self.unfinished -= 1
            self._metrics.served += not self.unfinished
        return first + event.answer, event

    def close(self) -> None:
        """Cancel what is unfinished. Any number of times."""
        if self.unfinished:
            for number in self.numbers:
                self._cancel(number)
        self._on_close()
        self._on_close = lambda: None


class Frontend:
    """Submits requests to the scheduler; its events come back to the event loop."""

    def __init__(self, scheduler: Scheduler | Ranks, grammars: Grammars, *, stalled_after_s: float = math.inf):
        """grammars: check JSON schemas. stalled_after_s: a rank that keeps rank 0 waiting for longer makes /health say
        so."""
        self._scheduler, self._metrics, self._stalled_after_s = scheduler, Metrics(), stalled_after_s
        self._grammars, self._num_checked = grammars, 0
        self._checkers = ThreadPoolExecutor(CHECKED_AT_ONCE, thread_name_prefix="schemas")
        self._ranks = scheduler if isinstance(scheduler, Ranks) else None
        self.state = "ok"
        """ "ok", "stopping" or "failed"; unless it is "ok" requests get a 503."""
        self.failure = ""
        """Why it failed."""
        self._told_at = -math.inf
        self._image_bytes = 0

    def health(self) -> dict[str, str]:
        """What /health reports: "status", the state, "restarting" or "stalled"; and unless it is "ok" or "stopping" the
        "reason"."""
        if self.state == "ok" and self._ranks is not None and self._ranks.failure:
            return {"status": "restarting", "reason": self._ranks.failure}
        waited = comm.waited_s() if self._ranks is None else self._ranks.waited_s
        if self.state == "ok" and waited > self._stalled_after_s:
            return {"status": "stalled", "reason": f"rank 0 has been waiting for another rank for {waited:.0f} s"}
        return {"status": self.state} | ({"reason": self.failure} if self.failure else {})

    def check(self) -> None:
        """Raises: ApiError (503) unless requests are taken."""
        if self.state != "ok":
            raise stopping()
        if self._ranks is not None and self._ranks.failure:
            raise restarting(self._ranks.ready_in_s)

    async def submit(
        self,
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        *,
        n: int,
        salt: str = "",
        images: dict | None = None,
        continues: bool = False,
    ) -> Ticket:
        """Queue n answers to every prompt; all of them or none. In the event loop, which does not wait meanwhile for
        grammars that are compiled, or for the scheduler's lock.

        sampling: with the same JSON schema or none. salt, images and continues: see `Request`; images are of the only
            prompt.
        Raises: ApiError: 400 for sizes that never fit, 429 when the queue is full,
        503 while stopping, while the ranks are started again, and while others' images take too much memory.
        """
        self.check()
        if sampling[0].json_schema is not None:
            await self._check_schema(sampling[0].json_schema)
        loop = asyncio.get_running_loop()
        if len(prompts) > self._scheduler.max_waiting:
            message = f"{len(prompts)} prompts are more than this server's queue holds ({self._scheduler.max_waiting})"
            raise bad_value("prompt", f"{message}: send them in several requests")
        on_close = self._hold(sum(x.nbytes for x in (images or {}).values()))
        cancel = self._scheduler.cancel
        ticket = Ticket(len(prompts) * n, sum(map(len, prompts)), cancel, self._metrics, on_close)

        def queue() -> None:
            for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
                options = {"n": n, "salt": salt, "images": images, "continues": continues}
                request = Request(prompt=prompt, sampling=params, **options)
                ticket.numbers.append(self._scheduler.submit(request, _sink(loop, ticket, i * n)))

        queued = loop.run_in_executor(None, queue)
        try:
            await asyncio.shield(queued)
        except asyncio.CancelledError:  # the client has gone
            queued.add_done_callback(lambda _: ticket.close())
            raise
        except Exception as error:
            ticket.close()
            raise self._answer_to(error) from None
        self._metrics.asked(sum(map(len, prompts)))
        self._tell_of_a_long_queue()
        return ticket

    def _hold(self, image_bytes: int) -> Callable[[], None]:
        """Count these bytes of images; returns what ends that. One request at a time may have any number."""
        if image_bytes and self._image_bytes and self._image_bytes + image_bytes > MOST_IMAGE_BYTES:
            raise busy("the images of other requests take all memory that there is for them")
        self._image_bytes += image_bytes

        def release() -> None:
            self._image_bytes -= image_bytes

        return release

    def _answer_to(self, error: Exception) -> Exception:
        """What a client is told of a request that was not taken."""
        if isinstance(error, QueueFull):
            return _queue_full(str(error), max(RETRY_AFTER_S, math.ceil(self._seconds_per_row)))
        if isinstance(error, RestartError):
            return restarting(self._ranks.ready_in_s)
        if isinstance(error, RanksError):
            return failed(str(error))
        if isinstance(error, TreeError):
            return stopping()
        if isinstance(error, ValueError):
            name = str(error).partition("=")[0]  # as in "n=9 must be ..."
            param = name if name in ("n", *SamplingParams.model_fields) else None
            return ApiError(400, str(error), param=param, code="invalid_value")
        return error

    async def _check_schema(self, json_schema: str) -> None:
        if self._num_checked >= MAX_CHECKED:
            raise _queue_full(f"{MAX_CHECKED} JSON schemas are being checked: try again later", RETRY_AFTER_S)
        self._num_checked += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._checkers, self._grammars.check, json_schema)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        finally:
            self._num_checked -= 1

    def close(self) -> None:
        """No schemas are checked any more."""
        self._checkers.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    @property
    def _seconds_per_row(self) -> float:
        """Between two rows that become free, when all are in use."""
        return self._metrics.row_s / self._scheduler.max_rows

    @property
    def expected_wait_s(self) -> float:
        """For a row, of a prompt that comes now."""
        return self._scheduler.load.waiting * self._seconds_per_row

    def _tell_of_a_long_queue(self) -> None:
        now, wait = time.monotonic(), self.expected_wait_s
        if wait > LONG_WAIT_S and now - self._told_at > TOLD_EVERY_S:
            self._told_at = now
            waiting, rows = self._scheduler.load.waiting, self._scheduler.max_rows
            logger.warning("%d prompts wait for %d rows, a new one for about %.0f s: see 'Rows and queue' in "
                           "docs/serving.md", waiting, rows, wait)  # fmt: skip

    def metrics(self) -> str:
        waiting, running = self._scheduler.load
        paused, speculated = self._scheduler.preemptions, self._scheduler.speculated
        more = {
            "requests_waiting": ("gauge", "Prompts that wait for a row.", waiting),
            "requests_running": ("gauge", "Prompts that are prefilled or answered.", running),
            "rows": ("gauge", "Answers that can be generated at the same time.", self._scheduler.max_rows),
            "rows_in_use": ("gauge", "Rows of answers under way.", self._scheduler.rows_in_use),
            "row_seconds": ("gauge", "For which an answer has had a row, on average.", self._metrics.row_s),
            "expected_wait_seconds": ("gauge", "Of a prompt that comes now, for a row.", self.expected_wait_s),
            "requests_served_total": ("counter", "Requests that were answered in full.", self._metrics.served),
            "drafted_tokens_total": ("counter", "Tokens: drafted by speculation.", speculated.drafted),
            "accepted_tokens_total": ("counter", "Tokens: drafted and right.", speculated.accepted),
            "preemptions_total": ("counter", "Answers that lost their rows for a while.", paused),
        }
        if self._ranks is not None:
            more["restarts_total"] = ("counter", "Times that the ranks were started again.", self._ranks.restarts)
        return self._metrics.text(more)


def _queue_full(message: str, seconds: int) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(seconds)})


def _sink(loop: asyncio.AbstractEventLoop, ticket: Ticket, first: int) -> Callable[[Event], None]:
    def sink(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its clients with it
            loop.call_soon_threadsafe(ticket.put, first, event)

    return sink
