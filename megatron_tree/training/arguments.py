"""Options of `launch/train_gpt.py`, named as in Megatron-LM: from a YAML file, the command line over it."""

from __future__ import annotations

import argparse

from ..launching import parse_with_config

EXAMPLES = """\
examples (the deepspeed launcher starts the ranks; on a machine without an accelerator put
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):

  TRAIN="deepspeed --num_gpus 4 --no_local_rank launch/train_gpt.py --config configs/train/quickstart.yaml"
  $TRAIN                                     tree attention over 4 ranks
  $TRAIN --cp-comm-type p2p                  the same run with the ring
  $TRAIN --context-parallel-size 1 --micro-batch-size 2
                                             the same run with data parallelism and Megatron's own attention
  $TRAIN --load runs/quickstart/checkpoints --train-iters 240
                                             continue it
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line. Defaults are those of a small model; `--config` may change them all."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a byte-level GPT with Megatron-core, its sequence sharded over ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="YAML", help="file with these options (underscores or dashes); the command line wins"
    )

    group = parser.add_argument_group("model")
    add = group.add_argument
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

    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--micro-batch-size", type=int, default=4)
    add("--global-batch-size", type=int, default=16)
    add("--train-iters", type=int, default=200)
    add("--lr", type=float, default=3e-3)
    add("--min-lr", type=float, help="default: lr / 10")
    add("--lr-warmup-iters", type=int, default=0)
    add("--weight-decay", type=float, default=0.01)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.95)
    add("--adam-eps", type=float, default=1e-8)
    add("--clip-grad", type=float, default=1.0)
    add("--bf16", action=argparse.BooleanOptionalAction, default=False)
    add("--seed", type=int, default=1234)
    add("--recompute-granularity", choices=["selective", "full"])
    add("--recompute-modules", nargs="+", help="with selective; Megatron's default is core_attn")
    add("--recompute-method", choices=["uniform", "block"], help="with full")
    add("--recompute-num-layers", type=int, help="with full")

    group = parser.add_argument_group("parallel layout")
    add = group.add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add("--context-parallel-size", type=int, default=1)
    add("--use-distributed-optimizer", action=argparse.BooleanOptionalAction, default=False)
    add("--cp-comm-type", nargs="+", default=["tree"], metavar="TYPE",
        help="tree, p2p (ring) or all_gather (KV gather): one, or one for each layer")  # fmt: skip
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

    group = parser.add_argument_group("data, checkpoints, reports")
    add = group.add_argument
    add("--data-path", help="folder of text files; default: this Python's standard library")
    add("--data-suffix", default=".py")
    add("--eval-interval", type=int, default=0, help="iterations between validations; 0: at the end only")
    add("--eval-iters", type=int, default=4, help="global batches of a validation; 0: none")
    add("--save", metavar="DIR", help="folder for checkpoints")
    add("--load", metavar="DIR", help="continue from the latest checkpoint in this folder")
    add("--save-interval", type=int, default=0, help="iterations between checkpoints; 0: at the end only")
    add("--output-dir", default="runs/train_gpt", metavar="DIR", help="train.jsonl and loss.png")
    add("--log-interval", type=int, default=0, help="iterations between printed lines; 0: ten lines a run")
    add("--assert-below-unigram", type=float, nargs="?", const=0.5, metavar="NATS",
        help="fail unless the final loss is this much below that of the byte unigram model (0.5)")  # fmt: skip
    return parser


def parse_grid(text: str) -> tuple[int, int]:
    """'2x4' -> (2, 4)."""
    parts = str(text).lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write AxB, for instance 2x4")
    return int(parts[0]), int(parts[1])


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
    if args.window_size is not None:
        args.window_size = tuple(args.window_size)
