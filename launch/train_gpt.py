"""Train a GPT with Megatron-core and context parallelism by tree attention.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 4 --no_local_rank launch/train_gpt.py \
        --config configs/train/quickstart.yaml

Every rank runs this file. `--help` lists the options; docs/training.md explains them.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> int:
    from megatron_tree.launching import exit_after_failure, tell_choices
    from megatron_tree.training.arguments import parse_arguments
    from megatron_tree.training.check import check_arguments
    from megatron_tree.training.distributed import launched_rank, start_process_group
    from megatron_tree.training.stop import StopRequest

    try:
        args = parse_arguments(argv)
        place = launched_rank()
        check_arguments(args, place.world_size)
    except ValueError as error:  # found on every rank alike, before any communication
        if os.environ.get("RANK", "0") == "0":
            print(f"train_gpt.py: {error}", file=sys.stderr, flush=True)
        return 2
    tell_choices(place.rank)
    with StopRequest() as stop:  # from here on SIGTERM and SIGUSR1 end the run after a step, with a checkpoint
        try:
            import torch.distributed as dist

            device = start_process_group(place, args.distributed_timeout_minutes)
            from megatron_tree.integrations.megatron.cpu import megatron_on_cpu

            with megatron_on_cpu():
                from megatron_tree.integrations import megatron as tree
                from megatron_tree.training.loop import train

                tree.install()
                outcome = train(args, device, stop)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException as error:
            exit_after_failure(place.rank, error)
    margin = args.assert_below_unigram
    if margin is None or outcome.stopped or outcome.final_loss <= outcome.unigram - margin:
        return 0
    if place.rank == 0:
        print(
            f"train_gpt.py: the final loss {outcome.final_loss:.4f} is not {margin} below the byte unigram model's "
            f"{outcome.unigram:.4f} (--assert-below-unigram): train longer, or look for what is wrong",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    from megatron_tree.launching import leave, quiet

    quiet()
    leave(main(sys.argv[1:]))
