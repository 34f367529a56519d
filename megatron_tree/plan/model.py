"""Sizes of a language model that decide how fast it decodes, read from its Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

RECURRENT = ("mamba_d_state", "ssm_state_size", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache", "lru_width")
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")  # what a config calls the number of experts


class ModelSizes(NamedTuple):
    """Words (numbers) of weights and cache. Those of a layer are means over all layers."""

    layers: int
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
    mlp: float
    """Weights of a layer's MLP, or of its shared experts and router."""
    expert: float
    """Weights of one expert, averaged over the layers."""
    num_experts: int
    experts_per_token: int
    lm_head: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> ModelSizes:
        """The sizes of a config.json with the field names of Llama, Qwen, Mixtral or DeepSeek.

        Every layer counts as one of full attention. Raises: ValueError that names a missing field, or a field of
            recurrent layers.
        """
        config = config | config.get("text_config", {})

        def field(name: str, default: int | None = None) -> int:
            value = config.get(name)
            value = default if value is None else value
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"the model's config has {name}={value!r}: a whole number is needed")
            return value

        if recurrent := sorted(name for name in RECURRENT if config.get(name)):
            raise ValueError(f"the model's config has {recurrent[0]}: models with recurrent layers are not planned")
        layers, hidden, heads = field("num_hidden_layers"), field("hidden_size"), field("num_attention_heads")
        attention = (_latent_attention if field("kv_lora_rank", 0) else _attention)(field, hidden, heads)
        experts = next((field(name) for name in EXPERTS if config.get(name)), 0)
        dense = layers if not experts else field("first_k_dense_replace", 0)
        one = 3 * hidden * field("moe_intermediate_size", field("intermediate_size")) if experts else 0
        sparse = (layers - dense) * (field("n_shared_experts", 0) * one + hidden * experts)
        return cls(
            layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            **attention,
            mlp=(dense * 3 * hidden * field("intermediate_size") + sparse) / layers,
            expert=one * (layers - dense) / layers,
            num_experts=experts,
            experts_per_token=field("num_experts_per_tok") if experts else 0,
            lm_head=hidden * field("vocab_size"),
        )

    def experts_read(self, batch: int) -> float:
        """Words of a layer's experts that a step of `batch` tokens reads, if every token chooses at random."""
        if not self.num_experts:
            return 0.0
        chosen = 1 - (1 - self.experts_per_token / self.num_experts) ** batch
        return self.expert * self.num_experts * chosen

    def words(self, batch: int) -> float:
        """Words of all weights that a step of `batch` tokens reads."""
        layer = self.queries + self.keys + self.shared + self.output + self.mlp + self.experts_read(batch)
        return self.layers * layer + self.lm_head


def _attention(field: Callable[..., int], hidden: int, heads: int) -> dict[str, int]:
    """Sizes of an attention layer with keys and values."""
    h_kv, d = field("num_key_value_heads", heads), field("head_dim", hidden // heads)
    return dict(
        num_heads_kv=h_kv,
        head_dim=d,
        head_dim_v=d,
        cache=2 * d,
        queries=hidden * heads * d,
        keys=2 * hidden * h_kv * d,
        shared=0,
        output=heads * d * hidden,
        values=0,
        value_dim=d,
    )


def _latent_attention(field: Callable[..., int], hidden: int, heads: int) -> dict[str, int]:
    """Sizes of an attention layer with latents (MLA)."""
    rank, q_rank = field("kv_lora_rank"), field("q_lora_rank", 0)
    rope, nope, d_v = field("qk_rope_head_dim"), field("qk_nope_head_dim"), field("v_head_dim")
    return dict(
        num_heads_kv=1,
        head_dim=rank + rope,
        head_dim_v=rank,
        cache=rank + rope,
        queries=(q_rank or hidden) * heads * (nope + rope) + heads * nope * rank,
        keys=0,
        shared=hidden * (q_rank + rank + rope),
        output=heads * d_v * (rank + hidden),
        values=heads * d_v * rank,
        value_dim=d_v,
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
