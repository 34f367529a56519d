"""Tuning on an emulated network whose topology file is wrong: the plan in the end is about as fast as the best."""

import dataclasses
import itertools
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_attn_func
from megatron_tree.core.attention.tuning import REPEATED
from megatron_tree.core.comm.group import GroupState
from megatron_tree.core.plan import load_topology, save_topology
from megatron_tree.tools.emulate import Cluster
from support.emulation import emulated

LATENCY_S, RATE_BITS = 3e-2, 3e7  # so slow that two busy cores matter little
SEQ, HEADS, DIM = 512, 8, 32
RIVALS = [
    *({"grid": grid, "ulysses_size": 1} for grid in ((1, 4), (2, 2), (4, 1))),
    *({"grid": grid, "ulysses_size": 2} for grid in ((1, 2), (2, 1))),
    {"grid": (1, 1), "ulysses_size": 4},
    {"schedule": "ring"},
]
ROUNDS = 3


def _seconds(config, qkv):
    """Of a forward and, if the inputs require gradients, a backward on this rank; all begin together."""
    dist.barrier()
    began = time.perf_counter()
    out = tree_attn_func(*qkv, cp_group=dist.group.WORLD, config=config)
    if out.requires_grad:
        out.backward(out.detach())
    return time.perf_counter() - began


def _tuned(path, heads_kv, backward):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shapes = [(1, SEQ // dist.get_world_size(), h, DIM) for h in (HEADS, heads_kv, heads_kv)]
    qkv = [torch.randn(shape).requires_grad_(backward) for shape in shapes]
    tuned = TreeConfig(topology=path)
    began = time.perf_counter()
    plans = GroupState.of(dist.group.WORLD).tuned
    for _ in range(1 if backward else REPEATED + dist.get_world_size() + 1):
        assert not plans
        _seconds(tuned, qkv)
    took = time.perf_counter() - began
    (plan,) = plans.values()
    found = f"{plan.forward} | {plan.backward}"
    configs = [tuned, *(TreeConfig(topology=path, **rival) for rival in RIVALS)]
    times = [[_seconds(config, qkv) for config in configs] for _ in range(ROUNDS)]
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return found, took, list(map(min, zip(*slowest.tolist())))


@emulated
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("heads_kv", [HEADS, 2])
@pytest.mark.parametrize(("latency", "rate"), list(itertools.product((0.1, 10.0), repeat=2)))
def test_a_wrong_topology_ends_at_a_fast_plan(tmp_path, latency, rate, heads_kv, backward):
    """Training measures in its first call; calls without gradients, such as an evaluation's, once they are repeated."""
    ethernet = load_topology("ethernet")
    wrong = {"latency_s": LATENCY_S * latency, **dict.fromkeys(("bandwidth", "port_bandwidth"), RATE_BITS / 8 * rate)}
    levels = (*ethernet.levels[:-1], dataclasses.replace(ethernet.levels[-1], **wrong))
    save_topology(dataclasses.replace(ethernet, levels=levels), tmp_path / "wrong.yaml")
    with Cluster(nodes=4, ranks_per_node=1, latency_s=LATENCY_S, rate_bits=RATE_BITS, lifetime_s=200) as cluster:
        results = cluster.run(_tuned, str(tmp_path / "wrong.yaml"), heads_kv, backward, timeout_s=180)
    found, took, (seconds, *rivals) = results[0]
    print(f"\n{found}, after {took:.1f} s: {seconds:.3f} s, {seconds / min(rivals):.2f} of the best's")
    print([f"{x:.3f}" for x in rivals])
    assert len({result[0] for result in results}) == 1
    assert seconds < 1.25 * min(rivals)
