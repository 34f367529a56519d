"""A decode step of a whole model on N ranks: what each way to share weights and cache reads, sends and takes.

All ways share the cache's tokens; they differ in the weights (`WAYS`). With fewer KV heads than ranks, or MLA (one KV
head), only those that split the weights over all ranks divide all of them by N. Layers are added up: a layer reads its
weights and the rank's share of its cache at `memory_bandwidth`, and its messages follow one after another. Activations,
norms, Python and overlap of any kind are not counted.

Ranks that split a recurrent layer's weights have its heads, and with them its states, which are read and written; only
results are added up. With an index a rank scores its index keys, the ranks agree on the best, and each attends to those
of its own; indexers are whole on every rank.
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
from .select import plan_select
from .topology import Topology, place


class Way(NamedTuple):
    """A way to share weights and cache. K head groups, K a divisor of the KV heads, hold different heads; the ranks of
    a head group share the tokens."""

    name: str
    head_groups: bool = True
    """Whether there are head groups; else all ranks have all heads."""
    splits_weights: bool = True
    """All ranks share the weights; else the K head groups do. A rank gets the results of its own heads then."""
    repeats_queries: bool = False
    """Each rank of a head group computes all of its queries, so that none are gathered."""
    splits_latents: bool = False
    """MLA's projections into latents are split, too, and what they give is gathered, where that is faster."""
    merges_values: bool = False
    """With MLA values made of partial latents are merged, not latents, where that is faster."""
    gathers_lse: bool = False
    """States are merged by an all-gather of lse and a reduce-scatter of the outputs."""


WAYS = {
    way.name: way
    for way in (
        Way("whole weights", head_groups=False, splits_weights=False, merges_values=True),
        Way("tensor parallel", splits_weights=False, merges_values=True),
        Way("sharded", splits_latents=True),
        Way("repeated", repeats_queries=True, splits_latents=True, merges_values=True),
        Way("Helix", repeats_queries=True),  # arXiv 2507.07120
        Way("DCP", gathers_lse=True),  # vLLM's decode context parallelism
    )
}


class StepCost(NamedTuple):
    """The predicted cost of one decode step for a rank."""

    way: str
    head_groups: int
    """K: groups of ranks with different KV heads."""
    weight_bytes: float
    """That a rank reads."""
    held_bytes: float
    """Weights that it has: with all experts, and blocks that several layers share once."""
    cache_bytes: float
    """Of keys and values that it reads; with an index, those selected."""
    index_bytes: float
    """Of index keys that it reads."""
    state_bytes: float
    """Of recurrent and convolution states, which it reads and writes."""
    attention_bytes: float
    """Sent for attention: queries, partial results, lists or counts of selected keys."""
    sent_bytes: float
    """All that it sends."""
    read_s: float
    """Seconds to read weights, cache and index keys, and to read and write states."""
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
    step = _Step(model, topology, tuple(hosts), batch, seq_len, bytes_per_word)
    return [step.cost(way) for way in WAYS.values()]


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


def repeats_queries(placed: PlacedTopology, projection: tuple[float, float], bytes_per_word: int) -> bool:
    """Whether a decode step of one row is faster if each rank of a head group computes all of its queries, which are
    then not gathered.

    placed: of a head group. projection: of a layer: words of its weights, and columns of its result.
    """
    words, columns = projection
    more = words * bytes_per_word * (1 - 1 / placed.world) / placed.topology.memory_bandwidth
    return more < gathered_queries(placed, columns / placed.world * bytes_per_word)[0]


