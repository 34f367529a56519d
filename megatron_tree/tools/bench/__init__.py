"""Benchmarks, see `megatron-tree bench --help`: no speed is printed before the result has been checked."""
