"""Measures a cluster and writes a topology for the planner: `megatron-tree calibrate --help`.

links.py times messages between ranks, compute.py the attention kernels; cluster.py makes a `plan.Topology` of both.
kernel_cases.py compares and times backends, and finds the fastest one of a GPU for `kernels.fastest`.
"""