class _Step(NamedTuple):
    model: ModelSizes
    topology: Topology
    hosts: tuple[int, ...]
    batch: int
    seq_len: int
    bytes_per_word: int

    def cost(self, way: Way) -> StepCost:
        model, world, word = self.model, len(self.hosts), self.bytes_per_word
        groups = math.gcd(world, model.num_heads_kv) if way.head_groups else 1
        split = world if way.splits_weights else groups
        weights_of = self._placed(self.hosts[:split])  # neighbours share a product's weights, or a head group's tokens
        tokens_of = self.hosts[: world // groups] if way.splits_weights else self.hosts[::groups]
        latents = [(model.shared / 2, model.shared / model.hidden_size / 2)] * 2
        if not way.splits_latents or not splits_latents(weights_of, latents, word, self.batch):
            latents = []
        rows = min(self.seq_len, model.index.topk) if model.index else self.seq_len
        cache = self.batch * rows * model.token * word / world
        index_keys = self.batch * self.seq_len * model.index_token * word / len(tokens_of)
        attention, more = self._attention(way, tokens_of, groups, cache / max(1, model.attention_layers))
        attention += [gathered(weights_of, self.batch * columns / world * word) for _, columns in latents]
        messages = [(model.attention_layers, message) for message in attention]
        if model.index:
            messages.append((model.index.layers, self._selection(tokens_of)))
        of_attention = sum(count * sent for count, (_, sent) in messages)
        messages.append((model.mixers + model.mlps, summed(weights_of, self.batch * model.hidden_size * word)))
        messages.append((1, gathered(weights_of, self.batch * model.lm_head / model.hidden_size / split * 4)))
        time, sent = (sum(count * cost[i] for count, cost in messages) for i in (0, 1))

        layer = model.queries / (groups if way.repeats_queries else split) + model.keys / groups
        layer += model.shared / (world if latents else 1) + model.output / split
        weights = model.attention_layers * layer + (model.layers * model.mlp + model.lm_head) / split
        weights += model.index.layers * model.index.weights if model.index else 0
        states = 0.0
        if recurrent := model.recurrent:
            weights += recurrent.layers * recurrent.weights_on(split)
            states = self.batch * recurrent.row_bytes(word, split)
        read = weights + model.attention_layers * more + model.layers * model.experts_read(self.batch) / split
        held = weights + (model.layers * model.expert * model.num_experts - model.repeated) / split
        read_s = (read * word + cache + index_keys + 2 * states) / self.topology.memory_bandwidth
        figures = read * word, held * word, cache, index_keys, states, of_attention, sent
        return StepCost(way.name, groups, *figures, read_s, read_s + time)

    def _selection(self, hosts: tuple[int, ...]) -> tuple[float, float]:
        """(seconds, bytes sent) of the choice of the best keys in one layer."""
        topk, placed = min(self.model.index.topk, self.seq_len), self._placed(hosts)
        plan, _ = plan_select(
            len(hosts), rows=self.batch, topk=topk, topology=self.topology, placement=placed.placement
        )
        return plan.cost.time_s, plan.cost.bytes

    def _attention(
        self, way: Way, hosts: tuple[int, ...], groups: int, kv_bytes: float
    ) -> tuple[list[tuple[float, float]], float]:
        """(seconds, bytes sent) of the messages of one layer's attention among the ranks that share the tokens; and
        words of weights that are read to make values of all heads' partial latents, and not only of local results."""
        model, n, placed = self.model, len(hosts), self._placed(hosts)
        heads = self.batch * model.num_heads / groups  # rows of a state
        share = heads / n * self.bytes_per_word
        if way.gathers_lse:
            parts = (share * model.head_dim, heads * 4, share * model.head_dim_v)
            return [gathered(placed, part) for part in parts], 0
        plan_of = functools.partial(
            plan_decode,
            n,
            rows=math.ceil(heads),
            kv_bytes=round(kv_bytes),
            topology=self.topology,
            placement=placed.placement,
            local_heads=way.splits_weights,
        )
        plan, more = plan_of(head_dim_v=model.head_dim_v), 0.0
        if model.values and way.merges_values:
            values, others = plan_of(head_dim_v=model.value_dim), model.values * (1 - 1 / n) * way.splits_weights
            if projects_first(placed, plan, values, others * self.bytes_per_word):
                plan, more = values, others
        messages = [(plan.cost.time_s - plan.cost.compute_s, plan.cost.bytes)]
        if way.splits_weights and not way.repeats_queries:
            messages.append(gathered_queries(placed, share * model.head_dim))
        return messages, more

    def _placed(self, hosts: tuple[int, ...]) -> PlacedTopology:
        return placed_topology(self.topology, place(self.topology, list(hosts)))
