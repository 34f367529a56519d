"""Everything about the options of a training run that can be checked before ranks talk to each other."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..integrations.megatron_compat import CP_COMM_TYPES
from ..plan import load_topology

POSITIVE = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "lr",
    "train_iters",
    "micro_batch_size",
    "global_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "distributed_timeout_minutes",
]
NOT_NEGATIVE = [
    "lr_warmup_iters",
    "min_lr",
    "clip_grad",
    "weight_decay",
    "eval_interval",
    "eval_iters",
    "save_interval",
    "log_interval",
]


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check the options of `arguments.parse_arguments` against each other and the number of ranks.

    Raises: ValueError that names the options, the values seen and the way out.
    """
    for name in POSITIVE:
        _require(getattr(args, name) > 0, f"{name}={getattr(args, name)} must be positive")
    for name in NOT_NEGATIVE:
        _require(getattr(args, name) >= 0, f"{name}={getattr(args, name)} must not be negative")
    _check_layout(args, world_size)
    _check_context_parallel(args)
    _check_training(args)


def _check_layout(args: argparse.Namespace, world_size: int) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    model_ranks = tp * pp * cp
    _require(
        world_size % model_ranks == 0,
        f"{world_size} ranks were started, but tensor_model_parallel_size={tp} * pipeline_model_parallel_size={pp} * "
        f"context_parallel_size={cp} = {model_ranks} does not divide that: change a size or the number of ranks",
    )
    _multiple(args, "num_attention_heads", "num_query_groups")
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        _multiple(args, name, "tensor_model_parallel_size")
    _multiple(args, "num_layers", "pipeline_model_parallel_size")
    _require(args.kv_channels % 2 == 0, f"kv_channels={args.kv_channels} must be even: rotary embeddings pair channels")
    dp = world_size // model_ranks
    _require(
        args.global_batch_size % (args.micro_batch_size * dp) == 0,
        f"global_batch_size={args.global_batch_size} must be a multiple of micro_batch_size={args.micro_batch_size} * "
        f"data-parallel size {dp} = {args.micro_batch_size * dp}",
    )


def _check_context_parallel(args: argparse.Namespace) -> None:
    cp = args.context_parallel_size
    _require(
        cp == 1 or args.seq_length % (2 * cp) == 0,
        f"seq_length={args.seq_length} must be a multiple of 2 * context_parallel_size = {2 * cp}: "
        "every rank holds two chunks",
    )
    unknown = [name for name in args.cp_comm_type if name not in CP_COMM_TYPES]
    _require(not unknown, f"cp_comm_type={' '.join(unknown)} is unknown: choose from {', '.join(CP_COMM_TYPES)}")
    _require(
        len(args.cp_comm_type) in (1, args.num_layers),
        f"cp_comm_type has {len(args.cp_comm_type)} entries: give one, or num_layers={args.num_layers}",
    )
    for option in ("grid", "grid_backward"):
        if getattr(args, option) is not None:
            cells = math.prod(getattr(args, option))
            grid = "{}={}x{}".format(option, *getattr(args, option))
            _require(cp > 1, f"{grid} has no effect with context_parallel_size=1")
            _require(cells == cp, f"{grid} has {cells} places, but context_parallel_size={cp}")
            _require("tree" in args.cp_comm_type, f"{grid} has no effect with cp_comm_type={args.cp_comm_type[0]}")
    kv_heads = args.num_query_groups // args.tensor_model_parallel_size
    if args.head_groups is not None:
        fits = args.head_groups > 0 and kv_heads % args.head_groups == 0
        _require(fits, f"head_groups={args.head_groups} must divide the {kv_heads} KV heads of a rank")
    if args.topology is not None:
        load_topology(args.topology)


def _check_training(args: argparse.Namespace) -> None:
    _require(
        args.lr_warmup_iters < args.train_iters,
        f"lr_warmup_iters={args.lr_warmup_iters} must be less than train_iters={args.train_iters}",
    )
    _require(args.min_lr <= args.lr, f"min_lr={args.min_lr} must not exceed lr={args.lr}")
    granularity = f"recompute_granularity={args.recompute_granularity!r}"
    full = args.recompute_granularity == "full"
    _require(
        not full or (args.recompute_method and args.recompute_num_layers),
        f"{granularity} needs recompute_method and recompute_num_layers",
    )
    _require(
        full or not (args.recompute_method or args.recompute_num_layers),
        f"recompute_method and recompute_num_layers have no effect with {granularity}",
    )
    _require(
        args.recompute_granularity == "selective" or not args.recompute_modules,
        f"recompute_modules has no effect with {granularity}",
    )
    _require(not args.save_interval or args.save, f"save_interval={args.save_interval} has no effect without --save")


def _multiple(args: argparse.Namespace, name: str, divisor: str) -> None:
    value, unit = getattr(args, name), getattr(args, divisor)
    _require(value % unit == 0, f"{name}={value} must be a multiple of {divisor}={unit}")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)
