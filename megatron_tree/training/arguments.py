"""Options of `launch/train_gpt.py`, named as in Megatron-LM: from a YAML file, the command line over it."""

from __future__ import annotations

import argparse

from ..integrations.megatron.compat import CP_COMM_TYPES
from ..launching import parse_with_config
from ..plan import parse_grid
from .data import VOCAB_SIZE, is_indexed
from .schedule import LR_DECAY_STYLES
from .tokenizers import HuggingFaceTokenizer

EXAMPLES = """\
examples (the deepspeed launcher starts the ranks; on a machine without an accelerator put
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):

  TRAIN="deepspeed --num_gpus 4 --no_local_rank launch/train_gpt.py --config configs/train/quickstart.yaml"
  $TRAIN                                     tree attention over 4 ranks
  $TRAIN --cp-comm-type p2p                  the same run with the ring
  $TRAIN --context-parallel-size 1 --micro-batch-size 2
                                             the same run with data parallelism and Megatron's own attention
  $TRAIN --resume --train-iters 240          continue it from its newest good checkpoint

  python -m megatron_tree.training.preprocess --input books/ --output data/books
  $TRAIN --data-path data/books --vocab-size 257 --tensorboard-dir runs/books/tensorboard
                                             train on an indexed dataset
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line. Defaults are those of a small model; `--config` may change them all."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a GPT with Megatron-core, its sequence sharded over ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="YAML", help="file with these options (underscores or dashes); the command line wins"
    )

    _add_model(parser.add_argument_group("model").add_argument)
    _add_training(parser.add_argument_group("training").add_argument)
    _add_layout(parser.add_argument_group("parallel layout").add_argument)
    _add_data(parser.add_argument_group("data").add_argument)
    _add_reports(parser.add_argument_group("checkpoints and reports").add_argument)
    return parser


def _add_model(add) -> None:
    add("--num-layers", type=int, default=4)
    add("--hidden-size", type=int, default=128)
    add("--ffn-hidden-size", type=int, help="default: 8/3 of hidden-size, rounded up to 32")
    add("--num-attention-heads", type=int, default=8)
    add("--num-query-groups", type=int, help="KV heads; default: num-attention-heads (MHA)")
    add("--kv-channels", type=int, help="size of a head; default: hidden-size / num-attention-heads")
    add("--seq-length", type=int, default=512)
    add("--rotary-base", type=int, default=10000)
    add("--norm-epsilon", type=float, default=1e-5)
    add("--init-method-std", type=float, default=0.02)
    add("--untie-embeddings-and-output-weights", action=argparse.BooleanOptionalAction, default=False)
    add(
        "--window-size",
        type=int,
        nargs=2,
        metavar=("LEFT", "RIGHT"),
        help="sliding window; RIGHT is 0 for a causal model",
    )
    add("--window-attn-skip-freq", type=int, help="every n-th layer attends to everything")
    add("--softmax-type", choices=["vanilla", "off-by-one", "learnable"], default="vanilla", help="attention sinks")
    add("--attention-dropout", type=float, default=0.0)
    add("--hidden-dropout", type=float, default=0.0)


def _add_training(add) -> None:
    add("--micro-batch-size", type=int, default=4)
    add("--global-batch-size", type=int, default=16)
    add("--train-iters", type=int, default=200)
    add("--lr", type=float, default=3e-3)
    add("--min-lr", type=float, help="default: lr / 10")
    add("--lr-decay-style", choices=list(LR_DECAY_STYLES), default="cosine")
    add("--lr-decay-iters", type=int, help="iterations to decay over, then min-lr; default: train-iters")
    add("--lr-warmup-iters", type=int, default=0, help="linear, from 0 to lr")
    add("--lr-wsd-decay-style", choices=["exponential", "linear", "cosine", "minus_sqrt"], default="exponential")
    add("--lr-wsd-decay-iters", type=int, help="with WSD: the last iterations of lr-decay-iters, in which lr decays")
    add("--weight-decay", type=float, default=0.01)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.95)
    add("--adam-eps", type=float, default=1e-8)
    add("--clip-grad", type=float, default=1.0)
    add("--bf16", action=argparse.BooleanOptionalAction, default=False)
    add("--fp16", action=argparse.BooleanOptionalAction, default=False, help="with loss scaling")
    add("--loss-scale", type=float, help="with fp16: this scale throughout; default: it adapts")
    add("--initial-loss-scale", type=float, default=2.0**32)
    add("--min-loss-scale", type=float, default=1.0)
    add("--loss-scale-window", type=int, default=1000, help="steps without overflow before the scale doubles")
    add("--hysteresis", type=int, default=2, help="steps with overflow before the scale is halved")
    add("--seed", type=int, default=1234)
    add("--recompute-granularity", choices=["selective", "full"])
    add("--recompute-modules", nargs="+", help="with selective; Megatron's default is core_attn")
    add("--recompute-method", choices=["uniform", "block"], help="with full")
    add("--recompute-num-layers", type=int, help="with full")


def _add_layout(add) -> None:
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=False,
        help="shard what lies between tensor-parallel layers along the sequence, too")  # fmt: skip
    add("--pipeline-model-parallel-size", type=int, default=1)
    add("--num-virtual-stages-per-pipeline-rank", type=int, metavar="N", help="interleaved pipeline schedule")
    add("--context-parallel-size", type=int, default=1)
    add("--use-distributed-optimizer", action=argparse.BooleanOptionalAction, default=False)
    add("--cp-comm-type", nargs="+", default=["tree"], metavar="TYPE",
        help=f"{', '.join(CP_COMM_TYPES)}: one, or one for each layer")  # fmt: skip
    add("--hierarchical-context-parallel-sizes", type=int, nargs="+", metavar="N",
        help="with a2a+tree or a2a+p2p: ranks that exchange heads, then the others; their product is "
        "context-parallel-size")  # fmt: skip
    add(
        "--grid",
        type=parse_grid,
        metavar="AxB",
        help="queries gathered over A ranks, KV over B; A*B = context-parallel-size (default: the planner's choice)",
    )
    add("--grid-backward", type=parse_grid, metavar="AxB", help="the backward's grid, where it shall differ")
    add("--head-groups", type=int, metavar="N", help="groups of KV heads worked off one after another, overlapped")
    add("--topology", metavar="NAME|YAML", help="network that the planner reckons with: a name in configs/topology, or "
        "a file of python -m megatron_tree.calibrate")  # fmt: skip
    add(
        "--attention-kernels",
        choices=["auto", "aten", "reference"],
        default="auto",
        help="kernels under tree attention",
    )
    add("--distributed-timeout-minutes", type=float, default=10.0, help="longest wait for other ranks")


def _add_data(add) -> None:
    add("--data-path", nargs="+", metavar="PATH",
        help="prefixes of indexed datasets (PREFIX.bin, PREFIX.idx), each with a weight in front or none; or one "
        "folder of text files, trained on as bytes; default: this Python's standard library")  # fmt: skip
    add("--data-suffix", default=".py", help="of the text files")
    add("--split", metavar="A,B,C", help="of indexed datasets: training, validation, test; default: 949,50,1")
    add(
        "--data-cache-path",
        metavar="DIR",
        help="for the order of indexed datasets; default: index-cache beside the first",
    )
    add("--verify-data", action=argparse.BooleanOptionalAction, default=True,
        help="compare indexed datasets with their SHA-256 first, where PREFIX.sha256 is there")  # fmt: skip
    add("--vocab-size", type=int, help="of indexed datasets")
    add("--tokenizer-model", metavar="NAME|DIR", help="Hugging Face tokenizer of the indexed datasets, instead")
    add("--eval-interval", type=int, default=0, help="iterations between validations; 0: at the end only")
    add("--eval-iters", type=int, default=4, help="global batches of a validation; 0: none")


def _add_reports(add) -> None:
    add("--save", metavar="DIR", help="folder for checkpoints")
    add("--save-interval", type=int, default=0, help="iterations between checkpoints; 0: at the end only")
    add("--keep-checkpoints", type=int, metavar="N", help="delete all but the newest N; default: keep all")
    add("--load", metavar="DIR", help="continue from the newest good checkpoint in this folder")
    add("--resume", action=argparse.BooleanOptionalAction, default=False,
        help="like --load with the folder of --save, but start afresh if there is no checkpoint in it")  # fmt: skip
    add("--output-dir", default="runs/train_gpt", metavar="DIR", help="train.jsonl and loss.png")
    add("--tensorboard-dir", metavar="DIR", help="curves for TensorBoard")
    add("--log-interval", type=int, default=0, help="iterations between printed lines; 0: ten lines a run")
    add("--peak-tflops", type=float, metavar="T",
        help="of one rank's device, for the MFU; default: known for usual GPUs")  # fmt: skip
    add("--assert-below-unigram", type=float, nargs="?", const=0.5, metavar="NATS",
        help="fail unless the final loss is this much below that of the byte unigram model (0.5)")  # fmt: skip


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the command line, completed; see `launching.parse_with_config`."""
    args = parse_with_config(build_parser(), argv)
    _fill_in(args)
    return args


def _fill_in(args: argparse.Namespace) -> None:
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
    if args.data_path and is_indexed(args.data_path):
        if args.vocab_size is None and args.tokenizer_model is not None:
            args.vocab_size = HuggingFaceTokenizer(args.tokenizer_model).vocab_size
    elif args.vocab_size is None:
        args.vocab_size = VOCAB_SIZE
