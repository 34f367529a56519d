"""A cluster emulated on one Linux machine: real processes in network namespaces, over a network of configured speed.

    from megatron_tree.tools.emulate import Cluster, Unavailable

    with Cluster(nodes=4, ranks_per_node=4, latency_s=1e-3, rate_bits=1e9) as cluster:
        results = cluster.run(fn, *args)      # fn(*args) on 16 ranks; their return values

docs/emulation.md describes what is emulated and what is not.
"""

from .cluster import Cluster
from .network import Unavailable, network_bytes

__all__ = ["Cluster", "Unavailable", "network_bytes"]
