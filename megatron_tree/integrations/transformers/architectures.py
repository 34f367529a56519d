"""Which Transformers architectures attention "tree" serves, told from a configuration: before anything is run."""

from __future__ import annotations

from transformers.cache_utils import get_layer_types_and_kwargs

from transformers import AutoModelForCausalLM

LAYER_TYPES = ("full_attention", "sliding_attention")
WINDOW_IN_MASK = ("phimoe",)  # they name their window to the mask only, not to the attention function
REPLACED = ("bloom", "falcon", "mpt")  # own_code.py replaces their attention
INSTEAD = "Use attn_implementation='sdpa' or 'eager', and the model's own cache"
UNSUPPORTED = {
    "blt": "tokens in patches, and several models with caches of their own",
    "doge": "a mask that depends on its keys (dynamic mask attention)",
    "git": "images in the prompt, which see each other without a causal mask",
    "moshi": "a window that its cache has and its attention has not",
}
NOT_CACHED = {
    "diffllama": "two attention calls for one cache update (differential attention)",
    "jetmoe": "keys and values that it repeats, in an order of its own, after they are in the cache",
}


def model_class(config) -> type | None:
    """The causal language model of a configuration; None if Transformers has none, or several."""
    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found if isinstance(found, type) else None


def check_layers(config) -> list[int | None]:
    """The window of every layer of a model: keys that a query sees, itself included; None for all.

    Raises: ValueError for models whose attention can't be replaced, or whose layers don't work over shards.
    """
    text = config.get_text_config(decoder=True)
    name = type(text).__name__
    if getattr(text, "is_encoder_decoder", False):
        raise ValueError(f"{name}: attn_implementation='tree' serves decoder-only models")
    check_replaceable(model_class(text))
    if found := UNSUPPORTED.get(text.model_type):
        raise ValueError(f"{name} has {found}; attn_implementation='tree' does not support it. {INSTEAD}")
    if getattr(text, "slow_but_exact", False) and text.pretraining_tp > 1:
        raise ValueError(
            f"{name} has slow_but_exact=True with pretraining_tp={text.pretraining_tp}, which is not supported: "
            f"set slow_but_exact=False for attn_implementation='tree'. {INSTEAD}"
        )
    kinds, options = get_layer_types_and_kwargs(text)
    others = sorted(set(kinds) - set(LAYER_TYPES))
    if others or getattr(text, "num_kv_shared_layers", 0):
        found = ", ".join(others) or "layers that share their keys and values"
        raise ValueError(
            f"{name} has {found}; attn_implementation='tree' serves {' and '.join(LAYER_TYPES)} layers "
            f"with keys and values of their own. {INSTEAD}"
        )
    return [own.get("sliding_window") for own in options]


def check_cached(config) -> None:
    """Raise ``ValueError`` for models that a `TreeCache` does not serve although `check_layers` accepts them."""
    text = config.get_text_config(decoder=True)
    if found := NOT_CACHED.get(text.model_type):
        raise ValueError(
            f"{type(text).__name__} has {found}; TreeCache does not support it, only training on shards. {INSTEAD}"
        )


def check_replaceable(model: type | None) -> None:
    """Raise ``ValueError`` for a class of models that compute their attention themselves, whatever is set."""
    if model is None or model._supports_attention_backend or model._can_set_attn_implementation():
        return
    raise ValueError(
        f"{model.__name__} computes attention in its own code and ignores attn_implementation='tree' (Transformers' "
        f"AttentionInterface). {INSTEAD}, or convert the weights to an architecture that uses the interface"
    )
