"""What the process of the front end and rank 0 tell each other: JSON arrays over a pair of sockets.

From the front end: ["submit", number, request], ["cancel", number], ["stop", grace_s]. From rank 0: ["ready", limits],
["taken", number, [kind, error] or null], ["events", [event, ...]] of one turn, ["load", ...] every second,
["failed", error].
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

from ...errors import TreeError
from ...generation.images import packed, unpacked
from ...generation.requests import Event, Request, Usage
from ...generation.sampler import Choice
from ...generation.sampling import SamplingParams
from ...generation.scheduler import QueueFull

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
