"""Where an answer ends, and its text in pieces that are final."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from .sampling import SamplingParams


class Detokenizer:
    """Text of tokens that come one by one: tokenizers' `DecodeStream`, and what waits in it at the end.

    All pieces together are the text of all tokens. The last token of half a character brings the whole character.
    """

    def __init__(self, tokenizer):
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._waiting.append(token)
        text = self._stream.step(self._tokenizer.backend_tokenizer, token)
        if text is None:
            return ""
        self._waiting = []
        return text

    def flush(self) -> str:
        """The text that waits: half a character, if any."""
        return decode(self._tokenizer, self._waiting)


def decode(tokenizer, tokens: Sequence[int]) -> str:
    """Text of tokens, without special ones, spaces as they are."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False) if tokens else ""


class StopTexts:
    """Finds the first of several stop texts in a text that comes in pieces, wherever it is cut.

    Holds back what may be the beginning of one.
    """

    def __init__(self, texts: Collection[str]):
        self._texts, self._held = tuple(texts), ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """(text that is final, the stop text that ends the answer or None)."""
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self._texts if (at := text.find(stop)) >= 0]
        if ends:
            _, at, stop = min(ends)
            self._held = ""
            return text[:at], stop
        longest = max((len(stop) for stop in self._texts), default=1) - 1
        begins = range(max(0, len(text) - longest), len(text))
        cut = next((i for i in begins if any(stop.startswith(text[i:]) for stop in self._texts)), len(text))
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


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
    unless params.ignore_eos is set. Neither they nor `params.stop_token_ids` are part of the text.
    """

    def __init__(self, tokenizer, params: SamplingParams, end_tokens: Collection[int] = ()):
        assert tokenizer is not None or not params.stop
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._texts = StopTexts(params.stop)
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(end_tokens))
        self._max_tokens, self.num_tokens = params.max_tokens, 0

    def add(self, token: int) -> Delta:
        self.num_tokens += 1
        if token in self._ends:
            return Delta(self.flush(), "stop", token)
        if self._detokenizer is None:
            return NOTHING if self.num_tokens < self._max_tokens else Delta("", "length")
        text, stop = self._texts.add(self._detokenizer.add(token))
        if stop is not None:
            return Delta(text, "stop", stop)
        if self.num_tokens < self._max_tokens:
            return Delta(text)
        return Delta(text + self.flush(), "length")

    def flush(self) -> str:
        """The text that waits, for an answer that ends here."""
        if self._detokenizer is None:
            return ""
        text, stop = self._texts.add(self._detokenizer.flush())
        return text if stop is not None else text + self._texts.flush()
