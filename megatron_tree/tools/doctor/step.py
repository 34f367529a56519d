"""`megatron-tree doctor --compare`: a training step of a Transformers model on one rank and on several of this machine,
compared layer by layer (compare.py). In fp32 on the CPU, without dropout."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.comm.rendezvous import start_default_group
from ...core.config import TreeConfig
from ...integrations.transformers import models
from ...integrations.transformers.families.rope import num_positions
from ...integrations.transformers.train.batch_shards import shard_batch
from ...integrations.transformers.train.train_on_shards import train_on_shards
from ..emulate.forked import LocalRanks
from .compare import compare_with_one_rank
from .findings import MISSING, NOTE, OK, Finding, Section

LIMIT_S = 3600.0  # a large model takes its time on a CPU


def compare_steps(args: Namespace) -> Section:
    """The first layers whose values, and whose bits, differ between a step on one rank and on args.ranks.

    Raises: ``ValueError`` for options that can't be, and for a model that does not train on shards.
    """
    if args.ranks < 2:
        raise ValueError(f"--ranks {args.ranks}: start at least two, to compare them with one")
    folder = models.model_folder(args.compare)
    tokens = _tokens(args, folder)
    by_rank = LocalRanks(args.ranks).run(_on_rank, folder, tokens, timeout_s=LIMIT_S)
    if isinstance(by_rank[0], str):
        raise ValueError(by_rank[0])
    name, loss, found = by_rank[0]
    values, bits = (
        Finding(what, "the same" if x is None else str(x), state=OK if x is None else state)
        for what, x, state in (("values", found.values, MISSING), ("bits", found.bits, NOTE))
    )
    title = f"a step of {name}, {tokens.shape[1]} tokens, fp32, on 1 rank and on {args.ranks}"
    return Section(title, [Finding("loss", f"{loss:.6f}"), values, bits])


def _tokens(args: Namespace, folder: Path) -> Tensor:
    """int64 [1, n]: the beginning of the text, or random tokens."""
    config = models.load_config(folder).get_text_config(decoder=True)
    limit = num_positions(config)
    if args.tokens < 2 or (limit is not None and args.tokens > limit):
        raise ValueError(f"--tokens {args.tokens} must be at least 2{f' and at most {limit}' if limit else ''}")
    if args.text is None:
        return torch.randint(config.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    try:
        text = Path(args.text).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {args.text!r} is not a text in UTF-8: {error}") from None
    tokens = models.load_tokenizer(folder)(text, return_tensors="pt").input_ids[:, : args.tokens]
    if tokens.shape[1] < 2:
        raise ValueError(f"--text {args.text!r} has {tokens.shape[1]} tokens: name a file of at least 2")
    return tokens


def _on_rank(folder: Path, tokens: Tensor) -> str | tuple:
    """(name of the model, its loss on one rank, the comparison), or why the model can't be trained on shards."""
    start_default_group("gloo", timeout_s=LIMIT_S)
    group, config = dist.group.WORLD, TreeConfig(deterministic="ranks", timeout_s=LIMIT_S)
    losses = []
    try:
        models.hide_progress_bars()
        model = models.load_model(folder, torch.float32)
        train_on_shards(model)
        batch = {"input_ids": tokens, "labels": tokens}
        shards = {whole: shard_batch(batch, cp_group=None if whole else group, tree_config=config) for whole in (1, 0)}

        def step(whole: bool) -> Tensor:
            loss = model(**shards[whole]).loss
            loss.backward()
            losses.append(float(loss))
            return loss

        rows = shards[0]["sequence_shard"].whole.rows
        found = compare_with_one_rank(model, lambda: step(True), lambda: step(False), positions=rows, cp_group=group)
    except ValueError as error:
        return str(error)
    return type(model).__name__, losses[0], found
