"""Answers of OpenAI's API: JSON objects, whole and in pieces, and the responses that carry them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...generation.requests import Event
from .errors import ApiError, timed_out
from .frontend import Ticket
from .token_texts import Echo, Placed, TokenTexts, Walk, chosen
from .tools import ToolText

GONE = 499  # never read: the client closed the connection


class Form:
    """The answers of one endpoint. logprobs, include_usage: whether the request asked for them, in a stream."""

    prefix = whole_object = chunk_object = ""
    last = "data: [DONE]\n\n"  # of a stream

    def __init__(self, *, model: str, tokens: TokenTexts, logprobs: bool, include_usage: bool = False):
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.tokens, self.wants_logprobs, self._include_usage = tokens, logprobs, include_usage
        self._walks: dict[int, Walk] = {}

    def whole(self, choices: list[list[Event]], usage: dict[str, Any]) -> dict[str, Any]:
        """The complete answer; choices: the events of every choice."""
        answers = [self._choice(i, events) for i, events in enumerate(choices)]
        return self._head | {"object": self.whole_object, "choices": answers, "usage": usage}

    def opening(self, choice: int) -> list[dict[str, Any]]:
        """The first events of a choice in a stream."""
        return []

    def chunk(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """What a stream tells of one event."""
        return [self._event([self._delta(choice, event)])]

    def ending(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The last events of a stream."""
        return [self._event([]) | {"usage": usage}] if self._include_usage else []

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that fails."""
        return error.body()

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return self._head | {"object": self.chunk_object, "choices": choices} | usage

    def _choice(self, index: int, events: list[Event]) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        return self._choice(index, [event])

    def _walk(self, index: int) -> Walk:
        """Of a choice, whose text begins anew."""
        return self.tokens.walk(())

    def _placed(self, index: int, events: list[Event]) -> list[Placed]:
        """The tokens of a choice that have a log-probability."""
        if index not in self._walks:
            self._walks[index] = self._walk(index)
        walk, events = self._walks[index], [event for event in events if event.logprob is not None]
        return [(chosen(event), walk.place(event.token)) for event in events]


class CompletionForm(Form):
    """/v1/completions.

    continued: the prompts; each has n answers. echo: what is put in front of them. nothing_new: the answers'
    own tokens are left out.
    """

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        *,
        continued: list[list[int]],
        echo: list[Echo] | None = None,
        n: int = 1,
        nothing_new: bool = False,
        **options,
    ):
        super().__init__(**options)
        self._prompts, self._echo, self._n, self._nothing_new = continued, echo, n, nothing_new
        self._begun: set[int] = set()  # choices

    def whole(self, choices: list[list[Event]], usage: dict[str, Any]) -> dict[str, Any]:
        return super().whole(choices, self._used(usage))

    def ending(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return super().ending(self._used(usage))

    def _used(self, usage: dict[str, Any]) -> dict[str, Any]:
        if not self._nothing_new:
            return usage
        return usage | {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}

    def _choice(self, index: int, events: list[Event]) -> dict[str, Any]:
        text, placed = "", []
        if self._echo is not None and index not in self._begun:
            self._begun.add(index)
            echo = self._echo[index // self._n]
            text = echo.text
            if self.wants_logprobs:
                placed += echo.placed(events[0].prompt_logprobs)
        if not self._nothing_new:
            text += _text(events)
            placed += self._placed(index, events)
        logprobs = self.tokens.completion(placed) if self.wants_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": events[-1].finish_reason}

    def _walk(self, index: int) -> Walk:
        number = index // self._n
        offset = 0 if self._echo is None else len(self._echo[number].text)
        return self.tokens.walk(self._prompts[number], offset)


class ChatForm(Form):
    """/v1/chat/completions. tools: makes what finds the tool calls in one answer, or None."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *, tools: Callable[[], ToolText] | None = None, **options):
        super().__init__(**options)
        self._tools: defaultdict[int, ToolText] | None = None if tools is None else defaultdict(tools)

    def opening(self, choice: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._event([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def _choice(self, index: int, events: list[Event]) -> dict[str, Any]:
        text, calls = self._read(index, events)
        message = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"index": index, "message": message, **self._end(index, events, calls)}

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        text, calls = self._read(index, [event])
        delta = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return {"index": index, "delta": delta, **self._end(index, [event], calls)}

    def _read(self, index: int, events: list[Event]) -> tuple[str, list[dict[str, Any]]]:
        """(text, tool calls)."""
        text = _text(events)
        if self._tools is None:
            return text, []
        tool_text = self._tools[index]
        text = tool_text.add(text)
        if events[-1].finish_reason is None:
            return text, []
        rest, calls = tool_text.finish()
        return text + rest, calls

    def _end(self, index: int, events: list[Event], calls: list[dict[str, Any]]) -> dict[str, Any]:
        logprobs = self.tokens.chat(self._placed(index, events)) if self.wants_logprobs else None
        reason = events[-1].finish_reason
        return {"logprobs": logprobs, "finish_reason": "tool_calls" if calls and reason == "stop" else reason}


def _text(events: list[Event]) -> str:
    return "".join(event.text for event in events)


async def respond(request: Request, ticket: Ticket, form: Form, *, stream: bool, timeout: float) -> Response:
    """Answer a request; when the response ends, for whatever reason, the ticket is closed and cancelled.

    timeout: seconds until an unfinished answer is cancelled. Raises: ApiError for an answer that is not a stream.
    """
    if stream:
        return EventStream(ticket, _stream(ticket, form, timeout))
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


async def _stream(ticket: Ticket, form: Form, timeout: float) -> AsyncIterator[str]:
    """The events of a stream; an error after its beginning is one more event."""
    for choice in range(ticket.choices):
        for told in form.opening(choice):
            yield _data(told)
    try:
        async for choice, event in _events(ticket, timeout):
            if event.text or event.logprob is not None or event.finish_reason:
                for told in form.chunk(choice, event):
                    yield _data(told)
    except ApiError as error:
        yield _data(form.failed(error))
        return
    for told in form.ending(ticket.usage):
        yield _data(told)
    yield form.last


def _data(content: dict[str, Any]) -> str:
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


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
