"""Answers of /v1/responses: the response object, and the events of a stream that build it up."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from ...generation.requests import Event
from .answers import ChatForm
from .errors import ApiError


class ResponseForm(ChatForm):
    """/v1/responses. asked: what the response repeats of the request."""

    prefix, last = "resp", ""

    def __init__(self, *, asked: dict[str, Any], **options):
        super().__init__(**options)
        head, self._asked = self._head, asked
        self._head = {"id": head["id"].replace("-", "_"), "object": "response", "created_at": head["created"],
                      "model": head["model"]}  # fmt: skip
        self._numbers = itertools.count()
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._message: dict[str, Any] | None = None
        self._texts: list[str] = []  # of the message
        self._told_logprobs: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._reason: str | None = None

    def whole(self, choices: list[list[Event]], usage: dict[str, Any]) -> dict[str, Any]:
        for event in choices[0]:
            self.chunk(0, event)
        return self._response(self._status, usage)

    def opening(self, choice: int) -> list[dict[str, Any]]:
        response = {"response": self._response("in_progress")}
        return [self._told(f"response.{stage}", **response) for stage in ("created", "in_progress")]

    def chunk(self, choice: int, event: Event) -> list[dict[str, Any]]:
        text, calls = self._read(choice, [event])
        if self.wants_logprobs:
            self._logprobs += self.tokens.chat(self._placed(choice, [event]))["content"]
        self._reason = event.finish_reason
        told = []
        if text or (self._reason and not calls and self._message is None):
            told += self._add_text(text)
        if self._reason and self._message is not None:
            told += self._end_message()
        for call in calls:
            told += self._call(call)
        return told

    def ending(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._told(f"response.{self._status}", response=self._response(self._status, usage))]

    def failed(self, error: ApiError) -> dict[str, Any]:
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._told("response.failed", response=response)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        counted = None
        if usage is not None:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counted = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        fields = {"instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
                  "previous_response_id": None, "temperature": 1.0, "text": {"format": {"type": "text"}},
                  "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled"}  # fmt: skip
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        state = {"status": status, "error": None, "incomplete_details": why, "store": False, "usage": counted}
        return self._head | fields | self._asked | state | {"output": list(self._output)}

    def _told(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _in_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._message["id"], "output_index": len(self._output), "content_index": 0}
        return self._told(kind, **place, **fields)

    def _add_text(self, text: str) -> list[dict[str, Any]]:
        told = []
        if self._message is None:
            self._message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant",
                             "status": "in_progress", "content": []}  # fmt: skip
            told = [
                self._told("response.output_item.added", output_index=len(self._output), item=dict(self._message)),
                self._in_part("response.content_part.added", part=_part("", [])),
            ]
        logprobs, self._logprobs = self._logprobs, []
        self._texts.append(text)
        self._told_logprobs += logprobs
        if text:
            told.append(self._in_part("response.output_text.delta", delta=text, logprobs=logprobs))
        return told

    def _end_message(self) -> list[dict[str, Any]]:
        part = _part("".join(self._texts), self._told_logprobs)
        told = [
            self._in_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._in_part("response.content_part.done", part=part),
        ]
        return [*told, self._end_item(self._message | {"status": self._status, "content": [part]})]

    def _call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """One function call: whole, as the chat endpoint finds it."""
        arguments = call["function"]["arguments"]
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed",
                "call_id": call["id"], "name": call["function"]["name"], "arguments": arguments}  # fmt: skip
        place = {"item_id": item["id"], "output_index": len(self._output)}
        begun = item | {"status": "in_progress", "arguments": ""}
        return [
            self._told("response.output_item.added", output_index=len(self._output), item=begun),
            self._told("response.function_call_arguments.delta", **place, delta=arguments),
            self._told("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments),
            self._end_item(item),
        ]

    def _end_item(self, item: dict[str, Any]) -> dict[str, Any]:
        told = self._told("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return told


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
