"""Sizes of a language model that decide how fast it decodes, read from its Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from .layers import Config, Layers
from .recurrent import Recurrent

UNPLANNED = {  # fields of layers that are not planned
    "compress_rates": "compressed keys",
    "index_kpool": "pooled index keys",
    "hc_lowrank": "hyper-connections of low rank",
    "per_layer_config": "layers of different sizes",
    "lru_width": "recurrent layers of RecurrentGemma",
}
GATED = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "hy_v4")  # by a gate of out's size


class Index(NamedTuple):
    """An index that selects the keys which a query sees; its layers have a cache of index keys."""

    layers: int
    """Those that score keys; others use the selection of the layer before."""
    heads: int
    head_dim: int
    """Numbers that a token takes in a layer's cache of index keys."""
    topk: int
    weights: int
    """Of one layer's indexer."""


class ModelSizes(NamedTuple):
    """Words (numbers) of weights and cache. Those of attention are of one layer that attends, those of MLPs and experts
    means over all layers."""

    layers: int
    attention_layers: int
    hidden_size: int
    num_heads: int
    num_heads_kv: int
    """1 with MLA, whose cache holds a latent for all heads."""
    head_dim: int
    """Of queries and the keys in the cache; with MLA those of a latent and its rope key together."""
    head_dim_v: int
    cache: int
    """Words that a token and KV head take in a layer's cache."""
    queries: float
    """Weights of a layer's query projections, which are split by query heads."""
    keys: float
    """Weights of its key and value projections, which are split by KV heads."""
    shared: float
    """Weights that every head needs: MLA's projections into latents."""
    output: float
    """Weights of the output projection; with MLA those that make values of latents, too."""
    values: float
    """MLA's weights that make values of latents."""
    value_dim: int
    """Width of a head's result as the output projection takes it."""
    key_dim: int
    """Of a head's keys; with MLA of those made of latents."""
    mlp: float
    """Weights of a layer's MLP, or of its shared experts and router."""
    expert: float
    """Weights of one expert, averaged over the layers."""
    num_experts: int
    experts_per_token: int
    lm_head: int
    mixers: int
    """Results of attention or a recurrent layer that ranks which share the weights add up."""
    mlps: int
    """The same of an MLP or experts."""
    expert_layers: int
    repeated: float
    """Words that a step reads more than once: those of blocks that several layers share."""
    recurrent: Recurrent | None
    index: Index | None

    @classmethod
    def of(cls, values: dict[str, Any]) -> ModelSizes:
        """The sizes of a config.json with the field names of Llama, Qwen, Mixtral or DeepSeek, of a hybrid
        (recurrent.py), or of DeepSeek V3.2 and others with an index.

        A layer with a window counts as one of full attention, and every layer has a cache of its own. Raises:
            ValueError that names a missing field, or a field of layers that are not planned.
        """
        config = Config(values)
        if name := next((name for name in UNPLANNED if name in config), None):
            raise ValueError(f"the model's config has {name}: models with {UNPLANNED[name]} are not planned")
        kinds, hidden = Layers.of(config), config.number("hidden_size")
        layers, sparse = len(kinds.mixers), kinds.mlps.count("sparse")
        attention = (_latent_attention if "kv_lora_rank" in config else _attention)(config)
        dense, one, per_layer = _mlp(config)
        both = kinds.mixers.count("both") * ("mamba_d_ssm" not in config)  # Falcon H1 adds up what it mixes
        sizes = cls(
            layers=layers,
            attention_layers=kinds.attending,
            hidden_size=hidden,
            num_heads=config.number("num_attention_heads"),
            **attention,
            mlp=(kinds.mlps.count("dense") * dense + sparse * per_layer) / layers,
            expert=one * sparse / layers,
            num_experts=config.experts,
            experts_per_token=config.number("num_experts_per_tok", "num_experts_per_token") if config.experts else 0,
            lm_head=hidden * config.number("vocab_size"),
            mixers=layers - kinds.mixers.count("none") + both,
            mlps=layers - kinds.mlps.count("none"),
            expert_layers=sparse,
            repeated=0,
            recurrent=Recurrent.of(config, kinds.recurrent) if kinds.recurrent else None,
            index=_index(config, layers) if "index_topk" in config else None,
        )
        return _with_shared_blocks(sizes, config) if "num_mem_blocks" in config else sizes

    def experts_read(self, batch: int) -> float:
        """Words of a layer's experts that a step of `batch` tokens reads, if every token chooses at random."""
        if not self.num_experts:
            return 0.0
        chosen = 1 - (1 - self.experts_per_token / self.num_experts) ** batch
        return self.expert * self.num_experts * chosen

    def words(self, batch: int) -> float:
        """Words of all weights that a step of `batch` tokens reads."""
        attention = self.queries + self.keys + self.shared + self.output
        words = self.attention_layers * attention + self.layers * (self.mlp + self.experts_read(batch)) + self.lm_head
        words += self.recurrent.layers * self.recurrent.weights if self.recurrent else 0
        return words + (self.index.layers * self.index.weights if self.index else 0)

    @property
    def parameters(self) -> float:
        """Words of all weights but the embedding and norms."""
        return self.words(1) + self.layers * (self.num_experts * self.expert - self.experts_read(1)) - self.repeated

    @property
    def token(self) -> int:
        """Words that a token takes in the cache of keys and values."""
        return self.attention_layers * self.num_heads_kv * self.cache

    @property
    def index_token(self) -> int:
        """Words that a token takes in the cache of index keys."""
        return self.index.layers * self.index.head_dim if self.index else 0


