"""Measures a cluster and writes a topology for the planner: `megatron-tree calibrate --help`.

links.py times messages between ranks, compute.py the attention kernels; cluster.py makes a `plan.Topology` of both.
backends.py finds the fastest backend of a GPU, for `kernels.fastest`.
"""

from .cluster import Found, calibrate

__all__ = ["Found", "calibrate"]
