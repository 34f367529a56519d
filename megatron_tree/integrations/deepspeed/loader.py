"""A data loader for ranks that share sequences, over one that gives every rank batches of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import group_size


class ShardedLoader:
    """Gives every rank its shard of the batches of all ranks of its sequence group, one batch after the other.

    For loaders that give every rank other batches, as Accelerate's and DeepSpeed's own do: there are sp_size times as
    many steps, each on a batch of one rank. Collective over the sequence group: its ranks must have the same number of
    batches.

    loader: gives dictionaries for `shard_batch`, int64 or bool [b, s]; its ranks may have other b and s.
    parallel: a `SequenceParallel`. The number of a batch is its dropout_seed.
    Raises: ValueError as `SequenceParallel.shard_batch`.
    """

    def __init__(self, loader, parallel):
        self.loader, self.parallel = loader, parallel
        self._number = 0

    def __len__(self) -> int:
        return len(self.loader) * self.parallel.sp_size

    def __iter__(self) -> Iterator[dict]:
        for batch in self.loader:
            for whole in batches_of_group(batch, self.parallel.sp_group):
                self._number += 1
                yield self.parallel.shard_batch(whole, dropout_seed=self._number)


def batches_of_group(batch: dict[str, Tensor], group) -> list[dict[str, Tensor]]:
    """The batches of all ranks of a group, on every rank. Collective; tensors [b, s] only, nothing is unpickled."""
    if group_size(group) == 1:
        return [batch]
    shapes = _gathered(torch.tensor([batch["input_ids"].shape], device=batch["input_ids"].device), group)
    rows, columns = torch.cat(shapes).amax(0).tolist()
    batches = [{} for _ in shapes]
    for name, x in sorted(batch.items()):
        padded = x.new_zeros((rows, columns))
        padded[: x.shape[0], : x.shape[1]] = x
        for of_rank, whole, shape in zip(batches, _gathered(padded, group), shapes, strict=True):
            of_rank[name] = whole[: shape[0, 0], : shape[0, 1]]
    return batches


def _gathered(x: Tensor, group) -> list[Tensor]:
    gathered = [torch.empty_like(x) for _ in range(group_size(group))]
    dist.all_gather(gathered, x, group=group)
    return gathered
