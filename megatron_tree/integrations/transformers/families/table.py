"""The families of models that do more than causal attention of every token to the keys before it: one table.

A model calls `tree_attention` with the mask that `tree_mask` made (attention.py), and most models need nothing else.
Where one computes across tokens in a function of its own, an adapter of its family's file takes the place of that
function, and calls it where there are neither a `TreeCache` nor a batch on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from transformers.cache_utils import get_layer_types_and_kwargs

from . import compressed, gated_pools, images, indexed, latent, pooled, recurrent, rope, shared_keys, zaya
from .modeling import INSTEAD, modeling_file, patch


@dataclass(frozen=True, kw_only=True)
class Family:
    models: tuple[str, ...] = ()
    """The model types, of the text part where there are several parts."""
    holds: Callable[[object], object] = lambda config: False
    """Whether a configuration is one of the family, if its model type does not tell."""
    patches: Mapping[str, Callable] = field(default_factory=dict)
    """What takes the place of functions of the modeling file, see `patch`: adapter(original, ...)."""
    cache_patches: Mapping[str, Callable] = field(default_factory=dict)
    """Likewise, for runs over a `TreeCache` only."""
    mixer_patches: Mapping[str, Callable] = field(default_factory=dict)
    """Likewise, of recurrent layers (mixers.py)."""
    check: Callable[[object], None] = lambda config: None
    """Raises ``ValueError`` for a configuration whose model the adapters don't know."""
    layer_types: tuple[str, ...] = ()
    """Types of layers that only these models have."""
    has_index: bool = False
    """Whether layers have an index, whose weights are whole on every rank."""
    block_size: str = ""
    """The option with the number of tokens of a block, each of which lies in one page of a cache."""
    not_captured: str = ""
    """Why a step can't be captured in a CUDA graph."""


def _has_latents(config) -> bool:
    text = config.get_text_config(decoder=True)
    return getattr(text.per_layer_config[0], "kv_lora_rank", None) is not None


def _has_states(config) -> bool:
    _, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return any(x.get("number_of_states") for x in options)


