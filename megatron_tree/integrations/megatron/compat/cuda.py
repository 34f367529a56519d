"""What Megatron's own modules do with CUDA, and its replacement on CPU ranks: (object, attribute, replacement)."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from .release import lookup

Replacements = list[tuple[Any, str, Any]]


def core_replacements() -> Replacements:
    """In megatron.core: the random state, and what its experts do. They complement those in torch itself."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    replacements: Replacements = [
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)),
        (dispatcher, "maybe_move_tensor_to_cpu", _as_on_cpu),
    ]
    # the router of 0.16 asks whether it is None, and only TransformerEngine's import sets it
    if not hasattr(moe_utils, "te_general_gemm"):
        replacements.append((moe_utils, "te_general_gemm", None))
    return replacements


def training_replacements() -> Replacements:
    """In megatron.training, the training loop of Megatron-LM: the assertion that there is CUDA, kernels, a warm-up."""
    initialize = lookup("megatron.training.training:initialize_megatron")
    lookup("megatron.training.training:set_jit_fusion_options")
    training = importlib.import_module("megatron.training.training")
    replacements: Replacements = [
        (training, "initialize_megatron", functools.partial(initialize, allow_no_cuda=True)),
        (training, "set_jit_fusion_options", lambda **sizes: None),
    ]
    kernels = getattr(importlib.import_module("megatron.training.initialize"), "fused_kernels", None)  # up to 0.16
    return [*replacements, (kernels, "load", lambda args: None)] if kernels is not None else replacements


def _as_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
