"""Accelerate's part of training on shards: the batches of a sequence group, and what `ParallelismConfig` means here.

    accelerator = Accelerator()                                          # DDP, FSDP2; no cp_size or sp_size
    parallel = register_sequence_parallel(model, sp_size=4)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = prepare_data_loader(loader, accelerator, parallel)          # not accelerator.prepare(loader)
    for batch in loader:
        accelerator.backward(model(**parallel.shard_batch(batch)).loss)

Accelerate's own context parallelism (cp_size) removes the attention's masks and, with them, what `shard_batch` says
about the batch: a model that trains on shards raises there.
"""

from __future__ import annotations

import os

import accelerate.data_loader
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import DataLoader

from .parallel import SequenceParallel


def prepare_data_loader(loader: DataLoader, accelerator: Accelerator, parallel: SequenceParallel) -> DataLoader:
    """As `Accelerator.prepare_data_loader`, but the ranks of a sequence group get the same batches.

    loader: the same on all ranks; a batch of it is that of a sequence group, or of all of them with split_batches.
    """
    prepared = accelerate.data_loader.prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=parallel.dp_size,
        process_index=parallel.dp_rank,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


def launched_with(name: str) -> bool:
    """Whether `accelerate launch` was told to use it: FSDP, PARALLELISM_CONFIG."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def read_parallelism(given: ParallelismConfig | None, *, fsdp: bool) -> tuple[int | None, ParallelismConfig | None]:
    """(ranks that share a sequence, what Accelerate is told) of a job that Accelerate would run with `given`.

    Accelerate is told of data-parallel ranks alone, those that share a sequence among them: FSDP2 shards the weights
    over world / dp_replicate_size. given: None for the environment's (`accelerate launch --use_parallelism_config`).
    Raises: ValueError for sizes that aren't those of the world, and tensor parallelism.
    """
    if given is None and launched_with("PARALLELISM_CONFIG"):
        given = ParallelismConfig()
    if given is None:
        return None, None
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {name: getattr(given, f"{name}_size") for name in ("dp_replicate", "dp_shard", "cp", "sp", "tp")}
    sp_size, data = sizes["cp"] * sizes["sp"], sizes["dp_replicate"] * sizes["dp_shard"]
    if sizes["tp"] != 1:
        raise ValueError(
            f"ParallelismConfig has tp_size={sizes['tp']}: a model on shards has all weights; leave it out"
        )
    if data > 1 and data * sp_size != world:
        raise ValueError(f"ParallelismConfig has {sizes}: their product is not the number of ranks, {world}")
    replicas = sizes["dp_replicate"] if fsdp else 1
    shards = world // replicas if fsdp else 1
    told = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, cp_size=1, sp_size=1, tp_size=1)
    return (sp_size if sp_size > 1 or data > 1 else None), told