FAMILIES: dict[str, Family] = {
    # delta rules, state-space models, short convolutions: Qwen3-Next, Kimi Linear, Mamba, Jamba, LFM2, ...
    "recurrent": Family(
        holds=_has_states,
        mixer_patches={
            **recurrent.in_runs(
                {
                    # all of these models, and LFM2, LFM3
                    "causal_conv1d_fn": recurrent.convolution,
                    # Qwen3-Next, Qwen3.5, OLMo Hybrid
                    "torch_chunk_gated_delta_rule": recurrent.delta_rule,
                    # Kimi Linear, Bailing
                    "chunk_kimi_delta_attention": recurrent.delta_rule,
                    # Mamba 2, Bamba, Falcon-H1, Granite, Nemotron-H, Zamba 2
                    "mamba2_chunk_scan": recurrent.mamba2,
                    # Mamba, Falcon Mamba, Jamba, Zamba
                    "mamba_selective_scan": recurrent.mamba1,
                }
            ),
            "mamba2_split_conv1d_scan_combined": recurrent.leave_unfused,
            "mamba_inner_fn": recurrent.leave_unfused,
        },
        not_captured="recurrent layers have states of their own for every run",
    ),
    # their scan of several tokens begins with a state of zeros, whatever the cache has
    "scan from zeros": Family(models=("jamba", "zamba")),
    "zaya": Family(
        models=("zaya",), mixer_patches=recurrent.in_runs({"ZayaCCAProjection.forward": zaya.cca_projection})
    ),
    # "longrope" and "dynamic" NTK, of any model
    "rope by length": Family(
        holds=rope.rope_rule,
        patches={"*RotaryEmbedding.forward": rope.rotate},
        not_captured="the model's rotary embedding depends on the rows' lengths",
    ),
    # multi-latent attention: DeepSeek V2, V3 and relatives
    "latent": Family(holds=_has_latents, cache_patches={"*.expand_kv": latent.hand_on}),
    # queries see the keys that an index selects: DeepSeek V3.2 and relatives
    "indexed": Family(
        models=("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text"),
        patches={"*Indexer.forward": indexed.select},
        has_index=True,
        layer_types=("indexed_attention",),
        not_captured="layers with an index select keys, whose number on a rank depends on their scores",
    ),
    # queries see the blocks of keys that an index selects, and embeddings are of n-grams: Qwen4-Exp
    "pooled": Family(
        models=("qwen4_exp_text",),
        patches={
            "Qwen4ExpText*Indexer.forward": pooled.select,
            "Qwen4ExpText*NGramEmbedding.forward": pooled.embed_ngrams,
            "Qwen4ExpText*PLELayer._short_conv": pooled.convolution,
        },
        check=pooled.check_model,
        block_size="indexer_compress_ratio",
        has_index=True,
        layer_types=("indexed_attention",),
        not_captured="layers with an index select keys, whose number on a rank depends on their scores",
    ),
    # likewise, whose keys are made with gates, and attention makes its own mask: GLM-5.3
    "gated pools": Family(
        models=("glm5_next_text",),
        patches={
            "create_recurrent_attention_mask": gated_pools.pool_mask,
            "apply_mask_to_padding_states": gated_pools.leave_tokens,
            "Glm5NextTextIndexer.forward": gated_pools.select,
            "Glm5NextTextAttention.build_attention_mask_from_topk": gated_pools.hand_on,
        },
        check=gated_pools.check_model,
        block_size="index_kpool",
        has_index=True,
        layer_types=("indexed_attention",),
        not_captured="layers with an index select keys, whose number on a rank depends on their scores",
    ),
    # keys of compressed blocks of tokens beside those of a window: DeepSeek V4
    "compressed": Family(
        models=("deepseek_v4",),
        patches={
            "DeepseekV4Attention.forward": compressed.run_layer,
            "DeepseekV4*Compressor.forward": compressed.compress,
            "DeepseekV4Indexer.forward": compressed.select,
        },
        check=compressed.check_model,
        has_index=True,
        layer_types=("compressed_sparse_attention", "heavily_compressed_attention"),
        not_captured="blocks of tokens end at other steps in each row",
    ),
    # queries see their own chunk of positions: Llama 4 (chunked.py)
    "chunked": Family(
        models=("llama4_text",),
        layer_types=("chunked_attention",),
        not_captured="layers whose queries see their chunk only depend on the rows' lengths",
    ),
    # the last layers read the keys and values of earlier ones: Gemma 3n, Gemma 4
    "shared keys": Family(
        holds=shared_keys.holds,
        not_captured="layers read other layers' keys, in more attention calls than are captured",
    ),
    "fewer inputs": Family(
        models=("gemma4_text", "gemma4_unified_text"),
        patches={"*TextModel._maybe_slice_kv_shared_inputs": shared_keys.all_inputs},
    ),
    # the window is named to the mask only, not to the attention function
    "window in mask": Family(models=("phimoe",)),
    # tokens of an image see each other in both directions: Gemma 3 (images.py)
    "joined images": Family(models=("gemma3_text",)),
    # images in batches on shards
    "images": Family(
        holds=lambda config: config.model_type in images.MODELS,
        patches={"*.get_*_features": images.features_of_shard},
    ),
}
BY_MODEL = {model: name for name, family in FAMILIES.items() for model in family.models}


def families_of(config) -> dict[str, Family]:
    """The families of a model, by name."""
    own = BY_MODEL.get(config.get_text_config(decoder=True).model_type)
    return {name: family for name, family in FAMILIES.items() if name == own or family.holds(config)}


def check_pages(config, page_size: int) -> None:
    """Raise ``ValueError`` unless every block of tokens of a model lies in one page of a cache."""
    for name in filter(None, (family.block_size for family in families_of(config).values())):
        text = config.get_text_config(decoder=True)
        if page_size % (size := getattr(text, name)):
            raise ValueError(
                f"page_size={page_size}: {type(text).__name__} selects blocks of {size} tokens ({name}), which have to "
                "divide it"
            )


def patch_model(config, *, cached: bool = False) -> None:
    """Put the adapters of a model's families in their places; a second call changes nothing.

    cached: also those for a `TreeCache`.
    Raises: ValueError for a model that has not the functions that its family has.
    """
    parts = config, config.get_text_config(decoder=True)
    for name, family in families_of(config).items():
        family.check(parts[1])
        patches = {**family.patches, **(family.cache_patches if cached else {})}
        found = set().union(*(patch(modeling_file(part), patches) for part in parts)) if patches else set()
        if lacking := sorted(patches.keys() - found):
            raise ValueError(
                f"{type(parts[1]).__name__}: its model has no {', '.join(lacking)}, which all that are known with such "
                f"layers ({name}) have; attn_implementation='tree' does not know how it computes. {INSTEAD}"
            )
