"""Text to tokens: bytes, or a Hugging Face tokenizer."""

from __future__ import annotations

import numpy as np

from .data import EOD, VOCAB_SIZE


class ByteTokenizer:
    """A token for each byte of UTF-8, and one for the end of a document."""

    vocab_size = VOCAB_SIZE
    eod = EOD

    def encode(self, text: str) -> np.ndarray:
        """Integers [number of bytes]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer of the transformers package; its end-of-text token ends a document.

    Args:
        name: folder, or name on the hub.
    Raises: ValueError if it can't be loaded, or has no end-of-text token.
    """

    def __init__(self, name: str):
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError(
                f"tokenizer_model={name!r} needs the package transformers: pip install 'megatron_tree[hf]'"
            ) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # what Transformers raises at damaged files has no end
            raise ValueError(f"tokenizer_model={name!r} can't be loaded: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer_model={name!r} has no end-of-text token, which must end documents")
        self.vocab_size = len(self._tokenizer)
        self.eod = int(self._tokenizer.eos_token_id)

    def encode(self, text: str) -> np.ndarray:
        """int64 [number of tokens], without any that the tokenizer would add at the ends."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)
