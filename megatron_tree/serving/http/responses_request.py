"""Requests of /v1/responses, as requests of /v1/chat/completions: one conversation, one answer, nothing kept."""

from __future__ import annotations

import json
from typing import Any

from pydantic import model_validator

from ...generation.sampling import Sampling
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
