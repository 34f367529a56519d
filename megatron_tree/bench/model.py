"""The model of `bench generate` and `bench serve`: a random Llama of given sizes, SmolLM2, or a user's."""

from __future__ import annotations

import torch

from ..integrations.transformers import models
from ..integrations.transformers.families.rope import num_positions
from ..units import parse_count

SIZES = {"layers": 4, "hidden_size": 512, "heads": 16, "kv_heads": 4, "head_dim": 128}


def add_model(parser) -> None:
    """Its options."""
    parser.add_argument("--model", default="tiny", help="tiny: a Llama with random weights (the default); smollm2; or "
        "a folder with a Transformers model")  # fmt: skip
    for name, value in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=parse_count, default=value, help="of tiny (default: %(default)s)")


def check_model(args, positions: int) -> None:
    """Raise ``ValueError`` for a model that is not there, has fewer positions, or an odd number of heads."""
    if args.model == "tiny":
        if args.heads % args.kv_heads:
            raise ValueError(f"--kv-heads {args.kv_heads}: must divide --heads {args.heads}")
        return
    limit = num_positions(models.load_config(models.model_folder(args.model)).get_text_config(decoder=True))
    if limit is not None and positions > limit:
        raise ValueError(f"--prompt-tokens and --new-tokens: {positions} exceed the {limit} positions of {args.model}")


def model_text(args) -> str:
    """The model in words."""
    shape = f" ({args.layers} layers, {args.heads}/{args.kv_heads} heads x {args.head_dim})"
    return f"{args.model}{shape if args.model == 'tiny' else ''}, fp32"


def load_model(args, positions: int):
    """The model in fp32 on this rank, with random weights for `positions` tokens if it is "tiny"."""
    if args.model == "tiny":
        return models.random_llama(**{name: getattr(args, name) for name in SIZES}, positions=positions)
    return models.load_model(models.model_folder(args.model), torch.float32)
