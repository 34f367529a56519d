"""Options of launch/chat.py; see arguments.py."""

from __future__ import annotations

import argparse

from .arguments import (
    add_model_options,
    add_sampling_options,
    check_model_options,
    check_readable,
    check_sampling_options,
    new_parser,
)

DESCRIPTION = """\
Chat with a language model in the terminal, with the KV cache spread over all ranks. The cache is kept between turns:
only what is new is prefilled, with the sequence sharded. Ctrl-C stops an answer, not the chat.

  /file PATH   put a file in front of the next message      /save PATH   write the messages to a file (JSON)
  /reset       begin a new conversation                     /quit        end (so does Ctrl-D)
"""
EXAMPLES = """\
examples:
  the default model on 4 ranks of this machine
    bash launch/deepspeed_local.sh -n 4 launch/chat.py
  a model in a local folder on 8 GPUs, sampled
    deepspeed --num_gpus 8 --no_local_rank launch/chat.py --model /models/llama --temperature 0.7 --top-p 0.9
  messages from a file, one a line (also where rank 0 has no terminal: several nodes, batch systems)
    bash launch/deepspeed_local.sh -n 4 launch/chat.py --input messages.txt
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of launch/chat.py."""
    parser = new_parser("chat.py", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--input", metavar="FILE", help="messages and commands, one a line (default: standard input if it is a pipe, "
        "else the terminal)")  # fmt: skip
    add("--system", metavar="TEXT", help="a message to the model that stands before the conversation")
    add_sampling_options(parser, max_new_tokens=512)
    add_model_options(parser)
    return parser


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Everything that can be checked before ranks talk. Raises: ValueError that names the option and the way out."""
    check_model_options(args, world_size)
    check_sampling_options(args)
    check_readable("--input", args.input)
