"""A needle in a haystack: a fact hidden in long texts, asked for with the cache over 1, 2 and 4 ranks.

Texts are those of Python's own help (pydoc), cut to each length, with one sentence at each depth that tells a number.
The answers are greedy. That a small model finds every number is not expected; that its tokens are the same on any
number of ranks is, and other tokens are an error. What is done is kept in cells.jsonl: the same command goes on there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import platform
import time
from typing import NamedTuple

import torch

from .. import comm
from ..files import whole_file
from ..integrations.transformers import models
from ..integrations.transformers.attention import TreeCache
from ..integrations.transformers.generation import generate
from . import runs
from .plots import save
from .ranks import CORES, LocalRanks, join
from .report import WrongResult, write_results

FACT = "The secret number of the lighthouse is {number}."
QUESTION = "What is the secret number of the lighthouse? Answer with the number."
CELL_LIMIT_S = 3600.0
EXAMPLES = """\
examples:
  python -m megatron_tree.bench needle                                  what docs/inference.md shows; half an hour
  python -m megatron_tree.bench needle --ranks 1 2 --lengths 1k --depths 50
  python -m megatron_tree.bench needle --model /models/llama --lengths 8k 32k 128k --ranks 1 8
"""


class Row(NamedTuple):
    """One answer: a line of results.csv and of cells.jsonl."""

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
    add("--lengths", type=runs.tokens, nargs="+", default=[2048, 4096, 7680], help="tokens (default: 2k 4k 7680)")
    add("--depths", type=_percent, nargs="+", default=[10.0, 50.0, 90.0], help="percent (default: 10 50 90)")
    add("--ranks", type=runs.positive, nargs="+", default=[1, 2, 4], help="plain ranks of this machine, each in a run "
        "of its own; the first is what the others must equal (default: 1 2 4)")  # fmt: skip
    add("--new-tokens", type=runs.positive, default=16, help="of an answer (default: 16)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench-results/needle"))


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a depth from 0 to 100 percent")
    return value


def run(args: argparse.Namespace) -> None:
    """Answer every cell that is not there yet, compare, print and write CSV, JSON and PNG.

    Raises: ValueError for options that don't fit the model, or cells of other options. WrongResult where the tokens
        differ between numbers of ranks.
    """
    folder = models.model_folder(args.model)
    limit = getattr(models.load_config(folder).get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and max(args.lengths) + args.new_tokens > limit:
        raise ValueError(f"--lengths {max(args.lengths)} and --new-tokens exceed the model's {limit} positions")
    args.out.mkdir(parents=True, exist_ok=True)
    cells = Cells(args.out / "cells.jsonl", {"model": args.model, "new_tokens": args.new_tokens, "fact": FACT})
    wanted = [(n, d) for n in sorted(set(args.lengths)) for d in sorted(set(args.depths))]
    ranks = list(dict.fromkeys(args.ranks))
    print(f"{args.model}: {len(wanted)} texts on {' '.join(map(str, ranks))} ranks each", flush=True)
    for p in ranks:
        todo = [cell for cell in wanted if (*cell, p) not in cells.rows]
        print(f"{p} ranks: {len(todo)} to do, {len(wanted) - len(todo)} are there", flush=True)
        if todo:
            told = os.fdopen(os.dup(2), "w")
            LocalRanks(p).run(on_rank, folder, todo, args.new_tokens, cells, told, timeout_s=CELL_LIMIT_S * len(todo))
            told.close()
            cells.read()
    rows = [cells.rows[(*cell, p)] for p in ranks for cell in wanted]
    for r in rows:
        first = cells.rows[r.length, r.depth, ranks[0]]
        if r.tokens != first.tokens:
            raise WrongResult(
                f"{r.length} tokens, depth {r.depth:g} %: {r.ranks} ranks answer {r.answer!r} ({r.tokens}), "
                f"{ranks[0]} {first.answer!r} ({first.tokens})"
            )
    print(table(rows, ranks))
    about = {
        "command": "needle", "model": args.model, "dtype": "fp32", "question": QUESTION,
        "machine": f"{platform.machine()}, {CORES} cores", "torch": torch.__version__,
    }  # fmt: skip
    write_results(args.out, rows, about, plots={"results.png": functools.partial(_draw, rows, ranks, args.model)})


class Cells:
    """The file of finished cells: a line that says what they depend on, then one for each."""

    def __init__(self, path: pathlib.Path, about: dict):
        self._path, self._about = path, about
        if not path.exists():
            with whole_file(path) as part:
                part.write_text(json.dumps(about) + "\n")
        self.read()

    def read(self) -> None:
        """Take in what is there. Raises ValueError for cells of other options."""
        first, *lines = self._path.read_text().splitlines(keepends=True)
        if json.loads(first) != self._about:
            raise ValueError(f"{self._path} is of other options: {first.strip()}; remove it, or name another --out")
        rows = [Row(**json.loads(line)) for line in lines if line.endswith("\n")]
        self.rows = {(r.length, r.depth, r.ranks): r for r in rows}

    def append(self, row: Row) -> None:
        """Add a cell; a line that a crash cut short goes first."""
        with self._path.open("r+b") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(row._asdict()).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def on_rank(folder: pathlib.Path, todo: list[tuple[int, float]], new_tokens: int, cells: Cells, told) -> None:
    """One rank's part of all cells on this many ranks; rank 0 puts them down."""
    group = join(timeout_s=CELL_LIMIT_S)
    rank, world = comm.group_rank(group), comm.group_size(group)
    tokenizer, model = models.load_tokenizer(folder), models.load_model(folder, torch.float32)
    end = model.generation_config.eos_token_id
    model.set_attn_implementation("tree")
    for number, (length, depth) in enumerate(todo, 1):
        secret = 1000 + (7919 * length + 104729 * round(10 * depth)) % 9000
        ids = haystack(tokenizer, length, depth, FACT.format(number=secret))
        begun = time.monotonic()

        what = f"[{number}/{len(todo)}] {world} ranks, {length} tokens, depth {depth:g} %"

        def tell(done, total, what=what):
            _tell(told, f"{what}: prefill {done} of {total}", done == total)

        result = generate(
            model, ids, cache=TreeCache(model.config, cp_group=group), max_new_tokens=new_tokens, eos_token_id=end,
            progress=tell if rank == 0 else None,
        )  # fmt: skip
        answer = tokenizer.decode(result.tokens[0], skip_special_tokens=True)
        if rank == 0:
            found = str(secret) in answer.replace(",", "")
            tokens = " ".join(map(str, result.tokens[0].tolist()))
            token_s = max(result.step_s, default=None)
            cells.append(
                Row(length, depth, world, ids.shape[1], secret, found, answer, tokens, result.prefill_s, token_s)
            )
            _tell(told, f"  {answer!r}, the number is {secret} ({time.monotonic() - begun:.0f} s)", True)


