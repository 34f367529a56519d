"""A whole prompt on N ranks that share a model's weights: do they share its tokens, or heads?

- "tokens shared": weights of attention and of recurrent layers are gathered, those of MLPs too or their tokens
  (prefill.py), experts get their tokens; attention runs on a grid (prefill_grid.py), recurrent layers scan their states
  (scan.py) and run a second time for their maps.
- "tensor parallel": every rank runs all tokens with its heads, and results are added up. Indexers, which have one head
  of keys, are whole on every rank and score all pairs.

A product of a token with n weights is 2 n operations at `flops`; a causal prompt of S tokens has S^2 / 2 pairs. The
prompt is one chunk. Messages follow the products that they come from, but those of a grid are pipelined. Activations,
norms and Python are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cost import PlacedTopology, placed_topology
from .decode import gathered
from .model import ModelSizes
from .plans import grids
from .prefill import PrefillSizes, plan_prefill
from .prefill_grid import chunk_sizes, plan_prefill_grid
from .scan import ScanSizes, plan_scan, scans
from .topology import Topology, place

CHUNK = 64  # tokens of a chunk in the kernels of recurrent layers
SEGMENTS = 2  # of a rank's tokens, as in a zigzag layout


class PromptCost(NamedTuple):
    """The predicted cost of a prompt for a rank."""

    way: str
    weights_s: float
    """Seconds of products with weights."""
    attention_s: float
    """Of attention, with the messages of its grid."""
    index_s: float
    recurrent_s: float
    """Of recurrences, without their projections, and of the scan of their states."""
    moved_s: float
    moved_bytes: float
    """Sent: weights, activations, tokens to experts and back."""
    keys_bytes: float
    """Sent for attention: queries, keys, results, index keys."""
    states_bytes: float
    """Sent for recurrent layers: states, and rows before a segment."""

    @property
    def time_s(self) -> float:
        return self.weights_s + self.attention_s + self.index_s + self.recurrent_s + self.moved_s


def plan_prompt(
    model: ModelSizes, topology: Topology, hosts: Sequence[int], *, seq_len: int, bytes_per_word: int = 2
) -> list[PromptCost]:
    """The cost of both ways, "tokens shared" first.

    Args:
        hosts: the host of every rank; ranks of a host are neighbours.
        seq_len: tokens of the prompt.
        bytes_per_word: of weights, cache and activations.
    """
    prompt = _Prompt(model, topology, tuple(hosts), seq_len, bytes_per_word)
    return [prompt.tokens_shared(), prompt.tensor_parallel()]


class _Prompt(NamedTuple):
    model: ModelSizes
    topology: Topology
    hosts: tuple[int, ...]
    seq_len: int
    word: int

    def tokens_shared(self) -> PromptCost:
        model, world = self.model, len(self.hosts)
        attention_s, keys = self._grid()
        scan_s, states = self._scan()
        moved = plan_prefill(self.seq_len, self._moved()).sharing
        times = dict(
            weights_s=2 * (model.words(1) - model.lm_head) * self.seq_len / world / self.topology.flops,
            attention_s=attention_s,
            index_s=self._index_flops() / world / self.topology.flops,
            recurrent_s=self._recurrent_flops() * self._passes() / world / self.topology.flops + scan_s,
        )
        return self._cost("tokens shared", times, moved, keys, states)

    def tensor_parallel(self) -> PromptCost:
        """Heads of attention and of recurrent layers are those of the busiest rank; a recurrence runs once."""
        model, world = self.model, len(self.hosts)
        whole = model.attention_layers * model.shared
        whole += model.index.layers * model.index.weights if model.index else 0
        split = model.words(1) - model.lm_head - whole
        heads = -(-model.num_heads // world) / model.num_heads
        states = model.recurrent.share(world) if model.recurrent else 0
        times = dict(
            weights_s=2 * (whole + split / world) * self.seq_len / self.topology.flops,
            attention_s=self._attention_flops() * heads / self.topology.flops,
            index_s=self._index_flops() / self.topology.flops,
            recurrent_s=self._recurrent_flops() * states / self.topology.flops,
        )
        added_up = 2 * (model.mixers + model.mlps) * self.seq_len * model.hidden_size * self.word
        return self._cost("tensor parallel", times, added_up * (world - 1) / world, 0.0, 0.0)

    def _cost(self, way: str, times: dict[str, float], moved: float, keys: float, states: float) -> PromptCost:
        others = max(1, len(self.hosts) - 1)
        moved_s, _ = gathered(self._placed, moved / others)
        return PromptCost(way, **times, moved_s=moved_s, moved_bytes=moved, keys_bytes=keys, states_bytes=states)

    def _moved(self) -> PrefillSizes:
        """Weights and tokens of a prompt whose tokens are shared. Projections into latents and indexers are whole."""
        model, world = self.model, len(self.hosts)
        part = self.word * (world - 1) / world
        attention = [(model.queries + model.keys + model.output) * part] * model.attention_layers
        attention += [model.recurrent.weights * part] * model.recurrent.layers if model.recurrent else []
        blocks = [model.layers * model.mlp / model.mlps * part] * model.mlps
        copies = 2 * model.experts_per_token * model.hidden_size * part * model.expert_layers
        return PrefillSizes(world, 1, model.hidden_size * self.word, 0, attention, blocks, experts=copies)

    def _grid(self) -> tuple[float, float]:
        """(seconds, bytes sent) of all attention; index keys travel with the keys."""
        model, world = self.model, len(self.hosts)
        numbers = (model.token + model.index_token) / max(1, model.attention_layers)
        sizes = chunk_sizes(
            world,
            self.seq_len,
            self.seq_len,
            num_heads=model.num_heads,
            head_dims=self._head_dims(),
            key_numbers=numbers,
            bytes_per_word=self.word,
        )
        sizes = sizes._replace(flops=self._attention_flops() / world / max(1, model.attention_layers))
        placement = self._placed.placement
        plan = plan_prefill_grid((sizes,) * len(grids(world)), topology=self.topology, placement=placement)
        return plan.cost.time_s * model.attention_layers, plan.cost.bytes * model.attention_layers

    def _scan(self) -> tuple[float, float]:
        """(seconds, bytes sent) of the scans of all recurrent layers, and of the rows before each segment."""
        recurrent = self.model.recurrent
        if recurrent is None or len(self.hosts) == 1:
            return 0.0, 0.0
        seconds, halo = self._placed.shift([SEGMENTS * (recurrent.kernel - 1) * recurrent.channels * self.word])
        num_bytes = sum(halo)
        if recurrent.state:
            sizes = ScanSizes(
                SEGMENTS, recurrent.heads, recurrent.map_numbers, recurrent.head_dim * recurrent.head_dim_v, True
            )
            chosen = plan_scan(
                len(self.hosts), **sizes._asdict(), topology=self.topology, placement=self._placed.placement
            )
            cost = next(c.cost for c in scans(self._placed, sizes) if c.schedule == chosen)
            seconds, num_bytes = seconds + cost.time_s, num_bytes + cost.bytes
        return seconds * recurrent.layers, num_bytes * recurrent.layers

    def _head_dims(self) -> tuple[int, int]:
        """Of a query and of its result: selected rows are latents, which no keys are made of."""
        model = self.model
        return (model.head_dim, model.head_dim_v) if model.index else (model.key_dim, model.value_dim)

    def _attention_flops(self) -> float:
        model, n = self.model, self.seq_len
        topk = min(n, model.index.topk) if model.index else n
        pairs = n * topk - topk * topk / 2
        return 2 * pairs * model.num_heads * sum(self._head_dims()) * model.attention_layers

    def _index_flops(self) -> float:
        index = self.model.index
        return self.seq_len**2 * index.heads * index.head_dim * index.layers if index else 0.0

    def _recurrent_flops(self) -> float:
        """Of one pass over all tokens: a product with the state and one into it, and those of pairs in a chunk."""
        if (recurrent := self.model.recurrent) is None:
            return 0.0
        d, d_v = recurrent.head_dim, recurrent.head_dim_v
        return recurrent.layers * recurrent.heads * self.seq_len * 4 * (d * d_v + CHUNK * (d + d_v))

    def _passes(self) -> float:
        """Passes over a segment: one more for a transition that is a matrix, a part of one for a decay."""
        recurrent = self.model.recurrent
        return 1.0 if not (recurrent and recurrent.state) else 2.0 if recurrent.general else 1.25

    @property
    def _placed(self) -> PlacedTopology:
        return placed_topology(self.topology, place(self.topology, list(self.hosts)))
