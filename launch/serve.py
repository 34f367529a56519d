"""Serve a language model over HTTP with OpenAI's API, with the KV cache spread over all ranks.

    bash launch/deepspeed_local.sh -n 2 launch/serve.py

Every rank runs this file. `--help` lists the options; docs/serving.md explains them.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> int:
    from megatron_tree.launching import exit_after_failure, parse_with_config, tell_choices
    from megatron_tree.server.arguments import build_parser, check_arguments

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        args = parse_with_config(build_parser(), argv)
        check_arguments(args, world)
    except ValueError as error:  # found on every rank alike, before any communication
        if rank == 0:
            print(f"serve.py: {error}", file=sys.stderr, flush=True)
        return 2
    tell_choices(rank)
    try:
        from megatron_tree.server.run import run

        run(args)
    except BaseException as error:
        exit_after_failure(rank, error)
    return 0


if __name__ == "__main__":
    from megatron_tree.launching import leave

    leave(main(sys.argv[1:]))
