"""Everything about the options of a training run that can be checked before ranks talk to each other."""

from __future__ import annotations

import argparse
import importlib.util
import math
from typing import Any

from ..integrations.megatron.compat import CP_COMM_TYPES
from ..plan import load_topology
from .data import VOCAB_SIZE, is_indexed
from .indexed import parse_data_path, parse_split
from .schedule import check_schedule

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
    "lr_decay_iters",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "distributed_timeout_minutes",
]
POSITIVE_IF_GIVEN = ["vocab_size", "loss_scale", "keep_checkpoints", "peak_tflops"]
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
    for name, value in vars(args).items():
        _require(not isinstance(value, float) or math.isfinite(value), f"{name}={value} must be a finite number")
    for name in POSITIVE:
        _require(getattr(args, name) > 0, f"{name}={getattr(args, name)} must be positive")
    for name in POSITIVE_IF_GIVEN:
        value = getattr(args, name)
        _require(value is None or value > 0, f"{name}={value} must be positive")
    for name in NOT_NEGATIVE:
        _require(getattr(args, name) >= 0, f"{name}={getattr(args, name)} must not be negative")
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(args, name)
        _require(0 <= value < 1, f"{name}={value} must be at least 0 and less than 1")
    _check_layout(args, world_size)
    _check_pipeline(args, world_size)
    _check_context_parallel(args)
    check_schedule(args)
    _check_training(args)
    _check_precision(args)
    _check_data(args)
    _check_files(args)


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
    _require(tp > 1 or not args.sequence_parallel, "sequence_parallel has no effect with tensor_model_parallel_size=1")
    _require(
        not args.sequence_parallel or args.seq_length % (tp * cp) == 0,
        f"seq_length={args.seq_length} must be a multiple of tensor_model_parallel_size * context_parallel_size = "
        f"{tp * cp} with sequence_parallel",
    )
    _require(args.kv_channels % 2 == 0, f"kv_channels={args.kv_channels} must be even: rotary embeddings pair channels")
    dp = world_size // model_ranks
    _require(
        args.global_batch_size % (args.micro_batch_size * dp) == 0,
        f"global_batch_size={args.global_batch_size} must be a multiple of micro_batch_size={args.micro_batch_size} * "
        f"data-parallel size {dp} = {args.micro_batch_size * dp}",
    )


