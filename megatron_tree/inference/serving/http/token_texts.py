"""Log-probabilities of single tokens in OpenAI's two forms: their texts, their bytes, and where in a text they are."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...generation.requests import Event
from ...generation.sampler import Choice
from ...generation.stopping import HALF, Detokenizer, decode

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Place(NamedTuple):
    """Where a token is in a text."""

    offset: int
    """Characters before the one that it begins in."""
    begins: bool
    """Whether there is no text before it."""


Placed = tuple[Choice, Place]


class Echo(NamedTuple):
    """What is repeated in front of the answers to a prompt."""

    text: str
    tokens: list[int]
    places: list[Place]

    def placed(self, choices: Sequence[Choice]) -> list[Placed]:
        """Its tokens; choices: of those after the first one, which has no log-probability."""
        return list(zip((Choice(self.tokens[0]), *choices), self.places, strict=True))


class Walk:
    """Where the tokens of a text are, one after another. offset: characters so far."""

    def __init__(self, texts: TokenTexts, detokenizer: Detokenizer, offset: int):
        self._texts, self._detokenizer, self.offset = texts, detokenizer, offset

    def place(self, token: int) -> Place:
        """Of the next token."""
        before, begins = self.offset, self._detokenizer.begins
        piece = self._detokenizer.add(token)
        self.offset += len(piece)
        if not piece:
            return Place(before, begins)
        own = len(self._texts.text(token, begins))  # less than the piece if that also has what waited
        return Place(max(before, self.offset - own), begins)


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens. It decodes only, so threads may share it."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._front: list[int] = tokenizer("a", add_special_tokens=False).input_ids
        self._known: dict[tuple[int, bool], tuple[str, bytes | None]] = {}

    def walk(self, before: Sequence[int], offset: int = 0) -> Walk:
        """Along an answer. before: tokens whose text it continues."""
        return Walk(self, Detokenizer(self._tokenizer, before), offset)

    def echo(self, prompt: str | list[int], tokens: list[int]) -> Echo:
        """Of a prompt that came as a text or as tokens; tokens: it."""
        typed = isinstance(prompt, str)
        walk = Walk(self, Detokenizer(self._tokenizer, skip_special_tokens=typed), 0)
        text, places = prompt if typed else self._decode(tokens), []
        for token in tokens:
            places.append(walk.place(token))
            name = self.text(token, places[-1].begins)
            if walk.offset == places[-1].offset and HALF not in name and text.startswith(name, walk.offset):
                walk.offset += len(name)  # a special token that was typed, not added
        return Echo(text, tokens, places)

    def text(self, token: int, begins: bool) -> str:
        """What a token adds to a text, or begins one with; U+FFFD stands for parts of a character."""
        return self._text_and_bytes(token, begins)[0]

    def chat(self, placed: Sequence[Placed]) -> dict[str, Any]:
        """For /v1/chat/completions."""
        content = []
        for (token, logprob, top), (_, begins) in placed:
            tops = [self._entry(*pair, begins) for pair in top]
            content.append(self._entry(token, logprob, begins) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def completion(self, placed: Sequence[Placed]) -> dict[str, Any]:
        """For /v1/completions."""
        tops = []
        for (_, own, top), (_, begins) in placed:
            tops.append(None if own is None else {})
            for token, logprob in top:  # most likely first: it wins if two tokens have the same text
                tops[-1].setdefault(self.text(token, begins), logprob)
        return {
            "tokens": [self.text(choice.token, place.begins) for choice, place in placed],
            "token_logprobs": [choice.logprob for choice, _ in placed],
            "top_logprobs": tops,
            "text_offset": [place.offset for _, place in placed],
        }

    def _entry(self, token: int, logprob: float, begins: bool) -> dict[str, Any]:
        text, utf8 = self._text_and_bytes(token, begins)
        return {"token": text, "logprob": logprob, "bytes": None if utf8 is None else list(utf8)}

    def _text_and_bytes(self, token: int, begins: bool) -> tuple[str, bytes | None]:
        if (token, begins) not in self._known:
            text, front, both = (self._decode(tokens) for tokens in ([token], self._front, [*self._front, token]))
            if not begins and both.startswith(front):
                text = both[len(front) :]
            self._known[token, begins] = text, self._bytes(token) if HALF in text else text.encode()
        return self._known[token, begins]

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens, skip_special_tokens=False)

    def _bytes(self, token: int) -> bytes | None:
        """Of a part of a character, by the two ways in which vocabularies write bytes; None: another way."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if HALF in name:
            return name.encode()
        if byte := _BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        letters = _byte_letters()
        return bytes(letters[c] for c in name) if letters.keys() >= set(name) else None


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: bytes that can be printed stand for themselves, the others come behind."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


def chosen(event: Event) -> Choice:
    """An event's token as it was chosen."""
    return Choice(event.token, event.logprob, event.top_logprobs)
