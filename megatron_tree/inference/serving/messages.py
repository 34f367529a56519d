"""The messages of a chat: what OpenAI's clients send, in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...core.files import check_text
from ..generation.sampling import Strict

# Fields of messages and their parts that clients send back or add, and that no template reads
IGNORED = frozenset({"annotations", "cache_control", "provider_specific_fields"})
MAX_PARTS = 1024  # of a message
MAX_CALLS = 512
MOST_VALUES = 100_000  # that a template may have to walk through: a second


class Lenient(Strict):
    """null is the same as nothing, and fields that no template reads are left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: x for name, x in data.items() if x is not None and name not in IGNORED}


class TextPart(Lenient):
    """A text in a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Lenient):
    """Where an image is. detail: the model's processor decides."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Lenient):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


class RefusalPart(Lenient):
    """What a model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class CalledFunction(Strict):
    """The function that a model called. arguments: JSON, as text."""

    name: str
    arguments: str = "{}"


class ToolCall(Lenient):
    """A call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0  # of streams; some clients send it back

    def for_template(self) -> dict[str, Any]:
        """Templates take the arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments  # what the model wrote, JSON or not
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]


class ChatMessage(Lenient):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _complete(self):
        if self.content is None and self.role != "assistant":
            raise ValueError("has no content")
        return self

    @property
    def image_urls(self) -> list[str]:
        """In their order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """In the form of chat templates: "developer" is OpenAI's newer name of "system"; parts of text are joined,
        unless there are images among them."""
        content = self.content
        if self.image_urls:
            is_image = [isinstance(part, ImagePart) for part in content]
            content = [
                {"type": "image"} if image else {"type": "text", "text": part.text}
                for part, image in zip(content, is_image, strict=True)
            ]
        elif isinstance(content, list):
            content = "".join(part.text for part in content)
        message = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = (self.refusal or "") if content is None else content
        more = {name: getattr(self, name) for name in ("name", "reasoning_content", "tool_call_id")}
        message |= {name: x for name, x in more.items() if x is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def chat_text(tokenizer, messages: list[dict[str, Any]], /, **options) -> str:
    """The text that the model's chat template makes of messages, up to where the answer begins.

    options: for the template, such as tools.
    Raises: ValueError for invalid Unicode, for too many values, and for whatever the template, code that comes with the
        model, refuses.
    """
    options = {"add_generation_prompt": True, **options}
    waiting, seen = [messages, options], 0
    while waiting:
        value, seen = waiting.pop(), seen + 1
        if seen + len(waiting) > MOST_VALUES:
            raise ValueError(f"messages: they, tools and options have more than {MOST_VALUES:,} values: send fewer")
        check_text("messages", value)
        if isinstance(value, dict | list):
            waiting += [*value, *value.values()] if isinstance(value, dict) else value
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # each template has errors of its own
        raise ValueError(f"messages: the model's chat template refuses them: {error}") from error


def chat_tokens(tokenizer, messages: list[dict[str, Any]], /, **options) -> list[int]:
    """The tokens of `chat_text`: the template writes special tokens itself."""
    return list(tokenizer(chat_text(tokenizer, messages, **options), add_special_tokens=False).input_ids)
