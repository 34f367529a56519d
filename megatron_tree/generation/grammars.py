"""Answers of a given form: which tokens keep to a JSON schema, by llguidance."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ..errors import TreeError

# As json.dumps writes it: models do not get lost in spaces
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Matcher:
    """What one answer may continue with."""

    def __init__(self, matcher, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Tensor:
        """bool [vocab_size], on the CPU. Raises: `TreeError` for a schema that takes too long."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).bool()

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TreeError(f"the answer can't keep to its JSON schema: {self._matcher.get_error()}")


class Grammars:
    """Makes matchers for a tokenizer's tokens.

    tokenizer: a fast one of Transformers; a copy is used. vocab_size: of the model. end_tokens: the model's; an answer
    that is complete can only continue with one of them.
    """

    def __init__(self, tokenizer, *, vocab_size: int, end_tokens: Collection[int]):
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, sorted(end_tokens)
        self._made, self._lock = None, threading.Lock()

    def check(self, json_schema: str) -> None:
        """Raises: ``ValueError`` that begins with "json_schema" and says what is wrong. From any thread."""
        if self._tokenizer is None:
            raise ValueError("json_schema: needs a tokenizer: give one to the scheduler")
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ValueError("json_schema: needs llguidance: pip install 'megatron_tree[serve]'") from None
        try:
            error = LLMatcher.validate_grammar(_grammar(json_schema), self._tokens())
        except ValueError as broken:
            error = str(broken)
        if error:
            raise ValueError(f"json_schema: {error}")

    def matcher(self, json_schema: str | None) -> Matcher | None:
        """For one answer, from its first token on."""
        if json_schema is None:
            return None
        from llguidance import LLMatcher

        return Matcher(LLMatcher(self._tokens(), _grammar(json_schema)), self._vocab_size)

    def _tokens(self):
        """The tokenizer as llguidance takes it: a second of work, once."""
        with self._lock:
            if self._made is None:
                from llguidance.hf import from_tokenizer

                ends = self._end_tokens or None
                self._made = from_tokenizer(copy.deepcopy(self._tokenizer), n_vocab=self._vocab_size, eos_token=ends)
            return self._made


def _grammar(json_schema: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json_schema, defaults=JSON_STYLE)
