"""Checkpoints in Megatron-core's distributed format: complete or not there, readable in another parallel layout."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from ..comm.wire import share_check
from ..integrations.megatron.compat import loading_torch_adam, no_manager_process
from .checkpoint_files import begin, checkpoint_folder, finish, newest
from .checkpoint_options import LAYOUT, Saved, check_model, check_run, options_to_save, read_saved
from .checkpoint_safety import check_index, weights_only
from .model import Trainee


def save_checkpoint(trainee: Trainee, args: argparse.Namespace, *, iteration: int, samples: int, digest: str) -> Path:
    """Write model, optimizer, schedule, random states and data position. All ranks call it.

    The files are written into a folder with a temporary name, which is renamed at the end (`checkpoint_files`): an
    interrupted save leaves the previous checkpoint as the newest.

    Returns: the checkpoint's folder, args.save/iter_0000100.
    """
    final = checkpoint_folder(args.save, iteration)
    unfinished = _on_first_rank(lambda: str(begin(final)), args)
    state = {
        "iteration": iteration,
        "consumed_train_samples": samples,
        "data_digest": digest,
        "options": options_to_save(args),
        "world_size": dist.get_world_size(),
        "checkpoint_version": 3.0,  # Megatron-LM takes a checkpoint without it for one of its oldest
        "opt_param_scheduler": trainee.scheduler.state_dict(),
        **_sharded_state(trainee, is_loading=False),
        "rng_state": _sharded_rng_state(),
    }
    with no_manager_process():
        dist_checkpointing.save(state, unfinished)  # it ends in a barrier: then all files are there
    _on_first_rank(lambda: finish(final, args.keep_checkpoints), args)
    return final


def load_checkpoint(trainee: Trainee, args: argparse.Namespace, *, digest: str) -> tuple[int, int, list[str]]:
    """Restore the newest complete checkpoint in `load`, or with `resume` in `save`. All ranks call it.

    The parallel layout may differ from the saved one; then the random states, on which only dropout depends, start
    afresh.

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
    same_layout = saved.world_size == dist.get_world_size() and all(
        saved.options[n] == getattr(args, n) for n in LAYOUT
    )
    with weights_only(), loading_torch_adam(trainee.optimizer):
        wanted = _sharded_state(trainee, is_loading=True, metadata=saved.metadata)
        if same_layout:
            wanted["rng_state"] = _sharded_rng_state()
        state = dist_checkpointing.load(wanted, checkpoint)
        model.load_state_dict(state["model"], strict=True)
        trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(saved.scheduler)
    notes.append(f"continuing from {checkpoint}")
    if saved.by_megatron_lm:
        notes.append("it is Megatron-LM's: its data and its random states are not continued")
    elif same_layout:
        _set_rng_state(state["rng_state"])
    elif args.attention_dropout or args.hidden_dropout:
        notes.append("warning: another parallel layout than the checkpoint's: dropout starts with fresh random states")
    return saved.iteration, saved.samples, notes


def load_weights(model: torch.nn.Module, saved: Saved) -> None:
    """Load the parameters of a GPTModel from a checkpoint that fits it. All ranks of its process groups call it."""
    with weights_only():
        wanted = {"model": model.sharded_state_dict(metadata=_metadata(saved.metadata))}
        model.load_state_dict(dist_checkpointing.load(wanted, saved.folder)["model"], strict=True)


def _metadata(saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """How state is cut into tensors of a checkpoint: as the one to load has it, or as we write it."""
    ours = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**(ours if saved is None else saved), "dp_cp_group": group}


def _sharded_state(trainee: Trainee, *, is_loading: bool, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = _metadata(metadata)
    model = {"model": unwrap_model(trainee.model).sharded_state_dict(metadata=metadata)}
    optimizer = trainee.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {**model, "optimizer": optimizer}


def _sharded_rng_state() -> ShardedObject:
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # no arrays: `torch.load` of plain values and tensors reads it
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.cuda.set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _on_first_rank(action: Callable[[], Any], args: argparse.Namespace) -> Any:
    """Run `action` on rank 0; all ranks return its result, a JSON value, or raise its error."""
    return share_check(action, dist.group.WORLD, timeout_s=60 * args.distributed_timeout_minutes)
