"""`WeightLayout`: which piece of every parameter a rank holds when N ranks share a model's weights.

`plan_layout` is a function of shapes alone; what the user leaves open the planner decides (`choose_layout`).

N ranks are K head groups of N / K ranks, K = gcd(N, KV heads). The ranks of a head group share the tokens of the cache
of their KV heads, so cache and weights are both split over all N ranks, whatever the number of KV heads: query heads,
output projection, MLPs, experts, embedding and LM head over all ranks, k and v over the head groups. Queries may be
split over the head groups, too: then each rank of a group computes those of all its heads. Latent attention has one
KV head, as has DeepSeek V4, so all ranks share the tokens; its down projections are split by rows and their outputs
gathered, or whole on every rank where messages take longer than reading them. Recurrent layers are split by their heads
(recurrent_heads.py). Norms over all heads are split as these are. Other norms and routers, which are small, and the
vision part of a model of images and text are whole on every rank. Anything else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from transformers import PreTrainedModel

from ....core.cache.gathered import Piece, even_shares
from ....core.comm import Ranks
from ....core.plan import place
from ....core.plan.cost import placed_topology
from ....core.plan.weights import repeats_queries, splits_latents
from ..architectures import num_heads_kv
from ..families.images import without_vision
from ..families.modeling import MLPS, PROJECTIONS
from .recurrent_heads import RecurrentHeads, Rule, attribute, rule_of

QUERIES = ("q_proj", "qkv_proj", "c_attn", "query_key_value")  # the first has its keys and values in others
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
SHARED_KEYS = ("q_a_proj", "kv_proj", "compressor.kv_proj", "compressor.gate_proj")  # of DeepSeek V4
GATED_QUERIES = "q_gate_proj"  # of latent attention: a head's query, then the gate of its result
# parts that are whole on every rank: an index, hyper connections, what is added to positions
SMALL = ("indexer", "attn_hc", "ffn_hc", "hc_head", "embed_positions", "position_bias")
SMALL += ("attn_hyper_connection", "mlp_hyper_connection", "hyper_connection_mixer")
GATES = ("gate_proj", "g_proj")  # of the result of each query head
OF_HEADS = ("sinks", "gate_bias")
OF_QUERIES = ("softmax_scaling.scale", "softmax_scaling.bias")
GATED_MLPS = ("gate_up_proj", "input_linear")  # gates, then inputs of the neurons
ROUTERS = ("gate", "router", "shared_expert_gate", "expert_bias")
EXPERTS = ("gate_up_proj", "up_proj")  # of all experts in one parameter, with a gate for each neuron and without
EVERY_EXPERT = "Llama4TextExperts"  # gets all tokens for its first expert, then for the next, and has no flags
JOINTS = ("fc1_latent_proj", "fc2_latent_proj")  # from and to the hidden states of Nemotron-H's experts
EXPERT_UNITS, ROW_BYTES = (8, 4), 16  # torch's grouped matrix product wants rows of whole 16 bytes


class HeadGroups(NamedTuple):
    """How N ranks share query heads and KV heads; head groups are neighbouring ranks."""

    num_groups: int
    shares: tuple[int, ...]
    """Query heads of each rank of a head group."""
    num_heads_kv: int
    """Of a head group."""

    @classmethod
    def of(cls, world: int, num_heads: int, num_heads_kv: int) -> HeadGroups:
        """Raises: ValueError for more ranks than query heads."""
        if world > num_heads:
            raise ValueError(
                f"weights='sharded' on {world} ranks: each takes at least one of the model's {num_heads} query heads; "
                f"start {num_heads} ranks or fewer, or use weights='replicated'"
            )
        groups = math.gcd(world, num_heads_kv)
        return cls(groups, even_shares(num_heads // groups, world // groups), num_heads_kv // groups)

    @property
    def size(self) -> int:
        """Ranks of a head group."""
        return len(self.shares)

    def query_heads(self, rank: int) -> tuple[int, int]:
        """(first, last + 1) of a rank's query heads."""
        group, place = divmod(rank, self.size)
        first = group * sum(self.shares) + sum(self.shares[:place])
        return first, first + self.shares[place]

    def all_query_heads(self, rank: int) -> tuple[int, int]:
        """(first, last + 1) of the query heads of a rank's group."""
        first = rank // self.size * sum(self.shares)
        return first, first + sum(self.shares)

    def kv_heads(self, rank: int) -> tuple[int, int]:
        """(first, last + 1) of the KV heads of a rank's group."""
        first = rank // self.size * self.num_heads_kv
        return first, first + self.num_heads_kv


