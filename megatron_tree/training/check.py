"""Checks of the options before the ranks talk to each other. What Megatron-core checks itself is left to it."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator

from ..integrations.megatron.compat import CP_COMM_TYPES
from ..plan import load_topology
from .data import VOCAB_SIZE, is_indexed

LESS_THAN_ONE = {"attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2"}
MAY_BE_ZERO = {"lr_warmup_iters", "min_lr", "clip_grad", "weight_decay", "init_method_std"}
MAY_BE_ZERO |= {"eval_interval", "eval_iters", "save_interval", "log_interval"}
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
    for check in (_numbers, _layout, _context_parallel, _schedule, _data, _files):
        for problem in check(args, world_size):
            raise ValueError(problem)
    from .model import transformer_config

    try:
        transformer_config(args)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"Megatron-core: {error}") from error


def _numbers(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    for name, value in vars(args).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            yield f"{name}={value} must be a finite number"
        if name in LESS_THAN_ONE and not 0 <= value < 1:
            yield f"{name}={value} must be at least 0 and less than 1"
        if name in MAY_BE_ZERO and value < 0:
            yield f"{name}={value} must not be negative"
        if name not in LESS_THAN_ONE | MAY_BE_ZERO | ANY_NUMBER and value <= 0:
            yield f"{name}={value} must be positive"


def _layout(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if world_size % (tp * pp * cp):
        yield (
            f"{world_size} ranks were started, but tensor_model_parallel_size={tp} * pipeline_model_parallel_size={pp} "
            f"* context_parallel_size={cp} = {tp * pp * cp} does not divide that: change a size or the number of ranks"
        )
    for name, divisor in MULTIPLES:
        value, unit = getattr(args, name), getattr(args, divisor)
        if value % unit:
            yield f"{name}={value} must be a multiple of {divisor}={unit}"
    if args.sequence_parallel and tp == 1:
        yield "sequence_parallel has no effect with tensor_model_parallel_size=1"
    if args.sequence_parallel and args.seq_length % (tp * cp):
        product = f"tensor_model_parallel_size * context_parallel_size = {tp * cp}"
        yield f"seq_length={args.seq_length} must be a multiple of {product} with sequence_parallel"
    if cp > 1 and args.seq_length % (2 * cp):
        product = f"2 * context_parallel_size = {2 * cp}"
        yield f"seq_length={args.seq_length} must be a multiple of {product}: every rank holds two chunks"
    if args.kv_channels % 2:
        yield f"kv_channels={args.kv_channels} must be even: rotary embeddings pair channels"
    samples = args.micro_batch_size * world_size // (tp * pp * cp)
    if args.global_batch_size % samples:
        yield (
            f"global_batch_size={args.global_batch_size} must be a multiple of micro_batch_size="
            f"{args.micro_batch_size} * data-parallel size {samples // args.micro_batch_size} = {samples}"
        )


def _context_parallel(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    tp, cp, types = args.tensor_model_parallel_size, args.context_parallel_size, args.cp_comm_type
    heads, kv_heads = args.num_attention_heads // tp, args.num_query_groups // tp
    kinds, cp_size = f"cp_comm_type={' '.join(types)}", f"context_parallel_size={cp}"
    if unknown := [name for name in types if name not in CP_COMM_TYPES]:
        yield f"cp_comm_type={' '.join(unknown)} is unknown: choose from {', '.join(CP_COMM_TYPES)}"
    if len(types) not in (1, args.num_layers):
        yield f"cp_comm_type has {len(types)} entries: give one, or num_layers={args.num_layers}"

    sizes, two_level = args.hierarchical_context_parallel_sizes, any("+" in name for name in types)
    option = f"hierarchical_context_parallel_sizes={' '.join(map(str, sizes or ['none']))}"
    if sizes and not two_level:
        yield f"{option} has no effect with {kinds}"
    if two_level and not (sizes and len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == cp):
        yield f"{option} must be two numbers whose product is {cp_size}: {kinds} needs them"
    for ranks in ([cp] if "a2a" in types else []) + ([sizes[0]] if two_level else []):  # ranks that exchange heads
        if heads % ranks:
            yield f"{kinds}: {ranks} ranks can't share {heads} query heads evenly"
        if kv_heads % ranks and ranks % kv_heads:
            yield f"{kinds}: {ranks} ranks can't share {kv_heads} KV heads evenly"

    places, tree_size = (sizes[1], option) if "a2a+tree" in types else (cp, cp_size)
    for name in ("grid", "grid_backward"):
        if getattr(args, name) is None:
            continue
        grid = "{}={}x{}".format(name, *getattr(args, name))
        if cp == 1:
            yield f"{grid} has no effect with context_parallel_size=1"
        if math.prod(getattr(args, name)) != places:
            yield f"{grid} must have {places} places, one for each rank of the tree ({tree_size})"
        if not {"tree", "a2a+tree"} & set(types):
            yield f"{grid} has no effect with {kinds}"
    if args.head_groups is not None and kv_heads % args.head_groups:
        yield f"head_groups={args.head_groups} must divide the {kv_heads} KV heads of a rank"
    if args.topology is not None:
        load_topology(args.topology)


def _schedule(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    warmup, decay = args.lr_warmup_iters, args.lr_decay_iters
    if warmup >= decay:
        name = "lr_decay_iters" if decay != args.train_iters else "train_iters"
        yield f"lr_warmup_iters={warmup} must be less than {name}={decay}"
    if args.min_lr > args.lr:
        yield f"min_lr={args.min_lr} must not exceed lr={args.lr}"


def _data(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    if not is_indexed(args.data_path):
        for name in ("split", "tokenizer_model", "data_cache_path"):
            if getattr(args, name) is not None:
                yield f"{name}={getattr(args, name)} has no effect on text: it is for indexed datasets"
        if args.vocab_size != VOCAB_SIZE:
            yield f"vocab_size={args.vocab_size}, but text is trained on as bytes, {VOCAB_SIZE} tokens: leave it out"
        return
    from .indexed import DEFAULT_SPLIT, parse_data_path, parse_split

    parse_data_path(args.data_path)
    parse_split(args.split or DEFAULT_SPLIT)
    if args.vocab_size is None:
        path = " ".join(args.data_path)
        yield f"data_path={path} is an indexed dataset: give the number of tokens by --vocab-size or --tokenizer-model"
    if args.assert_below_unigram is not None:
        yield f"assert_below_unigram={args.assert_below_unigram} needs a folder of text in data_path"


def _files(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    for name in ("save_interval", "keep_checkpoints", "resume"):
        if getattr(args, name) and not args.save:
            yield f"{name}={getattr(args, name)} has no effect without --save"
    if args.resume and args.load:
        yield f"resume and load={args.load!r} exclude each other: resume means --load from --save"
    if args.tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        way_out = "pip install 'megatron_tree[launch]'"
        yield f"tensorboard_dir={args.tensorboard_dir!r} needs the package tensorboard: {way_out}"
