"""What a checkpoint, ours or Megatron-LM's, says about its model and its run, and whether a run fits it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron.core import dist_checkpointing

from .checkpoint_safety import weights_only
from .model import padded_vocab_size

LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
MODEL = (  # options that decide what the weights mean
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "norm_epsilon", "rotary_base", "use_rope_scaling", "rope_scaling_factor", "qk_layernorm", "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)  # fmt: skip
VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by", "tokenizer_model")
OPTIMIZER = ("bf16", "use_distributed_optimizer")
DATA = ("seq_length", "seed")  # a run does not go on with Megatron-LM's data
# Options of Megatron-LM that must have this value. Those that a release lacks count as that.
PLAIN: dict[str, Any] = {
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


class Saved(NamedTuple):
    """What a checkpoint says about itself."""

    folder: str
    options: dict[str, Any]
    """Of `megatron-tree train`."""
    by_megatron_lm: bool
    has_optimizer: bool
    iteration: int
    samples: int
    digest: str | None
    """Of the training data; None if Megatron-LM wrote the checkpoint."""
    scheduler: dict[str, Any] | None
    metadata: dict[str, Any]
    """How Megatron-core cut the state into tensors."""


def options_to_save(args: argparse.Namespace) -> dict[str, Any]:
    """The options that a checkpoint holds."""
    return {name: getattr(args, name) for name in (*LAYOUT, *MODEL, *VOCABULARY, *OPTIMIZER, *DATA)}


def read_saved(checkpoint: str) -> Saved:
    """Read what is not sharded. The index must have been checked (`checkpoint_safety.check_index`).

    Raises: ValueError if it is no checkpoint of a GPT that `megatron-tree train` can build.
    """
    with weights_only():
        common = dist_checkpointing.load_common_state_dict(checkpoint)
    by_megatron_lm = "options" not in common
    if by_megatron_lm and not isinstance(common.get("args"), argparse.Namespace):
        raise ValueError(f"{checkpoint} names no options of its model: neither megatron_tree nor Megatron-LM wrote it")
    return Saved(
        folder=checkpoint,
        options=_of_megatron_lm(common["args"], checkpoint) if by_megatron_lm else common["options"],
        by_megatron_lm=by_megatron_lm,
        has_optimizer="optimizer" in common,
        iteration=common["iteration"],
        samples=getattr(common["args"], "consumed_train_samples", 0) if by_megatron_lm else common["samples"],
        digest=common.get("data_digest"),
        scheduler=common.get("opt_param_scheduler"),
        metadata=dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {},
    )


def _of_megatron_lm(args: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """Megatron-LM's options as ours."""
    for name, needed in PLAIN.items():
        if (value := getattr(args, name, needed)) != needed:
            raise ValueError(
                f"{checkpoint} holds a Megatron-LM model with {name}={value!r}; megatron-tree train and convert know "
                f"{name}={needed!r} only: continue it in Megatron-LM"
            )
    given = {name: getattr(args, name) for name in (*LAYOUT, *MODEL, *OPTIMIZER, *DATA) if hasattr(args, name)}
    if hasattr(args, "layernorm_epsilon"):  # its name from 0.16 on
        given["norm_epsilon"] = args.layernorm_epsilon
    if missing := set(MODEL) - set(given):
        raise ValueError(f"{checkpoint} doesn't say its {min(missing)}: an unknown release of Megatron-LM wrote it")
    if not getattr(args, "group_query_attention", False):
        given["num_query_groups"] = args.num_attention_heads
    of_huggingface = getattr(args, "tokenizer_type", None) == "HuggingFaceTokenizer"
    tokenizer = args.tokenizer_model if of_huggingface else None
    vocabulary = dict(zip(VOCABULARY, (args.padded_vocab_size, 1, tokenizer), strict=True))
    return {**given, **vocabulary}


def check_model(saved: Saved, args: argparse.Namespace) -> None:
    """Raise ValueError, with the option and both values, unless the options build the checkpoint's model."""
    _compare(saved, args, MODEL)
    there, given = padded_vocab_size(saved.options), padded_vocab_size(vars(args))
    if there != given:
        raise ValueError(
            f"vocab_size={args.vocab_size} (padded to {given}), but the vocabulary of {saved.folder} has {there} "
            "tokens with its padding: set vocab_size, or make_vocab_size_divisible_by"
        )


def check_run(saved: Saved, args: argparse.Namespace, digest: str) -> None:
    """Raise ValueError unless a run with these options and these data can continue the checkpoint's."""
    way_out = "use the same value to continue, or --finetune to take the weights alone"
    _compare(saved, args, OPTIMIZER if saved.by_megatron_lm else OPTIMIZER + DATA, way_out)
    if not saved.by_megatron_lm and saved.digest != digest:
        raise ValueError(
            f"the training data are not those that {saved.folder} was trained on: use the same text and data_suffix "
            "(for the standard library the same Python release), or --finetune to take the weights alone"
        )
    if saved.iteration >= args.train_iters:
        raise ValueError(f"train_iters={args.train_iters}, but {saved.folder} has already done {saved.iteration}")
    if saved.metadata.get("distrib_optim_sharding_type") == "dp_reshardable":
        way_out = "use that, save in Megatron-LM with --dist-ckpt-optim-fully-reshardable, or take --finetune"
        _compare(saved, args, LAYOUT[:2], way_out)


def _compare(saved: Saved, args: argparse.Namespace, names: Iterable[str], way_out: str = "use the same value") -> None:
    for name in names:
        there, given = saved.options.get(name), getattr(args, name)
        if there != given:
            raise ValueError(f"{name}={given!r}, but {saved.folder} was written with {there!r}: {way_out}")
