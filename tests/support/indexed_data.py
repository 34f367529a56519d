"""Indexed datasets for tests, and the corpus that the training loop makes of them."""

import json

from megatron_tree.training import preprocess
from megatron_tree.training.arguments import parse_arguments
from megatron_tree.training.check import check_arguments
from support.training_runs import TINY


def write_indexed(folder, name, words, num_documents):
    """An indexed dataset of documents of which each repeats one word. Returns its prefix."""
    texts = [f"{words[i % len(words)]}{i} " * (3 + i % 7) for i in range(num_documents)]
    lines = folder / f"{name}.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    preprocess.write_dataset([lines], str(folder / name), preprocess.load_tokenizer(None))
    return str(folder / name)


def open_corpus(options):
    from megatron_tree.training.data import open_corpus

    args = parse_arguments([*TINY.split(), *options.split()])
    check_arguments(args, 1)
    return open_corpus(args)
