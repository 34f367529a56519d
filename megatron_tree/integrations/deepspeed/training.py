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

import hashlib
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import groups, set_z3_leaf_module
from torch import Tensor

from ...comm import collective_call, group_rank, group_size
from ...config import TreeConfig, default_config
from ...files import whole_file
from .. import transformers  # noqa: F401  registers "tree"
from ..transformers.batch_shards import shard_batch
from ..transformers.token_tiles import IGNORED
from ..transformers.training import train_on_shards
from .inference import init_comm


def register_sequence_parallel(
    model,
    *,
    sp_size: int | None = None,
    tree_config: TreeConfig | None = None,
    loss_tile: int | None = None,
    mlp_tile: int | None = None,
) -> SequenceParallel:
    """Make a Transformers model train on sharded sequences. Collective over all ranks.

    Args:
        model: a decoder-only causal language model, before `deepspeed.initialize`; its attention becomes "tree".
        sp_size: number of neighbouring ranks that share a sequence; default: all ranks. ranks / sp_size is the
            data-parallel size.
        tree_config: of the attention; `TreeConfig(ulysses_size=2)` exchanges heads over pairs of ranks.
        loss_tile, mlp_tile: tokens whose logits, or MLPs, are computed at a time; see `train_on_shards`.
    Returns: the mpu for `deepspeed.initialize(mpu=...)`, with `shard_batch`.
    Raises: ValueError before any group is created: no process group yet, a size that doesn't divide the ranks, a model
        that can't be trained on shards.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group: call integrations.deepspeed.init_distributed() first")
    world = dist.get_world_size()
    sp_size = world if sp_size is None else sp_size
    if not isinstance(sp_size, int) or isinstance(sp_size, bool) or sp_size < 1 or world % sp_size:
        raise ValueError(f"sp_size={sp_size!r} must be a positive integer that divides the {world} ranks")
    tree_config = tree_config or default_config()
    for mlp in train_on_shards(model, loss_tile=loss_tile, mlp_tile=mlp_tile):
        set_z3_leaf_module(mlp, True)  # ZeRO 3 gathers its weights once for all tiles, whose number ranks may differ in
    init_comm(tree_config.timeout_s)
    return SequenceParallel(sp_size, tree_config, model.config.get_text_config(decoder=True).vocab_size)


def _check_words(batch: dict[str, Tensor], vocab_size: int) -> None:
    """Raise ``ValueError`` for tokens that the model lacks: in the model one rank alone would fail."""
    ids, labels = batch["input_ids"], batch.get("labels")
    for name, x in (("input_ids", ids), ("labels", None if labels is None else labels[labels != IGNORED])):
        if x is None or not x.numel():
            continue
        least, most = torch.stack(x.aminmax()).tolist()
        if least < 0 or most >= vocab_size:
            raise ValueError(f"{name} has tokens from {least} to {most}: the model has tokens 0 to {vocab_size - 1}")


class SequenceParallel:
    """This rank's position among sequence x data-parallel ranks; DeepSpeed's interface for that is called mpu.

    Rank = data-parallel rank * sp_size + sequence rank.
    """

    def __init__(self, sp_size: int, tree_config: TreeConfig, vocab_size: int):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.dp_size, self.sp_size = world // sp_size, sp_size
        self.dp_rank, self.sp_rank = divmod(rank, sp_size)
        self.sp_group = dist.group.WORLD if sp_size == world else dist.new_subgroups(sp_size)[0]
        self.tree_config, self._vocab_size = tree_config, vocab_size
        self._alone = dist.new_subgroups(1)[0]
        self._compared = False

    def shard_batch(self, batch: dict[str, Tensor], *, dropout_seed: int | None = None) -> dict:
        """This rank's shard of a batch that is equal on all ranks of its sequence group; see the `shard_batch` of
        `integrations.transformers`.

        dropout_seed: needed if the model has attention dropout: a different number for every batch (also within a
            gradient accumulation) that is the same on all ranks. Data-parallel ranks get different masks from it.
        Raises: ValueError for bad batches, tokens that the model lacks, an engine that was made without this mpu and,
            at the first batch, if the ranks of a sequence group hold different batches.
        """
        if dropout_seed is not None and (not isinstance(dropout_seed, int) or isinstance(dropout_seed, bool)):
            raise ValueError(f"dropout_seed={dropout_seed!r} must be an integer, for instance the batch's number")
        if groups.mpu not in (None, self):
            raise ValueError(
                "deepspeed.initialize was called with another mpu: pass this one as mpu=..., and do not configure "
                "tensor_parallel, which creates its own"
            )
        seed = None if dropout_seed is None else f"{dropout_seed}/{self.dp_rank}"
        options = {"loss_group": dist.group.WORLD, "tree_config": self.tree_config, "dropout_seed": seed}
        always = TreeConfig(check="always", timeout_s=self.tree_config.timeout_s)
        with collective_call("shard_batch", self.sp_group, always) as call:
            sharded = shard_batch(batch, cp_group=self.sp_group, **options)
            _check_words(batch, self._vocab_size)
            if not self._compared:
                self._compared = True
                digest = hashlib.sha256(batch["input_ids"].cpu().numpy().tobytes()).hexdigest()[:16]
                call.agree(**{"input_ids": batch["input_ids"].shape, "digest of input_ids": digest})
        return sharded

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


def save_checkpoint(engine, folder: str, step: int, *, kept: int = 2) -> None:
    """Save an engine as `folder`/step<N>, name it in `folder`/latest, and delete all but the newest. Collective.

    A run that is killed at any time leaves a whole checkpoint, which "latest" names: DeepSpeed itself writes that file
    when rank 0 is ready, here it is written when all ranks are. `engine.load_checkpoint(folder)` returns
    client_state = {"step": step}.
    """
    tag = f"step{step}"
    engine.save_checkpoint(folder, tag=tag, client_state={"step": step}, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        with whole_file(Path(folder, "latest")) as part:
            part.write_text(tag)
        others = [path for path in Path(folder).glob("step*") if path.name[4:].isdigit() and path.name != tag]
        for path in sorted(others, key=lambda path: int(path.name[4:]), reverse=True)[kept - 1 :]:
            shutil.rmtree(path)
