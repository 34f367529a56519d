"""Tools: those that a request offers, and their calls in the text of an answer, whole or in pieces."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...generation.sampling import Strict
from ..messages import Lenient
from .errors import bad_value

MARK, END = "<tool_call>", "</tool_call>"
VALUES = ("const", "enum", "default", "examples")  # whose contents are no schemas
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # whose keys are names
MAX_LEVELS = 100  # of a JSON schema; what copies or writes one recurses, and so does llguidance
_CALL = re.compile(f"{MARK}(.*?)(?:{END}|$)", re.DOTALL)


def _not_too_deep(schema: dict[str, Any]) -> dict[str, Any]:
    level = [schema]
    for _ in range(MAX_LEVELS):
        level = [x for value in level for x in (value.values() if isinstance(value, dict) else value)]
        level = [value for value in level if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"is nested more than {MAX_LEVELS} levels deep: make it flatter")
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]


class Function(Lenient):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Schema = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


class Tool(Lenient):
    """One of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    """`tool_choice`: this function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def tools_for(tools: list[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that may be called. Raises: `ApiError` (400) for a choice that is not among them."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_value("tools", f"names must differ, got {', '.join(names)}")
    if choice == "none":
        return []
    if not tools and choice != "auto":
        raise bad_value("tool_choice", "needs tools: pass them, or leave this out")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_value("tool_choice", f"there is no tool {choice.function.name!r}, only {', '.join(map(repr, names))}")
    return tools


def forced_calls(tools: list[Tool], choice: ToolChoice, parallel: bool) -> str:
    """The schema of calls: of the chosen tool, or of any."""
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    calls = []
    for i, function in enumerate(functions):
        arguments = _moved(function.parameters, f"#/items/anyOf/{i}/properties/arguments")
        properties = {"name": {"const": function.name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    most = {} if parallel and not isinstance(choice, NamedTool) else {"maxItems": 1}
    return json.dumps({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most})


def _moved(parameters: dict[str, Any], to: str) -> dict[str, Any]:
    """A schema whose own root has become the place `to` of another one: references to it follow.

    Its `$id` goes: two tools may have the same one. References below another `$id` are to that one, and stay.
    """
    own = parameters.get("$id")
    own = own.removesuffix("#") if isinstance(own, str) else ""

    def moved(schema: Any, names: bool = False) -> Any:
        if isinstance(schema, list):
            return [moved(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if names:
            return {name: moved(value) for name, value in schema.items()}
        if isinstance(other := schema.get("$id"), str) and not other.startswith("#"):
            return schema
        found = {name: value if name in VALUES else moved(value, name in NAMED) for name, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            place = reference.removeprefix(own)
            if reference == own or place == "#" or place.startswith("#/"):
                found["$ref"] = to + place[1:]
        return found

    return moved({name: value for name, value in parameters.items() if name != "$id"})


class ToolText:
    """Splits an answer into text and tool calls.

    Two forms are understood: JSON between <tool_call> and </tool_call> (Hermes, Qwen, SmolLM2), and an answer that is
    JSON and nothing else (Llama 3). What may become a call is held back until the answer ends.

    names: of the functions that may be called. most: calls at most. forced: the whole answer is JSON.
    """

    def __init__(self, names: Collection[str], *, most: int | None = None, forced: bool = False):
        self._names, self._most, self._forced = frozenset(names), most, forced
        self._held: list[str] = []  # in pieces
        self._end = ""  # of it, where MARK may begin
        self._first, self._sent, self._marked = "", False, False  # the first letter; whether text was sent, MARK found

    def add(self, text: str) -> str:
        """The text that is certainly none of a call."""
        self._held.append(text)
        if self._forced or self._marked:
            return ""
        self._end += text
        self._marked = MARK in self._end
        self._first = self._first or text.lstrip()[:1]
        if not self._marked and not self._sent and self._first in ("", "{", "["):
            self._end = self._end[1 - len(MARK) :]
            return ""
        held = "".join(self._held)
        if self._marked:
            at = held.find(MARK)
        else:
            at = len(held) - next(n for n in range(len(MARK) - 1, -1, -1) if held.endswith(MARK[:n]))
        out, self._end = held[:at], held[at:]
        self._held = [self._end]
        self._sent |= bool(out.strip())
        return out

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """(the rest of the text, the calls in OpenAI's form). A call that can't be read stays text."""
        held, self._held = "".join(self._held), []
        texts = (not self._forced and _CALL.findall(held)) or [held]
        try:
            calls = [call for text in texts for call in self._calls(text)]
        except (ValueError, RecursionError):
            return held, []
        rest = "" if not held.startswith(MARK) else _CALL.sub("", held).strip()
        return rest, calls[: self._most]

    def _calls(self, text: str) -> list[dict[str, Any]]:
        values = json.loads(text)
        values = values if isinstance(values, list) else [values]
        if not values:
            raise ValueError("no call")
        return [self._call(value) for value in values]

    def _call(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            raise ValueError("no call of a known function")
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": value["name"], "arguments": arguments}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
