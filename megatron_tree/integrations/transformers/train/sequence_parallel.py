"""Training on sharded sequences, the ranks' part: who shares a sequence, and their shards of a batch.

    dist.init_process_group()                                   # under torchrun
    parallel = register_sequence_parallel(model, sp_size=4)     # the other factor of the ranks is data parallel
    wrapped = DistributedDataParallel(model)                    # or fully_shard(layer) for each layer, then the model
    for batch in batches:                                       # equal on the ranks of one sequence group
        loss = wrapped(**parallel.shard_batch(batch)).loss      # the mean over all tokens of all ranks
        loss.backward()

The gradient on a rank is that of its own tokens times the number of all ranks (`loss_over_all_ranks`), so what wraps
the model must average over ALL ranks, those that share a sequence too: DDP in its default process group, FSDP2 with a
mesh of all ranks. `integrations.deepspeed.training` does that with ZeRO.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ....core.arguments import checked
from ....core.comm import Ranks, group_size, outside_graphs, shared_checks
from ....core.config import TreeConfig, default_config
from .batch_shards import IGNORED, shard_batch, with_tokens
from .train_on_shards import train_on_shards


@checked
def register_sequence_parallel(
    model,
    *,
    sp_size: int | None = None,
    mesh: DeviceMesh | None = None,
    tree_config: TreeConfig | None = None,
    loss_tile: int | None = None,
    mlp_tile: int | None = None,
) -> SequenceParallel:
    """Make a Transformers model train on sharded sequences, before it is wrapped. Collective over all ranks.

    Args:
        model: a decoder-only causal language model; its attention becomes "tree".
        sp_size: number of neighbouring ranks that share a sequence; default: all ranks. ranks / sp_size is the
            data-parallel size.
        mesh: instead, a DeviceMesh of all ranks. Ranks along its last dimension share a sequence, the other dimensions
            are data parallel: ("dp", "sp"), ("dp_replicate", "dp_shard", "cp"), or ("sp",) alone.
        tree_config: of the attention; `TreeConfig(ulysses_size=2)` exchanges heads over pairs of ranks.
        loss_tile, mlp_tile: tokens whose logits, or MLPs, are computed at a time; see `train_on_shards`.
    Returns: the ranks' positions, with `shard_batch`.
    Raises: ValueError before any group is created: no process group yet, a size that doesn't divide the ranks, a mesh
        of other ranks, a model that can't be trained on shards.
    """
    tiles = {"loss_tile": loss_tile, "mlp_tile": mlp_tile}
    return SequenceParallel(model, sp_size=sp_size, mesh=mesh, tree_config=tree_config, **tiles)


class SequenceParallel:
    """This rank's position among sequence x data-parallel ranks; `register_sequence_parallel` makes it.

    Attributes: sp_size, sp_rank, sp_group of the ranks that share a sequence; dp_size, dp_rank: whose batches they get;
        first_ranks: of each sequence group.
    """

    def __init__(self, model, *, sp_size=None, mesh=None, tree_config: TreeConfig | None = None, **tiles):
        if not dist.is_initialized():
            raise ValueError(f"there is no process group: {self.start} first")
        rows = _rows_of_ranks(sp_size, mesh)  # [dp, sp]
        self.dp_size, self.sp_size = rows.shape
        self.first_ranks = rows[:, 0].tolist()
        self.dp_rank, self.sp_rank = (rows == dist.get_rank()).nonzero()[0].tolist()
        self.tree_config = tree_config or default_config()
        self.tiled_mlps = train_on_shards(model, **tiles)
        if self.dp_size == 1:
            self.sp_group = dist.group.WORLD
        else:
            self.sp_group = dist.new_subgroups(self.sp_size)[0] if mesh is None else mesh.get_group(mesh.ndim - 1)
        self._model, self._checked = model, False
        model.register_forward_pre_hook(outside_graphs(_check_ddp))

    start = "call torch.distributed.init_process_group()"  # of a process group

    def shard_batch(self, batch: dict[str, Tensor], *, dropout_seed: int | None = None) -> dict:
        """This rank's shard of a batch that is equal on all ranks of its sequence group; see the `shard_batch` of
        `integrations.transformers`.

        dropout_seed: needed if the model has attention dropout: a different number for every batch (also within a
            gradient accumulation) that is the same on all ranks. Data-parallel ranks get different masks from it.
        Raises: ValueError for bad batches, tokens that the model lacks and, at the first batch, if FSDP2 shards the
            model over other ranks than all. If the ranks of a sequence group hold different batches, by the end of the
            backward.
        """
        if dropout_seed is not None and (not isinstance(dropout_seed, int) or isinstance(dropout_seed, bool)):
            raise ValueError(f"dropout_seed={dropout_seed!r} must be an integer, for instance the batch's number")
        seed = None if dropout_seed is None else f"{dropout_seed}/{self.dp_rank}"
        options = {"loss_group": dist.group.WORLD, "tree_config": self.tree_config, "dropout_seed": seed}
        with (
            shared_checks("shard_batch", dist.group.WORLD),
            Ranks.of(self.sp_group, config=self.tree_config).call("shard_batch") as call,
        ):
            sharded = shard_batch(batch, cp_group=self.sp_group, **options)
            _check_words(with_tokens(batch), self._model.config.get_text_config(decoder=True).vocab_size)
            if not self._checked:
                self._checked = True
                _check_fsdp(self._model, self.tiled_mlps)
            call.agree(of_batch=_contents(batch) if self.sp_size > 1 else None)
        # those that have no batch are missed here, and not where DDP sends its buffers or FSDP2 gathers weights
        Ranks.of(dist.group.WORLD, config=self.tree_config).meet("shard_batch")
        return sharded


def _contents(batch: dict) -> dict[str, str]:
    """What the tensors of a batch are, with their checksums."""
    tree = batch.get("prefix_tree")
    named = batch if tree is None else vars(tree)
    tensors = {name: x for name, x in sorted(named.items()) if isinstance(x, Tensor)}
    return {
        f"batch[{name!r}]": f"{x.dtype} {list(x.shape)} with checksum {int(_checksum(x)):x}"
        for name, x in tensors.items()
    }


def _checksum(x: Tensor) -> Tensor:
    """int64 of the bits of x and of their places: sums of its rows and columns, weighted by their numbers."""
    x = x.contiguous().flatten()
    bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    columns = math.isqrt(len(bits)) + 1
    bits = F.pad(bits, (0, -len(bits) % columns)).view(-1, columns)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim in range(2):
        sums = bits.sum(dim, dtype=torch.int64)
        total = 31 * total + (sums * torch.arange(1, len(sums) + 1, device=x.device)).sum()
    return total


def _rows_of_ranks(sp_size, mesh: DeviceMesh | None) -> Tensor:
    """int64 [dp, sp]: the ranks of every sequence group."""
    world = dist.get_world_size()
    if mesh is not None:
        if sp_size is not None:
            raise ValueError(f"sp_size={sp_size} and a mesh: pass one of them")
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
        if not _holds_all_ranks(mesh):
            raise ValueError(
                f"mesh has the ranks {mesh.mesh.tolist()}, not all {world} of them: pass the mesh of the whole job, "
                "data-parallel dimensions first and the sequence's last"
            )
        return mesh.mesh.cpu().reshape(-1, mesh.shape[-1])
    sp_size = world if sp_size is None else sp_size
    if not isinstance(sp_size, int) or isinstance(sp_size, bool) or sp_size < 1 or world % sp_size:
        raise ValueError(f"sp_size={sp_size!r} must be a positive integer that divides the {world} ranks")
    return torch.arange(world).view(-1, sp_size)


def _holds_all_ranks(mesh: DeviceMesh) -> bool:
    return sorted(mesh.mesh.flatten().tolist()) == list(range(dist.get_world_size()))


def _check_words(batch: dict[str, Tensor], vocab_size: int) -> None:
    """Raise ``ValueError`` for tokens that the model lacks: in the model one rank alone would fail."""
    ids, labels = batch["input_ids"], batch.get("labels")
    for name, x in (("input_ids", ids), ("labels", None if labels is None else labels[labels != IGNORED])):
        if x is None or not x.numel():
            continue
        least, most = torch.stack(x.aminmax()).tolist()
        if least < 0 or most >= vocab_size:
            raise ValueError(f"{name} has tokens from {least} to {most}: the model has tokens 0 to {vocab_size - 1}")


def _check_fsdp(model, tiled_mlps: list[nn.Module]) -> None:
    """Raise ``ValueError`` if FSDP2 shards a parameter over other ranks than all, or gathers weights in every tile."""
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and not _holds_all_ranks(p.device_mesh):
            raise ValueError(
                f"{name} is sharded over a mesh of the ranks {p.device_mesh.mesh.tolist()}: give fully_shard a mesh of "
                f"all {dist.get_world_size()}. Gradients are averaged over all ranks, those that share a sequence too"
            )
    for mlp in tiled_mlps:
        inner = next((name for name, m in mlp.named_modules() if m is not mlp and isinstance(m, FSDPModule)), None)
        if inner is not None:
            raise ValueError(
                f"mlp_tile: {inner} of a {type(mlp).__name__} is sharded by itself, and would be gathered for every "
                "tile, of which ranks may have different numbers: call fully_shard on the whole MLP or its layer"
            )


def _check_ddp(model, args) -> None:
    """Raise ``ValueError`` in the forward of a DDP wrapper of other ranks than all."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or not model.training:
        return
    ranks, world = group_size(wrapper.process_group), dist.get_world_size()
    if ranks != world:
        raise ValueError(
            f"DistributedDataParallel averages gradients over {ranks} of {world} ranks: leave out its process_group. "
            "Gradients are averaged over all ranks, those that share a sequence too"
        )
