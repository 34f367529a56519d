"""From a ticket's events to a response: whole or as a stream, and cancelled as soon as the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...generation.requests import Event
from .answers import Form
from .errors import ApiError, timed_out
from .frontend import Ticket

GONE = 499  # never read: the client closed the connection


async def respond(
    request: Request, ticket: Ticket, form: Form, *, stream: bool, include_usage: bool, timeout: float
) -> Response:
    """Answer a request; when the response ends, for whatever reason, the ticket is closed and cancelled.

    timeout: seconds until an unfinished answer is cancelled. Raises: ApiError for an answer that is not a stream.
    """
    if stream:
        return EventStream(ticket, _stream(ticket, form, include_usage, timeout))
    collecting = asyncio.create_task(_collect(ticket, timeout))
    leaving = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=GONE)
        choices = collecting.result()
    finally:
        collecting.cancel()
        leaving.cancel()
        ticket.close()
    return JSONResponse(form.whole(choices, ticket.usage))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _events(ticket: Ticket, timeout: float) -> AsyncIterator[tuple[int, Event]]:
    """(choice, event) as they come, until all choices are finished."""
    end = asyncio.get_running_loop().time() + timeout
    while ticket.unfinished:
        try:
            async with asyncio.timeout_at(end):
                yielded = await ticket.next()
        except TimeoutError:
            raise timed_out(timeout) from None
        yield yielded


async def _collect(ticket: Ticket, timeout: float) -> list[list[Event]]:
    choices = [[] for _ in range(ticket.choices)]
    async for choice, event in _events(ticket, timeout):
        choices[choice].append(event)
    return choices


async def _stream(ticket: Ticket, form: Form, include_usage: bool, timeout: float) -> AsyncIterator[str]:
    """The events of a stream; an error after its beginning is one more event."""
    more = {"usage": None} if include_usage else {}
    for choice in range(ticket.choices):
        if (opening := form.opening(choice)) is not None:
            yield _data(opening | more)
    try:
        async for choice, event in _events(ticket, timeout):
            if event.text or event.logprob is not None or event.finish_reason:
                yield _data(form.chunk(choice, event) | more)
    except ApiError as error:
        yield _data(error.body())
        return
    if include_usage:
        yield _data(form.ending(ticket.usage))
    yield "data: [DONE]\n\n"


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events; closes its ticket even if the client leaves before the first of them."""

    def __init__(self, ticket: Ticket, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.close()
