"""Answers of a given form: which tokens keep to a JSON schema, a regular expression or a grammar, by llguidance."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ..errors import TreeError
from .sampling import Grammar

# As json.dumps writes it: models do not get lost in spaces
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Matcher:
    """What one answer may continue with."""

    def __init__(self, matcher, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Tensor:
        """bool [vocab_size], on the CPU. Raises: `TreeError` for a grammar that takes too long."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).bool()

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TreeError(f"the answer can't keep to its grammar: {self._matcher.get_error()}")


class Grammars:
    """Makes matchers for a tokenizer's tokens.

    tokenizer: a fast one of Transformers; a copy is used. vocab_size: of the model. end_tokens: the model's; an answer
    that is complete can only continue with one of them.
    """

    def __init__(self, tokenizer, *, vocab_size: int, end_tokens: Collection[int]):
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, sorted(end_tokens)
        self._made, self._lock = None, threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raises: ``ValueError`` that begins with "grammar" and says what is wrong. From any thread."""
        if self._tokenizer is None:
            raise ValueError("grammar: needs a tokenizer: give one to the scheduler")
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ValueError("grammar: needs llguidance: pip install 'megatron_tree[serve]'") from None
        try:
            error = LLMatcher.validate_grammar(self._text(grammar), self._tokens())
        except ValueError as broken:
            error = str(broken)
        if error:
            raise ValueError(f"grammar: {error}")

    def matcher(self, grammar: Grammar | None) -> Matcher | None:
        """For one answer, from its first token on."""
        if grammar is None:
            return None
        from llguidance import LLMatcher

        return Matcher(LLMatcher(self._tokens(), self._text(grammar)), self._vocab_size)

    def _tokens(self):
        """The tokenizer as llguidance takes it: a second of work, once."""
        with self._lock:
            if self._made is None:
                from llguidance.hf import from_tokenizer

                ends = self._end_tokens or None
                self._made = from_tokenizer(copy.deepcopy(self._tokenizer), n_vocab=self._vocab_size, eos_token=ends)
            return self._made

    @staticmethod
    def _text(grammar: Grammar) -> str:
        from llguidance import LLMatcher

        match grammar.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_STYLE)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.text)
