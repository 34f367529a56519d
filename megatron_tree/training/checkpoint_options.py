"""What a checkpoint says about its model and its run, written by us or by Megatron-LM, and whether a run fits it."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from megatron.core import dist_checkpointing

from .checkpoint_safety import weights_only

LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
MODEL: dict[str, Any] = {  # options that decide what the weights mean; with the value of checkpoints that don't name it
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")),
    "softmax_type": "vanilla",
    "kv_channels": None,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "qk_layernorm": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
}
VOCABULARY: dict[str, Any] = {"vocab_size": 257, "make_vocab_size_divisible_by": 64, "tokenizer_model": None}
RUN = ("bf16", "use_distributed_optimizer", "seq_length", "seed", "window_size")
RUN_OF_MEGATRON_LM = (
    "bf16",
    "use_distributed_optimizer",
    "window_size",
)  # its data and random states are not continued
# Options of Megatron-LM that must have this value. Those that a release lacks count as that.
PLAIN: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None,),
    "no_rope_freq": (None,),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),  # its name from 0.16 on
    "multi_latent_attention": (False,),
    "num_experts": (None,),
    "mtp_num_layers": (None,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
    "window_attn_skip_freq": (None,),
}


class Saved(NamedTuple):
    """A checkpoint's account of itself."""

    folder: str
    options: dict[str, Any]
    """Of megatron-tree train."""
    by_megatron_lm: bool
    has_optimizer: bool
    iteration: int
    samples: int
    digest: str | None
    """Of the training data; None in a checkpoint of Megatron-LM's."""
    world_size: int | None
    scheduler: dict[str, Any] | None
    metadata: dict[str, Any] | None
    """How Megatron-LM cut the state into tensors; None: as we do."""


def options_to_save(args: argparse.Namespace) -> dict[str, Any]:
    """The options that a checkpoint holds."""
    return {name: getattr(args, name) for name in (*LAYOUT, *MODEL, *VOCABULARY, *RUN)}


def read_saved(checkpoint: str) -> Saved:
    """Read what is not sharded. The index must have been checked (`checkpoint_safety.check_index`).

    Raises: ValueError if it is no checkpoint of a GPT that megatron-tree train can build.
    """
    with weights_only():
        common = dist_checkpointing.load_common_state_dict(checkpoint)
    by_megatron_lm = "options" not in common
    if by_megatron_lm and not isinstance(common.get("args"), argparse.Namespace):
        raise ValueError(f"{checkpoint} names no options of its model: neither train nor Megatron-LM wrote it")
    options = _of_megatron_lm(common["args"], checkpoint) if by_megatron_lm else common["options"]
    options = {**MODEL, **VOCABULARY, **options}
    if options["kv_channels"] is None:
        options["kv_channels"] = options["hidden_size"] // options["num_attention_heads"]
    samples = (
        getattr(common["args"], "consumed_train_samples", 0) if by_megatron_lm else common["consumed_train_samples"]
    )
    return Saved(
        folder=checkpoint,
        options=options,
        by_megatron_lm=by_megatron_lm,
        has_optimizer="optimizer" in common,
        iteration=common["iteration"],
        samples=samples,
        digest=common.get("data_digest"),
        world_size=common.get("world_size"),
        scheduler=common.get("opt_param_scheduler"),
        metadata=(dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
        if by_megatron_lm
        else None,
    )


def _of_megatron_lm(args: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """Megatron-LM's options as ours."""
    for name, allowed in PLAIN.items():
        if (value := getattr(args, name, allowed[0])) not in allowed:
            raise ValueError(
                f"{checkpoint} holds a model of Megatron-LM with {name}={value!r}; megatron-tree train and "
                f"megatron_tree.convert know {name}={allowed[0]!r} only: continue it in Megatron-LM"
            )
    given = {name: getattr(args, name) for name in (*MODEL, *LAYOUT, *RUN) if hasattr(args, name)}
    if hasattr(args, "layernorm_epsilon"):  # its name from 0.16 on
        given["norm_epsilon"] = args.layernorm_epsilon
    if missing := set(MODEL) - {"softmax_type"} - set(given):
        raise ValueError(
            f"{checkpoint} says nothing about {min(missing)}: it was written by a release that is not known"
        )
    if not getattr(args, "group_query_attention", False):
        given["num_query_groups"] = args.num_attention_heads
    huggingface = getattr(args, "tokenizer_type", None) == "HuggingFaceTokenizer"
    tokenizer = {"tokenizer_model": args.tokenizer_model if huggingface else None}
    return {**given, "vocab_size": args.padded_vocab_size, "make_vocab_size_divisible_by": 1, **tokenizer}


def check_model(saved: Saved, args: argparse.Namespace) -> None:
    """Raise ValueError, with the option and both values, unless the options build the checkpoint's model."""
    _compare(saved, args, MODEL)
    rows, given = _padded(saved.options), _padded(vars(args))
    if rows != given:
        raise ValueError(
            f"vocab_size={args.vocab_size} (padded to {given}), but the vocabulary of {saved.folder} has {rows} tokens "
            "with its padding: set vocab_size, or make_vocab_size_divisible_by"
        )


def _padded(options: dict[str, Any]) -> int:
    unit = options["make_vocab_size_divisible_by"]
    return -(-options["vocab_size"] // unit) * unit


def check_run(saved: Saved, args: argparse.Namespace, digest: str) -> None:
    """Raise ValueError unless a run with these options and these data can continue the checkpoint's."""
    _compare(saved, args, RUN_OF_MEGATRON_LM if saved.by_megatron_lm else RUN, "use the same value to continue, or "
             "--finetune to take the weights alone")  # fmt: skip
    if not saved.by_megatron_lm and saved.digest != digest:
        raise ValueError(
            f"the training data are not those that {saved.folder} was trained on: use the same text and data_suffix "
            "(for the standard library the same Python release), or --finetune to take the weights alone"
        )
    if saved.iteration >= args.train_iters:
        raise ValueError(f"train_iters={args.train_iters}, but {saved.folder} has already done {saved.iteration}")
    kind = (saved.metadata or {}).get("distrib_optim_sharding_type", "fully_reshardable")
    moved = [name for name in LAYOUT[:2] if saved.options[name] != getattr(args, name)]
    if kind == "dp_reshardable" and moved:
        raise ValueError(
            f"{moved[0]}={getattr(args, moved[0])}, but the optimizer of {saved.folder} was saved for "
            f"{saved.options[moved[0]]}: use that, save in Megatron-LM with --dist-ckpt-optim-fully-reshardable, or "
            "take the weights alone with --finetune"
        )


def _compare(saved: Saved, args: argparse.Namespace, names: Any, way_out: str = "use the same value") -> None:
    for name in (name for name in names if name in saved.options):
        there, given = saved.options[name], getattr(args, name)
        if there != given:
            raise ValueError(f"{name}={given!r}, but {saved.folder} was written with {there!r}: {way_out}")
