"""Train a GPT with Megatron-core and context parallelism by tree attention.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 4 --no_local_rank launch/train_gpt.py \
        --config configs/train/quickstart.yaml

Every rank runs this file. `--help` lists the options; docs/training.md explains them.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from megatron_tree.comm.rendezvous import check_launched
    from megatron_tree.launching import run_script
    from megatron_tree.training.arguments import build_parser, check_arguments, complete

    def check(args, world_size):
        check_launched()
        check_arguments(complete(args), world_size)

    def load():
        from megatron_tree.training.loop import LossTooHigh, run

        return run, (LossTooHigh,)

    return run_script("train_gpt.py", argv, build_parser, check, load)


if __name__ == "__main__":
    from megatron_tree.launching import explain_missing, leave, quiet

    quiet()
    with explain_missing("train_gpt.py"):
        leave(main(sys.argv[1:]))
