"""The messages of a chat as tokens, such that the cached beginning stays valid."""

from __future__ import annotations

from typing import Any

from ..files import check_text

MOST_VALUES = 100_000  # that a template may have to walk through: a second


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


class Transcript:
    """Messages, and the tokens of the whole conversation so far.

    An answer keeps the tokens that the model generated; only what the chat template appends is tokenized. If the
    template changes earlier turns, the whole conversation is tokenized again.

    end_tokens: the model's. system: a message before all others.
    Raises: ValueError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer, end_tokens, system: str | None = None):
        if not tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template: ask it through megatron-tree generate")
        self._tokenizer, self._end_tokens = tokenizer, frozenset(end_tokens)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = list(self._system)
        self._tokens: list[int] = []  # of the conversation, the last answer included
        self._text = ""  # the same as the template writes it, as far as it is in the tokens

    def ask(self, message: str) -> list[int]:
        """The tokens of the conversation with this message, up to where its answer begins; see `answered`."""
        messages = [*self.messages, {"role": "user", "content": message}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if self._text and text.startswith(self._text):
            tokens = self._tokens + self._encode(text[len(self._text) :])
        else:
            tokens = self._encode(text)
        self._asked = messages, text, tokens
        return tokens

    def answered(self, answer: str, tokens: list[int]) -> None:
        """Note the answer to the last message: its text and the tokens that the model wrote."""
        messages, text, prompt = self._asked
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._tokens, self._text = prompt + tokens, text + answer
        if tokens and tokens[-1] in self._end_tokens:
            self._text += self._tokenizer.decode(tokens[-1:], skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        """The template writes special tokens itself."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)
