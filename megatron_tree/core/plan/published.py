"""What others have measured, beside what the cost model predicts for it: `megatron-tree plan --published`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..files import read_yaml
from ..units import format_bytes
from .cost import placed_topology
from .decode import Rounds, add_gather, add_sum
from .planner import plan_training
from .plans import Shape, rival_names
from .topology import Topology, load_topology, place

PUBLISHED = Path(__file__).with_name("published.yaml")
APART = 1.1  # measured times that differ by less have no order


class Comparison(NamedTuple):
    """One measurement and its prediction, in seconds."""

    what: str
    source: str
    case: str
    """A pass and its GPUs, whose schedules are alternatives; or a collective, its GPUs and bytes."""
    name: str
    """The schedule, or the collective."""
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def comparisons() -> list[Comparison]:
    """Every measurement of `published.yaml`, in its order."""
    published = read_yaml(PUBLISHED)
    training = (c for entry in published["training"] for c in _training(**entry))
    return [*training, *(c for entry in published["collectives"] for c in _collectives(**entry))]


def ordered(compared: list[Comparison]) -> tuple[list, list]:
    """Pairs (slower, faster) of one case whose measurements are `APART`: those that are predicted in this order, and
    the others."""
    pairs = (pair for pair in itertools.permutations(compared, 2) if pair[0][:3] == pair[1][:3])
    right, wrong = [], []
    for slower, faster in pairs:
        if slower.measured > APART * faster.measured:
            (right if slower.predicted > faster.predicted else wrong).append((slower, faster))
    return right, wrong


def _training(
    what, source, topology, flops, heads, causal, tokens, ranks, forward, backward=None, packs=None, **machine
) -> Iterator[Comparison]:
    (h, h_kv, d), passes = heads, {"forward": forward, "backward": backward or {}}
    for n, (name, measured) in enumerate(passes.items()):
        assumed = _machine(load_topology(topology), float(flops[n]), **machine)
        for i, world in enumerate(ranks):
            plans = [
                plan_training(
                    world,
                    Shape(h, h_kv, d, d),
                    batch=1,
                    seq_len=world * tokens,
                    bytes_per_word=2,
                    causal=causal,
                    visible_fraction=keys / (world * tokens),
                    packed=packs is not None,
                    topology=assumed,
                    placement=place(assumed, [rank // assumed.host_size for rank in range(world)]),
                    head_chunks=1,  # what was measured sends all heads at once
                )
                for keys in (packs[i] if packs else [world * tokens])
            ]
            for rival, speeds in measured.items():
                if speeds[i] is not None:
                    costs = [next(c.cost for c in x.candidates[n] if rival in rival_names(c)) for x in plans]
                    compute_s = fmean(cost.compute_s for cost in costs)
                    seconds = compute_s * assumed.flops / speeds[i] / 1e12
                    predicted = compute_s / fmean(cost.compute_s / cost.time_s for cost in costs)
                    yield Comparison(what, source, f"{name}, {world} GPUs", rival, seconds, predicted)


def _machine(topology: Topology, flops: float, nvlink=None, memory_bandwidth=None) -> Topology:
    """The topology with what is known of the machine."""
    inside, *rest = topology.levels
    bandwidth = float(nvlink or inside.bandwidth)
    return dataclasses.replace(
        topology,
        flops=flops,
        memory_bandwidth=float(memory_bandwidth or topology.memory_bandwidth),
        levels=(dataclasses.replace(inside, bandwidth=bandwidth, port_bandwidth=bandwidth), *rest),
    )


def _collectives(what, source, topology, ranks, kind, bytes, microseconds) -> Iterator[Comparison]:
    assumed = load_topology(topology)
    placed = placed_topology(assumed, place(assumed, [0] * ranks))
    for size, measured in zip(bytes, microseconds, strict=True):
        total = Rounds(placed)
        {"all-gather": add_gather, "all-reduce": add_sum}[kind](total, size)
        yield Comparison(what, source, f"{ranks} GPUs, {format_bytes(size)}", kind, measured * 1e-6, total.time)
