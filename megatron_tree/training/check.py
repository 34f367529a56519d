"""Checks of the options before the ranks talk to each other. What Megatron-core checks itself is left to it."""

from __future__ import annotations

import argparse
import importlib.util
import math
from typing import Any

from ..integrations.megatron.compat import CP_COMM_TYPES
from ..plan import load_topology
from .data import VOCAB_SIZE, is_indexed

MAY_BE_ZERO = {
    "lr_warmup_iters",
    "min_lr",
    "clip_grad",
    "weight_decay",
    "init_method_std",
    "eval_interval",
    "eval_iters",
}
MAY_BE_ZERO |= {"save_interval", "log_interval"}
LESS_THAN_ONE = {"attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2"}
ANY_NUMBER = {"seed", "assert_below_unigram"}
MULTIPLES = (
    ("num_attention_heads", "num_query_groups"),
    ("num_attention_heads", "tensor_model_parallel_size"),
    ("num_query_groups", "tensor_model_parallel_size"),
    ("ffn_hidden_size", "tensor_model_parallel_size"),
    ("num_layers", "pipeline_model_parallel_size"),
)


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check the options of `arguments.parse_arguments` against each other and the number of ranks.

    Raises: ValueError that names the options, the values seen and the way out.
    """
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _require(math.isfinite(value), f"{name}={value} must be a finite number")
            if name in LESS_THAN_ONE:
                _require(0 <= value < 1, f"{name}={value} must be at least 0 and less than 1")
            elif name in MAY_BE_ZERO:
                _require(value >= 0, f"{name}={value} must not be negative")
            elif name not in ANY_NUMBER:
                _require(value > 0, f"{name}={value} must be positive")
    _check_layout(args, world_size)
    _check_context_parallel(args)
    _check_schedule(args)
    _check_data(args)
    _check_files(args)
    _check_by_megatron(args)


def _check_layout(args: argparse.Namespace, world_size: int) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    _require(
        world_size % (tp * pp * cp) == 0,
        f"{world_size} ranks were started, but tensor_model_parallel_size={tp} * pipeline_model_parallel_size={pp} * "
        f"context_parallel_size={cp} = {tp * pp * cp} does not divide that: change a size or the number of ranks",
    )
    for name, divisor in MULTIPLES:
        value, unit = getattr(args, name), getattr(args, divisor)
        _require(value % unit == 0, f"{name}={value} must be a multiple of {divisor}={unit}")
    _require(tp > 1 or not args.sequence_parallel, "sequence_parallel has no effect with tensor_model_parallel_size=1")
    _require(
        not args.sequence_parallel or args.seq_length % (tp * cp) == 0,
        f"seq_length={args.seq_length} must be a multiple of tensor_model_parallel_size * context_parallel_size = "
        f"{tp * cp} with sequence_parallel",
    )
    _require(args.kv_channels % 2 == 0, f"kv_channels={args.kv_channels} must be even: rotary embeddings pair channels")
    dp = world_size // (tp * pp * cp)
    _require(
        args.global_batch_size % (args.micro_batch_size * dp) == 0,
        f"global_batch_size={args.global_batch_size} must be a multiple of micro_batch_size={args.micro_batch_size} * "
        f"data-parallel size {dp} = {args.micro_batch_size * dp}",
    )


def _check_context_parallel(args: argparse.Namespace) -> None:
    cp, sizes, types = args.context_parallel_size, args.hierarchical_context_parallel_sizes, args.cp_comm_type
    _require(
        cp == 1 or args.seq_length % (2 * cp) == 0,
        f"seq_length={args.seq_length} must be a multiple of 2 * context_parallel_size = {2 * cp}: "
        "every rank holds two chunks",
    )
    unknown = [name for name in types if name not in CP_COMM_TYPES]
    _require(not unknown, f"cp_comm_type={' '.join(unknown)} is unknown: choose from {', '.join(CP_COMM_TYPES)}")
    _require(
        len(types) in (1, args.num_layers),
        f"cp_comm_type has {len(types)} entries: give one, or num_layers={args.num_layers}",
    )
    two_level = any("+" in name for name in types)
    option = f"hierarchical_context_parallel_sizes={' '.join(map(str, sizes or ['none']))}"
    _require(two_level or not sizes, f"{option} has no effect with cp_comm_type={' '.join(types)}")
    if two_level:
        fits = sizes is not None and len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == cp
        _require(fits, f"{option} must be two numbers whose product is context_parallel_size={cp}: cp_comm_type="
                 f"{' '.join(types)} needs them")  # fmt: skip
    for ranks, name in ((cp, "a2a"), (sizes[0] if sizes else 1, "a2a+")):
        if any(kind == name or (name == "a2a+" and "+" in kind) for kind in types):
            _check_heads(args, ranks)
    places = sizes[1] if "a2a+tree" in types else cp
    for name in ("grid", "grid_backward"):
        if getattr(args, name) is not None:
            grid = "{}={}x{}".format(name, *getattr(args, name))
            _require(cp > 1, f"{grid} has no effect with context_parallel_size=1")
            _require(math.prod(getattr(args, name)) == places, f"{grid} must have {places} places, one for each rank "
                     f"of the tree (context_parallel_size={cp}, {option})")  # fmt: skip
            _require({"tree", "a2a+tree"} & set(types), f"{grid} has no effect with cp_comm_type={types[0]}")
    kv_heads = args.num_query_groups // args.tensor_model_parallel_size
    if args.head_groups is not None:
        fits = args.head_groups > 0 and kv_heads % args.head_groups == 0
        _require(fits, f"head_groups={args.head_groups} must divide the {kv_heads} KV heads of a rank")
    if args.topology is not None:
        load_topology(args.topology)


def _check_heads(args: argparse.Namespace, ranks: int) -> None:
    """Ranks that exchange heads for parts of the sequence must be able to share them."""
    tp, kinds = args.tensor_model_parallel_size, " ".join(args.cp_comm_type)
    heads, kv_heads = args.num_attention_heads // tp, args.num_query_groups // tp
    _require(heads % ranks == 0, f"cp_comm_type={kinds}: {ranks} ranks can't share {heads} query heads evenly")
    fits = kv_heads % ranks == 0 or ranks % kv_heads == 0
    _require(fits, f"cp_comm_type={kinds}: {ranks} ranks can't share {kv_heads} KV heads evenly")


def _check_schedule(args: argparse.Namespace) -> None:
    warmup, decay = args.lr_warmup_iters, args.lr_decay_iters
    name = "lr_decay_iters" if decay != args.train_iters else "train_iters"
    _require(warmup < decay, f"lr_warmup_iters={warmup} must be less than {name}={decay}")
    _require(args.min_lr <= args.lr, f"min_lr={args.min_lr} must not exceed lr={args.lr}")


def _check_data(args: argparse.Namespace) -> None:
    if is_indexed(args.data_path):
        from .indexed import DEFAULT_SPLIT, parse_data_path, parse_split

        parse_data_path(args.data_path)
        parse_split(args.split or DEFAULT_SPLIT)
        path = " ".join(args.data_path)
        _require(args.vocab_size, f"data_path={path} is an indexed dataset: say by --vocab-size or --tokenizer-model "
                 "how many tokens there are")  # fmt: skip
        margin = args.assert_below_unigram
        _require(margin is None, f"assert_below_unigram={margin} needs a folder of text in data_path")
        return
    for name in ("split", "tokenizer_model", "data_cache_path"):
        value = getattr(args, name)
        _require(value is None, f"{name}={value} has no effect on text: it is for indexed datasets")
    size = args.vocab_size
    _require(
        size == VOCAB_SIZE, f"vocab_size={size}, but text is trained on as bytes, {VOCAB_SIZE} tokens: leave it out"
    )


def _check_files(args: argparse.Namespace) -> None:
    for name in ("save_interval", "keep_checkpoints", "resume"):
        value = getattr(args, name)
        _require(not value or args.save, f"{name}={value} has no effect without --save")
    exclusive = not (args.resume and args.load)
    _require(exclusive, f"resume and load={args.load!r} exclude each other: resume means --load from --save")
    installed = args.tensorboard_dir is None or importlib.util.find_spec("tensorboard") is not None
    _require(installed, f"tensorboard_dir={args.tensorboard_dir!r} needs the package tensorboard: "
             "pip install 'megatron_tree[launch]'")  # fmt: skip


def _check_by_megatron(args: argparse.Namespace) -> None:
    from .model import transformer_config

    full, granularity = args.recompute_granularity == "full", f"recompute_granularity={args.recompute_granularity}"
    method_or_layers = args.recompute_method or args.recompute_num_layers
    _require(
        full or not method_or_layers, f"recompute_method and recompute_num_layers have no effect with {granularity}"
    )
    no_modules = args.recompute_granularity == "selective" or not args.recompute_modules
    _require(no_modules, f"recompute_modules has no effect with {granularity}")
    try:
        transformer_config(args)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"Megatron-core: {error}") from error


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)
