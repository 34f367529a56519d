"""Options of `megatron-tree train`, named as in Megatron-LM (the command line over a YAML file), and their checks."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NoReturn

from ..integrations.megatron.compat import CP_COMM_TYPES
from ..launching import parse_with_config
from ..plan import load_topology, parse_grid
from .data import open_tokenizer, vocab_size

EXAMPLES = """\
examples (the deepspeed launcher starts the ranks; on a machine without an accelerator put
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):

  TRAIN="deepspeed --num_gpus 4 --no_local_rank --module megatron_tree train --config configs/train/quickstart.yaml"
  $TRAIN                                     tree attention over 4 ranks
  $TRAIN --cp-comm-type p2p                  the same run with the ring
  $TRAIN --context-parallel-size 1 --micro-batch-size 2
                                             the same run with data parallelism and Megatron's own attention
  $TRAIN --resume --train-iters 240          continue from the newest complete checkpoint

This is a small example. Megatron-LM's own training with tree attention: bash launch/megatron_lm.sh --help
"""
MEGATRON_LM = "run Megatron-LM's pretrain_gpt.py with bash launch/megatron_lm.sh (docs/megatron-lm.md)"
NUMBERS = {  # options that are plain numbers, with their defaults
    "model": dict(
        num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=512, init_method_std=0.02,
        attention_dropout=0.0, hidden_dropout=0.0, norm_epsilon=1e-5, rotary_base=10000.0,
        make_vocab_size_divisible_by=64,
    ),
    "training": dict(
        micro_batch_size=4, global_batch_size=16, train_iters=200, seed=1234, lr=3e-3, lr_warmup_iters=0,
        weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0,
    ),
    "parallel layout": dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1),
}  # fmt: skip
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


def _numbers_of(text: str) -> tuple[int, ...]:
    """ "16,0" and "(16,0)" as (16, 0)."""
    try:
        return tuple(int(number) for number in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of whole numbers, for instance 16,0") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        others = f"; for Megatron-LM's other options {MEGATRON_LM}" if "unrecognized arguments" in message else ""
        super().error(message + others)


def build_parser() -> argparse.ArgumentParser:
    """The command line. The defaults are those of a small model."""
    parser = _Parser(
        prog="megatron-tree train",
        description="Train a small GPT with Megatron-core, the sequence sharded over ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="YAML", help="file with any of these options; the command line wins")
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    groups = {name: parser.add_argument_group(name).add_argument for name in NUMBERS}
    for name, numbers in NUMBERS.items():
        for option, default in numbers.items():
            text = f"--{option.replace('_', '-')}"
            groups[name](text, type=type(default), default=default, metavar="N", help="default: %(default)s")

    add = groups["model"]
    add("--ffn-hidden-size", type=int, help="default: 8/3 of hidden-size, rounded up to a multiple of 32")
    add("--num-query-groups", type=int, help="KV heads; default: num-attention-heads (MHA)")
    add("--window-size", type=_numbers_of, nargs="+", metavar="LEFT,RIGHT", help="sliding window, for instance 16,0 "
        "(RIGHT is 0 in a causal model)")  # fmt: skip
    add("--softmax-type", choices=["vanilla", "off-by-one", "learnable"], default="vanilla", help="attention sinks")
    add("--kv-channels", type=int, help="head_dim; default: hidden-size / num-attention-heads")
    add("--qk-layernorm", **switch, help="norms of every head's queries and keys, as in Qwen 3")
    add("--add-qkv-bias", **switch, help="biases of the projections to q, k and v, as in Qwen 2")
    add("--use-rope-scaling", **switch, help="rotary frequencies scaled as in Llama 3.1")
    add("--rope-scaling-factor", type=float, default=8.0, help="of --use-rope-scaling (default: %(default)s)")
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
    add("--grid-backward", type=parse_grid, metavar="AxB", help="another grid for the backward")
    add("--head-chunks", type=int, metavar="N", help="KV heads are processed in N chunks, overlapped")
    add("--topology", metavar="NAME|YAML", help="network for the planner: a name in the help of megatron-tree plan, "
        "or a file of megatron-tree calibrate")  # fmt: skip
    kernels = ["auto", "aten", "reference"]
    add("--attention-kernels", choices=kernels, default="auto", help="kernels under tree attention")
    add("--distributed-timeout-minutes", type=float, default=10.0, help="longest wait for other ranks")

    add = parser.add_argument_group("data").add_argument
    text = "folder of text files, trained on as bytes; default: this Python's standard library"
    add("--data-path", metavar="DIR", help=text)
    add("--data-suffix", default=".py", help="of the text files")
    add("--tokenizer-model", metavar="DIR", help="a tokenizer of Hugging Face (default: a token for each byte)")
    add("--eval-interval", type=int, default=0, help="iterations between validations; 0: at the end only")
    add("--eval-iters", type=int, default=4, help="global batches of a validation; 0: none")

    add = parser.add_argument_group("checkpoints and reports").add_argument
    add("--save", metavar="DIR", help="folder for checkpoints")
    add("--save-interval", type=int, default=0, help="iterations between checkpoints; 0: at the end only")
    add("--keep-checkpoints", type=int, metavar="N", help="delete all but the newest N; default: keep all")
    add("--load", metavar="DIR", help="continue from the newest complete checkpoint in this folder")
    add("--finetune", **switch, help="take only the weights from --load: the run starts at iteration 0, and its data "
        "may be others")  # fmt: skip
    add("--resume", **switch, help="--load from the folder of --save; start from scratch if it has no checkpoint yet")
    add("--output-dir", default="runs/train_gpt", metavar="DIR", help="train.jsonl and loss.png")
    add("--tensorboard-dir", metavar="DIR", help="curves for TensorBoard")
    add("--log-interval", type=int, default=0, help="iterations between printed lines; 0: ten lines a run")
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
        "min_lr": args.lr / 10,
        "lr_decay_iters": args.train_iters,
        "kv_channels": args.hidden_size // args.num_attention_heads,
    }
    for name, value in follows.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.window_size is not None:  # 16,0 or (16,0) as in Megatron-LM, or 16 0
        args.window_size = tuple(chain.from_iterable(args.window_size))
    if args.vocab_size is None:
        args.vocab_size = vocab_size(args.tokenizer_model)
    return args


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check completed options against each other and the number of ranks. What Megatron-core checks is left to it.

    Raises: ValueError that names the options, the values seen and the way out.
    """
    for problem in chain(_numbers(args), _layout(args, world_size), _context_parallel(args), _files(args)):
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
        if name in LESS_THAN_ONE and not 0 <= value < 1:
            yield f"{name}={value} must be at least 0 and less than 1"
        if name in MAY_BE_ZERO and value < 0:
            yield f"{name}={value} must not be negative"
        if name not in LESS_THAN_ONE | MAY_BE_ZERO | ANY_NUMBER and value <= 0:
            yield f"{name}={value} must be positive"
    if (warmup := args.lr_warmup_iters) >= (decay := args.lr_decay_iters):
        name = "lr_decay_iters" if decay != args.train_iters else "train_iters"
        yield f"lr_warmup_iters={warmup} must be less than {name}={decay}"
    if args.min_lr > args.lr:
        yield f"min_lr={args.min_lr} must not exceed lr={args.lr}"
    if args.window_size is not None and len(args.window_size) != 2:
        yield f"window_size={args.window_size} must be two numbers, LEFT,RIGHT: for instance 16,0"


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
    default_channels = args.kv_channels == args.hidden_size // args.num_attention_heads
    if args.hidden_size % (2 * args.num_attention_heads) and default_channels:
        product = f"2 * num_attention_heads = {2 * args.num_attention_heads}"
        yield f"hidden_size={args.hidden_size} must be a multiple of {product}: rotary embeddings pair channels"
    micro, dp = args.micro_batch_size, world_size // (tp * pp * cp)
    if args.global_batch_size % (micro * dp):
        product = f"micro_batch_size={micro} * data-parallel size {dp} = {micro * dp}"
        yield f"global_batch_size={args.global_batch_size} must be a multiple of {product}"


