"""Megatron's indexed datasets (`PREFIX.bin` and `PREFIX.idx`), read and blended by Megatron-core itself.

The order of the samples is that of Megatron-LM for the same files, seed, split and number of samples. Megatron-core's
wheels bring the compiled helper that lays it out; nothing has to be built.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
from collections import OrderedDict
from pathlib import Path

import numpy as np

from .data import Corpus

DEFAULT_SPLIT = "949,50,1"
CACHE = "index-cache"  # beside the first dataset: the order, laid out once and read by all ranks
_ENDS = 1 << 20  # bytes at either end of a file that identify it
_ORDER = 4096  # entries of an index that identify an order


def parse_data_path(entries: list[str]) -> tuple[list[str], list[float] | None]:
    """['a', 'b'] -> (['a', 'b'], None); ['0.3', 'a', '0.7', 'b'] -> (['a', 'b'], [0.3, 0.7]), as in Megatron-LM.

    Raises: ValueError for a mixture of both, a weight that is not positive, or a missing file.
    """
    numbers = [_number(entry) for entry in entries]
    if numbers[0] is None:
        prefixes, weights = entries, None
    else:
        prefixes, weights = entries[1::2], numbers[0::2]
        if len(entries) % 2 or any(w is None or not (0 < w < math.inf) for w in weights):
            raise ValueError(
                f"data_path={' '.join(entries)!r}: give prefixes alone, or each with a positive weight in front of it"
            )
    for prefix in prefixes:
        for ending in (".idx", ".bin"):
            if not Path(prefix + ending).is_file():
                raise ValueError(
                    f"data_path={prefix!r} is not a folder of text, and {prefix + ending} does not exist: name the "
                    "files of an indexed dataset without their endings; megatron_tree.training.preprocess makes them"
                )
    return list(prefixes), weights


def parse_split(text: str) -> tuple[float, float]:
    """'949,50,1' -> (0.949, 0.999): where the training documents and the validation documents end.

    Raises: ValueError unless these are one to three numbers with a positive first.
    """
    parts = [_number(part) for part in text.split(",")]
    if len(parts) > 3 or any(p is None or not (0 <= p < math.inf) for p in parts) or not parts[0]:
        raise ValueError(f"split={text!r} must be three numbers like {DEFAULT_SPLIT}: training, validation, test")
    parts += [0.0] * (3 - len(parts))
    train, valid, _ = (part / sum(parts) for part in parts)
    return train, train + valid


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class IndexedSamples:
    """Samples of a Megatron dataset; a `data.Samples`.

    Args:
        dataset: GPTDataset or BlendedDataset.
        vocab_size: token ids must be less.
    """

    def __init__(self, dataset, *, vocab_size: int):
        self._dataset, self._vocab_size = dataset, vocab_size

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices) -> np.ndarray:
        rows = []
        for index in indices:
            sample = self._dataset[index]
            rows.append(np.append(sample["tokens"].numpy(), sample["labels"][-1].item()))
        rows = np.stack(rows)
        if rows.max() >= self._vocab_size:
            raise ValueError(
                f"vocab_size={self._vocab_size}, but the data hold token {rows.max()}: "
                "give the vocabulary that they were made with (--vocab-size or --tokenizer-model)"
            )
        return rows


class _Vocabulary:
    """What Megatron's datasets want to know of a tokenizer, and what must change its cache's name."""

    def __init__(self, vocab_size: int, files: str):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1  # only asked for where losses at ends of documents are masked, which is off
        self.unique_identifiers = OrderedDict({"vocab_size": vocab_size, "files": files})


def open_indexed(args: argparse.Namespace) -> Corpus:
    """Training and validation samples of the indexed datasets in `data_path`. All ranks call it: rank 0 lays out the
    order in a cache first.

    Raises: ValueError if a file is damaged, or there is too little in it for `split`, `seq_length` or `train_iters`.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    prefixes, weights = parse_data_path(args.data_path)
    split = args.split or DEFAULT_SPLIT
    bounds = parse_split(split)
    facts = [_examine(prefix, bounds, args) for prefix in prefixes]
    files = hashlib.sha256("|".join(fact["fingerprint"] for fact in facts).encode()).hexdigest()
    cache = args.data_cache_path or str(Path(prefixes[0]).parent / CACHE)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, weights),
        split=split,
        path_to_cache=cache,
        tokenizer=_Vocabulary(args.vocab_size, files),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    config.split_matrix[2] = None  # the test part is not used
    if not args.eval_iters:
        config.split_matrix[1] = None
    wanted = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, None]
    if weights is not None:
        wanted[2] = 0  # Megatron's builder insists
    try:
        train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config).build()
    except Exception as error:  # Megatron turns an OSError into a bare Exception
        if not isinstance(error.__cause__ or error, (OSError, ValueError, EOFError)):
            raise
        raise ValueError(
            f"data_cache_path={cache!r}: the order can't be kept there, or what is kept is damaged "
            f"({error.__cause__ or error}): delete the folder, or name another by --data-cache-path"
        ) from error
    _require_enough("train_iters", args.train_iters, train, wanted[0])
    if valid is not None:
        _require_enough("eval_iters", args.eval_iters, valid, wanted[1])
    order = _order_fingerprint(train)
    return Corpus(
        train=IndexedSamples(train, vocab_size=args.vocab_size),
        valid=None if valid is None else IndexedSamples(valid, vocab_size=args.vocab_size),
        num_documents=sum(fact["documents"] for fact in facts),
        num_tokens=sum(fact["train_tokens"] for fact in facts),
        digest=hashlib.sha256(f"{files}|{split}|{weights}|{order}".encode()).hexdigest(),
        unigram=None,
    )