@dataclass
class WeightLayout:
    """One rank's pieces of a model's weights, and the modules whose results the ranks join; `plan_layout` makes it.

    Raises: ValueError, naming the parameter, for weights that can't be split.
    """

    model: PreTrainedModel = field(repr=False)
    world: int
    rank: int
    splits_latents: bool = True
    """Whether latent attention's down projections are split, not whole on every rank."""
    repeats_queries: bool = False
    """Whether every rank computes all queries of its head group."""
    heads: HeadGroups = field(init=False)
    pieces: dict[str, Piece] = field(default_factory=dict)
    """By parameter name; parameters without a piece are whole on every rank."""
    from_first_rank: set[str] = field(default_factory=set)
    """Biases of partial sums: zeros on all ranks but the first."""
    whole: set[str] = field(default_factory=set)
    """Parameters that could be split and are not."""
    summed: list[str] = field(default_factory=list)
    """Modules that return a partial sum."""
    not_by_token: set[str] = field(default_factory=set)
    """Those of them whose rows are no tokens, but tokens of each expert."""
    gathered: dict[str, int] = field(default_factory=dict)
    """Modules that return some columns of their output, and how many columns there are."""
    latents: list[str] = field(default_factory=list)
    """Those of them that project to latents."""
    attentions: list[str] = field(default_factory=list)
    """Attention modules."""
    recurrent: dict[str, RecurrentHeads] = field(default_factory=dict)
    """Recurrent layers, and this rank's heads of them."""
    gates_queries: bool = False
    """Whether q projections also make a gate for the result of each head, so that queries can't be repeated."""
    norms: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """RMS norms over heads of several ranks: their width, and whether this rank's part enters the sum."""
    tables: dict[str, int] = field(default_factory=dict)
    """Embeddings, of words and positions, and their numbers of rows."""
    pieces_by_rank: list[dict[str, Piece]] = field(default_factory=list)
    """`pieces` of every rank."""
    query_projection: tuple[int, int] = (0, 0)
    """(weights, output columns) of a head group's queries in the last layer; with latents, of queries for them."""
    num_logits: int = 0
    """Rows of the whole LM head."""

    @property
    def state_pieces(self) -> dict[str, Piece]:
        """This rank's part of every recurrent state, by its name in a `RowState`."""
        return {name: piece for share in self.recurrent.values() for name, piece in share.states.items()}

    def piece_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        if name in self.pieces:
            return self.pieces[name].of(whole)
        return torch.zeros_like(whole) if name in self.from_first_rank and self.rank else whole

    def share(self, n: int, unit: int = 1) -> tuple[int, int]:
        """(start, stop) of this rank's rows of n, in whole units, which divide n."""
        shares = even_shares(n // unit, self.world)
        first = sum(shares[: self.rank])
        return first * unit, (first + shares[self.rank]) * unit

    def __post_init__(self):
        config = self.model.config.get_text_config(decoder=True)
        if config.is_heterogeneous:
            raise self._refused("layers", "they have different numbers of heads")
        if config.model_type == "hrm_text":
            raise self._refused("layers", "it runs every layer several times for a token")
        self.num_heads, self.num_heads_kv = config.num_attention_heads, num_heads_kv(config)
        self.heads = HeadGroups.of(self.world, self.num_heads, self.num_heads_kv)
        modules, self.whole = without_vision(self.model)
        for name, module in modules:
            queries, output = (next((x for x in names if hasattr(module, x)), None) for names in (QUERIES, OUTPUTS))
            if rule := rule_of(module):
                self._recurrent(name, module, rule)
            elif hasattr(module, "o_proj") and hasattr(module, "kv_b_proj"):
                self._latent_attention(name, module)
            elif hasattr(module, "o_a_proj") and hasattr(module, "kv_proj"):
                self._grouped_attention(name, module)
            elif queries and output:
                self._attention(name, module, queries, output)
            elif any(isinstance(getattr(module, x, None), nn.Parameter) for x in EXPERTS):
                self._experts(name, module)
            for child in JOINTS:
                if isinstance(getattr(module, child, None), nn.Linear):
                    self._gathered_rows(f"{name}.{child}", getattr(module, child))
            if hasattr(module, "ple_embedding"):  # Qwen4-Exp: what embeddings of n-grams give, and its convolution
                self._gathered_rows(f"{name}.key_proj", module.key_proj)
                self._gathered_rows(f"{name}.value_proj", module.value_proj)
                self.whole.add(f"{name}.conv1d.weight")
            if hasattr(module, "mamba_decoder"):  # Zamba: of what a transformer block gives, which layers share
                self._gathered_rows(f"{name}.linear", module.linear)
            for ups, down in MLPS:
                if isinstance(getattr(module, down, None), PROJECTIONS) and not queries:
                    self._mlp(name, module, ups, down)
        words, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self.num_logits = len(head.weight)
        for name, module in modules:
            if module is head:
                self._rows(name, module, [self.share(len(module.weight))])
            elif module is words or (type(module) is nn.Embedding and len(module.weight) >= self.world):
                self.tables[name] = len(module.weight)
                self.pieces[f"{name}.weight"] = Piece(0, (self.share(len(module.weight)),))
        self.whole_shapes = {n: p.shape for n, p in self.model.named_parameters(remove_duplicate=False)}
        """The whole shape of every parameter."""

    def _attention(self, name: str, module, queries: str, output: str) -> None:
        d = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        if d is None:
            raise self._refused(name, "heads of one head_dim were expected")
        if not isinstance(getattr(module, queries), PROJECTIONS):
            raise self._refused(f"{name}.{queries}", "a projection was expected")
        heads, rank, num_heads, num_heads_kv = self.heads, self.rank, self.num_heads, self.num_heads_kv
        local, kv = _times(d, heads.query_heads(rank)), _times(d, heads.kv_heads(rank))
        q = _times(d, heads.all_query_heads(rank)) if self.repeats_queries else local
        if queries == "q_proj":
            projections = {"q_proj": (num_heads, [q]), "k_proj": (num_heads_kv, [kv]), "v_proj": (num_heads_kv, [kv])}
            if _widths(module.q_proj)[0] == 2 * num_heads * d:
                self._gated_queries(name)
                projections["q_proj"] = 2 * num_heads, [_times(2, q)]
        else:
            if queries == "query_key_value":
                if heads.size > 1 or num_heads != num_heads_kv:
                    raise self._wants_divisors(f"{name}.query_key_value")
                runs = [_times(3, kv)]
            else:
                k, v = num_heads * d, (num_heads + num_heads_kv) * d
                runs = [q, (k + kv[0], k + kv[1]), (v + kv[0], v + kv[1])]
            projections = {queries: (num_heads + 2 * num_heads_kv, runs)}
        columns = d * sum(heads.shares)
        self.query_projection = columns * _widths(getattr(module, queries))[1], columns
        for child, (of_heads, runs) in projections.items():
            projection = getattr(module, child, None)
            self._check_projection(f"{name}.{child}", projection, 0, of_heads, d)
            self._rows(f"{name}.{child}", projection, runs)
        self._check_projection(f"{name}.{output}", getattr(module, output), 1, num_heads, d)
        self._columns(f"{name}.{output}", getattr(module, output), local)
        self._of_heads(name, module, d)
        counts = rank % heads.size == 0  # of the ranks with the same heads
        self._whole_norm(f"{name}.q_norm", num_heads * d, q, d, counts=counts or not self.repeats_queries)
        self._whole_norm(f"{name}.k_norm", num_heads_kv * d, kv, d, counts=counts)
        self._whole_norm(f"{name}.attn_sub_norm", num_heads * d, local)
        self.attentions.append(name)

    def _of_heads(self, name: str, module, d: int) -> None:
        """Gates of the heads' results, for each head or each of its d numbers, and what else a head has one of."""
        local = self.heads.query_heads(self.rank)
        for child in GATES:
            gate = getattr(module, child, None)
            if isinstance(gate, nn.Linear) and len(gate.weight) in (self.num_heads, self.num_heads * d):
                self._rows(f"{name}.{child}", gate, [_times(len(gate.weight) // self.num_heads, local)])
        queries = self.heads.all_query_heads(self.rank) if self.repeats_queries else local
        for child, heads in (*((x, local) for x in OF_HEADS), *((x, queries) for x in OF_QUERIES)):
            if isinstance(attribute(module, child), nn.Parameter):
                self.pieces[f"{name}.{child}"] = Piece(0, (heads,))

    def _gated_queries(self, name: str) -> None:
        self.gates_queries = True
        if self.repeats_queries:
            raise ValueError(
                f"{type(self.model).__name__}: queries='repeated' can't split {name}.q_proj: it makes the query of a "
                "head and the gate of its result, which the head's rank needs. Use queries='split'"
            )

    def _wants_divisors(self, name: str) -> ValueError:
        divisors = [n for n in range(1, self.num_heads_kv + 1) if self.num_heads_kv % n == 0]
        return self._refused(name, f"q, k and v of each head lie together: start one of {divisors} ranks")

    def _latent_attention(self, name: str, module) -> None:
        """Query heads are split, with the rows that make their keys and values of latents; or every rank has all of
        both, and computes the queries of all heads."""
        num_heads = self.num_heads
        first, last = self.heads.query_heads(self.rank)
        self._down_projections(name, module, LATENTS)
        queries = next((x for x in ("q_proj", GATED_QUERIES) if getattr(module, x, None) is not None), "q_b_proj")
        d_q = module.qk_head_dim + (module.v_head_dim if queries == GATED_QUERIES else 0)
        if queries == GATED_QUERIES and self.repeats_queries:
            raise self._refused(f"{name}.{queries}", "the gates of repeated queries are of other ranks' results")
        for child, d in ((queries, d_q), ("kv_b_proj", module.qk_nope_head_dim + module.v_head_dim)):
            projection = getattr(module, child, None)
            self._check_projection(f"{name}.{child}", projection, 0, num_heads, d)
            if self.repeats_queries:
                self.whole |= {f"{name}.{child}.{x}" for x, _ in projection.named_parameters()}
            else:
                self._rows(f"{name}.{child}", projection, [(first * d, last * d)])
        keys = num_heads * module.qk_nope_head_dim * module.kv_lora_rank
        entry = module.kv_lora_rank + module.qk_rope_head_dim
        self.query_projection = getattr(module, queries).weight.numel() + keys, num_heads * entry
        d = module.v_head_dim
        self._check_projection(f"{name}.o_proj", module.o_proj, 1, num_heads, d)
        self._columns(f"{name}.o_proj", module.o_proj, (first * d, last * d))
        self._of_heads(name, module, d)
        self.attentions.append(name)

    def _grouped_attention(self, name: str, module) -> None:
        """One key, its own value, for all query heads, whose results are projected in groups of heads: both are split.
        What makes keys, also of blocks of tokens, is split as what makes latents."""
        self._down_projections(name, module, SHARED_KEYS)
        d, groups, num_heads = module.head_dim, module.o_a_proj.n_groups, self.num_heads
        if groups % self.world:
            divisors = [n for n in range(1, groups + 1) if groups % n == 0]
            raise self._refused(f"{name}.o_a_proj", f"it has {groups} groups of heads: start one of {divisors} ranks")
        self._check_projection(f"{name}.q_b_proj", module.q_b_proj, 0, num_heads, d)
        if self.repeats_queries:
            self.whole.add(f"{name}.q_b_proj.weight")
        else:
            self._rows(f"{name}.q_b_proj", module.q_b_proj, [_times(d, self.heads.query_heads(self.rank))])
        self.query_projection = module.q_b_proj.weight.numel(), num_heads * d
        own = self.share(len(module.o_a_proj.weight), len(module.o_a_proj.weight) // groups)
        self._rows(f"{name}.o_a_proj", module.o_a_proj, [own])
        self._columns(f"{name}.o_b_proj", module.o_b_proj, own)
        self._of_heads(name, module, d)
        self.whole.add(f"{name}.compressor.kv_norm.weight")
        self.attentions.append(name)

    def _down_projections(self, name: str, module, children: Sequence[str]) -> None:
        for child in children:
            projection = attribute(module, child)
            if projection is not None and not isinstance(projection, nn.Linear):
                raise self._refused(f"{name}.{child}", "a projection was expected")
            if projection is not None and not self.splits_latents:
                self.whole |= {f"{name}.{child}.{x}" for x, _ in projection.named_parameters()}
            elif projection is not None:
                self._gathered_rows(f"{name}.{child}", projection)
                self.latents.append(f"{name}.{child}")

    def _recurrent(self, name: str, module, rule: Rule) -> None:
        """Value heads are split, with the key heads that they read; in-projections, convolution and norm likewise."""
        try:
            share = RecurrentHeads(rule, module, self.world, self.rank)
        except ValueError as error:
            raise self._refused(name, str(error)) from error
        for child, blocks in rule.rows.items():
            for parameter, weight in _parameters_of(attribute(module, child)):
                width, path = share.width(blocks, whole=True), f"{name}.{child}{parameter}"
                if width not in weight.shape:
                    raise self._refused(path, f"{list(weight.shape)} was expected to have {width} rows of heads")
                self.pieces[path] = Piece(weight.shape.index(width), share.runs(blocks))
        for child, blocks in rule.columns.items():
            if (projection := attribute(module, child)) is not None:
                width = share.width(blocks, whole=True)
                if not isinstance(projection, nn.Linear) or projection.in_features != width:
                    raise self._refused(f"{name}.{child}", f"a projection from {width} was expected")
                self._columns(f"{name}.{child}", projection, *share.runs(blocks))
        self.whole |= {f"{name}.{x}.weight" for x in rule.whole if attribute(module, x) is not None}
        self.recurrent[name] = share

    def _check_projection(self, name: str, module, dim: int, num_heads: int, d: int) -> None:
        if not isinstance(module, PROJECTIONS) or _widths(module)[dim] != num_heads * d:
            what = ("to", "from")[dim]
            raise self._refused(name, f"a projection {what} {num_heads} heads of {d} was expected")

    def _whole_norm(self, name: str, width: int, run: tuple[int, int], above: int = 0, *, counts: bool = True) -> None:
        """An RMS norm, if there is one, over `width` numbers, of which this rank has a run; smaller ones stay whole."""
        owner, _, child = name.rpartition(".")
        norm = getattr(self.model.get_submodule(owner), child, None)
        if norm is None or sum(p.numel() for p in norm.parameters()) <= above:
            return
        shapes = {x: tuple(p.shape) for x, p in norm.named_parameters()}
        if shapes != {"weight": (width,)} or not hasattr(norm, "variance_epsilon"):
            raise self._refused(name, f"an RMS norm with {width} weights and a variance_epsilon was expected")
        self.pieces[f"{name}.weight"] = Piece(0, (run,))
        self.norms[name] = width, counts

    def _mlp(self, name: str, module, ups: tuple[str, ...], down: str) -> None:
        width = _widths(getattr(module, down))[1]
        start, stop = local = self.share(width)
        joined = next((x for x in GATED_MLPS if isinstance(getattr(module, x, None), nn.Linear)), None)
        if joined is not None:
            both = [local, (width + start, width + stop)]
            self._rows(f"{name}.{joined}", getattr(module, joined), both)
            for i, adapter in enumerate(getattr(module, f"{joined}_adapter_list", ())):
                if isinstance(adapter, nn.Sequential):  # Zamba 2: down to a few numbers, which every rank has, and up
                    self.whole.add(f"{name}.{joined}_adapter_list.{i}.0.weight")
                    self._rows(f"{name}.{joined}_adapter_list.{i}.1", adapter[1], both)
        else:
            for child in ups if hasattr(module, ups[0]) else ups[-1:]:
                projection = getattr(module, child, None)
                if not isinstance(projection, PROJECTIONS) or _widths(projection)[0] != width:
                    raise self._refused(f"{name}.{child}", f"a projection to {width} was expected")
                self._rows(f"{name}.{child}", projection, [local])
        self._whole_norm(f"{name}.ffn_sub_norm", width, local)
        self._columns(f"{name}.{down}", getattr(module, down), local)

    def _experts(self, name: str, module) -> None:
        """All experts are on every rank, each with a part of its neurons, so that every rank does the same work."""
        transposed, concatenated = (getattr(module, x, None) for x in ("is_transposed", "is_concatenated"))
        if type(module).__name__ == EVERY_EXPERT:
            transposed = concatenated = True
            self.not_by_token.add(name)
        rows, columns = (2, 1) if transposed else (1, 2)
        width, has_gates = module.down_proj.shape[columns], hasattr(module, "gate_up_proj")
        up = EXPERTS[not has_gates]
        if None in (transposed, concatenated) or getattr(module, up).shape[rows] != (1 + has_gates) * width:
            what = "gates and inputs" if has_gates else "inputs"
            raise self._refused(f"{name}.{up}", f"{what} of {width} neurons were expected")
        units = [n for n in EXPERT_UNITS if n * self.model.dtype.itemsize >= ROW_BYTES]
        unit = next((n for n in units if width % n == 0 and width // n >= self.world), None)
        if unit is None:
            raise self._refused(f"{name}.{up}", f"{width} neurons in units of {units[-1]} are too few for all ranks")
        start, stop = local = self.share(width, unit)
        both = (local, (width + start, width + stop)) if concatenated else ((2 * start, 2 * stop),)
        self.pieces[f"{name}.{up}"] = Piece(rows, both if has_gates else (local,))
        self.pieces[f"{name}.down_proj"] = Piece(columns, (local,))
        if getattr(module, "gate_up_proj_bias", None) is not None:
            self.pieces[f"{name}.gate_up_proj_bias"] = Piece(1, both)
            self.from_first_rank.add(f"{name}.down_proj_bias")
        self.summed.append(name)

    def _rows(self, name: str, module, runs) -> None:
        self.pieces[f"{name}.weight"] = Piece(int(isinstance(module, Conv1D)), tuple(runs))
        if module.bias is not None:
            self.pieces[f"{name}.bias"] = Piece(0, tuple(runs))

    def _gathered_rows(self, name: str, projection) -> None:
        """Each rank computes some columns of the output, which are gathered."""
        self._rows(name, projection, [self.share(len(projection.weight))])
        self.gathered[name] = len(projection.weight)

    def _columns(self, name: str, module, run: tuple[int, int]) -> None:
        self.pieces[f"{name}.weight"] = Piece(int(not isinstance(module, Conv1D)), (run,))
        if module.bias is not None:
            self.from_first_rank.add(f"{name}.bias")
        self.summed.append(name)

    def check_rest(self) -> None:
        """Raise ``ValueError`` for a parameter that would be on every rank though it is no norm's and no router's."""
        if not self.attentions:
            raise self._refused("attention", "its projections to q, k and v have unknown names")
        modules = dict(self.model.named_modules())
        for name, parameter in self.model.named_parameters():
            owner, parts = name.rpartition(".")[0], set(name.split("."))
            planned = name in {*self.pieces, *self.from_first_rank, *self.whole}
            if planned or parameter.numel() == 1 or parts.intersection(SMALL):
                continue
            is_norm = "norm" in type(modules[owner]).__name__.lower() and parameter.dim() == 1
            depth = owner.count(".") - 1  # deeper in attention, there is a norm for each head
            of_heads = any(owner.startswith(f"{x}.") and depth > x.count(".") for x in self.attentions)
            if (not is_norm or of_heads) and not parts.intersection(ROUTERS):
                raise self._refused(name, f"{list(parameter.shape)} is no part of attention, an MLP or experts")

    def _refused(self, name: str, why: str) -> ValueError:
        model = type(self.model).__name__
        return ValueError(f"{model}: weights='sharded' can't split {name}: {why}. Use weights='replicated'")


def _times(d: int, heads: tuple[int, int]) -> tuple[int, int]:
    return heads[0] * d, heads[1] * d


def _parameters_of(part) -> list[tuple[str, nn.Parameter]]:
    """(end of its name, parameter) of a parameter or a module; none of a buffer."""
    if isinstance(part, nn.Module):
        return [(f".{name}", parameter) for name, parameter in part.named_parameters()]
    return [("", part)] if isinstance(part, nn.Parameter) else []


def _widths(projection) -> tuple[int, int]:
    """(out, in) features of a projection."""
    rows, columns = projection.weight.shape
    return (columns, rows) if isinstance(projection, Conv1D) else (rows, columns)


def plan_layout(
    model, world: int, rank: int, *, split_latents: bool = True, repeat_queries: bool = False
) -> WeightLayout:
    """The layout of a causal language model (it may be on the meta device) on one of `world` ranks.

    split_latents, repeat_queries: see `WeightLayout`.
    Raises: ValueError, naming the parameter, for a model with weights that this can't split.
    """
    options = {"splits_latents": split_latents, "repeats_queries": repeat_queries}
    layout = WeightLayout(model, world, rank, **options)
    layout.check_rest()
    layout.pieces_by_rank = [WeightLayout(model, world, r, **options).pieces for r in range(world)]
    return layout


def choose_layout(
    layout: WeightLayout,
    ranks: Ranks,
    *,
    queries: str = "split",
    split_latents: bool | None = None,
    dtype: torch.dtype,
) -> WeightLayout:
    """The layout of a model's weights over all ranks. Collective.

    layout: from `plan_layout` with repeat_queries=(queries == "repeated"). queries, split_latents: see
    `init_inference`; "auto" and None let the planner predict which is faster.
    """
    repeats = layout.repeats_queries
    if queries == "auto" or (split_latents is None and layout.latents):
        with ranks.call("init_inference") as call:
            options = {"queries": queries, "split_latents": split_latents, "dtype": dtype, "config": ranks.config}
            call.agree(**options, topology=ranks.fingerprint)
            network = ranks.network_of_memory
    if queries == "auto" and layout.heads.size > 1 and not layout.gates_queries:
        hosts = ranks.hosts[: layout.heads.size]  # all decide by the first group
        placed = placed_topology(network.topology, place(network.topology, hosts))
        repeats = repeats_queries(placed, layout.query_projection, dtype.itemsize)
    if split_latents is None and layout.world > 1 and layout.latents:
        sizes = [(layout.whole_shapes[f"{name}.weight"].numel(), layout.gathered[name]) for name in layout.latents]
        split_latents = splits_latents(placed_topology(*network), sizes, dtype.itemsize)
    if split_latents is not False and repeats == layout.repeats_queries:
        return layout
    split = split_latents is not False
    return plan_layout(layout.model, layout.world, layout.rank, split_latents=split, repeat_queries=repeats)
