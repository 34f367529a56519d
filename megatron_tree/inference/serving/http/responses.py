"""/v1/responses: its requests, as requests of /v1/chat/completions (one conversation, one answer, nothing kept), and
its answers: the response object, and the events of a stream that build it up."""

from __future__ import annotations

import itertools
import json
import uuid
from typing import Any

from pydantic import model_validator

from ...generation.requests import Event
from ...generation.sampling import Sampling
from .answers import ChatForm
from .errors import ApiError, bad_value, refused
from .protocol import IGNORED, ChatRequest
from .protocol import REFUSED as OF_CHATS

PATH = "/v1/responses"
NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning", "response_format": "text",
}  # fmt: skip
"""Fields of chats -> here."""
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # of `include`: there is no reasoning to be included
SAME = frozenset(Sampling.model_fields) | {
    "add_generation_prompt", "cache_salt", "chat_template_kwargs", "continue_final_message", "model",
    "parallel_tool_calls", "stream", "stream_options", "top_logprobs",
}  # fmt: skip
TRANSLATED = frozenset({"include", "input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice",
                        "tools"})  # fmt: skip

_NOTHING_KEPT = "no response is kept here: send the whole conversation as input"
# (values that change nothing, besides null; why, and what to do instead)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "a request is answered while its connection is open: leave it out"),
    "conversation": ((), _NOTHING_KEPT),
    "max_tool_calls": ((), "tools are called by the client: limit the calls there"),
    "previous_response_id": ((), _NOTHING_KEPT),
    "priority": OF_CHATS["priority"],
    "prompt": ((), "no prompts are kept here: send the text as instructions and input"),
    "truncation": (("disabled",), "no input is left out: shorten it yourself"),
}


class ResponseRequest(ChatRequest):
    """The body of POST /v1/responses, as the chat that it asks for."""

    asked: dict[str, Any]
    """What the response repeats of the request."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        return super()._refuse(_chat(data) if isinstance(data, dict) else data)


def renamed(error: ApiError) -> ApiError:
    """An error about a chat's field names that of /v1/responses."""
    name = NAMES.get(error.param or "", error.param)
    message = error.message
    if name != error.param and message.startswith(f"{error.param}:"):
        message = name + message.removeprefix(error.param)
    return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)


def _chat(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ChatRequest`. Raises: ApiError (400)."""
    data = {name: value for name, value in data.items() if value is not None and name not in IGNORED}
    for name, (neutral, why) in REFUSED.items():
        if data.pop(name, None) not in (None, *neutral):
            raise refused(name, why)
    if unknown := sorted(set(data) - SAME - TRANSLATED):
        text = f"{unknown[0]}: this is no field of {PATH}, or one that is not supported: leave it out"
        raise ApiError(400, text, param=unknown[0], code="unknown_parameter")
    if "input" not in data:
        raise bad_value("input", "is missing")
    chat = {name: value for name, value in data.items() if name in SAME}
    chat["messages"] = _messages(data)
    if "max_output_tokens" in data:
        chat["max_tokens"] = data["max_output_tokens"]
    include = _list("include", data)
    if unknown := [name for name in include if name not in INCLUDED]:
        raise refused("include", f"{unknown[0]!r} is not supported: only {LOGPROBS!r} is")
    chat["logprobs"] = LOGPROBS in include or bool(chat.get("top_logprobs"))
    if not chat["logprobs"]:
        chat.pop("top_logprobs", None)
    chat["tools"] = [_tool(tool) for tool in _list("tools", data)]
    if "tool_choice" in data:
        chat["tool_choice"] = _tool_choice(data["tool_choice"])
    text = _known("text", data.get("text", {}), ("format", "verbosity"))
    if text.get("verbosity", "medium") != "medium":
        raise refused("text", "verbosity is not supported: say in the instructions how long the answer is to be")
    if "format" in text:
        chat["response_format"] = _format(text["format"])
    reasoning = _known("reasoning", data.get("reasoning", {}), ("effort",))
    if "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    repeated = ("instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "text", "tool_choice",
                "tools", "top_p")  # fmt: skip
    asked = {name: data[name] for name in repeated if name in data}
    for name, value in asked.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise bad_value(name, f"can't be repeated as JSON: {error}") from None
    return chat | {"asked": asked}


def _list(name: str, data: dict[str, Any]) -> list[Any]:
    value = data.get(name, [])
    if not isinstance(value, list):
        raise bad_value(name, "must be a list")
    return value


def _known(name: str, value: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """An object without its nulls. Raises: ApiError (400) for other fields than these."""
    if not isinstance(value, dict):
        raise bad_value(name, "must be an object")
    value = {key: x for key, x in value.items() if x is not None}
    if unknown := sorted(set(value) - set(fields)):
        raise refused(name, f"{unknown[0]} is not supported: leave it out")
    return value


def _messages(data: dict[str, Any]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": data["instructions"]}] if "instructions" in data else []
    if isinstance(data["input"], str):
        return [*messages, {"role": "user", "content": data["input"]}]
    for i, item in enumerate(_list("input", data)):
        if not isinstance(item, dict):
            raise bad_value("input", f"[{i}] must be an object")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(i, item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":  # calls, and the text before them, are one message
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(i, item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise refused("input", f"[{i}]: items of the type {kind!r} are not supported: leave it out")
    return messages


def _content(i: int, content: Any) -> Any:
    """As a chat's message has it."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "refusal":
            parts.append({"type": "refusal", "refusal": part.get("refusal")})
        elif kind == "input_image":
            url = {name: part.get(field) for name, field in (("url", "image_url"), ("detail", "detail"))}
            parts.append({"type": "image_url", "image_url": url})
        else:
            raise refused("input", f"[{i}]: parts of the type {kind!r} are not supported: only texts and images are")
    return parts


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise refused("tools", "only functions are supported: leave the others out")
    return {"type": "function", "function": {name: x for name, x in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {name: x for name, x in choice.items() if name != "type"}}
    return choice


def _format(form: Any) -> Any:
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: x for name, x in form.items() if name != "type"}}
    return form


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
