"""Megatron-LM's options for a model, and those in its checkpoints as ours."""

from __future__ import annotations

import argparse
from typing import Any

from ..training.model_options import NEW_MODEL

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
