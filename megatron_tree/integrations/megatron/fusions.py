"""The options of Megatron-core's fused kernels that this machine can run."""

from __future__ import annotations

import importlib.util

import torch


def fusion_options() -> dict[str, bool]:
    """Options for the TransformerConfig: `TransformerConfig(..., **fusion_options())`.

    `bias_activation_fusion`, which depends on the activation, is left out.
    """
    gpu = torch.cuda.is_available()
    return {
        # Megatron's own linear layers refuse it without Apex's module; TransformerEngine's have their own
        "gradient_accumulation_fusion": gpu and _has("fused_weight_gradient_mlp_cuda"),
        "apply_rope_fusion": gpu and _has("transformer_engine"),
        "bias_dropout_fusion": gpu,
        "masked_softmax_fusion": False,
    }


def _has(module: str) -> bool:
    """Whether a module can be found. It is not imported."""
    return importlib.util.find_spec(module) is not None
