"""A decode step of a whole model on N ranks: what each way to share weights and cache reads, sends and takes.

All ways share the cache's tokens. They differ in the weights:

    whole weights     every rank has all weights; the ranks merge what they attend to
    tensor parallel   K ranks share the weights, K a divisor of the KV heads; N / K such groups share the tokens
    sharded           all N ranks share the weights: K head groups of N / K neighbours, which share the tokens; queries
                      are gathered inside a head group, and every rank gets the results of its own heads; MLA's
                      projections into latents are split, too, and what they give is gathered, where that is faster
    repeated          as sharded, but each rank of a head group computes all of its queries, so that none are gathered
                      (`init_inference(queries="repeated")`)
    Helix             the same (arXiv 2507.07120), but with MLA latents are merged; we merge the values made of partial
                      latents where that is faster (here, and in the two ways in which ranks have all heads)
    DCP               as sharded, but states are merged by an all-gather of lse and a reduce-scatter of the outputs
                      (vLLM's decode context parallelism)

With fewer KV heads than ranks, or MLA (one KV head), only the last four divide all of the weights by N. Layers are
added up: a layer reads its weights and the rank's share of its cache at `memory_bandwidth`, and its messages follow one
after another. Activations, norms, Python and overlap of any kind are not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .cost import PlacedTopology, placed_topology
from .decode import gathered, gathered_queries, projects_first, summed
from .model import ModelSizes
from .planner import plan_decode
from .topology import Topology, place

WAYS = ("whole weights", "tensor parallel", "sharded", "repeated", "Helix", "DCP")


class StepCost(NamedTuple):
    """The predicted cost of one decode step for a rank."""

    way: str
    head_groups: int
    """K: groups of ranks with different KV heads."""
    weight_bytes: float
    """That a rank reads, and has, but for experts."""
    cache_bytes: float
    sent_bytes: float
    read_s: float
    """Seconds to read weights and cache."""
    time_s: float


def plan_step(
    model: ModelSizes,
    topology: Topology,
    hosts: Sequence[int],
    *,
    batch: int = 1,
    seq_len: int,
    bytes_per_word: int = 2,
) -> list[StepCost]:
    """The cost of every way, in the order of `WAYS`.

    Args:
        hosts: the host of every rank; ranks of a host are neighbours.
        batch: rows of the step. seq_len: tokens of each row's cache.
        bytes_per_word: of weights, cache and activations.
    """
    return [_Step(model, topology, tuple(hosts), batch, seq_len, bytes_per_word).cost(way) for way in WAYS]


def splits_latents(
    placed: PlacedTopology, projections: Sequence[tuple[float, float]], bytes_per_word: int, batch: int = 1
) -> bool:
    """Whether a decode step is faster if the ranks share MLA's projections into latents and gather what they give.

    projections: of a layer, or of all: words of each, and columns of its result, which every rank needs.
    """
    world = placed.world
    saved = sum(words for words, _ in projections) * bytes_per_word * (1 - 1 / world)
    messages = (gathered(placed, batch * columns / world * bytes_per_word)[0] for _, columns in projections)
    return sum(messages) < saved / placed.topology.memory_bandwidth


def repeats_queries(
    placed: PlacedTopology, projection: tuple[float, float], bytes_per_word: int, batch: int = 1
) -> bool:
    """Whether a decode step is faster if each rank of a head group computes all of its queries, which are then not
    gathered. placed: of a head group. projection: of a layer: words of its weights, and columns of its result."""
    words, columns = projection
    more = words * bytes_per_word * (1 - 1 / placed.world) / placed.topology.memory_bandwidth
    return more < gathered_queries(placed, batch * columns / placed.world * bytes_per_word)[0]


class _Step(NamedTuple):
    model: ModelSizes
    topology: Topology
    hosts: tuple[int, ...]
    batch: int
    seq_len: int
    bytes_per_word: int

    def cost(self, way: str) -> StepCost:
        model, world, word = self.model, len(self.hosts), self.bytes_per_word
        groups = 1 if way == "whole weights" else math.gcd(world, model.num_heads_kv)
        split = {"whole weights": 1, "tensor parallel": groups}.get(way, world)
        queries = groups if way in ("repeated", "Helix") else split
        # neighbours share a product's weights, or a head group's tokens
        weights_of = self._placed(self.hosts[:split])
        ours = way in ("sharded", "repeated")
        latents = [(model.shared / 2, model.shared / model.hidden_size / 2)] * 2 if ours else []
        latents = latents if splits_latents(weights_of, latents, word, self.batch) else []
        layer = model.queries / queries + model.keys / groups + model.shared / (world if latents else 1)
        layer += (model.output + model.mlp + model.experts_read(self.batch)) / split
        cache = self.batch * self.seq_len * model.num_heads_kv * model.cache * model.layers * word / world

        tokens_of = self.hosts[::groups] if split < world else self.hosts[: world // groups]
        layers = [summed(weights_of, self.batch * model.hidden_size * word)] * 2
        messages, more = self._attention(way, tokens_of, groups, cache / model.layers)
        layers += messages
        weights = (model.layers * (layer + more) + model.lm_head / split) * word
        layers += [gathered(weights_of, self.batch * columns / world * word) for _, columns in latents]
        ends = gathered(weights_of, self.batch * model.lm_head / model.hidden_size / split * 4)  # the logits
        read = (weights + cache) / self.topology.memory_bandwidth
        time, sent = (model.layers * sum(part) + end for part, end in zip(zip(*layers), ends))
        return StepCost(way, groups, weights, cache, sent, read, read + time)

    def _attention(
        self, way: str, hosts: tuple[int, ...], groups: int, kv_bytes: float
    ) -> tuple[list[tuple[float, float]], float]:
        """(seconds, bytes sent) of the messages of one layer's attention among the ranks that share the tokens; and
        words of weights that are read to make values of all heads' partial latents, and not only of own results."""
        model, n, placed = self.model, len(hosts), self._placed(hosts)
        heads = self.batch * model.num_heads / groups  # rows of a state
        share = heads / n * self.bytes_per_word
        if way == "DCP":
            return [gathered(placed, share * model.head_dim), gathered(placed, heads * 4),
                    gathered(placed, share * model.head_dim_v)], 0  # fmt: skip
        own = way in ("sharded", "repeated", "Helix")
        plans = functools.partial(
            plan_decode,
            n,
            rows=math.ceil(heads),
            kv_bytes=round(kv_bytes),
            topology=self.topology,
            placement=placed.placement,
            own_heads=own,
        )
        plan, more = plans(head_dim_v=model.head_dim_v), 0.0
        if model.values and way not in ("sharded", "Helix"):
            values, others = plans(head_dim_v=model.value_dim), model.values * (1 - 1 / n) if own else 0.0
            if projects_first(placed, plan, values, others * self.bytes_per_word):
                plan, more = values, others
        merged = plan.cost.time_s - plan.cost.compute_s, plan.cost.bytes
        asked = [gathered_queries(placed, share * model.head_dim)] if way == "sharded" else []
        return [merged, *asked], more

    def _placed(self, hosts: tuple[int, ...]) -> PlacedTopology:
        return placed_topology(self.topology, place(self.topology, list(hosts)))
