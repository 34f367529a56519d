"""A cluster on one Linux machine: real processes, each in the network namespace of its node, over a set network.

    from megatron_tree.emulate import Cluster, Unavailable

    with Cluster(nodes=4, ranks_per_node=4, latency_s=1e-3, rate_bits=1e9) as cluster:
        results = cluster.run(fn, *args)      # fn(*args) on 16 ranks; the list of what they return

docs/emulation.md tells what is emulated and what is not.
"""

from .cluster import Cluster
from .network import Unavailable, network_bytes
from .units import bits_per_second, nodes_by_ranks, seconds

__all__ = ["Cluster", "Unavailable", "bits_per_second", "network_bytes", "nodes_by_ranks", "seconds"]
