"""Runs of the training loop of megatron-tree train, one after another in ranks that a test starts once.

outcomes = run_distributed(train_all, 2, [(folder, "--context-parallel-size 2 --lr 1e-3")], fresh=True)[0]
assert losses(folder) == ...
"""

import contextlib
import json
import multiprocessing
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist

REPO = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr-warmup-iters 2"
)


def write_text(folder, files=8):
    """A few documents, so that a run starts fast, and the same for ever: losses depend on them. Returns the folder."""
    folder.mkdir(exist_ok=True)
    words = random.Random(0)
    for number in range(files):
        text = " ".join(words.choice(["energy", "lse", "merge", "rank", "tree", "query"]) for _ in range(1500))
        (folder / f"{number}.py").write_text(text)
    return folder


def train_all(rank, world, runs):
    """Train each of `runs`, pairs of the output folder and options after TINY's. What rank 0 prints goes to FOLDER.txt.

    Returns a list with each run's `Outcome`, or the text of its ValueError or NotWritten.
    """
    from megatron_tree.integrations.megatron.cpu import megatron_on_cpu

    multiprocessing.current_process()._config["daemon"] = False  # Megatron forks writers of checkpoints
    with megatron_on_cpu():
        return [_train(rank, world, Path(folder), options) for folder, options in runs]


def _train(rank, world, folder, options):
    from megatron_tree import TreeConfig
    from megatron_tree.core.files import NotWritten
    from megatron_tree.integrations import megatron as tree
    from megatron_tree.tools.training.arguments import check_arguments, parse_arguments
    from megatron_tree.tools.training.loop import recorded_signals, train

    failed = False
    output = folder.with_name(folder.name + ".txt") if rank == 0 else os.devnull
    tree.install(tree_config=TreeConfig(tune=False))  # runs are compared bit for bit
    try:
        with open(output, "w") as file, contextlib.redirect_stdout(file), recorded_signals() as received:
            args = parse_arguments([*TINY.split(), "--output-dir", str(folder), *options.split()])
            check_arguments(args, world)
            return train(args, torch.device("cpu"), received)
    except (ValueError, NotWritten) as error:
        failed = True  # the default group can't be used any more
        return str(error)
    finally:
        tree.uninstall()
        _clean_up()
        if failed:
            _start_again(rank, world)


def _start_again(rank, world):
    """A new default group over the same store."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)


def _clean_up():
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from torch.distributed import distributed_c10d

    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()  # forgets the groups, but leaves their threads running
    for group in [g for g in distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def records(folder, event=None):
    """Lines of a run's train.jsonl: its steps, or those of an event."""
    lines = [json.loads(line) for line in (Path(folder) / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == event]


def losses(folder):
    """{step: loss} of a run."""
    return {record["step"]: record["loss"] for record in records(folder)}
