"""Options of `launch/train_gpt.py`, named as in Megatron-LM: from a YAML file, the command line over it."""

from __future__ import annotations

import argparse
from functools import partial

from ..integrations.megatron.compat import CP_COMM_TYPES
from ..launching import parse_with_config
from ..plan import parse_grid
from .data import VOCAB_SIZE, is_indexed

EXAMPLES = """\
examples (the deepspeed launcher starts the ranks; on a machine without an accelerator put
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):

  TRAIN="deepspeed --num_gpus 4 --no_local_rank launch/train_gpt.py --config configs/train/quickstart.yaml"
  $TRAIN                                     tree attention over 4 ranks
  $TRAIN --cp-comm-type p2p                  the same run with the ring
  $TRAIN --context-parallel-size 1 --micro-batch-size 2
                                             the same run with data parallelism and Megatron's own attention
  $TRAIN --resume --train-iters 240          continue from the newest complete checkpoint

  python -m megatron_tree.training.preprocess --input books/ --output data/books
  $TRAIN --data-path data/books --vocab-size 257 --tensorboard-dir runs/books/tensorboard
                                             train on an indexed dataset
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line. The defaults are those of a small model."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a small GPT with Megatron-core, the sequence sharded over ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="YAML", help="file with any of these options; the command line wins")
    _add_model(parser.add_argument_group("model").add_argument)
    _add_training(parser.add_argument_group("training").add_argument)
    _add_layout(parser.add_argument_group("parallel layout").add_argument)
    _add_data(parser.add_argument_group("data").add_argument)
    _add_output(parser.add_argument_group("checkpoints and reports").add_argument)
    return parser


_SWITCH = {"action": argparse.BooleanOptionalAction, "default": False}


def _add_model(add) -> None:
    number, fraction = partial(add, type=int), partial(add, type=float)
    number("--num-layers", default=4)
    number("--hidden-size", default=128)
    number("--ffn-hidden-size", help="default: 8/3 of hidden-size, rounded up to a multiple of 32")
    number("--num-attention-heads", default=8)
    number("--num-query-groups", help="KV heads; default: num-attention-heads (MHA)")
    number("--kv-channels", help="size of a head; default: hidden-size / num-attention-heads")
    number("--seq-length", default=512)
    number("--rotary-base", default=10000)
    fraction("--norm-epsilon", default=1e-5)
    fraction("--init-method-std", default=0.02)
    add("--untie-embeddings-and-output-weights", **_SWITCH)
    number("--window-size", nargs=2, metavar=("LEFT", "RIGHT"), help="sliding window; RIGHT is 0 in a causal model")
    number("--window-attn-skip-freq", help="every n-th layer attends to the whole sequence")
    add("--softmax-type", choices=["vanilla", "off-by-one", "learnable"], default="vanilla", help="attention sinks")
    fraction("--attention-dropout", default=0.0)
    fraction("--hidden-dropout", default=0.0)


def _add_training(add) -> None:
    number, fraction = partial(add, type=int), partial(add, type=float)
    number("--micro-batch-size", default=4)
    number("--global-batch-size", default=16)
    number("--train-iters", default=200)
    fraction("--lr", default=3e-3)
    fraction("--min-lr", help="default: lr / 10")
    add("--lr-decay-style", choices=["constant", "linear", "cosine", "inverse-square-root"], default="cosine")
    number("--lr-decay-iters", help="iterations until min-lr is reached; default: train-iters")
    number("--lr-warmup-iters", default=0, help="linear, from 0 to lr")
    fraction("--weight-decay", default=0.01)
    fraction("--adam-beta1", default=0.9)
    fraction("--adam-beta2", default=0.95)
    fraction("--adam-eps", default=1e-8)
    fraction("--clip-grad", default=1.0)
    add("--bf16", **_SWITCH)
    number("--seed", default=1234)
    add("--recompute-granularity", choices=["selective", "full"])
    add("--recompute-modules", nargs="+", help="with selective; default: core_attn")
    add("--recompute-method", choices=["uniform", "block"], help="with full")
    number("--recompute-num-layers", help="with full")


def _add_layout(add) -> None:
    number = partial(add, type=int)
    number("--tensor-model-parallel-size", default=1)
    add("--sequence-parallel", **_SWITCH, help="with tensor parallelism: shard norms and dropout along the sequence")
    number("--pipeline-model-parallel-size", default=1)
    number("--context-parallel-size", default=1)
    add("--use-distributed-optimizer", **_SWITCH)
    types = f"{', '.join(CP_COMM_TYPES)}: one, or one for each layer"
    add("--cp-comm-type", nargs="+", default=["tree"], metavar="TYPE", help=types)
    number("--hierarchical-context-parallel-sizes", nargs="+", metavar="N", help="with a2a+tree or a2a+p2p: ranks that "
           "exchange heads, then the others; their product is context-parallel-size")  # fmt: skip
    grid = partial(add, type=parse_grid, metavar="AxB")
    grid("--grid", help="queries gathered over A ranks, KV over B; A*B = context-parallel-size; default: planned")
    grid("--grid-backward", help="another grid for the backward")
    number("--head-groups", metavar="N", help="KV heads are processed in N groups, overlapped")
    add("--topology", metavar="NAME|YAML", help="network for the planner: a name in configs/topology, or a file of "
        "python -m megatron_tree.calibrate")  # fmt: skip
    kernels = ["auto", "aten", "reference"]
    add("--attention-kernels", choices=kernels, default="auto", help="kernels under tree attention")
    add("--distributed-timeout-minutes", type=float, default=10.0, help="longest wait for other ranks")


def _add_data(add) -> None:
    add("--data-path", nargs="+", metavar="PATH",
        help="prefixes of indexed datasets (PREFIX.bin, PREFIX.idx), all or none of them preceded by a weight; or one "
        "folder of text files, trained on as bytes; default: this Python's standard library")  # fmt: skip
    add("--data-suffix", default=".py", help="of the text files")
    add("--split", metavar="A,B,C", help="of indexed datasets: training, validation, test; default: 949,50,1")
    add("--data-cache-path", metavar="DIR", help="for the sample order of indexed datasets; default: index-cache "
        "beside the first")  # fmt: skip
    add("--vocab-size", type=int, help="of indexed datasets")
    add("--tokenizer-model", metavar="NAME|DIR", help="Hugging Face tokenizer of the indexed datasets, instead")
    add("--eval-interval", type=int, default=0, help="iterations between validations; 0: at the end only")
    add("--eval-iters", type=int, default=4, help="global batches of a validation; 0: none")


def _add_output(add) -> None:
    add("--save", metavar="DIR", help="folder for checkpoints")
    add("--save-interval", type=int, default=0, help="iterations between checkpoints; 0: at the end only")
    add("--keep-checkpoints", type=int, metavar="N", help="delete all but the newest N; default: keep all")
    add("--load", metavar="DIR", help="continue from the newest complete checkpoint in this folder")
    add("--resume", **_SWITCH, help="--load from the folder of --save; start from scratch if it has no checkpoint yet")
    add("--output-dir", default="runs/train_gpt", metavar="DIR", help="train.jsonl and loss.png")
    add("--tensorboard-dir", metavar="DIR", help="curves for TensorBoard")
    add("--log-interval", type=int, default=0, help="iterations between printed lines; 0: ten lines a run")
    add("--assert-below-unigram", type=float, nargs="?", const=0.5, metavar="NATS",
        help="fail unless the final loss is this much below that of the byte unigram model (0.5)")  # fmt: skip


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the command line, completed; see `launching.parse_with_config`."""
    return complete(parse_with_config(build_parser(), argv))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Replace the defaults that follow from other options, in place. Returns: args."""
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = -(-8 * args.hidden_size // 3 // 32) * 32
    if args.num_query_groups is None:
        args.num_query_groups = args.num_attention_heads
    if args.kv_channels is None and args.num_attention_heads > 0:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    if isinstance(args.data_path, str):
        args.data_path = [args.data_path]
    if args.window_size is not None:
        args.window_size = tuple(args.window_size)
    if args.vocab_size is None and is_indexed(args.data_path) and args.tokenizer_model is not None:
        from .preprocess import load_tokenizer

        args.vocab_size = load_tokenizer(args.tokenizer_model).vocab_size
    elif args.vocab_size is None and not is_indexed(args.data_path):
        args.vocab_size = VOCAB_SIZE
    return args
