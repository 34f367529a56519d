"""Requests for answers of a given form: `response_format`, `structured_outputs`, and calls of a tool, as grammars."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...generation.sampling import Grammar
from ..messages import Lenient
from .tools import NamedTool, Tool, ToolChoice

ANY_OBJECT = {"type": "object"}


def _json(schema: Any) -> Grammar:
    return Grammar(kind="json", text=schema if isinstance(schema, str) else json.dumps(schema))


class JsonSchema(Lenient):
    """`response_format.json_schema`. The schema is kept to, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = ANY_OBJECT
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
    def grammar(self) -> Grammar | None:
        """None for text."""
        if self.type == "text":
            return None
        return _json(ANY_OBJECT if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(Lenient):
    """vLLM's `structured_outputs`: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None
    json_object: bool = False

    @model_validator(mode="after")
    def _one(self):
        wishes = (self.json_, self.regex, self.choice, self.grammar_, self.json_object or None)
        if sum(wish is not None for wish in wishes) != 1:
            raise ValueError("must have one of json, regex, choice, grammar and json_object")
        return self

    @property
    def grammar(self) -> Grammar:
        if self.regex is not None:
            return Grammar(kind="regex", text=self.regex)
        if self.choice is not None:
            return Grammar(kind="regex", text="|".join(map(re.escape, self.choice)))
        if self.grammar_ is not None:
            return Grammar(kind="lark", text=self.grammar_)
        return _json(ANY_OBJECT if self.json_ is None else self.json_)


def forced_calls(tools: list[Tool], choice: ToolChoice, parallel: bool) -> Grammar:
    """JSON of calls: of the chosen tool, or of any."""
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
    return _json({"type": "array", "items": call, "minItems": 1, **most})
