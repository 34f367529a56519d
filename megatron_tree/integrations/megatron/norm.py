"""A norm in plain torch for Megatron's sequence parallelism without Apex and TransformerEngine.

With `sequence_parallel=True` every tensor-parallel rank normalizes its own part of the sequence, so the gradients of a
norm's weights must be summed over these ranks. Megatron's `finalize_model_grads` does that for parameters that have the
attribute `sequence_parallel`. TransformerEngine's and Apex's norms set it. Megatron's fallback `WrappedTorchNorm`, also
the only RMSNorm of its local spec, refuses sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch

from . import compat
from .spec import SpecCopy

_NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class SequenceParallelNorm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, instead of Megatron's `WrappedTorchNorm`.

    Its parameters have the same names (`weight`, and `bias` of a LayerNorm), so checkpoints fit.

    Args:
        config: TransformerConfig; `normalization`, `sequence_parallel` and
            `layernorm_zero_centered_gamma` (weights around 0 instead of 1) are used.
        hidden_size: length of the last dimension.
        eps: added to the variance.
    Raises: ValueError for another `normalization`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        if config.normalization not in _NORMALIZATIONS:
            raise ValueError(
                f"normalization={config.normalization!r} in the TransformerConfig: SequenceParallelNorm is one of "
                f"{', '.join(_NORMALIZATIONS)}; leave other norms out of use_sequence_parallel_norm"
            )
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size], any floating dtype. Returns the same shape and dtype."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return torch.nn.functional.rms_norm(x, (self.hidden_size,), weight, self.eps)
        return torch.nn.functional.layer_norm(x, (self.hidden_size,), weight, self.bias, self.eps)


def use_sequence_parallel_norm(block_spec: Any) -> Any:
    """A copy of a spec in which SequenceParallelNorm replaces every `WrappedTorchNorm`; fused norms are kept.

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        spec = tree.use_sequence_parallel_norm(tree.use_tree_attention(spec))

    Args:
        block_spec: block submodules, or any nesting of specs as in `use_tree_attention`. It is not changed.
    Returns: the same type; `block_spec` itself if it has no `WrappedTorchNorm` (Apex or TransformerEngine is used).
    Raises: ValueError for the spec of a single layer: Megatron would then add its own final norm.
    """
    base_layer = compat.lookup("megatron.core.transformer.transformer_layer:BaseTransformerLayer")
    module = getattr(block_spec, "module", None)
    if isinstance(module, type) and issubclass(module, base_layer):
        raise ValueError(
            "use_sequence_parallel_norm got the spec of one layer: pass a block spec, which has the final norm in it, "
            "for instance get_gpt_decoder_block_spec(config, use_transformer_engine=False)"
        )
    return _NormWalk()(block_spec)


class _NormWalk(SpecCopy):
    def __init__(self):
        super().__init__()
        self._replaced = compat.lookup("megatron.core.transformer.torch_norm:WrappedTorchNorm")

    def _rebuild(self, node: Any) -> Any:
        return SequenceParallelNorm if node is self._replaced else super()._rebuild(node)
