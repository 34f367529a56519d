"""Chat with a language model in the terminal, with the KV cache spread over all ranks and kept between turns.

    bash launch/deepspeed_local.sh -n 4 launch/chat.py

Every rank runs this file. `--help` lists the options; docs/inference.md explains them.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> int:
    from megatron_tree.inference.chat_arguments import build_parser, check_arguments
    from megatron_tree.launching import exit_after_failure, parse_with_config

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        args = parse_with_config(build_parser(), argv)
        check_arguments(args, world)
    except ValueError as error:  # found on every rank alike, before any communication
        if rank == 0:
            print(f"chat.py: {error}", file=sys.stderr, flush=True)
        return 2
    try:
        from megatron_tree.inference.chat import run
        from megatron_tree.inference.terminal import NoInput

        run(args)
    except NoInput as error:  # every rank has it
        if rank == 0:
            print(f"chat.py: {error}", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:
        exit_after_failure(rank, error)
    return 0


if __name__ == "__main__":
    from megatron_tree.launching import leave

    leave(main(sys.argv[1:]))
