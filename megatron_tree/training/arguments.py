"""Options of the training example, named as in Megatron-LM (the command line over a YAML file), and their checks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ..integrations.megatron.compat import CP_COMM_TYPES
from ..launching import new_parser, parse_with_config
from ..plan import load_topology
from ..units import parse_grid
from .data import open_tokenizer, vocab_size

EXAMPLES = """\
examples (on a machine without an accelerator put DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):

  TRAIN="torchrun --nproc-per-node 4 -m megatron_tree train --config configs/train/quickstart.yaml"
  $TRAIN                                     tree attention over 4 ranks
  $TRAIN --cp-comm-type p2p                  the same run with the ring
  $TRAIN --context-parallel-size 1 --micro-batch-size 2
                                             the same run with data parallelism and Megatron's own attention
  $TRAIN --resume --train-iters 240          continue from the newest complete checkpoint

This is a small example. Megatron-LM's own training with tree attention: bash launch/megatron_lm.sh --help
"""
NUMBERS = {  # options that are plain numbers, with their defaults
    "model": dict(
        num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=512, attention_dropout=0.0,
        hidden_dropout=0.0, norm_epsilon=1e-5, rotary_base=10000.0, rope_scaling_factor=8.0,
        make_vocab_size_divisible_by=64,
    ),
    "training": dict(
        micro_batch_size=4, global_batch_size=16, train_iters=200, seed=1234, lr=3e-3, lr_warmup_iters=0,
        weight_decay=0.01, clip_grad=1.0,
    ),
    "parallel layout": dict(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
        distributed_timeout_minutes=10.0,
    ),
    "data": dict(eval_interval=0, eval_iters=4),
    "checkpoints and reports": dict(save_interval=0),
}  # fmt: skip
HELP = {
    "rope_scaling_factor": "of --use-rope-scaling; ",
    "distributed_timeout_minutes": "longest wait for other ranks; ",
    "eval_interval": "iterations between validations; 0: at the end only; ",
    "eval_iters": "global batches of a validation; 0: none; ",
    "save_interval": "iterations between checkpoints; 0: at the end only; ",
}
MAY_BE_ZERO = {"attention_dropout", "hidden_dropout", "lr_warmup_iters", "min_lr", "clip_grad", "weight_decay"}
MAY_BE_ZERO |= {"eval_interval", "eval_iters", "save_interval"}
ANY_NUMBER = {"seed", "assert_below_unigram"}


def build_parser() -> argparse.ArgumentParser:
    """The command line. The defaults are those of a small model."""
    description = "Train a small GPT with Megatron-core, the sequence sharded over ranks."
    parser = new_parser("megatron-tree train", description, EXAMPLES)
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    groups = {name: parser.add_argument_group(name).add_argument for name in NUMBERS}
    for name, numbers in NUMBERS.items():
        for option, default in numbers.items():
            text = HELP.get(option, "") + "default: %(default)s"
            groups[name](f"--{option.replace('_', '-')}", type=type(default), default=default, metavar="N", help=text)

    add = groups["model"]
    add("--ffn-hidden-size", type=int, help="default: 8/3 of hidden-size, rounded up to a multiple of 32")
    add("--num-query-groups", type=int, help="KV heads; default: num-attention-heads (MHA)")
    add("--kv-channels", type=int, help="head_dim; default: hidden-size / num-attention-heads")
    add("--qk-layernorm", **switch, help="norms of the queries and keys of every head, as in Qwen 3")
    add("--add-qkv-bias", **switch, help="biases of the projections to q, k and v, as in Qwen 2")
    add("--use-rope-scaling", **switch, help="rotary frequencies scaled as in Llama 3.1")
    add("--untie-embeddings-and-output-weights", **switch, help="an output layer with weights of its own")
    add("--vocab-size", type=int, help="default: the tokenizer's")

    add = groups["training"]
    add("--min-lr", type=float, help="default: lr / 10")
    add("--lr-decay-style", choices=["constant", "linear", "cosine", "inverse-square-root"], default="cosine")
    add("--lr-decay-iters", type=int, help="iterations until min-lr is reached; default: train-iters")
    add("--bf16", **switch)

    add = groups["parallel layout"]
    add("--sequence-parallel", **switch, help="with tensor parallelism: shard norms and dropout along the sequence")
    add("--use-distributed-optimizer", **switch)
    types = f"{', '.join(CP_COMM_TYPES)}: one, or one for each layer"
    add("--cp-comm-type", nargs="+", choices=CP_COMM_TYPES, default=["tree"], metavar="TYPE", help=types)
    add("--hierarchical-context-parallel-sizes", type=int, nargs="+", metavar="N", help="with a2a+tree or a2a+p2p: "
        "ranks that exchange heads, then the others; their product is context-parallel-size")  # fmt: skip
    add("--grid", type=parse_grid, metavar="AxB", help="queries gathered over A ranks, KV over B; A*B = "
        "context-parallel-size; default: planned")  # fmt: skip
    add("--topology", metavar="NAME|YAML", help="network for the planner: a known name, or a file that "
        "megatron-tree calibrate wrote")  # fmt: skip

    add = groups["data"]
    add("--data-path", metavar="DIR", help="folder of text files; default: this Python's standard library")
    add("--data-suffix", default=".py", help="of the text files")
    add("--tokenizer-model", metavar="DIR", help="a Hugging Face tokenizer (default: a token for each byte)")

    add = groups["checkpoints and reports"]
    add("--save", metavar="DIR", help="folder for checkpoints")
    add("--keep-checkpoints", type=int, metavar="N", help="delete all but the newest N; default: keep all")
    add("--load", metavar="DIR", help="continue from the newest complete checkpoint in this folder")
    add("--finetune", **switch, help="take only the weights from --load and start at iteration 0")
    add("--resume", **switch, help="--load from the folder of --save; start from scratch if it has no checkpoint yet")
    add("--output-dir", default="runs/train", metavar="DIR", help="for train.jsonl and loss.png")
    add("--assert-below-unigram", type=float, nargs="?", const=0.5, metavar="NATS",
        help="fail unless the final loss is this much below that of the unigram model (0.5)")  # fmt: skip
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the command line, completed; see `launching.parse_with_config`."""
    return complete(parse_with_config(build_parser(), argv))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Replace the defaults that follow from other options, in place. Returns: args."""
    follows = {
        "ffn_hidden_size": -(-8 * args.hidden_size // 3 // 32) * 32,
        "num_query_groups": args.num_attention_heads,
        "kv_channels": args.hidden_size // max(1, args.num_attention_heads),
        "min_lr": args.lr / 10,
        "lr_decay_iters": args.train_iters,
    }
    for name, value in follows.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.vocab_size is None:
        args.vocab_size = vocab_size(args.tokenizer_model)
    return args


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check completed options against each other and the number of ranks. Megatron-core checks the model's shape.

    Raises: ValueError that names the options, the values seen and the way out.
    """
    for problem in chain(_numbers(args), _layout(args, world_size), _files(args)):
        raise ValueError(problem)
    from .model import transformer_config, tree_config

    tree_config(args)
    try:
        transformer_config(args)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"Megatron-core: {error}") from error


