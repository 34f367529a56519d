"""Checkpoints in Megatron-core's distributed format: complete or not there, readable in another parallel layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

from ..comm import Ranks
from ..comm.wire import share_check
from ..files import writing
from ..integrations.megatron.compat import loading_torch_adam, no_manager_process
from .checkpoint_files import begin, checkpoint_folder, finish, newest
from .checkpoint_safety import check_index, weights_only
from .model import Trainee
from .model_options import NEW_MODEL, model_options, write_model

METADATA = {  # how Megatron-core cuts the state into tensors
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
OF_RUN = ("bf16", "use_distributed_optimizer", "seq_length", "seed")  # what a resumed run must not change


def save_checkpoint(trainee: Trainee, args: argparse.Namespace, *, iteration: int, samples: int, digest: str) -> Path:
    """Write model, optimizer, schedule and data position. All ranks call it.

    The files are written into a folder with a temporary name, which is renamed at the end (`checkpoint_files`): an
    interrupted save leaves the previous checkpoint as the newest.

    Returns: the checkpoint's folder, args.save/iter_0000100.
    """
    state = {
        "samples": samples,
        "data_digest": digest,
        "opt_param_scheduler": trainee.scheduler.state_dict(),
        **_sharded_state(trainee, is_loading=False),
    }
    final = checkpoint_folder(args.save, iteration)
    unfinished = _on_first_rank(lambda: start_writing(final, args), args)
    write_state(state, unfinished, args, iteration=iteration)
    _on_first_rank(lambda: finish(final, args.keep_checkpoints), args)
    return final


def start_writing(final: Path, args: argparse.Namespace) -> str:
    """Write the model's options, and make an empty folder for what is to become the checkpoint `final`."""
    unfinished = begin(final)
    write_model(args, final.parent)
    return str(unfinished)


def write_state(state: dict[str, Any], folder: str, args: argparse.Namespace, *, iteration: int) -> None:
    """Write a state and the options of its model in Megatron-core's format. All ranks call it."""
    state = {
        **state,
        "iteration": iteration,
        "options": model_options(args) | {name: getattr(args, name) for name in OF_RUN},
        "checkpoint_version": 3.0,  # without it Megatron-LM assumes one of its oldest
    }
    with no_manager_process(), writing(Path(folder), CheckpointException):
        dist_checkpointing.save(state, folder, content_metadata=METADATA)  # it ends in a barrier


def load_checkpoint(trainee: Trainee, args: argparse.Namespace, *, digest: str) -> tuple[int, int, list[str]]:
    """With `resume` continue the run in `save`; else, or if there is none, take the weights in `load`. All ranks call
    it.

    Returns: (iteration, samples consumed, lines to print); zeros if no run is continued.
    Raises: ValueError if there are no weights to load, all are damaged, or they belong to another model or other data.
    """
    notes: list[str] = []
    if args.resume:
        checkpoint, notes = _on_first_rank(lambda: newest(args.save), args)
        if checkpoint is not None:
            return _continue(trainee, args, checkpoint, digest, notes)
        notes = [f"no checkpoint in {args.save} yet: starting a new run"]
    if args.load is None:
        return 0, 0, notes
    checkpoint, warnings = _on_first_rank(lambda: newest(args.load), args)
    if checkpoint is None:
        raise ValueError(f"load={args.load!r} has no checkpoint: name a folder that --save wrote, or leave --load out")
    _on_first_rank(lambda: check_index(Path(checkpoint)), args)
    common = read_common(checkpoint)
    _compare(common["options"], args, NEW_MODEL, checkpoint)
    load_weights(unwrap_model(trainee.model), checkpoint)
    trainee.optimizer.reload_model_params()
    return 0, 0, [*notes, *warnings, f"weights of {checkpoint}; the run starts at iteration 0"]


def _continue(
    trainee: Trainee, args: argparse.Namespace, checkpoint: str, digest: str, notes: list[str]
) -> tuple[int, int, list[str]]:
    _on_first_rank(lambda: check_index(Path(checkpoint)), args)
    common = read_common(checkpoint)
    _compare(common["options"], args, (*NEW_MODEL, *OF_RUN), checkpoint)
    if common["data_digest"] != digest:
        raise ValueError(
            f"the training data are not those that {checkpoint} was trained on: use the same text (for the standard "
            "library the same Python release), or start a new run from its weights with --load"
        )
    if (done := common["iteration"]) >= args.train_iters:
        raise ValueError(f"train_iters={args.train_iters}, but {checkpoint} has already done {done}")
    with weights_only(), loading_torch_adam(trainee.optimizer):
        state = dist_checkpointing.load(_sharded_state(trainee, is_loading=True), checkpoint)
        unwrap_model(trainee.model).load_state_dict(state["model"], strict=True)
        trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(common["opt_param_scheduler"])
    return done, common["samples"], [*notes, f"continuing from {checkpoint}"]


def read_common(checkpoint: str) -> dict[str, Any]:
    """What is not sharded. The index must have been checked (`checkpoint_safety.check_index`)."""
    with weights_only():
        return dist_checkpointing.load_common_state_dict(checkpoint)


def load_weights(model: torch.nn.Module, checkpoint: str, metadata: dict[str, Any] = METADATA) -> None:
    """Load the parameters of a GPTModel from a checkpoint that fits it. All ranks of its process groups call it."""
    with weights_only():
        state = dist_checkpointing.load(model_state(model, metadata), checkpoint)
        model.load_state_dict(state["model"], strict=True)


def model_state(model: torch.nn.Module, metadata: dict[str, Any] = METADATA) -> dict[str, Any]:
    """The parameters of a GPTModel as Megatron-core writes and reads them."""
    return {"model": model.sharded_state_dict(metadata=_with_group(metadata))}


def _sharded_state(trainee: Trainee, *, is_loading: bool) -> dict[str, Any]:
    model = model_state(unwrap_model(trainee.model))
    optimizer = trainee.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_with_group(METADATA))
    return {**model, "optimizer": optimizer}


def _with_group(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _compare(saved: dict[str, Any], args: argparse.Namespace, names: Iterable[str], checkpoint: str) -> None:
    for name in names:
        if saved.get(name) != (given := getattr(args, name)):
            raise ValueError(
                f"{name}={given!r}, but {checkpoint} was written with {saved.get(name)!r}: use the same value, or "
                "start a new run from its weights with --load"
            )


def _on_first_rank(action: Callable[[], Any], args: argparse.Namespace) -> Any:
    """Run `action` on rank 0; all ranks return its result, a JSON value, or raise its error."""
    return share_check(action, Ranks.of(dist.group.WORLD, limit_s=60 * args.distributed_timeout_minutes))
