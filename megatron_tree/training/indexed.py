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
import torch.distributed as dist

from .data import Corpus
from .digests import check_digests, read_digests, sha256, write_digests
from .distributed import on_all_ranks, on_first_rank

DEFAULT_SPLIT = "949,50,1"
DIGESTS = ".sha256"  # after a prefix: SHA-256 of the two files, from preprocess
_ORDER_DIGESTS = "files.sha256"  # in the cache
CACHE = "index-cache"  # beside the first dataset: the order, laid out once and read by all ranks
VERIFY_MINUTES = 24 * 60.0  # reading terabytes takes its time
WAY_OUT = "make the dataset anew, or leave this out with --no-verify-data"
_ENDS = 1 << 20  # bytes at either end of a file that identify it
_INDEX_HEADER = 34  # bytes of an .idx file before its tables
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
        if rows.max() >= self._vocab_size or rows.min() < 0:
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise ValueError(
                f"vocab_size={self._vocab_size}, but the data hold token {wrong}: "
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
    if args.verify_data:
        _verify(prefixes)
    on_first_rank(lambda: _check_order(Path(cache)), args.distributed_timeout_minutes)
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
    on_first_rank(lambda: _note_order(Path(cache)), args.distributed_timeout_minutes)
    order = _order_fingerprint(train)
    return Corpus(
        train=IndexedSamples(train, vocab_size=args.vocab_size),
        valid=None if valid is None else IndexedSamples(valid, vocab_size=args.vocab_size),
        num_documents=sum(fact["documents"] for fact in facts),
        num_tokens=sum(fact["train_tokens"] for fact in facts),
        digest=hashlib.sha256(f"{files}|{split}|{weights}|{order}".encode()).hexdigest(),
        unigram=None,
    )


def _verify(prefixes: list[str]) -> None:
    """Compare datasets that have a PREFIX.sha256, all ranks together. ValueError on all of them for other bytes."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def check():
        files = [file for prefix in prefixes for file in _listed(prefix)]
        files.sort(key=lambda file: (-file[0].stat().st_size, file))  # dealt out, the largest first
        check_digests(files[rank::world], WAY_OUT)

    on_all_ranks(check, VERIFY_MINUTES)


def _listed(prefix: str) -> list[tuple[Path, str]]:
    """The dataset's files with their SHA-256; none where it has no list. Raises: ValueError for a list without them."""
    listing, files = Path(prefix + DIGESTS), [Path(prefix + ending) for ending in (".idx", ".bin")]
    if not listing.is_file():
        return []
    digests = read_digests(listing)
    for file in files:
        if file.name not in digests:
            raise ValueError(f"{listing} does not list {file.name}: it is cut, or of another dataset: {WAY_OUT}")
    return [(file, digests[file.name]) for file in files]


def _check_order(cache: Path) -> None:
    files = [(cache / name, digest) for name, digest in read_digests(cache / _ORDER_DIGESTS).items()]
    check_digests(files, f"delete the folder {cache}, it is made anew")


def _note_order(cache: Path) -> None:
    """Keep the digests of what Megatron has put into its cache."""
    known = read_digests(cache / _ORDER_DIGESTS)
    new = [path for path in sorted(cache.glob("*.npy")) if path.name not in known]
    if new:
        write_digests(cache / _ORDER_DIGESTS, known | {path.name: sha256(path) for path in new})


def _examine(prefix: str, bounds: tuple[float, float], args: argparse.Namespace) -> dict:
    """Documents, tokens and fingerprint of one indexed dataset."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    try:
        dataset = IndexedDataset(prefix)
    except Exception as error:  # Megatron's, struct's and numpy's at sizes that can't be
        raise ValueError(
            f"data_path: {prefix}.idx is damaged ({type(error).__name__}: {error}): make it anew"
        ) from error
    lengths, itemsize = dataset.sequence_lengths, DType.size(dataset.index.dtype)
    _check_index(prefix, dataset.index, itemsize)
    expected = int(lengths.sum(dtype=np.int64)) * itemsize
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


def _check_index(prefix: str, index, itemsize: int) -> None:
    """Sequences must lie one after the other, documents be made of them, and tokens be whole numbers."""
    lengths = np.asarray(index.sequence_lengths, dtype=np.int64)
    documents = np.asarray(index.document_indices, dtype=np.int64)
    rest = Path(prefix + ".idx").stat().st_size - _INDEX_HEADER - 12 * len(lengths) - 8 * len(documents)
    fits = rest in (0, len(lengths)) and len(lengths) > 0 and int(lengths.min()) >= 0  # modes may follow, 1 byte each
    fits = fits and np.array_equal(index.sequence_pointers, (np.cumsum(lengths) - lengths) * itemsize)
    fits = fits and len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    if not fits or (np.diff(documents) < 0).any() or not np.issubdtype(index.dtype, np.integer):
        raise ValueError(f"data_path: {prefix}.idx is damaged, places, lengths and documents don't fit: make it anew")


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
