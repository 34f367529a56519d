"""Where an answer ends, and its text in pieces that are final."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from .sampling import SamplingParams

HALF = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet
CONTEXT = 8  # tokens: what is in front of a token may change its text
MOST_WAITING = 32  # tokens: a character has four bytes at most


class Detokenizer:
    """Text of tokens that come one by one: all pieces together are decode(before + tokens) without decode(before).

    No piece ends inside a character, and none is taken back: where more bytes turn those before them into other text,
    what waits is told as it is by itself.
    """

    def __init__(self, tokenizer, before: Sequence[int] | Tensor = (), *, skip_special_tokens: bool = True):
        self._tokenizer, self._before, self._skip = tokenizer, before, skip_special_tokens
        self._tokens: list[int] | None = None  # the last ones, as many as matter
        self._text = self._told = ""  # theirs, and what of it has been told
        self._whole = 0  # so many of them make whole characters
        self._begins = True

    @property
    def begins(self) -> bool:
        """Whether the next token is the beginning of the text, before included."""
        self._begin()
        return self._begins

    def add(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._begin()
        self._tokens.append(token)
        before, self._text = self._text, self._decode(self._tokens)
        whole = not self._text.endswith(HALF)
        if whole and self._text == before != "":  # a special token
            self._tokens.pop()
            return ""
        told = self._told
        if not self._text.startswith(told):  # half a character at the end of `before` is whole now
            told = told.rstrip(HALF)
        goes_on = self._text.startswith(told)
        if (whole and not goes_on) or len(self._tokens) - self._whole > MOST_WAITING:
            piece = self.flush()
            self._keep(self._tokens[self._whole :])
            return piece
        piece = self._text[len(told) : len(self._text.rstrip(HALF))] if goes_on else ""
        self._told = told + piece if goes_on else self._told
        if whole and len(self._tokens) > 2 * CONTEXT:
            self._keep(self._tokens[self._whole :])
        elif whole:
            self._whole = len(self._tokens)
        self._begins &= not self._text
        return piece

    def flush(self) -> str:
        """The text that waits: half a character, if any."""
        self._begin()
        if self._text.startswith(self._told):
            return self._text[len(self._told) :]
        return self._decode(self._tokens[self._whole :])

    def _begin(self) -> None:
        """Once, at the first use: with the end of what is before, from the beginning of a character on."""
        if self._tokens is not None:
            return
        size = CONTEXT
        while True:
            self._keep([int(token) for token in self._before[-size:]])
            if size >= len(self._before) or (self._text and not self._text.startswith(HALF)):
                break
            size *= 2
        self._begins = not self._text

    def _keep(self, tokens: list[int]) -> None:
        """Only these; their text has been told."""
        self._tokens, self._whole = tokens, len(tokens)
        self._text = self._told = self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens, skip_special_tokens=self._skip)


def decode(tokenizer, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Text of tokens, spaces as they are."""
    return tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


class StopTexts:
    """Finds the first of several stop texts in a text that comes in pieces, wherever it is cut.

    Holds back what may be the beginning of one. include: the stop text is part of the text.
    """

    def __init__(self, texts: Collection[str], *, include: bool = False):
        self._texts, self._include, self._held = tuple(texts), include, ""

    def add(self, piece: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """(text that is final, the stop text that ends the answer or None).

        may_end: otherwise a stop text that ends in this piece is as any other text.
        """
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self._texts if may_end and (at := text.find(stop)) >= 0]
        if ends:
            end, at, stop = min(ends)
            self._held = ""
            return text[: end if self._include else at], stop
        longest = max((len(stop) for stop in self._texts), default=1) - 1
        begins = range(max(0, len(text) - longest), len(text))
        cut = next((i for i in begins if any(_goes_on(stop, text[i:]) for stop in self._texts)), len(text))
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def _goes_on(text: str, beginning: str) -> bool:
    return len(text) > len(beginning) and text.startswith(beginning)


class Delta(NamedTuple):
    """What one token adds to an answer."""

    text: str
    finish_reason: str | None = None
    """ "stop": an end token or a stop text; "length": max_tokens; None: it continues."""
    stop_reason: int | str | None = None
    """The token or the text that ended it."""


NOTHING = Delta("")


class Stopper:
    """The text of one answer and its end.

    tokenizer: with None texts are empty, and `params.stop` must be empty. end_tokens: the model's; they end the answer
    unless params.ignore_eos is set. Neither they nor `params.stop_token_ids` are part of the text, unless
    params.include_stop_str_in_output is set. before: tokens whose text it continues.
    """

    def __init__(
        self,
        tokenizer,
        params: SamplingParams,
        end_tokens: Collection[int] = (),
        before: Sequence[int] | Tensor = (),
    ):
        assert tokenizer is not None or not params.stop
        skips = params.skip_special_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, before, skip_special_tokens=skips)
        self._texts = StopTexts(params.stop, include=params.include_stop_str_in_output)
        self.end_tokens = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else end_tokens)
        self._params, self.num_tokens = params, 0

    def add(self, token: int) -> Delta:
        self.num_tokens += 1
        ends, text = token in self.end_tokens, ""
        if self._detokenizer is not None and (self._params.include_stop_str_in_output or not ends):
            text, stop = self._texts.add(self._detokenizer.add(token), may_end=not ends and self._is_long_enough)
            if stop is not None:
                return Delta(text, "stop", stop)
        if ends:
            return Delta(text + self.flush(), "stop", token)
        if self.num_tokens < self._params.max_tokens:
            return Delta(text) if text else NOTHING
        return Delta(text + self.flush(), "length")

    @property
    def _is_long_enough(self) -> bool:
        """Whether a stop text may end here."""
        return self.num_tokens > self._params.min_tokens

    def flush(self) -> str:
        """The text that waits, for an answer that ends here."""
        if self._detokenizer is None:
            return ""
        text, stop = self._texts.add(self._detokenizer.flush(), may_end=self._is_long_enough)
        return text if stop is not None else text + self._texts.flush()
