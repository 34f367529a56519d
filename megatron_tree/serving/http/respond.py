"""From a ticket's events to a response: whole or as a stream, and cancelled as soon as the client has gone."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    TokenTexts,
    Usage,
)
from .errors import ApiError, timed_out
from .frontend import Piece, Ticket

GONE = 499  # nobody reads it: the client closed the connection


class Form:
    """How one of the two endpoints words its answers. logprobs: whether the request asked for them."""

    prefix = ""

    def __init__(self, *, model: str, tokens: TokenTexts, logprobs: bool):
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.tokens, self.wants_logprobs = tokens, logprobs

    def whole(self, choices: list[list[Piece]], usage: Usage):
        """The complete answer; choices: the pieces of every choice."""
        raise NotImplementedError

    def opening(self, choice: int):
        """The first event of a choice in a stream, or None."""
        return None

    def chunk(self, choice: int, piece: Piece):
        """One event of a stream."""
        raise NotImplementedError

    def ending(self, usage: Usage):
        """The last event of a stream that tells the usage."""
        raise NotImplementedError


class CompletionForm(Form):
    """/v1/completions."""

    prefix = "cmpl"

    def __init__(self, **options):
        super().__init__(**options)
        self._offsets: dict[int, int] = {}

    def whole(self, choices: list[list[Piece]], usage: Usage) -> Completion:
        made = [self._choice(i, joined(pieces)) for i, pieces in enumerate(choices)]
        return Completion(**self.head, choices=made, usage=usage)

    def chunk(self, choice: int, piece: Piece) -> Completion:
        return Completion(**self.head, choices=[self._choice(choice, piece)])

    def ending(self, usage: Usage) -> Completion:
        return Completion(**self.head, choices=[], usage=usage)

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        logprobs = None
        if self.wants_logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = self.tokens.completion(piece.logprobs, offset)
            self._offsets[index] = offset + sum(map(len, logprobs.tokens))
        return CompletionChoice(index=index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish_reason)


class ChatForm(Form):
    """/v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self, choices: list[list[Piece]], usage: Usage) -> ChatCompletion:
        made = []
        for i, piece in enumerate(map(joined, choices)):
            options = {"logprobs": self._logprobs(piece), "finish_reason": piece.finish_reason}
            made.append(ChatChoice(index=i, message=ChatMessage(content=piece.text), **options))
        return ChatCompletion(**self.head, choices=made, usage=usage)

    def opening(self, choice: int) -> ChatChunk:
        delta = {"role": "assistant", "content": ""}
        return ChatChunk(**self.head, choices=[ChatChunkChoice(index=choice, delta=delta)])

    def chunk(self, choice: int, piece: Piece) -> ChatChunk:
        delta = {"content": piece.text} if piece.text else {}
        made = ChatChunkChoice(
            index=choice, delta=delta, logprobs=self._logprobs(piece), finish_reason=piece.finish_reason
        )
        return ChatChunk(**self.head, choices=[made])

    def ending(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self.head, choices=[], usage=usage)

    def _logprobs(self, piece: Piece):
        return self.tokens.chat(piece.logprobs) if self.wants_logprobs else None


def joined(pieces: list[Piece]) -> Piece:
    """The pieces of one choice as one."""
    logprobs = [entry for piece in pieces for entry in piece.logprobs]
    return Piece(
        text="".join(piece.text for piece in pieces), logprobs=logprobs, finish_reason=pieces[-1].finish_reason
    )


async def respond(
    request: Request, ticket: Ticket, form: Form, *, stream: bool, include_usage: bool, timeout: float
) -> Response:
    """Answer a request; the ticket is closed, and what it stands for cancelled, when the response ends however it does.

    timeout: seconds until an unfinished answer is cancelled. Raises: ApiError for an answer that is not a stream.
    """
    if stream:
        return EventStream(ticket, _events(ticket, form, include_usage, timeout))
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
    return Response(form.whole(choices, ticket.usage).model_dump_json(), media_type="application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pieces(ticket: Ticket, timeout: float) -> AsyncIterator[tuple[int, Piece]]:
    """(choice, piece) as they come, until all choices are finished."""
    end = asyncio.get_running_loop().time() + timeout
    while ticket.unfinished:
        try:
            async with asyncio.timeout_at(end):
                yielded = await ticket.next()
        except TimeoutError:
            raise timed_out(timeout) from None
        yield yielded


async def _collect(ticket: Ticket, timeout: float) -> list[list[Piece]]:
    choices = [[] for _ in range(ticket.choices)]
    async for choice, piece in _pieces(ticket, timeout):
        choices[choice].append(piece)
    return choices


async def _events(ticket: Ticket, form: Form, include_usage: bool, timeout: float) -> AsyncIterator[str]:
    """The events of a stream; an error after its beginning is one more event."""
    exclude = None if include_usage else {"usage"}
    for choice in range(ticket.choices):
        if (opening := form.opening(choice)) is not None:
            yield _event(opening.model_dump_json(exclude=exclude))
    try:
        async for choice, piece in _pieces(ticket, timeout):
            if piece.text or piece.logprobs or piece.finish_reason:
                yield _event(form.chunk(choice, piece).model_dump_json(exclude=exclude))
    except ApiError as error:
        yield _event(json.dumps(error.body()))
        return
    if include_usage:
        yield _event(form.ending(ticket.usage).model_dump_json())
    yield _event("[DONE]")


def _event(data: str) -> str:
    return f"data: {data}\n\n"


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
