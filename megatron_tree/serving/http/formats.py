"""Requests for answers of a given form, `response_format` and calls of a tool, as JSON schemas."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..messages import Lenient
from .tools import NamedTool, Schema, Tool, ToolChoice

ANY_OBJECT = {"type": "object"}


class JsonSchema(Lenient):
    """`response_format.json_schema`. The schema is kept to, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = ANY_OBJECT
    strict: bool = False


class ResponseFormat(Lenient):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self):
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type 'json_schema'")
        return self

    @property
    def schema_text(self) -> str | None:
        """None for text."""
        if self.type == "text":
            return None
        return json.dumps(ANY_OBJECT if self.json_schema is None else self.json_schema.schema_)


def forced_calls(tools: list[Tool], choice: ToolChoice, parallel: bool) -> str:
    """The schema of calls: of the chosen tool, or of any."""
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": function.parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    most = {} if parallel and not isinstance(choice, NamedTool) else {"maxItems": 1}
    return json.dumps({"type": "array", "items": call, "minItems": 1, **most})
