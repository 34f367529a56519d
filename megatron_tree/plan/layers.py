"""Which layers of a model attend, are recurrent, or both, and which have an MLP or experts, by its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MIXERS = {
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv"), "recurrent"),
    **dict.fromkeys(("full_attention", "attention", "sliding_attention", "chunked_attention"), "attention"),
    "indexed_attention": "attention",
    "hybrid": "both",
    **dict.fromkeys(("mlp", "moe"), "none"),
}
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
RECURRENT = ("mamba_d_state", "ssm_state_size", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache", "lru_width")
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")  # what a config calls the number of experts


class Config:
    """The fields of a model's config.json; those of a text_config count as its own."""

    def __init__(self, values: dict[str, Any]):
        self._values = values | (values.get("text_config") or {})

    def __contains__(self, name: str) -> bool:
        """Whether a field is there and says something: not null, 0, empty or false."""
        return bool(self._values.get(name))

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that is there. Raises: ValueError that names a missing or a wrong one."""
        name = next((name for name in names if self.get(name) is not None), names[0])
        value = self.get(name, default)
        value = default if value == "auto" else value
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"the model's config has {name}={value!r}: a whole number is needed")
        return value

    @property
    def experts(self) -> int:
        """Experts of a layer; 0: none."""
        return next((self.number(name) for name in EXPERTS if name in self), 0)


class Layers(NamedTuple):
    """What each layer has."""

    mixers: tuple[str, ...]
    """"attention", "recurrent", "both" or "none"."""
    mlps: tuple[str, ...]
    """"dense", "sparse" (experts) or "none"."""

    @classmethod
    def of(cls, config: Config) -> Layers:
        """Raises: ValueError for a model that doesn't say which of its layers are recurrent."""
        types = _types(config)
        if unknown := sorted(set(types) - set(MIXERS)):
            raise ValueError(f"the model's config has layers of type {unknown[0]!r}, which are not planned")
        mixers = tuple(MIXERS[kind] for kind in types)
        return cls(mixers, _mlps(config, types))

    @property
    def attending(self) -> int:
        return sum(mixer in ("attention", "both") for mixer in self.mixers)

    @property
    def recurrent(self) -> int:
        return sum(mixer in ("recurrent", "both") for mixer in self.mixers)


def _types(config: Config) -> list[str]:
    """The type of every layer, by one of the names in `MIXERS`."""
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is None and "hybrid_override_pattern" in config:
        types = [PATTERN.get(letter, letter) for letter in config.get("hybrid_override_pattern")]
    if types is not None:
        return list(types)
    layers = range(config.number("num_hidden_layers"))
    attends = _attending(config, len(layers))
    if attends is None:
        if recurrent := [name for name in RECURRENT if name in config]:
            raise ValueError(
                f"the model's config has {recurrent[0]}, but doesn't say which layers are recurrent: add layer_types, "
                f"a list with linear_attention or full_attention for every layer"
            )
        attends = layers
    if attends == "both":
        return ["hybrid"] * len(layers)
    return ["attention" if n in attends else "mamba" for n in layers]


def _attending(config: Config, layers: int) -> Sequence[int] | str | None:
    """Numbers of the layers that attend, in the words of several architectures; None: the config says nothing."""
    listed = config.get("linear_attn_config", {}).get("full_attn_layers")
    if listed is not None:
        return [n - 1 for n in listed]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(name) is not None:
            return config.get(name)
    for name in ("full_attention_interval", "layer_group_size"):
        if name in config:
            return range(config.number(name) - 1, layers, config.number(name))
    if "attn_layer_period" in config:
        return range(config.number("attn_layer_offset"), layers, config.number("attn_layer_period"))
    return "both" if "mamba_d_ssm" in config else None  # Falcon H1


def _mlps(config: Config, types: list[str]) -> tuple[str, ...]:
    layers = range(len(types))
    if {"mlp", "moe"} & set(types) or "hybrid_override_pattern" in config:  # Nemotron H: a layer has one or the other
        return tuple({"mlp": "dense", "moe": "sparse"}.get(kind, "none") for kind in types)
    if "num_mem_blocks" in config:  # Zamba 2
        return tuple("dense" if kind == "hybrid" else "none" for kind in types)
    if not config.experts:
        return ("dense",) * len(types)
    if "mlp_layer_types" in config:
        return tuple(config.get("mlp_layer_types"))
    if "expert_layer_period" in config:
        first, period = config.number("expert_layer_offset"), config.number("expert_layer_period")
        return tuple("sparse" if n % period == first else "dense" for n in layers)
    dense = config.number("first_k_dense_replace", "num_dense_layers", default=0)
    step, only = config.number("decoder_sparse_step", default=1), config.get("mlp_only_layers", ())
    return tuple("sparse" if n >= dense and (n + 1) % step == 0 and n not in only else "dense" for n in layers)
