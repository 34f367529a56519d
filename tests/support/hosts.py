"""Ranks of this machine that pass for ranks of several."""

import torch.distributed as dist

from megatron_tree.core import comm


class Hosts:
    """Makes comm believe that ranks run on these hosts, while the context is open."""

    def __init__(self, hosts):
        self.hosts = hosts

    def __enter__(self):
        self.real, comm.ranks._this_host = comm.ranks._this_host, lambda: f"host{self.hosts[dist.get_rank()]}"

    def __exit__(self, *_):
        comm.ranks._this_host = self.real
