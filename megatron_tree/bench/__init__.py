"""Benchmarks, see `python -m megatron_tree.bench --help`: no speed is printed before the result has been checked."""
