"""Checkpoints in Megatron-core's distributed format: complete or not there, readable in another parallel layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model

from ..comm.wire import share_check
from ..integrations.megatron.compat import loading_torch_adam, no_manager_process
from .checkpoint_files import begin, checkpoint_folder, finish, newest
from .checkpoint_options import Saved, check_model, check_run, options_to_save, read_saved
from .checkpoint_safety import check_index, weights_only
from .model import Trainee

METADATA = {  # how Megatron-core cuts the state into tensors
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


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
        **_sharded_state(trainee, METADATA, is_loading=False),
    }
    final = checkpoint_folder(args.save, iteration)
    unfinished = _on_first_rank(lambda: str(begin(final)), args)
    write_state(state, unfinished, args, iteration=iteration)
    _on_first_rank(lambda: finish(final, args.keep_checkpoints), args)
    return final


def write_state(state: dict[str, Any], folder: str, args: argparse.Namespace, *, iteration: int) -> None:
    """Write a state and the options of its model in Megatron-core's format. All ranks call it."""
    state = {
        **state,
        "iteration": iteration,
        "options": options_to_save(args),
        "checkpoint_version": 3.0,  # without it Megatron-LM assumes one of its oldest
    }
    with no_manager_process():
        dist_checkpointing.save(state, folder, content_metadata=METADATA)  # it ends in a barrier


def load_checkpoint(trainee: Trainee, args: argparse.Namespace, *, digest: str) -> tuple[int, int, list[str]]:
    """Restore the newest complete checkpoint in `load`, or with `resume` in `save`. All ranks call it.

    Returns: (iteration, samples consumed, lines to print); zeros if neither option is set, or with `resume` nothing has
        been saved yet.
    Raises: ValueError if there is no checkpoint, all are damaged, or it belongs to another model or other data.
    """
    folder = args.save if args.resume else args.load
    if folder is None:
        return 0, 0, []
    checkpoint, notes = _on_first_rank(lambda: newest(folder), args)
    if checkpoint is None and args.resume:
        return 0, 0, [f"no checkpoint in {folder} yet: starting from scratch"]
    if checkpoint is None:
        raise ValueError(f"load={folder!r} has no checkpoint: name a folder that --save wrote, or leave --load out")
    _on_first_rank(lambda: check_index(Path(checkpoint)), args)
    saved = read_saved(checkpoint)
    check_model(saved, args)
    model = unwrap_model(trainee.model)
    if args.finetune or not saved.has_optimizer:
        load_weights(model, saved)
        trainee.optimizer.reload_model_params()
        return 0, 0, [*notes, f"weights of {checkpoint}; the run starts at iteration 0"]
    check_run(saved, args, digest)
    with weights_only(), loading_torch_adam(trainee.optimizer):
        wanted = _sharded_state(trainee, saved.metadata, is_loading=True)
        state = dist_checkpointing.load(wanted, checkpoint)
        model.load_state_dict(state["model"], strict=True)
        trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(saved.scheduler)
    notes.append(f"continuing from {checkpoint}")
    if saved.by_megatron_lm:
        notes.append("Megatron-LM wrote it: its data are not continued")
    return saved.iteration, saved.samples, notes


def load_weights(model: torch.nn.Module, saved: Saved) -> None:
    """Load the parameters of a GPTModel from a checkpoint that fits it. All ranks of its process groups call it."""
    with weights_only():
        state = dist_checkpointing.load(model_state(model, saved.metadata), saved.folder)
        model.load_state_dict(state["model"], strict=True)


def model_state(model: torch.nn.Module, metadata: dict[str, Any] = METADATA) -> dict[str, Any]:
    """The parameters of a GPTModel as Megatron-core writes and reads them."""
    return {"model": model.sharded_state_dict(metadata=_with_group(metadata))}


def _sharded_state(trainee: Trainee, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    model, metadata = model_state(unwrap_model(trainee.model), metadata), _with_group(metadata)
    optimizer = trainee.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {**model, "optimizer": optimizer}


def _with_group(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _on_first_rank(action: Callable[[], Any], args: argparse.Namespace) -> Any:
    """Run `action` on rank 0; all ranks return its result, a JSON value, or raise its error."""
    return share_check(action, dist.group.WORLD, timeout_s=60 * args.distributed_timeout_minutes)
