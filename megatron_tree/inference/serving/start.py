"""What the commands generate, chat and serve do first: join the process group, load the model, and distribute it."""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...core import comm
from ...core.cache.graph import check_cuda_graphs
from ...core.comm.rendezvous import start_on_own_device
from ...core.config import default_config
from ...integrations.transformers import models
from ...integrations.transformers.architectures import check_cached, layers_of
from ...integrations.transformers.infer.engine import replay_steps, share_model
from ...launching import start_errors, together
from ..generation.conversation import Conversation
from ..generation.scheduler import Scheduler
from ..generation.speculation import NO_SPECULATION, Speculation

WAIT_HOURS = 24  # ranks wait for the plain model, or for a user
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker(NamedTuple):
    """This rank, ready to generate."""

    rank: int
    device: torch.device
    ranks: comm.Ranks
    """All of them, over gloo: for messages, and for waiting without keeping a GPU busy."""
    folder: Path
    tokenizer: Any
    engine: Any
    dtype: torch.dtype
    end_tokens: tuple[int, ...]
    """The model's end tokens, and the tokenizer's."""
    prepared: Any
    """What `prepare` returned."""
    num_drafted: int
    """Tokens drafted in a step, at most."""

    def scheduler(self, runner, *, max_rows: int, max_waiting: int, keep_bytes: int = 0) -> Scheduler:
        """A scheduler of a runner of the engine."""
        options = {"end_tokens": self.end_tokens, "group": self.ranks.group, "timeout_s": self.ranks.timeout_s}
        options |= {"keep_bytes": keep_bytes, "speculation": self._speculation()}
        return Scheduler(runner, self.tokenizer, max_rows=max_rows, max_waiting=max_waiting, **options)

    def conversation(self) -> Conversation:
        """A conversation over a new cache."""
        options = {"end_tokens": self.end_tokens, "group": self.ranks.group, "timeout_s": self.ranks.timeout_s}
        return Conversation(self.engine.new_runner(), self.tokenizer, speculation=self._speculation(), **options)

    def _speculation(self) -> Speculation | None:
        return Speculation(self.num_drafted) if self.num_drafted and self.rank == 0 else None


def _end_tokens(of_model: int | list[int] | None, of_tokenizer: int | None) -> tuple[int, ...]:
    """Both: a model that learned to end with its tokenizer's token can have kept the list of the one before."""
    ends = [of_model] if isinstance(of_model, int) else of_model or []
    return tuple(sorted({*ends, of_tokenizer} - {None}))


def _served_chunk(device: torch.device, ranks: int) -> int:
    """Tokens of a prompt that a server runs between two tokens of other answers."""
    return ranks * (128 if device.type == "cpu" else 1024)


@start_errors()
def start(args: Namespace, prepare: Callable[[Any, Any], Any]) -> Worker:
    """Start this rank; collective over all ranks.

    prepare(tokenizer, config) is called on every rank before the weights are loaded; it may raise ValueError.
    Raises: `StartError` for options, prompts and models that can't be run.
    """
    tree_config = replace(default_config(), timeout_s=60 * args.distributed_timeout_minutes)
    device = start_on_own_device(tree_config.timeout_s)
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=WAIT_HOURS))
    ranks = comm.Ranks.of(group, config=tree_config)
    models.hide_progress_bars()
    begun = time.perf_counter()
    with together(args, ranks):
        if args.cuda_graphs:
            check_cuda_graphs(device_type=device.type, schedule="auto", config=tree_config)
        folder = models.model_folder(args.model)
        tokenizer = models.load_tokenizer(folder)
        config = models.load_config(folder)
        check_cached(config)
        if args.num_speculative_tokens and any(layer.num_states for layer in layers_of(config)):
            raise ValueError(NO_SPECULATION)
        prepared = prepare(tokenizer, config)
    dtype = DTYPES.get(args.dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    with comm.monitored("the start"):
        model = folder if args.weights == "sharded" else models.load_model(folder, dtype)  # reads its pieces only
        make_engine = share_model
        if args.tensor_model_parallel_size > 1:
            from ...integrations.deepspeed import init_inference  # nothing else here needs DeepSpeed

            make_engine = functools.partial(init_inference, tp_size=args.tensor_model_parallel_size)
        engine = make_engine(
            model,
            weights=args.weights,
            dtype=dtype,
            cache_dtype=args.cache_dtype,
            prefill_chunk=args.prefill_chunk or _served_chunk(device, world // args.tensor_model_parallel_size),
            tree_config=tree_config,
            cuda_graphs=args.cuda_graphs,
        )
        if args.record_steps:
            replay_steps(engine, "record_steps")
        ranks.reduce(torch.zeros(1))  # all are here, or the missing ones are named
    if rank == 0:
        cache = "" if args.cache_dtype == "auto" else f" in {args.cache_dtype}"
        shared = f"the cache{cache} over {engine.sp_size}, the weights over {engine.tp_size}"
        if args.weights == "sharded":
            shared = f"the cache{cache} and the weights over all"
        print(
            f"{args.model} on {world} rank{'s' * (world > 1)} ({device.type}, {dtype}): {shared}; ready after "
            f"{time.perf_counter() - begun:.1f} s",
            flush=True,
        )
    ends = _end_tokens(engine.module.generation_config.eos_token_id, tokenizer.eos_token_id)
    return Worker(rank, device, ranks, folder, tokenizer, engine, dtype, ends, prepared, args.num_speculative_tokens)
