"""The options of megatron-tree train that build a model: from a Hugging Face configuration and back, and from the
options in a checkpoint of Megatron-LM and back."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import transformers

from ..training.arguments import NEW_MODEL

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # Megatron's


class Family(NamedTuple):
    """Models of one `model_type`."""

    config: type
    plain: dict[str, Any]
    """Fields of the configuration that must have this value."""
    options: dict[str, bool]
    """What distinguishes the family, as options."""


FAMILIES = {
    "llama": Family(
        transformers.LlamaConfig,
        {"attention_bias": False, "mlp_bias": False},
        {"qk_layernorm": False, "add_qkv_bias": False},
    ),
    "qwen2": Family(
        transformers.Qwen2Config, {"use_sliding_window": False}, {"qk_layernorm": False, "add_qkv_bias": True}
    ),
    "qwen3": Family(
        transformers.Qwen3Config,
        {"attention_bias": False, "use_sliding_window": False},
        {"qk_layernorm": True, "add_qkv_bias": False},
    ),
}
KNOWN = "llama (Llama, SmolLM, SmolLM2, TinyLlama), qwen2 (Qwen 2, Qwen 2.5) and qwen3 (dense)"


def options_of(config: Any) -> dict[str, Any]:
    """The options of megatron-tree train that build the model of a Transformers configuration.

    Raises: ValueError that names what can't be converted, and what can.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} can't be converted: the families that can are {KNOWN}")
    family = FAMILIES[kind]
    needed = {**family.plain, "hidden_act": "silu", "quantization_config": None}
    for name, value in needed.items():
        if (found := getattr(config, name, value)) != value:
            raise ValueError(f"{name}={found!r} can't be converted: of {kind} models only those with {name}={value!r}")
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "norm_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        **family.options,
        **_rope_options(config.rope_parameters),
    }


def _rope_options(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    base = {"rotary_base": float(rope["rope_theta"])}
    if kind == "default":
        return base
    if kind != "llama3":
        raise ValueError(
            f"rope_type={kind!r} can't be converted: Megatron's rotary embedding has 'default' and 'llama3'"
        )
    for name, value in LLAMA3.items():
        if rope[name] != value:
            raise ValueError(f"{name}={rope[name]!r} can't be converted: Megatron has {value!r} built in")
    return {**base, "use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def config_of(options: dict[str, Any], *, dtype: str) -> Any:
    """The Transformers configuration of a model that these options build; the inverse of `options_of`.

    dtype: name of the weights' dtype.
    Raises: ValueError for a model that none of the families has.
    """
    special = {name: options[name] for name in ("qk_layernorm", "add_qkv_bias")}
    kinds = [kind for kind, family in FAMILIES.items() if family.options == special]
    if not kinds:
        both = "qk_layernorm=True with add_qkv_bias=True"
        raise ValueError(f"{both} can't be converted: no family has both ({KNOWN})")
    rope = {"rope_type": "default", "rope_theta": options["rotary_base"]}
    if options["use_rope_scaling"]:
        rope |= {"rope_type": "llama3", "factor": options["rope_scaling_factor"], **LLAMA3}
    return FAMILIES[kinds[0]].config(
        num_hidden_layers=options["num_layers"],
        hidden_size=options["hidden_size"],
        intermediate_size=options["ffn_hidden_size"],
        num_attention_heads=options["num_attention_heads"],
        num_key_value_heads=options["num_query_groups"],
        head_dim=options["kv_channels"],
        rms_norm_eps=options["norm_epsilon"],
        vocab_size=options["vocab_size"],
        tie_word_embeddings=not options["untie_embeddings_and_output_weights"],
        rope_parameters=rope,
        max_position_embeddings=options["seq_length"],
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )


PLAIN: dict[str, Any] = {  # those that must have this value; a release that lacks one means that
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,  # its name from 0.16 on
    "multi_latent_attention": False,
    "num_experts": None,
    "mtp_num_layers": None,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
    "hybrid_override_pattern": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
}
VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by", "tokenizer_model")


def options_of_megatron_lm(args: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """The options of a checkpoint's model. args: Megatron-LM's, which it holds.

    Raises: ValueError for a model that can't be converted.
    """
    for name, needed in PLAIN.items():
        if (value := getattr(args, name, needed)) != needed:
            raise ValueError(
                f"{checkpoint} holds a Megatron-LM model with {name}={value!r}, which can't be converted: only "
                f"{name}={needed!r} can"
            )
    wanted = (*(name for name in NEW_MODEL if name not in VOCABULARY), "seq_length", "bf16")
    given = {name: getattr(args, name) for name in wanted if hasattr(args, name)}
    if hasattr(args, "layernorm_epsilon"):  # its name from 0.16 on
        given["norm_epsilon"] = args.layernorm_epsilon
    if missing := set(wanted) - set(given):
        raise ValueError(f"{checkpoint} doesn't say its {min(missing)}: an unknown release of Megatron-LM wrote it")
    if not getattr(args, "group_query_attention", False):
        given["num_query_groups"] = args.num_attention_heads
    of_huggingface = getattr(args, "tokenizer_type", None) == "HuggingFaceTokenizer"
    tokenizer = args.tokenizer_model if of_huggingface else None
    return {**given, **dict(zip(VOCABULARY, (args.padded_vocab_size, 1, tokenizer), strict=True))}


def megatron_lm_options(options: dict[str, Any]) -> list[str]:
    """Megatron-LM's command line for a model of these options."""
    words = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"]
    words += ["--group-query-attention", "--max-position-embeddings", str(options["seq_length"])]
    for name in (*(name for name in NEW_MODEL if name != "tokenizer_model"), "bf16"):
        value, option = options.get(name, False), "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False:
            words += [option, repr(value) if name == "norm_epsilon" else str(int(value))]
    return words
