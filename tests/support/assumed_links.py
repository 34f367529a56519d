"""Links that a benchmark does not measure: fast, and every time the same plans."""

from megatron_tree.core.plan import Level, Topology
from megatron_tree.tools.bench import cases


def assume_links(monkeypatch, *names, host_size=8):
    """Have the multi-rank benchmarks assume these levels instead of calibrating, from the innermost out."""
    link = dict(latency_s=1e-4, bandwidth=1e9, port_bandwidth=1e9)
    sizes = [host_size] * (len(names) - 1) + [0]
    levels = tuple(Level(name=name, size=size, **link) for name, size in zip(names, sizes))
    rest = dict(overhead_s=3e-5, memory_bandwidth=1e10, flops=1e12, transport="direct")
    some = Topology(name="some", levels=levels, host_size=host_size, **rest)
    monkeypatch.setattr(cases, "calibrate_on_rank", lambda how, name: some)
