"""Megatron's indexed datasets (`PREFIX.bin` and `PREFIX.idx`), read, shuffled and blended by Megatron-core.

The order of the samples is that of Megatron-LM for the same files, seed, split and number of samples.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections import OrderedDict
from pathlib import Path

import numpy as np

from .data import Corpus

DEFAULT_SPLIT = "949,50,1"
CACHE = "index-cache"  # next to the first dataset: the sample order, written once and read by all ranks
_IDENTIFYING = 1 << 20  # bytes at the start of a .bin file that, with its .idx file, identify it
_ORDER = 4096  # entries of an order that identify it


def parse_data_path(entries: list[str]) -> tuple[list[str], list[float] | None]:
    """['a', 'b'] -> (['a', 'b'], None); ['0.3', 'a', '0.7', 'b'] -> (['a', 'b'], [0.3, 0.7]), as in Megatron-LM.

    Raises: ValueError for a mixture of both, a weight that is not positive, or a missing file.
    """
    from megatron.core.datasets.utils import get_blend_from_list

    try:
        prefixes, weights = get_blend_from_list(entries)
        fits = all(0 < weight < float("inf") for weight in weights or ())
    except AssertionError:
        fits = False
    if not fits:
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


def parse_split(text: str) -> list[float]:
    """Shares of training, validation and test documents, from an option such as "949,50,1".

    Raises: ValueError unless these are one to three numbers, the first of them positive.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    try:
        shares = parse_and_normalize_split(text)
    except (AssertionError, ValueError, ZeroDivisionError):
        shares = [0.0]
    if not shares[0] > 0:
        raise ValueError(f"split={text!r} must be three numbers like {DEFAULT_SPLIT}: training, validation, test")
    return shares


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
        samples = [self._dataset[index] for index in indices]
        rows = np.stack([np.append(sample["tokens"].numpy(), sample["labels"][-1].item()) for sample in samples])
        if rows.min() < 0 or rows.max() >= self._vocab_size:
            raise ValueError(
                f"vocab_size={self._vocab_size}, but the data hold tokens {rows.min()} .. {rows.max()}: "
                "give the vocabulary that they were made with (--vocab-size or --tokenizer-model)"
            )
        return rows


class _Vocabulary:
    """The tokenizer as far as Megatron's datasets need one: its identifiers become part of the cached order's name."""

    def __init__(self, vocab_size: int, files: str):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1  # not used: losses at ends of documents are not masked
        self.unique_identifiers = OrderedDict({"vocab_size": vocab_size, "files": files})


def open_indexed(args: argparse.Namespace) -> Corpus:
    """Training and validation samples of the indexed datasets in `data_path`. All ranks call it: rank 0 writes the
    order into the cache.

    Raises: ValueError if a file is damaged, or holds too little for `split`, `seq_length` or `train_iters`.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    prefixes, weights = parse_data_path(args.data_path)
    split = args.split or DEFAULT_SPLIT
    facts = [_examine(prefix, split, args) for prefix in prefixes]
    files = hashlib.sha256("".join(digest for *_, digest in facts).encode()).hexdigest()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, weights),
        split=split,
        path_to_cache=args.data_cache_path or str(Path(prefixes[0]).parent / CACHE),
        tokenizer=_Vocabulary(args.vocab_size, files),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, valid = _build(config, args)
    identity = f"{files}|{split}|{weights}|{_order_digest(train)}"
    return Corpus(
        train=IndexedSamples(train, vocab_size=args.vocab_size),
        valid=None if valid is None else IndexedSamples(valid, vocab_size=args.vocab_size),
        num_documents=sum(documents for documents, *_ in facts),
        num_tokens=sum(tokens for _, tokens, _ in facts),
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        unigram=None,
    )


def _build(config, args: argparse.Namespace):
    """(training dataset, validation dataset or None)."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    iters = {"train_iters": args.train_iters, "eval_iters": args.eval_iters}
    sizes = [count * args.global_batch_size for count in iters.values()]
    config.split_matrix[1:] = [config.split_matrix[1] if args.eval_iters else None, None]  # no test part
    try:
        datasets = BlendedMegatronDatasetBuilder(GPTDataset, [*sizes, 0], lambda: True, config).build()[:2]
    except Exception as error:  # Megatron turns an OSError into a bare Exception
        if not isinstance(error.__cause__ or error, (OSError, ValueError, EOFError)):
            raise
        raise ValueError(
            f"data_cache_path={config.path_to_cache!r}: the order can't be written there, or the one that is there is "
            f"damaged ({error.__cause__ or error}): delete the folder, or name another by --data-cache-path"
        ) from error
    for option, wanted, dataset in zip(iters, sizes, datasets, strict=True):
        if dataset is not None and len(dataset) < wanted:
            raise ValueError(
                f"{option}={iters[option]} needs {wanted} samples, but data_path without weights is read once and "
                f"holds {len(dataset)}: put a weight in front of each prefix, then data repeat"
            )
    return datasets


def _examine(prefix: str, split: str, args: argparse.Namespace) -> tuple[int, int, str]:
    """(documents, training tokens, digest that identifies the files) of one indexed dataset."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    try:
        dataset = IndexedDataset(prefix)
        lengths = dataset.sequence_lengths.astype(np.int64)
        expected = int(lengths.sum()) * DType.size(dataset.index.dtype)
    except Exception as error:  # Megatron, struct and numpy raise many kinds of exceptions for damaged files
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"data_path: {index} is damaged ({what}): make it again") from error
    size = data.stat().st_size
    if size != expected:
        raise ValueError(
            f"data_path: {data} holds {size} bytes, but {index} describes {expected}: one of them is damaged or of "
            "another dataset; make them again"
        )
    shares = parse_split(split)
    ends = [0, *(round(sum(shares[: n + 1]) * len(lengths)) for n in (0, 1))]  # as Megatron's builder rounds
    train, valid = (int(lengths[start:end].sum()) for start, end in itertools.pairwise(ends))
    least = min(train, valid) if args.eval_iters else train
    if least <= args.seq_length:
        raise ValueError(
            f"split={split!r} leaves {least} tokens of {prefix} for {'training' if least == train else 'validation'}, "
            f"less than a sample of seq_length={args.seq_length} + 1: change the split, take more data, or eval_iters=0"
        )
    digest = hashlib.sha256(index.read_bytes())
    with data.open("rb") as file:
        digest.update(file.read(_IDENTIFYING))
    return len(lengths), train, digest.hexdigest()


def _order_digest(dataset) -> str:
    """Of the beginning of an order. It changes where Megatron shuffles another number of epochs together."""
    digest = hashlib.sha256()
    for part in getattr(dataset, "datasets", [dataset]):
        for index in (part.document_index, part.shuffle_index):
            digest.update(np.ascontiguousarray(index[:_ORDER]).tobytes())
    return digest.hexdigest()
