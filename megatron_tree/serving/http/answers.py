"""Answers of OpenAI's API, whole and in pieces."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]
IMPOSSIBLE = -9999.0  # OpenAI's number for what JSON can't say: minus infinity


class Usage(BaseModel):
    """Tokens of a request; a prompt counts once however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> Usage:
        """From the two numbers."""
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class CompletionLogprobs(BaseModel):
    """Of /v1/completions; lists with one entry per token. Offsets are in characters from the answer's beginning."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(BaseModel):
    """The answer of /v1/completions, and of every event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token with its log-probability; bytes: UTF-8, or None where the token is no whole character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of the answer, with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of /v1/chat/completions; one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    """The answer's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    """A piece of one answer; delta: {"role", "content"} at first, then {"content"}, {} at the end."""

    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    """An event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TokenTexts:
    """Log-probabilities of single tokens in OpenAI's two forms; tokens are told as the text they decode to."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        """What the tokenizer makes of one token alone; U+FFFD stands for parts of a character."""
        if token not in self._known:
            self._known[token] = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return self._known[token]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        return {
            "token": text,
            "logprob": max(logprob, IMPOSSIBLE),
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    def chat(self, tokens: list[tuple[int, float, list[tuple[int, float]]]]) -> ChatLogprobs:
        """From (token, logprob, [(alternative, logprob), ...]) for every token."""
        content = [
            ChatLogprob(**self._entry(token, logprob), top_logprobs=[TopLogprob(**self._entry(*pair)) for pair in top])
            for token, logprob, top in tokens
        ]
        return ChatLogprobs(content=content)

    def completion(self, tokens: list[tuple[int, float, list[tuple[int, float]]]], offset: int) -> CompletionLogprobs:
        """The same for /v1/completions; offset: characters of the answer's earlier tokens."""
        offsets = []
        for token, _, _ in tokens:
            offsets.append(offset)
            offset += len(self.text(token))
        tops = []
        for _, _, top in tokens:
            tops.append({})
            for token, logprob in top:  # likeliest first: it wins where two tokens have the same text
                tops[-1].setdefault(self.text(token), max(logprob, IMPOSSIBLE))
        return CompletionLogprobs(
            tokens=[self.text(token) for token, _, _ in tokens],
            token_logprobs=[max(logprob, IMPOSSIBLE) for _, logprob, _ in tokens],
            top_logprobs=tops,
            text_offset=offsets,
        )
