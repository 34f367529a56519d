"""Mixers with a recurrent state: their kernels, and what Megatron checks of them under context parallelism.

Megatron computes a gated delta net in one forward, which gated_delta_net.py writes anew. Mamba's convolution and
scan have methods of their own, which mamba.py replaces. Both were read in the releases of `READ`.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ....core.config import TREE_CP_COMM_TYPES
from .release import UnsupportedMegatronError, megatron_version

READ = ("0.16", "0.17", "0.18", "0.19")

MIXERS = {
    "megatron.core.ssm.gated_delta_net": "GatedDeltaNet",
    "megatron.core.ssm.gated_delta_net.gdn": "GatedDeltaNet",  # 0.19
    "megatron.core.ssm.mamba_mixer": "MambaMixer",
}
"""Modules of Megatron's mixers, and their names there."""


def mixer_name(module: Any) -> str | None:
    """The name of a mixer of Megatron's that can run on shards of a sequence; None for anything else.

    Raises: UnsupportedMegatronError for a release whose mixers were not read.
    """
    name = MIXERS.get(getattr(module, "__module__", None))
    if name is None or getattr(module, "__qualname__", None) != name:
        return None
    if not megatron_version().startswith(tuple(f"{release}." for release in READ)):
        raise UnsupportedMegatronError(
            f"megatron-core {megatron_version()}: its {name} is not known to compute what it does in "
            f"{', '.join(READ)}, so it can't run on shards of a sequence: use one of these releases, or another "
            "cp_comm_type in this layer"
        )
    return name


def is_recurrent(module: Any) -> bool:
    """Whether a module is a Mamba or GatedDeltaNet layer."""
    return any(cls.__name__ in ("MambaMixer", "GatedDeltaNet") for cls in type(module).__mro__)


def uses_tree(config: Any) -> bool:
    """Whether any layer of this configuration has a `cp_comm_type` with a tree."""
    kinds = getattr(config, "cp_comm_type", None)
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return config.context_parallel_size > 1 and any(kind in TREE_CP_COMM_TYPES for kind in kinds)


def cp_comm_type_of_layer(config: Any, layer_number: int) -> str | None:
    """The `cp_comm_type` of a layer, 1-based over all pipeline stages; of layers after the list's end the last."""
    kinds = config.cp_comm_type
    return kinds[min(layer_number, len(kinds)) - 1] if isinstance(kinds, list) else kinds


def exchanges_heads(mixer: type) -> bool:
    """Whether this mixer has context parallelism of Megatron's own: Mamba, and gated delta nets from 0.18 on."""
    is_mamba = any(cls.__name__ == "MambaMixer" for cls in mixer.__mro__)
    return is_mamba or _named(mixer, "get_parameter_local_cp") is not None


class OneRank:
    """Stands in for the context-parallel group of a mixer of Megatron's, which is to compute as on one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def as_on_one_rank(pg_collection: Any) -> Any:
    """A copy of process groups, with a context-parallel group of one rank."""
    if pg_collection is None:
        return None  # Megatron says that it must be given
    groups = copy.copy(pg_collection)
    groups.cp = OneRank()
    return groups


def _named(mixer: type, name: str) -> Any:
    """What the module of this class, or of a class that it derives from, calls by this name; None without."""
    modules = (vars(sys.modules[cls.__module__]) for cls in mixer.__mro__ if cls.__module__.startswith("megatron."))
    return next((names[name] for names in modules if names.get(name) is not None), None)


def gated_delta_rule(mixer: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The kernel that a GatedDeltaNet calls: fla's, or Megatron's own in torch (`deterministic_mode`)."""
    kind = "torch_chunk_gated_delta_rule" if mixer.config.deterministic_mode else "chunk_gated_delta_rule"
    return getattr(mixer, "gated_delta_rule", None) or _named(type(mixer), kind)  # an attribute from 0.18 on


def l2norm(mixer: Any) -> Callable[[Tensor], Tensor]:
    """fla's norm of queries and keys over their last dimension."""
    return _named(type(mixer), "l2norm")


def chunk_scan(mixer: Any) -> Callable[..., Any]:
    """mamba_ssm's `mamba_chunk_scan_combined`, with the dtype of states that newer releases pass."""
    scan = _named(type(mixer), "mamba_chunk_scan_combined")
    if _named(type(mixer), "MAMBA_HAS_STATE_DTYPE"):
        return functools.partial(scan, state_dtype=mixer.mamba_training_ssm_states_dtype)
    return scan


def short_convolution(mixer: Any, weight: Tensor, bias: Tensor | None, activation: Callable) -> Callable:
    """The causal convolution of every channel and the activation after it, by the kernel that this mixer has.

    weight: [c, 1, width]. bias: [c]. Returns a function [b, t, c] -> [b, t, c].
    """
    width, fuses = weight.shape[-1], mixer.activation in ("silu", "swish") and not mixer.config.deterministic_mode
    if fuses and (kernel := _named(type(mixer), "causal_conv1d_fn")) is not None:  # causal_conv1d's

        def convolve(x: Tensor) -> Tensor:
            x = x.transpose(1, 2).contiguous()
            return kernel(x=x, weight=weight.squeeze(1), bias=bias, activation=mixer.activation).transpose(1, 2)

    elif fuses and (kernel := _named(type(mixer), "causal_conv1d")) is not None:  # fla's

        def convolve(x: Tensor) -> Tensor:
            return kernel(x=x, weight=weight.squeeze(1), bias=bias, activation=mixer.activation)[0]

    else:

        def convolve(x: Tensor) -> Tensor:
            padded = F.pad(x.transpose(1, 2), (width - 1, 0))
            return activation(F.conv1d(padded, weight, bias, groups=len(weight))).transpose(1, 2)

    return convolve


def checked_without_exchange(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """`TransformerConfig.__post_init__` for gated delta nets whose ranks do not exchange heads, and for DSA.

    Megatron refuses context parallelism for the former up to 0.17, and from 0.18 on wants heads that the ranks divide;
    for the latter up to 0.18, and then wants cp_comm_type "allgather". Where all layers have a tree the options of
    these are checked as on one rank; all others as for any attention.
    """

    @functools.wraps(post_init)
    def checked(config: Any) -> None:
        kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
        trees = config.context_parallel_size > 1 and all(kind in TREE_CP_COMM_TYPES for kind in kinds)
        if config.experimental_attention_variant not in ("gated_delta_net", "dsa") or not trees:
            return post_init(config)
        others = copy.copy(config)
        others.experimental_attention_variant = None
        post_init(others)
        world, config.context_parallel_size = config.context_parallel_size, 1
        try:
            post_init(config)
        finally:
            config.context_parallel_size = world

    return checked
