"""Rank 0 of a server whose HTTP front end is another process, which started the ranks (see `Ranks`), and what the two
tell each other: JSON arrays over a pair of sockets.

From the front end: ["submit", number, request], ["cancel", number], ["stop", grace_s]. From rank 0: ["ready", limits],
["taken", number, [kind, error] or null], ["events", [event, ...]] of one turn, ["load", ...] every second,
["failed", error].
"""

from __future__ import annotations

import json
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from ....core import comm
from ....core.errors import TreeError
from ....core.log import logger
from ....launching import leave
from ...generation.images import packed, unpacked
from ...generation.requests import Event, Request, Usage
from ...generation.sampler import Choice
from ...generation.sampling import SamplingParams
from ...generation.scheduler import QueueFull, Scheduler

LOAD_S = 1.0  # between two messages about the load
REFUSALS = {"QueueFull": QueueFull, "TreeError": TreeError, "ValueError": ValueError}
"""The errors of a request that rank 0 does not take; others are failures."""


def send(connection: Connection, *message: Any) -> None:
    """Raises: OSError when the other side has gone."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> list[Any]:
    """Raises: EOFError or OSError when the other side has gone."""
    return json.loads(connection.recv_bytes())


def request_to_json(request: Request, begun: list[list[int] | None]) -> dict[str, Any]:
    images = None if request.images is None else packed(request.images)
    fields = {"sampling": request.sampling.model_dump(), "n": request.n, "begun": begun}
    fields |= {"salt": request.salt, "continues": request.continues}
    return {"prompt": list(request.prompt), "images": images, **fields}


def request_from_json(value: dict[str, Any]) -> Request:
    images = None if value["images"] is None else unpacked(value["images"])
    return Request(**value | {"sampling": SamplingParams(**value["sampling"]), "images": images})


def event_from_json(value: list[Any]) -> Event:
    """Of an `Event`, which is a JSON array as it is."""
    event = Event(*value)
    scored = None if event.prompt_logprobs is None else tuple(Choice(*choice) for choice in event.prompt_logprobs)
    return event._replace(prompt_logprobs=scored, usage=None if event.usage is None else Usage(*event.usage))


class Link:
    """Serves the front end's requests.

    limits: what the front end has to know of the model.
    """

    def __init__(self, scheduler: Scheduler, limits: dict[str, int], connection: Connection):
        self._scheduler, self._limits, self._connection = scheduler, limits, connection
        self._sending = threading.Lock()
        self._numbers: dict[int, int] = {}  # the front end's -> the scheduler's
        self._events: list[Event] = []  # of the turn under way

    def run(self) -> None:
        """Until the front end wants to stop. The events of a turn are sent together, once it has succeeded: an answer
        that the front end continues elsewhere is in a state between two turns."""
        threading.Thread(target=self._read, name="front end", daemon=True).start()
        self._send("ready", self._limits)
        try:
            going = True
            while going:
                going = self._scheduler.run_once()
                events, self._events = self._events, []
                if events:
                    self._send("events", events)
        except BaseException as error:
            self._send("failed", f"{type(error).__name__}: {error}")
            raise

    def _send(self, *message: Any) -> None:
        with self._sending:
            send(self._connection, *message)

    def _read(self) -> None:
        """Without a front end there is nobody to serve: this process ends, and other ranks find out."""
        told = time.monotonic()
        try:
            while True:
                if self._connection.poll(LOAD_S):
                    self._take(*receive(self._connection))
                if time.monotonic() - told >= LOAD_S:
                    told, scheduler = time.monotonic(), self._scheduler
                    numbers = scheduler.preemptions, list(scheduler.speculated), comm.waited_s()
                    self._send("load", [*scheduler.load, scheduler.rows_in_use], *numbers)
        except (EOFError, OSError):
            print("the process of the HTTP server has gone", file=sys.stderr)
            leave(1)

    def _take(self, what: str, *about: Any) -> None:
        if what == "submit":
            self._submit(*about)
        elif what == "cancel":
            if about[0] in self._numbers:
                self._scheduler.cancel(self._numbers[about[0]])
        else:
            self._scheduler.stop(grace_s=about[0])

    def _submit(self, number: int, request: dict[str, Any]) -> None:
        over = threading.Event()

        def sink(event: Event) -> None:
            self._events.append(event._replace(request=number))
            if event.last:
                over.set()
                self._numbers.pop(number, None)

        error = None
        try:
            self._numbers[number] = self._scheduler.submit(request_from_json(request), sink)
        except tuple(REFUSALS.values()) as refused:
            error = [next(name for name, kind in REFUSALS.items() if isinstance(refused, kind)), str(refused)]
        except Exception as failure:  # of this request alone: this thread goes on for the others
            logger.exception("a request could not be taken")
            error = ["", f"{type(failure).__name__}: {failure}"]
        if over.is_set():  # before its number was known
            self._numbers.pop(number, None)
        self._send("taken", number, error)