def _examine(prefix: str, bounds: tuple[float, float], args: argparse.Namespace) -> dict:
    """Documents, tokens and fingerprint of one indexed dataset."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    try:
        dataset = IndexedDataset(prefix)
    except (AssertionError, ValueError, OSError) as error:
        raise ValueError(f"data_path: {prefix}.idx is damaged ({error}): make it anew") from error
    lengths = dataset.sequence_lengths
    expected = int(lengths.sum(dtype=np.int64)) * DType.size(dataset.index.dtype)
    size = Path(prefix + ".bin").stat().st_size
    if size != expected:
        raise ValueError(
            f"data_path: {prefix}.bin holds {size} bytes, but {prefix}.idx tells of {expected}: "
            "one of them is damaged or belongs to another dataset; make them anew"
        )
    ends = [round(bound * len(lengths)) for bound in (0.0, *bounds)]  # as Megatron's builder rounds
    tokens = [int(lengths[start:end].sum(dtype=np.int64)) for start, end in itertools.pairwise(ends)]
    parts = ["training", "validation"] if args.eval_iters else ["training"]
    for part, count in zip(parts, tokens, strict=False):
        if count <= args.seq_length:
            raise ValueError(
                f"split={args.split or DEFAULT_SPLIT!r} leaves {count} tokens of {prefix} for {part}, less than one "
                f"sample of seq_length={args.seq_length} + 1: change the split, take more data"
                + (", or eval_iters=0" if part == "validation" else "")
            )
    return {"documents": len(lengths), "train_tokens": tokens[0], "fingerprint": _file_fingerprint(prefix)}


def _file_fingerprint(prefix: str) -> str:
    digest = hashlib.sha256()
    for ending in (".idx", ".bin"):
        path = Path(prefix + ending)
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def _order_fingerprint(dataset) -> str:
    """Of the beginning of an order. It changes where Megatron shuffles another number of epochs together; how datasets
    take turns in a blend follows from their weights, however long the run is."""
    digest = hashlib.sha256()
    for part in getattr(dataset, "datasets", [dataset]):
        for index in (part.document_index, part.shuffle_index):
            digest.update(np.ascontiguousarray(index[:_ORDER]).tobytes())
    return digest.hexdigest()


def _require_enough(option: str, value: int, dataset, wanted: int) -> None:
    if len(dataset) < wanted:
        raise ValueError(
            f"{option}={value} needs {wanted} samples, but data_path without weights is read once and holds "
            f"{len(dataset)}: put a weight in front of each prefix, then data repeat"
        )
