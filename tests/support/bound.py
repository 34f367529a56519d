"""`comm.Ranks` of a test's group, on the CPU."""

import torch
import torch.distributed as dist

from megatron_tree.core.comm import Ranks
from megatron_tree.core.config import TreeConfig

CPU = torch.device("cpu")


def bound(group=None, **config):
    """group: default all ranks; config: fields of `TreeConfig`."""
    return Ranks.of(dist.group.WORLD if group is None else group, CPU, TreeConfig(**{"timeout_s": 20.0} | config))
