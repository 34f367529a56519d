"""Which Transformers architectures attention "tree" serves, told from a configuration: before anything is run."""

from __future__ import annotations

import math
from typing import NamedTuple

from transformers.cache_utils import get_layer_types_and_kwargs

from .families import compressed, shared_keys
from .families.modeling import INSTEAD, model_class
from .families.table import families_of

LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT_TYPES = ("linear_attention", "conv")
BOTH_TYPES = ("hybrid", "hybrid_sliding")  # attention beside a recurrent layer
PLAIN_TYPES = ("mlp", "moe")  # Transformers calls them "dummy" where it makes a cache
UNSUPPORTED = {
    "blt": "tokens in patches, and several models with caches of their own",
    "doge": "a mask that depends on its keys (dynamic mask attention)",
    "git": "images in the prompt, which see each other without a causal mask",
    "inkling_text": "a bias by positions (position_bias)",
    "inkling2_text": "a bias by positions (position_bias)",
    "jetmoe": "keys that are repeated after they are in the cache",
    "minimax": "recurrent layers whose state only a cache of its own (MiniMaxCache) keeps",
    "mllama_text_model": "layers whose queries see the keys of images only (cross-attention)",
    "moshi": "a window that its cache has and its attention has not",
    "musicgen_decoder": "tokens of several codebooks at each position",
    "musicgen_melody_decoder": "tokens of several codebooks at each position",
    "recurrent_gemma": "recurrent layers that keep their state in themselves, not in the cache",
    "xlstm": "recurrent layers whose state only a cache of its own (xLSTMCache) keeps",
}


class LayerKind(NamedTuple):
    """What a layer keeps of earlier tokens."""

    attends: bool
    """Keys and values."""
    window: int | None = None
    """How many of the last keys a query sees, itself included; None: all."""
    num_states: int = 0
    """Recurrent states: of a convolution, of a state-space model or of linear attention; of a compressor the last
    tokens."""
    block_size: int = 0
    """Tokens of a compressed block: queries see keys of blocks beside those of the window; 0: there are none."""
    source: int | None = None
    """The earlier layer whose keys and values it attends to instead of its own."""


def layers_of(config) -> list[LayerKind]:
    """The layers of a model, in order.

    Raises: ValueError for models whose attention can't be replaced, or whose layers don't work over shards.
    """
    text = config.get_text_config(decoder=True)
    name = type(text).__name__
    if getattr(text, "is_encoder_decoder", False) or getattr(type(text), "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is of an encoder-decoder architecture; attn_implementation='tree' serves decoder-only models. "
            f"{INSTEAD}"
        )
    check_replaceable(model_class(text))
    if reason := UNSUPPORTED.get(text.model_type):
        raise ValueError(f"{name} has {reason}; attn_implementation='tree' does not support it. {INSTEAD}")
    sources = {}
    if shared_keys.holds(text):
        if text.num_kv_shared_layers >= text.num_hidden_layers:
            raise _unknown_layers(name, "layers that attend to keys and values of another model")
        sources = shared_keys.sources(text)
    elif getattr(text, "num_kv_shared_layers", 0) or any(getattr(text, "kv_sharing_modes", ())):
        raise _unknown_layers(name, "layers that share their keys and values")
    kinds, options = get_layer_types_and_kwargs(text)
    names = getattr(text, "layer_types", None) or kinds
    plain = [
        kind == "dummy" and (named in PLAIN_TYPES or i in sources)
        for i, (kind, named) in enumerate(zip(kinds, names, strict=True))
    ]
    own = {kind for family in families_of(config).values() for kind in family.layer_types}
    known = {*LAYER_TYPES, *RECURRENT_TYPES, *BOTH_TYPES, *own}
    others = sorted({kind for kind, is_plain in zip(kinds, plain) if not is_plain and kind not in known})
    if others:
        raise _unknown_layers(name, f"layers of the kind {', '.join(others)}")
    states = [x.get("number_of_states", 0) for x in options]
    if ngrams := getattr(text, "ple_layer_ids", None):  # other layers have no states of n-grams
        states = [n if i + 1 in ngrams else min(n, 1) for i, n in enumerate(states)]
    windows = [None if kind == "chunked_attention" else x.get("sliding_window") for kind, x in zip(kinds, options)]
    attending, sizes = {*LAYER_TYPES, *BOTH_TYPES, *own}, [0] * len(kinds)
    if text.model_type == "deepseek_v4":  # whose layers' caches are of classes of their own
        windows = [text.sliding_window] * len(kinds)
        sizes = [text.compress_rates.get(kind, 0) for kind in kinds]
        states = [compressed.NUM_STATES.get(kind, 0) for kind in kinds]
    layers = [
        LayerKind(kind in attending, window, num_states, size)
        for kind, window, num_states, size in zip(kinds, windows, states, sizes, strict=True)
    ]
    for i, source in sources.items():
        layers[i] = LayerKind(attends=False, window=layers[source].window, source=source)
    return layers


def _unknown_layers(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} has {reason}; attn_implementation='tree' serves {' and '.join(LAYER_TYPES)} layers with keys and "
        f"values of their own, and recurrent ones ({', '.join(RECURRENT_TYPES + BOTH_TYPES)}). {INSTEAD}"
    )


def num_heads_kv(config) -> int:
    """KV heads of a text model's attention; 1 where it keeps latents, or keys that are values, too."""
    config = config.per_layer_config[0]  # all but dots3_note have the same in every layer
    if getattr(config, "kv_lora_rank", None) is not None or config.model_type == "deepseek_v4":
        return 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def size_of_blocks(config) -> int:
    """Between how many tokens all layers of a model have a boundary of blocks; 1: none has blocks."""
    text = config.get_text_config(decoder=True)
    named = [getattr(text, family.block_size) for family in families_of(config).values() if family.block_size]
    return math.lcm(*named, *(layer.block_size or 1 for layer in layers_of(config)))


def attention_windows(config) -> dict[int, int | None]:
    """By number the attention layers of a model that is trained on shards, and their windows.

    A layer that runs several times (hrm_text) has one number.
    Raises: ValueError as `layers_of`.
    """
    layers = layers_of(config)
    num_modules = getattr(config.get_text_config(decoder=True), "num_layers_per_stack", len(layers))
    layers = enumerate(layers[:num_modules])
    return {i: layer.window for i, layer in layers if layer.attends or layer.source is not None}


def check_cached(config) -> None:
    """Raise ``ValueError`` for models that a `TreeCache` does not serve although `layers_of` accepts them."""
    text = config.get_text_config(decoder=True)
    if text.model_type == "diffllama":
        raise ValueError(
            f"{type(text).__name__} has two attention calls for one cache update (differential attention); TreeCache "
            f"does not support it, only training on shards. {INSTEAD}"
        )
    if not any(layer.attends for layer in layers_of(config)):
        raise ValueError(f"{type(text).__name__} has no attention layers: TreeCache has nothing to share. {INSTEAD}")


def check_replaceable(model: type | None) -> None:
    """Raise ``ValueError`` for a class of models that compute their attention themselves, whatever is set."""
    if model is None or model._supports_attention_backend or model._can_set_attn_implementation():
        return
    raise ValueError(
        f"{model.__name__} computes attention in its own code and ignores attn_implementation='tree' (Transformers' "
        f"AttentionInterface). {INSTEAD}, or convert the weights to an architecture that uses the interface"
    )
