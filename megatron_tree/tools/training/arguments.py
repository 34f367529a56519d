"""Options of the training example, named as in Megatron-LM (the command line over a YAML file), and their checks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ...core.config import CP_COMM_TYPES
from ...core.files import read_yaml, whole_file, why_uncreatable
from ...launching import as_typed, new_parser, parse_with_config
from .data import VOCAB_SIZE, open_tokenizer, text_files, vocab_size

EXAMPLES = """\
examples (on a machine without an accelerator put DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):

  TRAIN="torchrun --nproc-per-node 4 -m megatron_tree train --config configs/train/quickstart.yaml"
  $TRAIN                                     tree attention over 4 ranks
  $TRAIN --cp-comm-type p2p                  the same run with the ring
  $TRAIN --context-parallel-size 1 --micro-batch-size 2
                                             the same run with data parallelism and Megatron's own attention
  $TRAIN --resume --train-iters 240          continue from the newest complete checkpoint

This is a small example. Megatron-LM's own training with tree attention: docs/megatron-lm.md.
"""
NUMBERS = {  # options that are plain numbers, with their defaults
    "model": dict(seq_length=512),
    "training": dict(
        micro_batch_size=4, global_batch_size=16, train_iters=200, seed=1234, lr=3e-3, lr_warmup_iters=0,
        weight_decay=0.01, clip_grad=1.0,
    ),
    "parallel layout": dict(
        tensor_model_parallel_size=1, context_parallel_size=1, distributed_timeout_minutes=10.0
    ),
    "data and checkpoints": dict(save_interval=0),
}  # fmt: skip
HELP = {
    "distributed_timeout_minutes": "longest wait for other ranks; ",
    "save_interval": "iterations between checkpoints; 0: at the end only; ",
}
MAY_BE_ZERO = {"lr_warmup_iters", "clip_grad", "weight_decay", "save_interval"}
ANY_NUMBER = {"seed", "assert_below_unigram"}
MODEL_FILE = "model.yaml"
NEW_MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": None,  # None: follows from others
    "num_attention_heads": 8,
    "num_query_groups": None,
    "kv_channels": None,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "qk_layernorm": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "vocab_size": VOCAB_SIZE,
    "make_vocab_size_divisible_by": 64,
    "tokenizer_model": None,
}
"""Of a model that starts from scratch; those that only converted models change are no options of the command line."""


def build_parser() -> argparse.ArgumentParser:
    """The command line. The defaults describe a small model."""
    description = "Train a small GPT with Megatron-core, the sequence sharded over ranks."
    parser = new_parser("megatron-tree train", description, EXAMPLES)
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    groups = {name: parser.add_argument_group(name).add_argument for name in NUMBERS}
    for name, numbers in NUMBERS.items():
        for option, default in numbers.items():
            text = HELP.get(option, "") + "default: %(default)s"
            groups[name](f"--{option.replace('_', '-')}", type=type(default), default=default, metavar="N", help=text)

    add = groups["model"]
    add("--num-layers", type=int, metavar="N", help="default: 4; this and the following: the checkpoint's if one is "
        "loaded")  # fmt: skip
    add("--hidden-size", type=int, metavar="N", help="default: 128")
    add("--ffn-hidden-size", type=int, metavar="N", help="default: 8/3 of hidden-size, up to a multiple of 32")
    add("--num-attention-heads", type=int, metavar="N", help="default: 8")
    add("--num-query-groups", type=int, metavar="N", help="KV heads; default: num-attention-heads (MHA)")

    add = groups["training"]
    add("--lr-decay-iters", type=int, metavar="N", help="iterations of the cosine from lr to lr / 10; default: "
        "train-iters")  # fmt: skip
    add("--bf16", **switch)
    add("--assert-below-unigram", type=float, nargs="?", const=0.5, metavar="NATS",
        help="fail unless the final loss is this much below that of the unigram model (0.5)")  # fmt: skip

    add = groups["parallel layout"]
    add("--sequence-parallel", **switch, help="with tensor parallelism: shard norms along the sequence")
    add("--use-distributed-optimizer", **switch)
    types = [kind for kind in CP_COMM_TYPES if "+" not in kind]
    add("--cp-comm-type", choices=types, default="tree", metavar="TYPE", help=", ".join(types))

    add = groups["data and checkpoints"]
    add("--data-path", metavar="DIR", help="folder of text files; default: this Python's standard library")
    add("--save", metavar="DIR", help="folder for checkpoints")
    add("--keep-checkpoints", type=int, metavar="N", help="delete all but the newest N; default: keep all")
    add("--resume", **switch, help="continue the run in --save, if there is one")
    add("--load", metavar="DIR", help="start with the weights in this folder, of --save or megatron-tree convert")
    add("--output-dir", default="runs/train", metavar="DIR", help="for train.jsonl and loss.png (default: runs/train)")
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the command line, completed; see `launching.parse_with_config`."""
    return complete(parse_with_config(build_parser(), argv))


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check completed options against each other and the number of ranks. Megatron-core checks the model's shape.

    Raises: ValueError that names the options, the values seen and the way out.
    """
    for problem in chain(_numbers(args), _layout(args, world_size), _files(args)):
        raise ValueError(problem)
    from .model import transformer_config

    try:
        transformer_config(args)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"Megatron-core: {error}") from error


def _numbers(args: argparse.Namespace) -> Iterator[str]:
    for name, value in vars(args).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            yield f"{as_typed(name, value)} must be a finite number"
        if name not in ANY_NUMBER and value < 0:
            yield f"{as_typed(name, value)} must not be negative"
        if name not in ANY_NUMBER | MAY_BE_ZERO and value == 0:
            yield f"{as_typed(name, value)} must be positive"
    if args.lr_warmup_iters >= args.lr_decay_iters:
        yield f"--lr-warmup-iters {args.lr_warmup_iters} must be less than --lr-decay-iters {args.lr_decay_iters}"


def _layout(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if world_size % (tp * cp):
        yield (
            f"{world_size} ranks were started, but --tensor-model-parallel-size {tp} * --context-parallel-size {cp} "
            "does not divide that: change a size or the number of ranks"
        )
        return
    dp_batch = args.micro_batch_size * (world_size // (tp * cp))
    chunks = max(2 * cp if cp > 1 else 1, tp * cp if args.sequence_parallel else 1)
    for name, unit, why in (
        ("global_batch_size", dp_batch, "--micro-batch-size * data-parallel size"),
        ("seq_length", chunks, "2 * --context-parallel-size, and with --sequence-parallel of tp * cp"),
        ("num_attention_heads", args.num_query_groups, "--num-query-groups"),
        ("num_query_groups", tp, "--tensor-model-parallel-size"),
        ("ffn_hidden_size", tp, "--tensor-model-parallel-size"),
        ("kv_channels", 2, "2: rotary embeddings pair channels"),
    ):
        if (value := getattr(args, name)) % unit:
            yield f"{as_typed(name, value)} must be a multiple of {unit} ({why})"


def _files(args: argparse.Namespace) -> Iterator[str]:
    if args.data_path is not None and not Path(args.data_path).is_dir():
        yield (
            f"--data-path {args.data_path!r} is not a folder of text files: name one, or for indexed datasets run "
            "Megatron-LM's pretrain_gpt.py (docs/megatron-lm.md)"
        )
    elif args.data_path is not None and not text_files(args.data_path):
        yield f"--data-path {args.data_path!r} holds no files: name a folder of text files"
    for option, path in (("--output-dir", args.output_dir), ("--save", args.save)):
        if path is not None and (fault := why_uncreatable(Path(path).absolute())) is not None:
            yield f"{option} {path!r} can't be created: {fault}; name another folder"
    for name in ("save_interval", "keep_checkpoints", "resume"):
        if getattr(args, name) and not args.save:
            yield f"{as_typed(name, getattr(args, name))} has no effect without --save"
    if (tokens := vocab_size(args.tokenizer_model)) > args.vocab_size:
        source = "bytes and end of document" if args.tokenizer_model is None else args.tokenizer_model
        yield f"vocab_size={args.vocab_size} must be at least {tokens}, the tokens of {source}"
    if args.tokenizer_model is not None and open_tokenizer(args.tokenizer_model).eos_token_id is None:
        yield f"tokenizer_model={args.tokenizer_model!r} has no token for the end of a document (eos_token)"


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Set, in place, the model's options that are not given: those of the checkpoint to load, else of a new model.

    Returns: args.
    Raises: ValueError if an option differs from the checkpoint's, or its model.yaml can't be read.
    """
    for name, value in _of_checkpoint(args).items():
        if getattr(args, name, None) not in (None, value):
            raise ValueError(
                f"{as_typed(name, getattr(args, name))}, but the model to load has {value!r}: leave it out"
            )
        setattr(args, name, value)
    _set_missing(args, NEW_MODEL)
    follows = {
        "ffn_hidden_size": -(-8 * args.hidden_size // 3 // 32) * 32,
        "num_query_groups": args.num_attention_heads,
        "kv_channels": args.hidden_size // max(1, args.num_attention_heads),
        "lr_decay_iters": args.train_iters,
    }
    _set_missing(args, follows)
    return args


def _set_missing(args: argparse.Namespace, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def _of_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    if args.resume and args.save is not None and (path := Path(args.save) / MODEL_FILE).exists():
        return _read(path)
    return {} if args.load is None else _read(Path(args.load) / MODEL_FILE)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"--load {str(path.parent)!r} has no {path.name}: name a folder that --save or megatron-tree convert wrote"
        )
    options = read_yaml(path)
    if not isinstance(options, dict) or options.keys() != NEW_MODEL.keys():
        raise ValueError(f"{path} must hold {', '.join(NEW_MODEL)}, and no other options")
    for name, default in NEW_MODEL.items():
        kind = int if default is None else type(default)
        if name != "tokenizer_model" and type(options[name]) is not kind:
            raise ValueError(f"{path}: {name}={options[name]!r} must be of type {kind.__name__}")
    return options


def write_model(args: argparse.Namespace, folder: str | Path) -> None:
    """Write the model.yaml of these completed options."""
    import yaml

    with whole_file(Path(folder) / MODEL_FILE) as part:
        part.write_text(yaml.safe_dump(model_options(args), sort_keys=False))


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the model among completed options."""
    return {name: getattr(args, name) for name in NEW_MODEL}