def _attention(config: Config) -> dict[str, int]:
    """Sizes of an attention layer with keys and values."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    h_kv = config.number("num_key_value_heads", default=heads)
    d = config.number("head_dim", "attention_head_dim", default=hidden // heads)
    gate = hidden * heads * d * (config.get("model_type") in GATED)
    return dict(
        num_heads_kv=h_kv,
        head_dim=d,
        head_dim_v=d,
        cache=2 * d,
        queries=hidden * heads * d + gate,
        keys=2 * hidden * h_kv * d,
        shared=0,
        output=heads * d * hidden,
        values=0,
        value_dim=d,
        key_dim=d,
    )


def _latent_attention(config: Config) -> dict[str, int]:
    """Sizes of an attention layer with latents (MLA)."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    rank, q_rank = config.number("kv_lora_rank"), config.number("q_lora_rank", default=0)
    rope, nope, d_v = (config.number(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    queries = (q_rank or hidden) * heads * (nope + rope)
    if config.get("model_type") == "axk2":  # queries and a gate, of latents before and after their norm
        queries = 2 * q_rank * heads * (nope + rope + d_v)
    gate = hidden * heads * d_v * (config.get("model_type") in GATED)
    return dict(
        num_heads_kv=1,
        head_dim=rank + rope,
        head_dim_v=rank,
        cache=rank + rope,
        queries=queries + gate + heads * nope * rank,
        keys=0,
        shared=hidden * (q_rank + rank + rope),
        output=heads * d_v * (rank + hidden),
        values=heads * d_v * rank,
        value_dim=d_v,
        key_dim=nope + rope,
    )


def _mlp(config: Config) -> tuple[int, int, int]:
    """Weights of an MLP, of one expert, and of what a layer with experts has besides."""
    hidden, experts, shared = config.number("hidden_size"), config.experts, "shared_intermediate_size"
    products = 2 if config.get("mlp_hidden_act") == "relu2" else 3  # without a gate
    width = config.number("intermediate_size", default=0 if experts else None)
    if config.get("block_auto_adjust_ff_dim"):  # LFM 2
        width = int(config.get("block_ffn_dim_multiplier", 1) * int(2 * width / 3))
        width = -(-width // config.number("block_multiple_of")) * config.number("block_multiple_of")
    dense = products * hidden * width
    if shared in config:  # Granite: beside experts, or alone
        dense = products * hidden * config.number(shared)
    if not experts:
        return dense, 0, 0
    latent = config.number("moe_latent_size", default=hidden)
    width = config.number("moe_intermediate_size", default=width)
    one, others = products * latent * width, 2 * hidden * latent * (latent != hidden)
    if shared in config:
        others += dense
    names = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    widths = config.number(*names, default=width)
    count = config.number("n_shared_experts", "num_shared_experts", default=int(names[1] in config))
    return dense, one, others + count * products * hidden * widths + hidden * experts


def _index(config: Config, layers: int) -> Index:
    """The index of DeepSeek V3.2 and those that took it over."""
    hidden, types = config.number("hidden_size"), config.get("indexer_types", ["full"] * layers)
    heads, d = config.number("index_n_heads"), config.number("index_head_dim")
    weights = (config.number("q_lora_rank", default=hidden)) * heads * d + hidden * (d + heads)
    return Index(types.count("full"), heads, d, config.number("index_topk"), weights)


def _with_shared_blocks(sizes: ModelSizes, config: Config) -> ModelSizes:
    """Zamba 2: attention takes the hidden state and the embedding side by side, in blocks that several layers share."""
    hidden, blocks, joined = sizes.hidden_size, config.number("num_mem_blocks"), 2 * sizes.hidden_size
    heads = sizes.num_heads
    d = config.number("attention_head_dim", default=joined // heads)
    queries, keys, output = joined * heads * d, 2 * joined * sizes.num_heads_kv * d, heads * d * hidden
    attention = queries + keys + output
    width, uses = config.number("intermediate_size"), sizes.attention_layers
    adapters = config.number("adapter_rank") * (hidden + 2 * width)
    return sizes._replace(
        head_dim=d,
        head_dim_v=d,
        value_dim=d,
        key_dim=d,
        cache=2 * d,
        queries=queries,
        keys=keys,
        output=output + hidden * hidden,  # of what follows it
        mlp=sizes.mlp + uses * adapters / sizes.layers,
        repeated=max(0, uses - blocks) * (attention + 3 * hidden * width),
    )


def load_model_sizes(path: str | Path) -> ModelSizes:
    """The sizes of a model on disk: its config.json, or the folder that has one. Raises: ValueError; OSError."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not a model's config.json: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a model's config.json: it holds a {type(config).__name__}")
    return ModelSizes.of(config)
