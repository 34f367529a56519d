"""Measures the machines one is on and writes a topology for the planner: `python -m megatron_tree.calibrate --help`.

links.py times messages between ranks, compute.py the attention kernels; cluster.py turns that into a `plan.Topology`.
"""

from .cluster import Found, calibrate

__all__ = ["Found", "calibrate"]
