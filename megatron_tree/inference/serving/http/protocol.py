"""Requests of OpenAI's API as this server takes them: a field that matters is honoured, or else refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...generation.sampling import Sampling, SamplingParams, StopTexts, Strict, Temperature, TokenId
from ..messages import ChatMessage, Lenient
from .errors import bad_value, refused
from .tools import Schema, Tool, ToolChoice, forced_calls, tools_for

MAX_CHOICES = 128
MAX_MESSAGES = 8192
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_TOOLS = 512
MAX_TOP_LOGPROBS = 20
ANY_OBJECT = {"type": "object"}
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
# No effect on the answer: records, caches and speed
IGNORED = frozenset({
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip

_TOOLS = "an older form of tools and tool_choice: pass those"
_NO_SEARCH = "answers are sampled, not searched for: "
_TEXT_ONLY = "this server reads and writes text only: leave the field out"
# What would change the answer: (values that change nothing, besides null; why, and what to do instead)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _TEXT_ONLY),
    "best_of": ((1,), "candidates are not ranked here: ask for n choices with logprobs and rank them yourself"),
    "chat_template": ((), "the model's own template is used: format the prompt yourself and use /v1/completions"),
    "function_call": (("none",), _TOOLS),
    "functions": (([],), _TOOLS),
    "length_penalty": ((1, 1.0), f"{_NO_SEARCH}leave it out"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "priority": ((0,), "prompts get rows in the order in which they come: leave it out"),
    "prompt_logprobs": ((), "/v1/completions gives them for echo with logprobs"),
    "suffix": (("",), "text can't be inserted: put what follows into the prompt"),
    "use_beam_search": ((False,), f"{_NO_SEARCH}ask for n choices"),
}


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # against those who count bytes: this server adds none
    continuous_usage_stats: Literal[False] | None = None


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


TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Several = Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationRequest(Sampling):
    """What /v1/chat/completions and /v1/completions have in common; null means the default."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    # OpenAI's ranges and defaults
    temperature: Annotated[Temperature, Field(le=2)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: StopTexts = Field(default_factory=list, max_length=MAX_STOPS)
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None  # not OpenAI's: see `Request`

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (neutral, why) in REFUSED.items():
            if data.get(name) is not None and not any(type(data[name]) is type(x) and data[name] == x for x in neutral):
                raise refused(name, why)
        default = {name for name, field in cls.model_fields.items() if not field.is_required()}
        known = {name: x for name, x in data.items() if name not in IGNORED and name not in REFUSED}
        return {name: x for name, x in known.items() if not (x is None and name in default)}

    @model_validator(mode="after")
    def _combinations(self):
        if self.stream_options is not None and not self.stream:
            raise bad_value("stream_options", "is for streams only: set stream to true, or leave it out")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> SamplingParams:
        """How to answer a prompt, with this many tokens at most."""
        fields = self.model_dump(include=set(Sampling.model_fields))
        fields |= {"logprobs": self.top_logprobs_wanted, "prompt_logprobs": self.prompt_logprobs_wanted}
        fields["json_schema"] = self.json_schema
        return SamplingParams(**fields, max_tokens=max_tokens)

    @property
    def json_schema(self) -> str | None:
        """What the answer must look like. Raises: `ApiError` (400) for a form that can't be combined with tools."""
        return None if self.response_format is None else self.response_format.schema_text

    @property
    def limit(self) -> int | None:
        """Tokens of an answer at most; None: as many as fit."""
        return self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many alternatives to report for every token: None: no logprobs at all, 0: the chosen token's only."""
        raise NotImplementedError

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """The same for tokens of the prompt."""
        return None


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: str | TokenIds | Annotated[list[str], Several] | Annotated[list[TokenIds], Several]
    max_tokens: Annotated[int, Field(ge=0)] = COMPLETION_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True  # not OpenAI's: what the tokenizer puts around a text

    @model_validator(mode="after")
    def _something_is_asked_for(self):
        if not self.max_tokens and not self.echo:
            raise bad_value("max_tokens", "0 is for echo only: ask for 1 token or more")
        return self

    @property
    def limit(self) -> int:
        return max(self.max_tokens, 1)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        return self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, as text or as tokens."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    # not OpenAI's: for the chat template
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _chat_combinations(self):
        if "tool_choice" in self.model_fields_set or self.tools:
            tools_for(self.tools, self.tool_choice)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_value("top_logprobs", "needs logprobs: set that to true, or leave this out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_value("max_tokens", "differs from max_completion_tokens: pass one of the two")
        begins = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if begins and self.continue_final_message:
            raise bad_value("continue_final_message", "begins no new message: set add_generation_prompt to false")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def active_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return tools_for(self.tools, self.tool_choice)

    @property
    def calls_are_forced(self) -> bool:
        """Whether the answer consists of tool calls."""
        return self.tool_choice not in ("none", "auto")

    @property
    def json_schema(self) -> str | None:
        wish = super().json_schema
        if not self.active_tools:
            return wish
        if wish is not None:
            raise bad_value("response_format", "an answer of this form can't call tools: set tool_choice to 'none'")
        return forced_calls(self.tools, self.tool_choice, self.parallel_tool_calls) if self.calls_are_forced else None

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        options = dict(self.chat_template_kwargs) | {"continue_final_message": self.continue_final_message}
        options["add_generation_prompt"] = self.add_generation_prompt and not self.continue_final_message
        options |= {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return options | ({"tools": [tool.for_template() for tool in self.active_tools]} if self.active_tools else {})
