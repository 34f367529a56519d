"""Which fused kernels Megatron-core uses on this machine, and the options that turn them on.

Megatron chooses by what can be imported: TransformerEngine first, then NVIDIA Apex, then plain torch. Here the same is
found out without importing anything: Apex is an optional package that people build themselves, often without its
kernels, and the package of that name on PyPI is something else.
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
    """What brings it; where it is not used: what runs instead."""
    needs: tuple[str, ...]
    """What is missing, empty where it is used; `HOW_TO_GET` says where from."""
    options: dict[str, bool]
    """Options of the TransformerConfig to set, True or False; empty where Megatron chooses by itself."""


def fusions(*, normalization: str = "LayerNorm") -> tuple[Fusion, ...]:
    """All fused kernels that Megatron-core may use around tree attention, and whether it does.

    Args:
        normalization: "LayerNorm" or "RMSNorm", as in the TransformerConfig; Apex's fused norm in Megatron's own layers
            is a LayerNorm.
    Raises: ValueError for another `normalization`.
    """
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"normalization={normalization!r} is unknown: choose 'LayerNorm' or 'RMSNorm'")
    return (
        _optimizer(),
        _multi_tensor(),
        _norm(normalization),
        _weight_gradient(),
        _rope(),
        _jit(),
    )


def fusion_options(*, normalization: str = "LayerNorm") -> dict[str, bool]:
    """Options for the TransformerConfig: `TransformerConfig(..., **fusion_options())`.

    Only of fusions that need more than the GPU: `bias_activation_fusion`, which depends on the activation, is left out.
    """
    chosen = {}
    for fusion in fusions(normalization=normalization):
        chosen |= fusion.options
    return chosen


def apex_problem() -> str | None:
    """Why the package named apex can't be used, or None: it is NVIDIA's, or there is none."""
    if not _has("apex") or _apex("optimizers/fused_adam.py"):
        return None
    return (
        "a package named apex is installed that is not NVIDIA's, and Megatron takes it for that: it then builds a "
        "FusedLayerNorm that does not exist; pip uninstall apex"
    )


def _has(module: str) -> bool:
    """Whether a top-level module can be found. It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something without a spec was put into sys.modules
        return True


def _apex(*files: str) -> bool:
    """Whether the package apex has all of these files. Importing a submodule would run another package of that name."""
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:
        return False
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return any(all((Path(folder) / file).exists() for file in files) for folder in folders)


@functools.lru_cache
def _gpu() -> bool:
    return torch.cuda.is_available()


def _missing(*needs: tuple[bool, str]) -> tuple[str, ...]:
    return tuple(what for there, what in ((_gpu(), GPU), *needs) if not there)


def _by_package(name: str, apex_files: tuple[str, ...], apex_kernels: str, instead: str) -> Fusion:
    """A fusion from TransformerEngine or Apex, whichever is installed, that Megatron uses without an option."""
    te, apex = _has("transformer_engine"), _apex(*apex_files) and _has(apex_kernels)
    by = "TransformerEngine" if te else "Apex" if apex else instead
    needs = _missing((te or apex, f"{TE} or {APEX}"))
    return Fusion(name, not needs, by if not needs else instead, needs, {})


def _optimizer() -> Fusion:
    return _by_package("FusedAdam", ("optimizers/fused_adam.py",), "amp_C", "torch's AdamW")


def _multi_tensor() -> Fusion:
    name = "gradient norm and clipping of all tensors at once"
    return _by_package(name, ("multi_tensor_apply/__init__.py",), "amp_C", "one tensor after another")


def _norm(normalization: str) -> Fusion:
    files = ("normalization/fused_layer_norm.py",)
    if _has("transformer_engine") or normalization == "RMSNorm":
        te = _has("transformer_engine")
        needs = _missing((te, TE))
        name = f"fused {normalization}, with TransformerEngine's layers"
        return Fusion(name, not needs, "TransformerEngine" if not needs else f"torch's {normalization}", needs, {})
    apex = _apex(*files) and _has("fused_layer_norm_cuda")
    persistent = _apex("contrib/layer_norm/layer_norm.py") and _has("fast_layer_norm")
    needs = _missing((apex, APEX))
    by = "Apex" + ", one persistent kernel for the usual hidden sizes" * persistent
    options = {"persist_layer_norm": not needs and persistent}
    return Fusion("fused LayerNorm", not needs, by if not needs else "torch's LayerNorm", needs, options)


def _weight_gradient() -> Fusion:
    """Only Apex has the module that Megatron's own linear layers ask for; TransformerEngine's layers have their own."""
    te, apex = _has("transformer_engine"), _has("fused_weight_gradient_mlp_cuda")
    needs = _missing((te or apex, f"{APEX}, or {TE} with its own layers"))
    by = "Apex" if apex else "TransformerEngine, in its own layers"
    name = "weight gradients added up in the matrix product"
    # Megatron's own layers refuse the option without Apex's module.
    options = {"gradient_accumulation_fusion": not needs and apex}
    return Fusion(name, not needs, by if not needs else "two steps", needs, options)


def _rope() -> Fusion:
    needs = _missing((_has("transformer_engine"), TE))
    by = "TransformerEngine" if not needs else "plain torch"
    return Fusion("rotary embedding", not needs, by, needs, {"apply_rope_fusion": not needs})


def _jit() -> Fusion:
    needs = _missing()
    by = "torch.compile" if not needs else "plain torch"
    options = {"bias_dropout_fusion": not needs, "masked_softmax_fusion": False}  # tree attention has its own softmax
    return Fusion("bias, dropout and residual", not needs, by, needs, options)
