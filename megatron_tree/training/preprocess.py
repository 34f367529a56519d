"""Make an indexed dataset (PREFIX.bin and PREFIX.idx, Megatron's format) from text files.

A text file is one document; of a .jsonl file every line is one, the string under --json-key. Each ends with the
tokenizer's end-of-text token. An interrupted run leaves no files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ..files import check_text, whole_file
from .data import EOD, VOCAB_SIZE

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


def load_tokenizer(name: str | None):
    """Megatron-core's Hugging Face tokenizer from a folder or hub name; its byte-level one for None.

    Returns an object with `tokenize(text)`, `eod` and `vocab_size`.
    Raises: ValueError if it can't be loaded, or has no end-of-text token.
    """
    from megatron.core.tokenizers import MegatronTokenizer

    if name is None:
        library = {"library": "byte-level"}
        return MegatronTokenizer.from_pretrained(metadata_path=library, vocab_size=VOCAB_SIZE, _eos_id=EOD)
    try:
        tokenizer = MegatronTokenizer.from_pretrained(name, {"library": "huggingface"}, use_fast=True)
    except Exception as error:  # Transformers raises many kinds of exceptions for damaged files
        raise ValueError(f"tokenizer_model={name!r} can't be loaded: {error}") from error
    if tokenizer.eod is None:
        raise ValueError(f"tokenizer_model={name!r} has no end-of-text token, which must end documents")
    return tokenizer


def find_files(inputs: list[str], suffix: str) -> list[Path]:
    """The files to read, in order of their names below each input.

    Raises: ValueError for an input that does not exist, or a folder without such a file.
    """
    files = []
    for name in inputs:
        path = Path(name)
        found = sorted(file for file in path.rglob(f"*{suffix}") if file.is_file()) if path.is_dir() else [path]
        if not path.exists():
            raise ValueError(f"input={name!r} does not exist")
        if not found:
            raise ValueError(f"input={name!r} holds no file *{suffix}: name the ending with --suffix")
        files += found
    return files


def read_documents(file: Path, json_key: str) -> Iterator[str]:
    """The text of each document. Raises: ValueError that names the file (and line) if it can't be read as one."""
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8")
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, json_key, f"{file}:{number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _text_of(line: str, json_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON that can be read: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(json_key), str):
        raise ValueError(f"{where} has no text under {json_key!r}: name the key with --json-key")
    check_text(where, record[json_key])
    return record[json_key]


def write_dataset(files: list[Path], prefix: str, tokenizer, *, json_key: str = "text", progress: bool = False) -> dict:
    """Write PREFIX.bin and PREFIX.idx.

    Args:
        files: see `find_files`. prefix: of the output. tokenizer: see `load_tokenizer`.
        progress: show a bar on standard error.
    Returns: {"documents", "tokens"} that were written.
    Raises: ValueError if the output exists, or there is no text.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from tqdm import tqdm

    index, data = (Path(prefix + ending) for ending in (".idx", ".bin"))
    for path in (index, data):
        if path.exists():
            raise ValueError(f"output={prefix!r}: {path} exists; delete it or choose another prefix")
    index.parent.mkdir(parents=True, exist_ok=True)
    count = {"documents": 0, "tokens": 0}
    with whole_file(index) as index_part, whole_file(data) as data_part:
        builder = IndexedDatasetBuilder(str(data_part), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        with builder.data_file:
            for file in tqdm(files, unit="file", disable=not progress, dynamic_ncols=True):
                for text in filter(None, read_documents(file, json_key)):
                    tokens = torch.tensor([*tokenizer.tokenize(text), tokenizer.eod])
                    builder.add_item(tokens)
                    builder.end_document()
                    count["documents"] += 1
                    count["tokens"] += tokens.numel()
            if not count["documents"]:
                raise ValueError("input: no file holds any text")
            builder.finalize(str(index_part))
    return count


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        tokenizer = load_tokenizer(args.tokenizer_model)
        files = find_files(args.input, args.suffix)
        count = write_dataset(files, args.output, tokenizer, json_key=args.json_key, progress=sys.stderr.isatty())
    except ValueError as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 2
    documents, tokens = count["documents"], count["tokens"]
    print(
        f"{args.output}.bin and .idx: {documents:,} documents, {tokens:,} tokens, vocabulary {tokenizer.vocab_size:,}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
