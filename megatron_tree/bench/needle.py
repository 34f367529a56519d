"""A needle in a haystack: a fact hidden in long texts, asked for with the cache over 1, 2 and 4 ranks.

The texts are Python's own help (pydoc), cut to each length, with a sentence that states a number at each depth.
Decoding is greedy. A small model need not find every number, but its tokens must be the same on any number of ranks; if
they differ, this is an error.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
from typing import NamedTuple

import torch

from .. import comm
from ..integrations.transformers import models
from ..integrations.transformers.attention import TreeCache
from ..integrations.transformers.generation import generate
from ..integrations.transformers.rope import num_positions
from ..units import parse_count
from .figures import figure, grouped, heat_map
from .ranks import LocalRanks, join
from .results import Results, WrongResult, metadata, progress_bar

FACT = "The secret number of the lighthouse is {number}."
QUESTION = "What is the secret number of the lighthouse? Answer with the number."
ANSWER_LIMIT_S = 3600.0
EXAMPLES = """\
examples:
  megatron-tree bench needle                                  what docs/inference.md shows; half an hour
  megatron-tree bench needle --ranks 1 2 --lengths 1k --depths 50
  megatron-tree bench needle --model /models/llama --lengths 8k 32k 128k --ranks 1 8
"""


class Answer(NamedTuple):
    """One answer: a line of results.csv."""

    length: int
    depth: float
    ranks: int
    prompt_tokens: int
    number: int
    found: bool
    answer: str
    tokens: str
    prefill_s: float
    token_s: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench needle`."""
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2 (the default), or a folder with a Transformers model")
    add("--lengths", type=parse_count, nargs="+", default=[2048, 4096, 7680], help="tokens (default: 2k 4k 7680)")
    add("--depths", type=float, nargs="+", default=[10.0, 50.0, 90.0], help="percent (default: 10 50 90)")
    add("--ranks", type=parse_count, nargs="+", default=[1, 2, 4], help="processes of this machine, one run "
        "for each number; all must equal the first (default: 1 2 4)")  # fmt: skip
    add("--new-tokens", type=parse_count, default=16, help="of an answer (default: 16)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench-results/needle"))


def run(args: argparse.Namespace) -> None:
    """Ask on every number of ranks, compare, print and write CSV, JSON and PNG.

    Raises: ValueError for options that don't fit the model. WrongResult if the tokens depend on the number of ranks.
    """
    if outside := [depth for depth in args.depths if not 0 <= depth <= 100]:
        raise ValueError(f"--depths {outside[0]:g}: a depth is 0 to 100 percent")
    folder = models.model_folder(args.model)
    limit = num_positions(models.load_config(folder))
    if limit is not None and max(args.lengths) + args.new_tokens > limit:
        raise ValueError(f"--lengths {max(args.lengths)} and --new-tokens exceed the model's {limit} positions")
    texts = list(itertools.product(sorted(set(args.lengths)), sorted(set(args.depths))))
    ranks = list(dict.fromkeys(args.ranks))
    print(f"{args.model}: {len(texts)} texts on {' '.join(map(str, ranks))} ranks each", flush=True)
    results = Results(args.out, metadata("needle", model=args.model, dtype="fp32", question=QUESTION))
    with progress_bar(len(texts) * len(ranks), "text") as bar:
        for p in ranks:
            limit_s = ANSWER_LIMIT_S * len(texts)
            answers = LocalRanks(p).run(on_rank, folder, texts, args.new_tokens, timeout_s=limit_s)[0]
            bar.update(len(texts))
            for answer, first in zip(answers, results.rows or answers):
                if answer.tokens != first.tokens:
                    raise WrongResult(
                        f"{first.length} tokens, depth {first.depth:g} %: {p} ranks answer {answer.answer!r} "
                        f"({answer.tokens}), {first.ranks} {first.answer!r} ({first.tokens})"
                    )
            results.add(*answers)
    print(f"\nthe same tokens on {' '.join(map(str, ranks))} ranks in all {len(texts)} texts\n  tokens  depth  found")
    for r in results.rows[: len(texts)]:
        print(f"  {r.prompt_tokens:>6} {r.depth:>5g}%  {'yes' if r.found else 'no '}  {r.answer!r}")
    results.finish({"results.png": functools.partial(_draw, rows=results.rows, model=args.model)})


def on_rank(folder: pathlib.Path, texts: list[tuple[int, float]], new_tokens: int) -> list[Answer]:
    """One rank's part of all texts on this many ranks."""
    group = join(timeout_s=ANSWER_LIMIT_S)
    tokenizer, model = models.load_tokenizer(folder), models.load_model(folder, torch.float32)
    model.set_attn_implementation("tree")
    options = dict(max_new_tokens=new_tokens, eos_token_id=model.generation_config.eos_token_id)
    answers = []
    for length, depth in texts:
        secret = 1000 + (7919 * length + 104729 * round(10 * depth)) % 9000
        ids = haystack(tokenizer, length, depth, FACT.format(number=secret))
        result = generate(model, ids, cache=TreeCache(model.config, cp_group=group), **options)
        answer = tokenizer.decode(result.tokens[0], skip_special_tokens=True)
        tokens, right = " ".join(map(str, result.tokens[0].tolist())), str(secret) in answer.replace(",", "")
        times = result.prefill_s, max(result.step_s, default=None)
        given = length, depth, comm.group_size(group), ids.shape[1], secret
        answers.append(Answer(*given, right, answer, tokens, *times))
    return answers


def haystack(tokenizer, length: int, depth: float, fact: str) -> torch.Tensor:
    """int64 [1, n <= length]: a text of about `length` tokens, question included, with a fact at `depth` percent.

    Raises: ValueError if the question alone is longer.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer(text[: 12 * length]).input_ids
    room = length
    while room > 0:
        hay = tokenizer.decode(tokens[:room], skip_special_tokens=True)
        at = hay.rfind("\n", 0, round(len(hay) * depth / 100) + 1) + 1
        ids = models.encode_question(tokenizer, f"{hay[:at]}{fact}\n{hay[at:]}", QUESTION)
        if ids.shape[1] <= length:
            return ids
        room -= max(1, ids.shape[1] - length)
    raise ValueError(f"--lengths {length}: the question alone is longer")


def _draw(path: pathlib.Path, rows: list[Answer], model: str) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(["tab:red", "tab:green"])
    by_ranks = grouped(rows, lambda r: r.ranks)
    title = f"{model}: a fact in a long text, the same tokens on every number of ranks"
    with figure(path, 1, len(by_ranks), size=(3.6 * len(by_ranks) + 0.6, 3.2), title=title) as axes:
        for ax, (ranks, of_ranks) in zip(axes[0], by_ranks.items()):
            lines = grouped(of_ranks, lambda r: r.depth)
            values = [[r.found for r in line] for line in lines.values()]
            texts = [["found" if found else "not found" for found in line] for line in values]
            ticks = [f"{r.length:,}" for r in next(iter(lines.values()))], [f"{depth:g} %" for depth in lines]
            labels = "tokens in the prompt", "depth of the fact"
            heat_map(ax, values, texts, limits=(0, 1), cmap=colours, labels=labels, ticks=ticks)
            ax.set_title(f"{ranks} rank{'s' * (ranks > 1)}", fontsize=9)
