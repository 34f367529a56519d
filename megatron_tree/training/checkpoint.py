"""Checkpoints in Megatron-core's distributed format: whole or not at all, readable in another parallel layout."""

from __future__ import annotations

import argparse
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from ..integrations.megatron_compat import no_manager_process
from .model import Trainee

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name
LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "softmax_type",
    "untie_embeddings_and_output_weights",
    "bf16",
)
DATA = ("seq_length", "seed")


def save_checkpoint(
    folder: str, trainee: Trainee, args: argparse.Namespace, *, iteration: int, samples: int, digest: str
) -> Path:
    """Write model, optimizer, schedule, random states and data position. All ranks call it.

    The checkpoint is written into a folder of a passing name and then renamed; last of all the tracker file is
    replaced. So an interrupted save leaves the former checkpoint in force.

    Returns: the checkpoint's folder, `folder`/iter_0000100.
    """
    final = Path(folder) / f"iter_{iteration:07d}"
    unfinished = final.with_name(final.name + ".unfinished")
    _on_first_rank(lambda: _make_empty(unfinished))
    state = {
        "iteration": iteration,
        "consumed_train_samples": samples,
        "data_digest": digest,
        "options": {name: getattr(args, name) for name in (*LAYOUT, *ARCHITECTURE, *DATA)},
        "world_size": dist.get_world_size(),
        "opt_param_scheduler": trainee.scheduler.state_dict(),
        **_sharded_state(trainee, is_loading=False),
        "rng_state": _sharded_rng_state(),
    }
    with no_manager_process():
        dist_checkpointing.save(state, str(unfinished))
    dist.barrier()
    _on_first_rank(lambda: _put_in_force(unfinished, final))
    return final


def load_checkpoint(folder: str, trainee: Trainee, args: argparse.Namespace, *, digest: str) -> tuple[int, int]:
    """Restore what `save_checkpoint` wrote last. All ranks call it.

    The parallel layout may differ from the saved one; then the random states start afresh (dropout is 0, so no result
    depends on them).

    Returns: (iteration, samples consumed).
    Raises: ValueError if there is no checkpoint, or it belongs to another model or other data.
    """
    checkpoint = latest_checkpoint(folder)
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    _check_options(common, args, checkpoint, digest)
    same_layout = common["world_size"] == dist.get_world_size() and all(
        common["options"][n] == getattr(args, n) for n in LAYOUT
    )
    wanted = _sharded_state(trainee, is_loading=True)
    if same_layout:
        wanted["rng_state"] = _sharded_rng_state()
    state = dist_checkpointing.load(wanted, str(checkpoint))
    unwrap_model(trainee.model).load_state_dict(state["model"], strict=True)
    trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(common["opt_param_scheduler"])
    if same_layout:
        _set_rng_state(state["rng_state"])
    return common["iteration"], common["consumed_train_samples"]


def latest_checkpoint(folder: str) -> Path:
    """The checkpoint that the tracker file in `folder` names.

    Raises: ValueError if there is none.
    """
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        raise ValueError(f"load={folder!r} has no {TRACKER}: name a folder that --save wrote, or leave --load out")
    checkpoint = Path(folder) / f"iter_{int(tracker.read_text()):07d}"
    if not dist_checkpointing.check_is_distributed_checkpoint(str(checkpoint)):
        raise ValueError(f"{tracker} names {checkpoint.name}, which is no complete checkpoint")
    return checkpoint


def _sharded_state(trainee: Trainee, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    model = unwrap_model(trainee.model).sharded_state_dict(metadata=metadata)
    optimizer = trainee.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _sharded_rng_state() -> ShardedObject:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
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


def _check_options(common: dict[str, Any], args: argparse.Namespace, checkpoint: Path, digest: str) -> None:
    for name in (*ARCHITECTURE, *DATA):
        saved, given = common["options"][name], getattr(args, name)
        if saved != given:
            raise ValueError(
                f"{name}={given!r}, but {checkpoint} was written with {saved!r}: use the same value to continue"
            )
    if common["data_digest"] != digest:
        raise ValueError(
            f"the training text is not the one that {checkpoint} was trained on: "
            "use the same data_path, data_suffix and Python release"
        )


def _on_first_rank(action) -> None:
    """Run `action` on rank 0; an error there is raised on every rank."""
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _put_in_force(unfinished: Path, final: Path) -> None:
    former = final.with_name(final.name + ".replaced")  # of the same iteration: deleted only when the new one is there
    if final.exists():
        os.replace(final, former)
    os.replace(unfinished, final)
    shutil.rmtree(former, ignore_errors=True)
    tracker = final.parent / TRACKER
    fresh = tracker.with_name(TRACKER + ".unfinished")
    fresh.write_text(f"{int(final.name.removeprefix('iter_'))}\n")
    os.replace(fresh, tracker)