def _context_parallel(args: argparse.Namespace) -> Iterator[str]:
    tp, cp, types = args.tensor_model_parallel_size, args.context_parallel_size, args.cp_comm_type
    heads, kv_heads = args.num_attention_heads // tp, args.num_query_groups // tp
    kinds, cp_size = f"cp_comm_type={' '.join(types)}", f"context_parallel_size={cp}"
    sizes, two_level = args.hierarchical_context_parallel_sizes, any("+" in name for name in types)
    option = f"hierarchical_context_parallel_sizes={' '.join(map(str, sizes or ['none']))}"
    if sizes and not two_level:
        yield f"{option} has no effect with {kinds}"
    if two_level and not (sizes and len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == cp):
        yield f"{option} must be two numbers whose product is {cp_size}: {kinds} needs them"
    for ranks in ([cp] if "a2a" in types else []) + ([sizes[0]] if two_level else []):  # ranks that exchange heads
        if ranks > heads:
            yield f"{kinds}: {ranks} ranks can't share {heads} query heads; take {heads} ranks or fewer"

    places, tree_size = (sizes[1], option) if "a2a+tree" in types else (cp, cp_size)
    for name in ("grid", "grid_backward"):
        if (shape := getattr(args, name)) is None:
            continue
        grid = "{}={}x{}".format(name, *shape)
        if cp == 1 or not {"tree", "a2a+tree"} & set(types):
            yield f"{grid} has no effect with {cp_size if cp == 1 else kinds}"
        if math.prod(shape) != places:
            yield f"{grid} must have {places} places, one for each rank of the tree ({tree_size})"
    if args.head_chunks is not None and kv_heads % args.head_chunks:
        yield f"head_chunks={args.head_chunks} must divide the {kv_heads} KV heads of a rank"
    if args.topology is not None:
        load_topology(args.topology)


def _files(args: argparse.Namespace) -> Iterator[str]:
    if args.data_path is not None and not Path(args.data_path).is_dir():
        way_out = f"name one, or for indexed datasets {MEGATRON_LM}"
        yield f"data_path={args.data_path!r} is not a folder of text files: {way_out}"
    for name in ("save_interval", "keep_checkpoints", "resume"):
        if getattr(args, name) and not args.save:
            yield f"{name}={getattr(args, name)} has no effect without --save"
    if args.finetune and not args.load:
        yield "finetune=True has no effect without --load"
    if (tokens := vocab_size(args.tokenizer_model)) > args.vocab_size:
        source = "bytes and end of document" if args.tokenizer_model is None else args.tokenizer_model
        yield f"vocab_size={args.vocab_size} must be at least {tokens}, the tokens of {source}"
    if args.tokenizer_model is not None and open_tokenizer(args.tokenizer_model).eos_token_id is None:
        yield f"tokenizer_model={args.tokenizer_model!r} has no token for the end of a document (eos_token)"
    if args.resume and args.load:
        yield f"resume and load={args.load!r} exclude each other: resume means --load from --save"
    if args.tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        way_out = "pip install 'megatron_tree[launch]'"
        yield f"tensorboard_dir={args.tensorboard_dir!r} needs the package tensorboard: {way_out}"
