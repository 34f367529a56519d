"""Checkpoints in Megatron-core's distributed format: whole or not at all, readable in another parallel layout."""

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

from ..integrations.megatron.compat import loading_torch_adam, no_manager_process
from .checkpoint_files import begin, candidates, checkpoint_folder, contents, digests_of, fault_of, finish, newest_good
from .checkpoint_safety import check_index, weights_only
from .distributed import on_all_ranks, on_first_rank
from .model import Trainee

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
    "vocab_size",
    "bf16",
    "fp16",
    "use_distributed_optimizer",
)
DATA = ("seq_length", "seed")


def save_checkpoint(
    folder: str, trainee: Trainee, args: argparse.Namespace, *, iteration: int, samples: int, digest: str
) -> Path:
    """Write model, optimizer, schedule, random states and data position. All ranks call it.

    The checkpoint is written into a folder of a passing name and then renamed; last of all the tracker file is
    replaced (`checkpoint_files`). So an interrupted save leaves the former checkpoint in force.

    Returns: the checkpoint's folder, `folder`/iter_0000100.
    """
    final = checkpoint_folder(folder, iteration)
    limit = args.distributed_timeout_minutes
    unfinished = Path(on_first_rank(lambda: str(begin(final)), limit))
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
    sizes = on_first_rank(lambda: contents(unfinished), limit)
    shares = on_all_ranks(lambda: digests_of(unfinished, sizes, dist.get_rank(), dist.get_world_size()), limit)
    digests = {name: digest for share in shares for name, digest in share.items()}
    on_first_rank(lambda: finish(final, sizes, digests, args.keep_checkpoints), limit)
    return final


def find_checkpoint(args: argparse.Namespace, say: Callable[[str], None]) -> Path | None:
    """The newest good checkpoint in `load` (or with `resume` in `save`). All ranks call it; each reads its share of the
    files, to compare their digests.

    Args: say: is told, on every rank, of each newer checkpoint that is damaged, or that the tracker file leaves out.
    Returns: its folder; None if neither option is set, or with `resume` nothing has been saved yet.
    Raises: ValueError if `load` has no checkpoint, or there are only damaged ones.
    """
    folder = args.save if args.resume else args.load
    if folder is None:
        return None
    limit = args.distributed_timeout_minutes
    found, notes = on_first_rank(lambda: _listed(folder), limit)
    checkpoint, warnings = newest_good([Path(path) for path in found], lambda path: _fault_by_ranks(path, limit))
    for note in notes:
        say(note)
    for warning in warnings:
        say(f"warning: {warning}; taking the one before")
    if checkpoint is None and not args.resume:
        raise ValueError(f"load={folder!r} has no checkpoint: name a folder that --save wrote, or leave --load out")
    return checkpoint


def load_checkpoint(
    checkpoint: Path, trainee: Trainee, args: argparse.Namespace, *, digest: str
) -> tuple[int, int, bool]:
    """Restore what `save_checkpoint` wrote. All ranks call it.

    The parallel layout may differ from the saved one; then the random states, on which only dropout depends, start
    afresh.

    Args: checkpoint: a folder that `find_checkpoint` found.
    Returns: (iteration, samples consumed, whether the random states were restored).
    Raises: ValueError if the checkpoint belongs to another model or other data, or its index is none.
    """
    on_first_rank(lambda: check_index(checkpoint), args.distributed_timeout_minutes)
    with weights_only():
        return _load(checkpoint, trainee, args, digest)


def _load(checkpoint: Path, trainee: Trainee, args: argparse.Namespace, digest: str) -> tuple[int, int, bool]:
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    _check_options(common, args, checkpoint, digest)
    same_layout = common["world_size"] == dist.get_world_size() and all(
        common["options"][n] == getattr(args, n) for n in LAYOUT
    )
    with loading_torch_adam(trainee.optimizer):
        wanted = _sharded_state(trainee, is_loading=True)
        if same_layout:
            wanted["rng_state"] = _sharded_rng_state()
        state = dist_checkpointing.load(wanted, str(checkpoint))
        for name, chunk in trainee.named_chunks():
            unwrap_model(chunk).load_state_dict(state[name], strict=True)
        trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(common["opt_param_scheduler"])
    if same_layout:
        _set_rng_state(state["rng_state"])
    return common["iteration"], common["consumed_train_samples"], same_layout


def _sharded_state(trainee: Trainee, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    model = {name: unwrap_model(c).sharded_state_dict(metadata=metadata) for name, c in trainee.named_chunks()}
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


def _check_options(common: dict[str, Any], args: argparse.Namespace, checkpoint: Path, digest: str) -> None:
    for name in (*ARCHITECTURE, *DATA):
        saved, given = common["options"][name], getattr(args, name)
        if saved != given:
            raise ValueError(
                f"{name}={given!r}, but {checkpoint} was written with {saved!r}: use the same value to continue"
            )
    if common["data_digest"] != digest:
        raise ValueError(
            f"the training data, or their order, are not those that {checkpoint} was trained on: use the same text and "
            "data_suffix (for the standard library the same Python release), or the same indexed datasets, weights and "
            "split, with train_iters that read them equally often"
        )


def _listed(folder: str) -> tuple[list[str], list[str]]:
    found, notes = candidates(folder)
    return [str(path) for path in found], notes


def _fault_by_ranks(checkpoint: Path, timeout_minutes: float) -> str | None:
    """What any rank finds wrong with a checkpoint; the same on all."""
    faults = on_all_ranks(lambda: fault_of(checkpoint, dist.get_rank(), dist.get_world_size()), timeout_minutes)
    return next((fault for fault in faults if fault is not None), None)
