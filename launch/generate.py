"""Ask a language model about a long text, or answer a file of prompts, with the KV cache spread over all ranks.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 4 --no_local_rank launch/generate.py --check

Every rank runs this file. `--help` lists the options; docs/inference.md explains them.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> int:
    from megatron_tree.inference.arguments import build_parser, check_arguments
    from megatron_tree.launching import exit_after_failure, parse_with_config, tell_choices

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        args = parse_with_config(build_parser(), argv)
        check_arguments(args, world)
    except ValueError as error:  # found on every rank alike, before any communication
        if rank == 0:
            print(f"generate.py: {error}", file=sys.stderr, flush=True)
        return 2
    tell_choices(rank)
    try:
        from megatron_tree.inference.run import CheckError, JobError, run

        run(args)
    except (CheckError, JobError) as error:  # every rank has it
        if rank == 0:
            print(f"generate.py: {error}", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:
        exit_after_failure(rank, error)
    return 0


if __name__ == "__main__":
    from megatron_tree.launching import leave

    leave(main(sys.argv[1:]))
