"""Which fused kernels Megatron-core uses on this machine, and the options that turn them on.

Megatron chooses by what can be imported: TransformerEngine first, then NVIDIA Apex, then plain torch. This module finds
out without importing anything: people build Apex themselves, often without its kernels, and the package of that name on
PyPI is something else.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch

GPU, TE, APEX = "a CUDA GPU", "TransformerEngine", "Apex"
HOW_TO_GET = {
    TE: "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    APEX: "from NVIDIA's sources: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . (pip install apex "
    "gets another package of that name)",
}


class Fusion(NamedTuple):
    """One fused kernel."""

    name: str
    used: bool
    """Whether Megatron-core uses it here once `options` are set."""
    by: str
    """The package that provides it, or what runs instead."""
    needs: tuple[str, ...]
    """What is missing, empty if it is used; `HOW_TO_GET` says where from."""
    options: dict[str, bool]
    """Options of the TransformerConfig to set; empty where Megatron chooses by itself."""


def fusions() -> tuple[Fusion, ...]:
    """All fused kernels that Megatron-core may use around tree attention and RMSNorm, and whether it does."""
    te, amp, gradients = map(_has, ("transformer_engine", "amp_C", "fused_weight_gradient_mlp_cuda"))
    clipping = _fusion(
        "gradient norm and clipping of all tensors at once",
        {TE: te, APEX: amp and _apex("multi_tensor_apply/__init__.py")},
        "one tensor after another",
    )
    # Megatron's own linear layers refuse gradient_accumulation_fusion without Apex's module; TransformerEngine's have
    # their own.
    gradient = _fusion("weight gradients added up in the matrix product", {APEX: gradients, TE: te}, "two steps")
    rope = _fusion("rotary embedding", {TE: te}, "plain torch")
    jit = _fusion("bias, dropout and residual", {}, "plain torch", by="torch.compile")
    return (
        _fusion("FusedAdam", {TE: te, APEX: amp and _apex("optimizers/fused_adam.py")}, "torch's AdamW"),
        clipping,
        _fusion("fused RMSNorm, with TransformerEngine's layers", {TE: te}, "torch's RMSNorm"),
        gradient._replace(options={"gradient_accumulation_fusion": gradient.by == APEX}),
        rope._replace(options={"apply_rope_fusion": rope.used}),
        jit._replace(options={"bias_dropout_fusion": jit.used, "masked_softmax_fusion": False}),
    )


def fusion_options() -> dict[str, bool]:
    """Options for the TransformerConfig: `TransformerConfig(..., **fusion_options())`.

    `bias_activation_fusion`, which depends on the activation, is left out.
    """
    return {name: value for fusion in fusions() for name, value in fusion.options.items()}


def apex_problem() -> str | None:
    """Why the package named apex can't be used; None if it is NVIDIA's, or if there is none."""
    if not _has("apex") or _apex("optimizers/fused_adam.py"):
        return None
    return (
        "a package named apex is installed that is not NVIDIA's, and Megatron takes it for that: it then builds a "
        "FusedLayerNorm that does not exist; pip uninstall apex"
    )


def _fusion(name: str, packages: dict[str, bool], instead: str, *, by: str | None = None) -> Fusion:
    """A kernel that the first installed one of these packages provides, or torch itself if none are named."""
    installed = [package for package, there in packages.items() if there]
    needs = () if _gpu() else (GPU,)
    if packages and not installed:
        needs += (" or ".join(packages),)
    return Fusion(name, not needs, instead if needs else by or installed[0], needs, {})


@functools.lru_cache
def _gpu() -> bool:
    return torch.cuda.is_available()


def _has(module: str) -> bool:
    """Whether a top-level module can be found. It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something without a spec was put into sys.modules
        return True


def _apex(file: str) -> bool:
    """Whether the package apex has this file. Importing a submodule would run another package of that name."""
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:
        return False
    return any((Path(folder) / file).exists() for folder in (spec and spec.submodule_search_locations) or ())
