"""Make an indexed dataset (PREFIX.bin and PREFIX.idx, Megatron's format) from text files, and PREFIX.sha256 of both.

A text file is one document; of a .jsonl file every line is one, the string under --json-key. Each ends with the
tokenizer's end-of-text token. Both files are whole or not there: an interrupted run leaves none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..files import check_text, whole_file
from .digests import sha256, write_digests
from .indexed import DIGESTS
from .tokenizers import ByteTokenizer, HuggingFaceTokenizer

EXAMPLES = """\
examples:
  python -m megatron_tree.training.preprocess --input books/ --suffix .txt --output data/books
      every file books/**/*.txt as bytes; train with: --data-path data/books --vocab-size 257
  python -m megatron_tree.training.preprocess --input web.jsonl code.jsonl --tokenizer-model my_llama/ --output data/mix
      train with: --data-path data/mix --tokenizer-model my_llama/
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_tree.training.preprocess",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="text files, .jsonl files, or folders of such files")
    add("--suffix", default=".txt", help="of the files to take from folders (default: .txt)")
    add("--json-key", default="text", help="of a .jsonl line's text (default: text)")
    add("--tokenizer-model", metavar="NAME|DIR", help="Hugging Face tokenizer (default: a token for each byte)")
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    return parser


def find_files(inputs: list[str], suffix: str) -> list[Path]:
    """The files to read, in order of their names below each input.

    Raises: ValueError for an input that is not there, or a folder with no such file.
    """
    files = []
    for name in inputs:
        path = Path(name)
        found = sorted(file for file in path.rglob(f"*{suffix}") if file.is_file()) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"input={name!r} holds no file *{suffix}: name the ending with --suffix")
        if not path.exists():
            raise ValueError(f"input={name!r} does not exist")
        files += found
    return files


def read_documents(file: Path, json_key: str) -> Iterator[tuple[str, int]]:
    """(text, its bytes in the file) of each document.

    Raises: ValueError that names the file (and line) if it is not UTF-8, or not what a .jsonl file should be.
    """
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8"), file.stat().st_size
            return
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, json_key, f"{file}:{number}"), len(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _text_of(line: bytes, json_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON that can be read: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(json_key), str):
        raise ValueError(f"{where} has no text under {json_key!r}: name the key with --json-key")
    check_text(where, record[json_key])
    return record[json_key]


def write_dataset(files: list[Path], prefix: str, tokenizer, *, json_key: str = "text", progress: bool = False) -> dict:
    """Write PREFIX.bin and PREFIX.idx, and their SHA-256 in PREFIX.sha256.

    Args:
        files: see `find_files`. prefix: of the output. tokenizer: with encode(), eod and vocab_size.
        progress: show a bar on standard error.
    Returns: {"documents", "tokens"} that were written.
    Raises: ValueError if the output exists, or there is no text.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from tqdm import tqdm

    paths = [Path(prefix + ending) for ending in (".idx", ".bin")]
    for path in paths:
        if path.exists():
            raise ValueError(f"output={prefix!r}: {path} exists; delete it or choose another prefix")
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    total = sum(file.stat().st_size for file in files)
    count = {"documents": 0, "tokens": 0}
    with (
        whole_file(paths[0]) as index,
        whole_file(paths[1]) as data,
        tqdm(total=total, unit="B", unit_scale=True, disable=not progress, dynamic_ncols=True) as bar,
    ):
        builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        try:
            for file in files:
                for text, size in read_documents(file, json_key):
                    if text:
                        tokens = np.append(tokenizer.encode(text).astype(np.int64), tokenizer.eod)
                        builder.add_item(torch.from_numpy(tokens))
                        builder.end_document()
                        count["documents"] += 1
                        count["tokens"] += tokens.size
                    bar.update(size)
            if not count["documents"]:
                raise ValueError("input: no file holds any text")
            builder.finalize(str(index))
        finally:
            builder.data_file.close()
    write_digests(Path(prefix + DIGESTS), {path.name: sha256(path) for path in paths})
    return count


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        tokenizer = HuggingFaceTokenizer(args.tokenizer_model) if args.tokenizer_model else ByteTokenizer()
        files = find_files(args.input, args.suffix)
        count = write_dataset(files, args.output, tokenizer, json_key=args.json_key, progress=sys.stderr.isatty())
    except ValueError as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.output}.bin and .idx: {count['documents']:,} documents, {count['tokens']:,} tokens, "
        f"vocabulary {tokenizer.vocab_size:,}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