def _check_pipeline(args: argparse.Namespace, world_size: int) -> None:
    pp, virtual = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank
    if virtual is None:
        _multiple(args, "num_layers", "pipeline_model_parallel_size")
        return
    option = f"num_virtual_stages_per_pipeline_rank={virtual}"
    _require(virtual > 0, f"{option} must be positive")
    _require(pp > 1, f"{option} has no effect with pipeline_model_parallel_size=1")
    _require(
        args.num_layers % (pp * virtual) == 0,
        f"num_layers={args.num_layers} must be a multiple of pipeline_model_parallel_size={pp} * {option} = "
        f"{pp * virtual}",
    )
    dp = world_size // (args.tensor_model_parallel_size * pp * args.context_parallel_size)
    microbatches = args.global_batch_size // (args.micro_batch_size * dp)
    _require(
        microbatches % pp == 0,
        f"{option} needs microbatches in multiples of pipeline_model_parallel_size={pp}; global_batch_size="
        f"{args.global_batch_size} makes {microbatches} of them",
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
    _check_hierarchical(args)
    for option in ("grid", "grid_backward"):
        if getattr(args, option) is not None:
            cells = math.prod(getattr(args, option))
            grid = "{}={}x{}".format(option, *getattr(args, option))
            _require(cp > 1, f"{grid} has no effect with context_parallel_size=1")
            places, what = cp, "context_parallel_size"
            if "a2a+tree" in args.cp_comm_type:
                places = args.hierarchical_context_parallel_sizes[1]
                what = "the second of hierarchical_context_parallel_sizes"
            _require(cells == places, f"{grid} has {cells} places, but {what}={places}")
            trees = {"tree", "a2a+tree"} & set(args.cp_comm_type)
            _require(trees, f"{grid} has no effect with cp_comm_type={args.cp_comm_type[0]}")
    kv_heads = args.num_query_groups // args.tensor_model_parallel_size
    if args.head_groups is not None:
        fits = args.head_groups > 0 and kv_heads % args.head_groups == 0
        _require(fits, f"head_groups={args.head_groups} must divide the {kv_heads} KV heads of a rank")
    if args.topology is not None:
        load_topology(args.topology)


def _check_hierarchical(args: argparse.Namespace) -> None:
    cp, sizes = args.context_parallel_size, args.hierarchical_context_parallel_sizes
    two_level = [name for name in args.cp_comm_type if "+" in name]
    option = f"hierarchical_context_parallel_sizes={' '.join(map(str, sizes or ()))}"
    if two_level:
        _require(sizes, f"cp_comm_type={two_level[0]} needs hierarchical_context_parallel_sizes, for instance 2 2")
        _require(
            len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == cp,
            f"{option} must be two numbers whose product is context_parallel_size={cp}",
        )
        _check_heads_of(args, sizes[0], option)
    else:
        _require(sizes is None, f"{option} has no effect with cp_comm_type={' '.join(args.cp_comm_type)}")
    if "a2a" in args.cp_comm_type:
        _check_heads_of(args, cp, f"cp_comm_type=a2a with context_parallel_size={cp}")


def _check_heads_of(args: argparse.Namespace, ranks: int, what: str) -> None:
    """Ranks that exchange heads for parts of the sequence must be able to share them."""
    tp = args.tensor_model_parallel_size
    heads, kv_heads = args.num_attention_heads // tp, args.num_query_groups // tp
    _require(heads % ranks == 0, f"{what}: {ranks} ranks can't share {heads} query heads evenly")
    _require(
        kv_heads % ranks == 0 or ranks % kv_heads == 0,
        f"{what}: {ranks} ranks can't share {kv_heads} KV heads, nor each of them by as many ranks",
    )


def _check_training(args: argparse.Namespace) -> None:
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


def _check_precision(args: argparse.Namespace) -> None:
    _require(not (args.bf16 and args.fp16), "bf16 and fp16 exclude each other")
    if not args.fp16:
        _require(args.loss_scale is None, f"loss_scale={args.loss_scale} has no effect without fp16")
    _require(
        args.min_loss_scale <= args.initial_loss_scale,
        f"min_loss_scale={args.min_loss_scale} must not exceed initial_loss_scale={args.initial_loss_scale}",
    )


def _check_data(args: argparse.Namespace) -> None:
    if is_indexed(args.data_path):
        parse_data_path(args.data_path)
        if args.split is not None:
            parse_split(args.split)
        _require(
            args.vocab_size is not None,
            f"data_path={' '.join(args.data_path)} is an indexed dataset: say by --vocab-size or --tokenizer-model how "
            "many tokens there are",
        )
        _require(
            args.assert_below_unigram is None,
            f"assert_below_unigram={args.assert_below_unigram} needs a folder of text in data_path",
        )
        return
    for name in ("split", "tokenizer_model", "data_cache_path"):
        value = getattr(args, name)
        _require(
            value is None, f"{name}={value} has no effect on text: it is for indexed datasets (--data-path PREFIX)"
        )
    _require(
        args.vocab_size == VOCAB_SIZE,
        f"vocab_size={args.vocab_size}, but text is trained on as bytes, {VOCAB_SIZE} tokens: leave it out",
    )


def _check_files(args: argparse.Namespace) -> None:
    for name in ("save_interval", "keep_checkpoints", "resume"):
        value = getattr(args, name)
        _require(not value or args.save, f"{name}={value} has no effect without --save")
    _require(
        not (args.resume and args.load),
        f"resume and load={args.load!r} exclude each other: resume means --load of --save",
    )
    if args.tensorboard_dir is not None:
        _require(
            importlib.util.find_spec("tensorboard") is not None,
            f"tensorboard_dir={args.tensorboard_dir!r} needs the package tensorboard: "
            "pip install 'megatron_tree[launch]'",
        )


def _multiple(args: argparse.Namespace, name: str, divisor: str) -> None:
    value, unit = getattr(args, name), getattr(args, divisor)
    _require(value % unit == 0, f"{name}={value} must be a multiple of {divisor}={unit}")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)
