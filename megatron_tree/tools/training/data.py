"""Training data: samples of plain text, in an order that every parallel layout shares."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

EOD = 256  # end of document; bytes are 0 .. 255
VOCAB_SIZE = 257
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Documents, each followed by its end token, concatenated and cut into samples of `seq_length` + 1 tokens, for
    inputs and labels. Each epoch has its own order.
    """

    tokens: np.ndarray
    """Integers [n]."""
    seq_length: int
    seed: int

    def __post_init__(self):
        if len(self) < 1:
            raise ValueError(
                f"{self.tokens.size} tokens of text don't fill one sample of --seq-length {self.seq_length} + 1 tokens"
                ": add text, or shorten it"
            )
        order = functools.lru_cache(1)(lambda epoch: np.random.default_rng([self.seed, epoch]).permutation(len(self)))
        object.__setattr__(self, "_order", order)

    def __len__(self) -> int:
        """Samples of an epoch."""
        return (self.tokens.size - 1) // self.seq_length

    def sample(self, index: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        epoch, place = divmod(index, len(self))
        start = int(self._order(epoch)[place]) * self.seq_length
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)

    def batch(self, indices) -> np.ndarray:
        """int64 [len(indices), seq_length + 1]."""
        return np.stack([self.sample(i) for i in indices])

    def unigram_entropy(self) -> float:
        """Loss, in nats per token, of the best model that ignores context: the entropy of the token frequencies."""
        counts = np.bincount(self.tokens).astype(np.float64)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())

    def digest(self) -> str:
        """SHA-256 of the tokens, hexadecimal; checkpoints hold it."""
        return hashlib.sha256(self.tokens.tobytes()).hexdigest()


@functools.lru_cache(1)
def open_tokenizer(folder: str) -> Any:
    """A Hugging Face tokenizer. Raises: ValueError if the folder holds none."""
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):  # AutoTokenizer would make an empty one
        raise ValueError(f"tokenizer_model={folder!r} is no folder with one of {', '.join(TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds
        raise ValueError(
            f"tokenizer_model={folder!r} is no tokenizer that Transformers can read: {str(error).splitlines()[0]}"
        ) from error


def vocab_size(tokenizer_model: str | None) -> int:
    """Tokens that the training data may hold."""
    return VOCAB_SIZE if tokenizer_model is None else len(open_tokenizer(tokenizer_model))


def text_files(path: str | Path | None) -> list[Path]:
    """All files below a folder, sorted; None: the .py files of Python's standard library, real text that every machine
    has, without installed packages."""
    folder, pattern = (sysconfig.get_paths()["stdlib"], "*.py") if path is None else (path, "*")
    files = sorted(file for file in Path(folder).rglob(pattern) if file.is_file())
    return [file for file in files if not SKIPPED & set(file.relative_to(folder).parts)]


def load_text(path: str | Path | None, *, seq_length: int, seed: int, tokenizer_model: str | None = None) -> PackedText:
    """Read all files below a folder as documents, in an order that the seed decides.

    Args:
        path: see `text_files`.
        seq_length: tokens of a sample.
        seed: of the order of documents and samples.
        tokenizer_model: folder of a tokenizer; None: each byte is a token.
    Raises: ValueError if the folder holds too little text.
    """
    documents = [text for file in text_files(path) if (text := file.read_bytes())]
    if not documents:
        raise ValueError(f"no file with text in {path}")
    order = np.random.default_rng(seed).permutation(len(documents))
    pack = _pack if tokenizer_model is None else functools.partial(_tokenize, open_tokenizer(tokenizer_model))
    return PackedText(tokens=pack([documents[i] for i in order]), seq_length=seq_length, seed=seed)


def _pack(documents: list[bytes]) -> np.ndarray:
    """int16 [n]: the documents' bytes, each followed by EOD."""
    ended = [np.append(np.frombuffer(text, dtype=np.uint8).astype(np.int16), np.int16(EOD)) for text in documents]
    return np.concatenate(ended)


def _tokenize(tokenizer: Any, documents: list[bytes]) -> np.ndarray:
    """int32 [n]: the documents' tokens, each document followed by the tokenizer's end of text."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    texts = (text.decode("utf-8", "replace") for text in documents)
    return np.concatenate([np.array([*encode(text), tokenizer.eos_token_id], dtype=np.int32) for text in texts])


def microbatch_indices(consumed: int, *, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int):
    """Sample numbers of this data-parallel rank's microbatches of the next global batch, `micro_batch_size` at a time.

    All ranks together use samples consumed .. consumed + global_batch_size - 1, in every parallel layout.
    """
    step = micro_batch_size * dp_size
    for start in range(consumed, consumed + global_batch_size, step):
        first = start + dp_rank * micro_batch_size
        yield range(first, first + micro_batch_size)
