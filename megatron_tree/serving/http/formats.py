"""Requests for answers of a given form, `response_format` and calls of a tool, as JSON schemas."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..messages import Lenient
from .tools import NamedTool, Schema, Tool, ToolChoice

ANY_OBJECT = {"type": "object"}
VALUES = ("const", "enum", "default", "examples")  # whose contents are no schemas
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # whose keys are names


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
