"""Requests of OpenAI's API as this server takes them: every field is supported or refused by name, none is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...generation.sampling import Sampling, SamplingParams, StopTexts, Strict, Temperature, TokenId
from .errors import bad_value, refused

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_NO_TOOLS = "this server calls no tools: leave the field out, and describe functions in the messages"
_TEXT_ONLY = "this server reads and writes text only: leave the field out"
_NO_STORE = "nothing is stored between requests: leave the field out"
# Unsupported fields of OpenAI's API: (values that change nothing, besides null; why, and what to do instead)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _TEXT_ONLY),
    "best_of": ((), "candidates are not ranked here: ask for n choices with logprobs and rank them yourself"),
    "echo": ((False,), "the prompt is not repeated in the answer: put it in front yourself"),
    "function_call": (("none",), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "logit_bias": (({},), "tokens can't be biased one by one: use top_k, top_p or min_p"),
    "metadata": (({},), _NO_STORE),
    "modalities": ((["text"],), _TEXT_ONLY),
    "moderation": ((), "answers are not moderated here: leave the field out"),
    "parallel_tool_calls": ((), _NO_TOOLS),
    "prediction": ((), "predicted outputs are not used here: leave the field out"),
    "prompt_cache_key": ((), "prompts are not cached by key: leave the field out"),
    "prompt_cache_options": ((), "prompts are not cached between requests: leave the field out"),
    "prompt_cache_retention": ((), "prompts are not cached between requests: leave the field out"),
    "reasoning_effort": ((), "the effort can't be set: ask for it in the messages, or limit max_completion_tokens"),
    "response_format": (
        ({"type": "text"},),
        "answers are plain text: ask for JSON in the prompt and check it yourself",
    ),
    "safety_identifier": ((), "users are not distinguished here: leave the field out"),
    "service_tier": (("auto", "default"), "there is one tier only: leave the field out"),
    "store": ((False,), _NO_STORE),
    "suffix": ((), "text can't be inserted: put what follows into the prompt"),
    "tool_choice": (("none",), _NO_TOOLS),
    "tools": (([],), _NO_TOOLS),
    "verbosity": ((), "the verbosity can't be set: ask for it in the messages"),
    "web_search_options": ((), "this server searches nothing: leave the field out"),
}


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationRequest(Sampling):
    """What /v1/chat/completions and /v1/completions have in common; null means the default."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # OpenAI's label of the caller for its own records: there are none here
    # OpenAI's ranges and defaults
    temperature: Annotated[Temperature, Field(le=2)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: StopTexts = Field(default_factory=list, max_length=MAX_STOPS)
    top_k: Annotated[int, Field(ge=1)] = 0

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (neutral, why) in REFUSED.items():
            if data.get(name) is not None and not any(type(data[name]) is type(x) and data[name] == x for x in neutral):
                raise refused(name, why)
        default = {*REFUSED, *(name for name, field in cls.model_fields.items() if not field.is_required())}
        return {name: x for name, x in data.items() if name not in REFUSED and not (x is None and name in default)}

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
        return SamplingParams(**fields, max_tokens=max_tokens, logprobs=self.top_logprobs_wanted)

    @property
    def limit(self) -> int | None:
        """Tokens of an answer at most; None: as many as fit."""
        return self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many alternatives to report for every token: None: no logprobs at all, 0: the chosen token's only."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=1)] = COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True  # not OpenAI's: what the tokenizer puts around a text

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, as text or as tokens."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Strict):
    """A part of a message's content; only text can be read."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """In the form of chat templates: "developer" is OpenAI's newer name of "system"; parts of text are joined."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _chat_combinations(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_value("top_logprobs", "needs logprobs: set that to true, or leave this out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_value("max_tokens", "differs from max_completion_tokens: pass one of the two")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