def _numbers(args: argparse.Namespace) -> Iterator[str]:
    for name, value in vars(args).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            yield f"{name}={value} must be a finite number"
        if name not in ANY_NUMBER and value < 0:
            yield f"{name}={value} must not be negative"
        if name not in ANY_NUMBER | MAY_BE_ZERO and value == 0:
            yield f"{name}={value} must be positive"
    if args.lr_warmup_iters >= args.lr_decay_iters:
        yield f"lr_warmup_iters={args.lr_warmup_iters} must be less than lr_decay_iters={args.lr_decay_iters}"
    if args.min_lr > args.lr:
        yield f"min_lr={args.min_lr} must not exceed lr={args.lr}"


def _layout(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if world_size % (tp * pp * cp):
        yield (
            f"{world_size} ranks were started, but tensor_model_parallel_size={tp} * pipeline_model_parallel_size={pp} "
            f"* context_parallel_size={cp} = {tp * pp * cp} does not divide that: change a size or the number of ranks"
        )
        return
    dp_batch = args.micro_batch_size * (world_size // (tp * pp * cp))
    chunks = max(2 * cp if cp > 1 else 1, tp * cp if args.sequence_parallel else 1)
    for name, unit, why in (
        ("global_batch_size", dp_batch, "micro_batch_size * data-parallel size"),
        ("seq_length", chunks, "2 * context_parallel_size, and with sequence_parallel of tp * cp"),
        ("num_layers", pp, "pipeline_model_parallel_size"),
        ("num_attention_heads", args.num_query_groups, "num_query_groups"),
        ("num_query_groups", tp, "tensor_model_parallel_size"),
        ("ffn_hidden_size", tp, "tensor_model_parallel_size"),
        ("kv_channels", 2, "2: rotary embeddings pair channels"),
    ):
        if (value := getattr(args, name)) % unit:
            yield f"{name}={value} must be a multiple of {unit} ({why})"
    sizes = args.hierarchical_context_parallel_sizes or ()
    if any("+" in kind for kind in args.cp_comm_type) != bool(sizes) or (sizes and math.prod(sizes) != cp):
        yield (
            f"hierarchical_context_parallel_sizes={' '.join(map(str, sizes)) or 'none'} with cp_comm_type="
            f"{' '.join(args.cp_comm_type)}: a2a+tree and a2a+p2p, and only they, need two numbers whose product is "
            f"context_parallel_size={cp}"
        )
    places = sizes[-1] if "a2a+tree" in args.cp_comm_type and sizes else cp
    if args.grid is not None and (math.prod(args.grid) != places or cp == 1):
        yield "grid={}x{} must have one place for each of the {} ranks of the tree".format(*args.grid, places)
    if args.topology is not None:
        load_topology(args.topology)


def _files(args: argparse.Namespace) -> Iterator[str]:
    if args.data_path is not None and not Path(args.data_path).is_dir():
        yield (
            f"data_path={args.data_path!r} is not a folder of text files: name one, or for indexed datasets run "
            "Megatron-LM's pretrain_gpt.py (bash launch/megatron_lm.sh)"
        )
    needs = {"save_interval": "save", "keep_checkpoints": "save", "resume": "save", "finetune": "load"}
    for name, needed in needs.items():
        if getattr(args, name) and not getattr(args, needed):
            yield f"{name}={getattr(args, name)} has no effect without --{needed}"
    if args.resume and args.load:
        yield f"resume and load={args.load!r} exclude each other: resume means --load from --save"
    if (tokens := vocab_size(args.tokenizer_model)) > args.vocab_size:
        source = "bytes and end of document" if args.tokenizer_model is None else args.tokenizer_model
        yield f"vocab_size={args.vocab_size} must be at least {tokens}, the tokens of {source}"
    if args.tokenizer_model is not None and open_tokenizer(args.tokenizer_model).eos_token_id is None:
        yield f"tokenizer_model={args.tokenizer_model!r} has no token for the end of a document (eos_token)"
