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

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

import accelerate.accelerator
import accelerate.data_loader
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import operations
from torch.utils.data import DataLoader

from .random_numbers import share_random_numbers
from .sequence_parallel import SequenceParallel


def prepare_data_loader(loader: DataLoader, accelerator: Accelerator, parallel: SequenceParallel) -> DataLoader:
    """As `Accelerator.prepare_data_loader`, but the ranks of a sequence group get the same batches.

    They draw the same random numbers from the beginning of each iteration on, those of the group's first rank: what
    shuffles, the seeds of workers, and collators.

    loader: the same on all ranks; a batch of it is that of a sequence group, or of all of them with split_batches.
    Raises: ValueError for dispatch_batches=True.
    """
    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True: rank 0 would send every rank another batch, but those that share a sequence need "
            "the same one; set it to False, which reads batches on every rank"
        )
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
    shared = SharedLoader.__new__(SharedLoader)
    vars(shared).update(vars(prepared), parallel=parallel)
    accelerator._dataloaders.append(shared)
    return shared


class SharedLoader(DataLoaderShard):
    """A prepared loader that the ranks of a sequence group iterate with the same random numbers."""

    def __iter__(self):
        share_random_numbers(self.parallel.sp_group)
        for batch in super().__iter__():
            if self.end_of_dataloader and self.remainder == -1 and self.parallel.dp_size == 1:
                self.remainder = operations.find_batch_size(batch) or -1  # of a stream, of which it was not known
            yield batch


class RealSamples(BatchSamplerShard):
    """Without the samples that repeat others at the end, but for one of a group that would have none."""

    def __iter__(self):
        size = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        whole = size * self.num_processes
        kept = (len(self.batch_sampler.sampler) % whole or whole) - size * self.process_index
        for number, batch in enumerate(super().__iter__(), 1):
            yield batch[: max(kept, 1)] if number == len(self) and not self.drop_last else batch


def drop_repeated(loader: DataLoader) -> None:
    """Make the last batches of a prepared loader smaller where Accelerate has filled them up with the first samples."""
    if isinstance(loader.batch_sampler, BatchSamplerShard):
        loader.batch_sampler.__class__ = RealSamples


def repeats_only(accelerator: Accelerator) -> bool:
    """Whether this group's batch, of a loader of `drop_repeated`, has but a sample that others have, too."""
    state = accelerator.gradient_state
    if not state.end_of_dataloader:
        return False
    return (
        0
        < state.remainder
        <= accelerator.process_index * (state.active_dataloader.total_batch_size // accelerator.num_processes)
    )


class OfSequenceGroups:
    """What `count_sequence_groups` makes of an `Accelerator`."""

    plain: type[Accelerator]

    @property
    def num_processes(self) -> int:
        return self.sequence_parallel.dp_size

    @property
    def process_index(self) -> int:
        return self.sequence_parallel.dp_rank

    def prepare_data_loader(self, data_loader: DataLoader, *_, **__) -> DataLoader:
        return prepare_data_loader(data_loader, self, self.sequence_parallel)

    def split_between_processes(self, inputs, apply_padding: bool = False):
        return PartialState.split_between_processes(self, inputs, apply_padding)  # which counts as this accelerator

    def gather(self, tensor):
        with gathers_once(self.sequence_parallel, accelerate.accelerator):
            return super().gather(tensor)

    def gather_for_metrics(self, input_data, use_gather_object: bool = False):
        with gathers_once(self.sequence_parallel, accelerate.accelerator):
            return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor, reduction: str = "sum", scale: float = 1.0):
        if reduction == "sum" and self.sequence_parallel.sp_rank:
            tensor = operations.recursively_apply(torch.zeros_like, tensor)
        return super().reduce(tensor, reduction, scale)


def count_sequence_groups(accelerator: Accelerator, parallel: SequenceParallel) -> None:
    """Make an accelerator take a sequence group for a process: in `num_processes`, `process_index` and the loaders that
    it prepares; and gather and reduce what the first rank of each group has, since the others have the same rows."""
    plain = type(accelerator)
    accelerator.__class__ = type(plain.__name__, (OfSequenceGroups, plain), {"plain": plain})
    accelerator.sequence_parallel = parallel


@contextlib.contextmanager
def counts_processes(accelerator: Accelerator) -> Iterator[None]:
    """While in this context an accelerator of `count_sequence_groups` counts processes, as before. Process 0
    writes FSDP's whole weights: all ranks of the first sequence group would, of which all but one have none. And it
    sends them to the others, if there are several processes: of one sequence group it would not."""
    counted, accelerator.__class__ = type(accelerator), accelerator.plain
    try:
        yield
    finally:
        accelerator.__class__ = counted


@contextlib.contextmanager
def gathers_once(parallel: SequenceParallel, *modules: ModuleType) -> Iterator[None]:
    """While in this context, what these modules have imported as `gather` and `gather_object` from Accelerate gathers
    from the first rank of each sequence group."""

    def gather(tensor):
        whole = operations.gather(tensor)
        return operations.recursively_apply(from_first_ranks, whole)

    def from_first_ranks(x: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size()
        return x.unflatten(0, (ranks, len(x) // ranks))[parallel.first_ranks].flatten(0, 1)

    def gather_object(objects):
        return operations.gather_object(objects if parallel.sp_rank == 0 else [])

    if parallel.sp_size == 1:
        yield
        return
    named = {"gather": gather, "gather_object": gather_object}
    saved = [(module, name, vars(module)[name]) for module in modules for name in named if name in vars(module)]
    try:
        for module, name, _ in saved:
            setattr(module, name, named[name])
        yield
    finally:
        for module, name, function in saved:
            setattr(module, name, function)


def launched_with(name: str) -> bool:
    """Whether `accelerate launch` was told to use it: FSDP, PARALLELISM_CONFIG."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def read_parallelism(given: ParallelismConfig | None, *, fsdp: bool) -> tuple[int | None, ParallelismConfig | None]:
    """(ranks that share a sequence, what Accelerate is told) of a job that Accelerate would run with `given`.

    Accelerate is told of data-parallel ranks alone, those that share a sequence among them: FSDP2 shards the weights
    over world / dp_replicate_size. given: None for the environment's (`accelerate launch --use_parallelism_config`).
    Raises: ValueError for sizes whose product is not the number of ranks, and tensor parallelism.
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
