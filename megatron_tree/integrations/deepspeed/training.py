"""DeepSpeed training of Transformers models with the sequence sharded by tree attention, ZeRO 0 to 3.

    init_distributed()                                          # under the deepspeed launcher
    parallel = register_sequence_parallel(model, sp_size=4)     # the other factor of the ranks is data parallel
    engine, *_ = deepspeed.initialize(model=model, mpu=parallel, config=config, model_parameters=model.parameters())
    for batch in batches:                                       # equal on the ranks of one sequence group
        loss = engine(**parallel.shard_batch(batch)).loss       # the mean over all tokens of all ranks
        engine.backward(loss)
        engine.step()

The mpu hides the sequence ranks from DeepSpeed, whose ZeRO stages divide by different numbers of ranks if it knows them
(docs/deepspeed.md). It averages over all ranks at every stage, and the loss is scaled to match (`loss_over_all_ranks`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from deepspeed.utils import groups, set_z3_leaf_module
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import deepspeed

from ...core.comm import group_rank, group_size
from ...core.config import TreeConfig
from ...core.files import whole_file, writing
from ..transformers.train.sequence_parallel import SequenceParallel
from .inference import init_comm


def register_sequence_parallel(
    model,
    *,
    sp_size: int | None = None,
    mesh: DeviceMesh | None = None,
    tree_config: TreeConfig | None = None,
    loss_tile: int | None = None,
    mlp_tile: int | None = None,
) -> SequenceParallelMpu:
    """`integrations.transformers.register_sequence_parallel`, before `deepspeed.initialize`. Collective over all ranks.

    Returns: the mpu for `deepspeed.initialize(mpu=...)`, with `shard_batch`.
    """
    tiles = {"loss_tile": loss_tile, "mlp_tile": mlp_tile}
    return SequenceParallelMpu(model, sp_size=sp_size, mesh=mesh, tree_config=tree_config, **tiles)


class SequenceParallelMpu(SequenceParallel):
    """A `SequenceParallel` that DeepSpeed asks for this rank's position; its name for that is mpu."""

    start = "call integrations.deepspeed.init_distributed()"

    def __init__(self, model, **options):
        super().__init__(model, **options)
        for mlp in self.tiled_mlps:  # ZeRO 3 gathers its weights once for all tiles, whose number ranks may differ in
            set_z3_leaf_module(mlp, True)
        init_comm(self.tree_config.timeout_s)
        self._alone = dist.new_subgroups(1)[0]

    def shard_batch(self, batch: dict[str, Tensor], *, dropout_seed: int | None = None) -> dict:
        """As that of `SequenceParallel`; ValueError also for an engine that was made without this mpu."""
        if groups.mpu not in (None, self):
            raise ValueError(
                "deepspeed.initialize was called with another mpu: pass this one as mpu=..., and do not configure "
                "tensor_parallel, which creates its own"
            )
        return super().shard_batch(batch, dropout_seed=dropout_seed)

    # DeepSpeed's interface: batch sizes and samplers depend on the data-parallel ranks, ...

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    # ... gradients are averaged and states partitioned over all ranks, ...

    def get_data_parallel_group(self):
        return dist.group.WORLD

    def get_sequence_data_parallel_group(self):
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self) -> int:
        return group_size(dist.group.WORLD)

    def get_sequence_data_parallel_rank(self) -> int:
        return group_rank(dist.group.WORLD)

    # ... and every rank has all weights: a group of one rank, because in places None means all ranks to DeepSpeed

    def get_model_parallel_group(self):
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


@contextlib.contextmanager
def initialized_with(parallel: SequenceParallelMpu) -> Iterator[None]:
    """While Accelerate calls `deepspeed.initialize`, it gets the mpu, and batch sizes by data-parallel ranks."""
    initialize = deepspeed.initialize

    def with_mpu(**options):
        config = options["config_params"]
        whole = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        config["train_batch_size"] = whole * parallel.dp_size
        return initialize(**options, mpu=parallel)

    deepspeed.initialize = with_mpu
    try:
        yield
    finally:
        deepspeed.initialize = initialize


def save_checkpoint(engine, folder: str, step: int, *, kept: int = 2) -> None:
    """Save an engine as `folder`/step<N>, name it in `folder`/latest, and delete all but the newest. Collective.

    A run that is killed at any time, or has no space left, leaves a whole checkpoint, which "latest" names: the new one
    has another name until all ranks are ready, and DeepSpeed itself writes "latest" when rank 0 is.
    `engine.load_checkpoint(folder)` returns client_state = {"step": step}.

    Raises: `NotWritten` on the ranks that can't write; others wait, for a `comm.monitored` region to tell them.
    """
    tag, unfinished = f"step{step}", Path(folder, f"step{step}.unfinished")
    if dist.get_rank() == 0:
        for left in Path(folder).glob("step*.unfinished"):
            shutil.rmtree(left)
    dist.barrier()
    with writing(unfinished):
        engine.save_checkpoint(folder, tag=unfinished.name, client_state={"step": step}, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        with writing(unfinished):
            shutil.rmtree(final := Path(folder, tag), ignore_errors=True)
            unfinished.replace(final)
        with whole_file(Path(folder, "latest")) as part:
            part.write_text(tag)
        others = [path for path in Path(folder).glob("step*") if path.name[4:].isdigit() and path.name != tag]
        for path in sorted(others, key=lambda path: int(path.name[4:]), reverse=True)[kept - 1 :]:
            shutil.rmtree(path)