def _tell(file, text: str, line: bool) -> None:
    """A line that is written anew on a terminal; elsewhere only those that stay."""
    if file.isatty():
        file.write(f"\r\033[K{text}" + "\n" * line)
    elif line:
        file.write(f"{text}\n")
    file.flush()


def haystack(tokenizer, length: int, depth: float, fact: str) -> torch.Tensor:
    """int64 [1, n <= length]: a text of that many tokens, question included, with a fact at `depth` percent of it.

    Raises: ValueError where no text fits.
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


def table(rows: list[Row], ranks: list[int]) -> str:
    """Found numbers by length and depth for people; the same on all numbers of ranks."""
    mine = [r for r in rows if r.ranks == ranks[0]]
    lines = [
        f"\nthe same tokens on {' '.join(map(str, ranks))} ranks in all {len(mine)} texts",
        "  tokens  depth  found",
    ]
    lines += [f"  {r.prompt_tokens:>6} {r.depth:>5g}%  {'yes' if r.found else 'no '}  {r.answer!r}" for r in mine]
    return "\n".join(lines)


def _draw(rows: list[Row], ranks: list[int], model: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    lengths, depths = sorted({r.length for r in rows}), sorted({r.depth for r in rows})
    figure, axes = plt.subplots(1, len(ranks), figsize=(3.6 * len(ranks) + 0.6, 3.2), squeeze=False)
    for ax, p in zip(axes[0], ranks):
        mine = {(r.length, r.depth): r for r in rows if r.ranks == p}
        grid = [[mine[n, d].found for n in lengths] for d in depths]
        ax.imshow(grid, cmap=ListedColormap(["tab:red", "tab:green"]), vmin=0, vmax=1, aspect="auto", alpha=0.75)
        for y, d in enumerate(depths):
            for x, n in enumerate(lengths):
                ax.text(x, y, "found" if mine[n, d].found else "not found", ha="center", va="center", fontsize=8)
        ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        ax.set_yticks(range(len(depths)), [f"{d:g} %" for d in depths])
        ax.set_title(f"{p} rank{'s' * (p > 1)}", fontsize=9)
        ax.set_xlabel("tokens in the prompt", fontsize=8)
        ax.tick_params(labelsize=8)
    axes[0][0].set_ylabel("depth of the fact", fontsize=8)
    figure.suptitle(f"{model}: a fact in a long text, the same tokens on every number of ranks", fontsize=9)
    save(figure, path, dpi=80)
