"""Convert weights between Hugging Face models and checkpoints of Megatron's GPTModel."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ...core.files import check_free
from ...inference.serving.arguments import check_model
from ...launching import new_parser

EXAMPLES = """\
examples:
  megatron-tree convert to-megatron path/to/SmolLM2-135M runs/smollm2
  torchrun --nproc-per-node 4 -m megatron_tree train --load runs/smollm2 --seq-length 2048 --lr 1e-5 \\
      --context-parallel-size 4 --data-path my_texts --save runs/tuned
  megatron-tree convert to-huggingface runs/tuned runs/tuned-hf
  torchrun --nproc-per-node 4 -m megatron_tree serve --model runs/tuned-hf

Families: Llama (also SmolLM and SmolLM2), Qwen 2 and 2.5, Qwen 3 (dense). Weights are not changed: there and back
they are equal bit for bit. It runs in one process on the CPU; memory: twice the weights.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser("megatron-tree convert", __doc__, EXAMPLES, config=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{to-megatron,to-huggingface}")
    command = commands.add_parser("to-megatron", help="a Transformers model folder -> a checkpoint of weights")
    command.add_argument("model", help="folder with config.json and weights, or smollm2")
    command.add_argument("out", type=Path, help="folder to make")
    command = commands.add_parser("to-huggingface", help="a checkpoint -> a Transformers model folder")
    command.add_argument("checkpoint", type=Path, help="folder of --save, ours or Megatron-LM's (torch_dist)")
    command.add_argument("out", type=Path, help="folder to make")
    command.add_argument("--like", metavar="MODEL", help="model folder whose config.json and tokenizer are used")
    command.add_argument("--vocab-size", type=int, metavar="N", help="tokens to keep, without Megatron-LM's padding")
    return parser


def main(argv: list[str]) -> int:
    """Returns: the exit status."""
    args = vars(build_parser().parse_args(argv))
    try:
        lines = _convert(**args)
    except (ValueError, OSError) as error:
        print(f"megatron-tree convert: {error}", file=sys.stderr)
        return 2
    print("\n".join([f"wrote {args['out']}", *lines]))
    return 0


def _convert(command: str, out: Path, **options: Any) -> list[str]:
    """What can be checked before the slow imports, then the conversion. Returns: lines to print."""
    check_free(out)
    if command == "to-megatron":
        check_model("model", options["model"])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # weights are copied, nothing is computed
    from transformers.utils import logging

    from .checkpoints import to_huggingface, to_megatron

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return (to_megatron if command == "to-megatron" else to_huggingface)(out=out, **options)
