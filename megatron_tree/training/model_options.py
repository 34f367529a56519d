"""The options that say what a model's weights mean. They lie as model.yaml beside its checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..files import read_yaml, whole_file
from .data import VOCAB_SIZE

MODEL_FILE = "model.yaml"
NEW_MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": None,  # None: follows from others
    "num_attention_heads": 8,
    "num_query_groups": None,
    "kv_channels": None,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "qk_layernorm": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "vocab_size": VOCAB_SIZE,
    "make_vocab_size_divisible_by": 64,
    "tokenizer_model": None,
}
"""Of a model that starts from scratch; those that only converted models change are no options of the command line."""


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Set, in place, the model's options that are not given: those of the checkpoint to load, else of a new model.

    Returns: args.
    Raises: ValueError if an option differs from the checkpoint's, or its model.yaml can't be read.
    """
    for name, value in _of_checkpoint(args).items():
        if getattr(args, name, None) not in (None, value):
            raise ValueError(f"{name}={getattr(args, name)!r}, but the model to load has {value!r}: leave it out")
        setattr(args, name, value)
    _set_missing(args, NEW_MODEL)
    follows = {
        "ffn_hidden_size": -(-8 * args.hidden_size // 3 // 32) * 32,
        "num_query_groups": args.num_attention_heads,
        "kv_channels": args.hidden_size // max(1, args.num_attention_heads),
        "lr_decay_iters": args.train_iters,
    }
    _set_missing(args, follows)
    return args


def _set_missing(args: argparse.Namespace, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def _of_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    if args.resume and args.save is not None and (path := Path(args.save) / MODEL_FILE).exists():
        return _read(path)
    return {} if args.load is None else _read(Path(args.load) / MODEL_FILE)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"load={str(path.parent)!r} has no {path.name}: name a folder that --save or megatron-tree convert wrote"
        )
    options = read_yaml(path)
    if not isinstance(options, dict) or options.keys() != NEW_MODEL.keys():
        raise ValueError(f"{path} must hold {', '.join(NEW_MODEL)}, and no other options")
    for name, default in NEW_MODEL.items():
        kind = int if default is None else type(default)
        if name != "tokenizer_model" and type(options[name]) is not kind:
            raise ValueError(f"{path}: {name}={options[name]!r} must be of type {kind.__name__}")
    return options


def write_model(args: argparse.Namespace, folder: str | Path) -> None:
    """Write the model.yaml of these completed options."""
    import yaml

    with whole_file(Path(folder) / MODEL_FILE) as part:
        part.write_text(yaml.safe_dump(model_options(args), sort_keys=False))


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the model among completed options."""
    return {name: getattr(args, name) for name in NEW_MODEL}
