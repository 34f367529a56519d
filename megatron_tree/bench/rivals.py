"""Attention over several ranks that others wrote: contenders of `bench train`.

They compute with their own kernels, so they need --compute real, and the planner has no prediction for them.
torch's public `context_parallel` dispatches to CUDA's attention operators only. So the template behind it is called
with torch's flash operator for CPUs: the same loop, exchanges and merges, forward and backward.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

import torch
from torch import Tensor

_PACKAGE = "torch.distributed.tensor.experimental."
_MODULES = ("_context_parallel._attention", "_attention")  # newer, older
_NEEDED = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options", "_RotateMethod")
_SEQ_DIM = 2  # of [b, h, s, d]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _TorchRing(torch.autograd.Function):
    """Causal attention of a rank's zigzag shares [b, h, s, d]; rotation: "ALL_TO_ALL", a ring, or "ALL_GATHER"."""

    @staticmethod
    def forward(ctx, q, k, v, group, rotation):
        ctx.group, ctx.rotation = group, rotation
        with _rotating(rotation) as template:
            op = lambda q, k, v, is_causal: _flash(q, k, v, 0.0, is_causal)  # noqa: E731
            out, lse = template._templated_ring_attention(group, _SEQ_DIM, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        with _rotating(ctx.rotation) as template:
            *grads, _ = template._templated_ring_attention_backward(
                ctx.group, _SEQ_DIM, _block_backward, dout, "dout", q, k, v, out, lse, True
            )
        return *grads, None, None


def _block_backward(*, dout, query, key, value, out, logsumexp, is_causal):
    return *_flash_backward(dout, query, key, value, out, logsumexp, 0.0, is_causal), None


@functools.cache
def _template():
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(_PACKAGE + name)
            if all(hasattr(module, needed) for needed in _NEEDED):
                return module
    raise LookupError(f"torch {torch.__version__} has no {_PACKAGE}{_MODULES[0]} with {', '.join(_NEEDED)}")


@contextlib.contextmanager
def _rotating(rotation: str) -> Iterator:
    """The module of the template, set to rotate keys in this way."""
    template = _template()
    options, before = template._cp_options, template._cp_options.rotate_method
    options.rotate_method = template._RotateMethod[rotation]
    try:
        yield template
    finally:
        options.rotate_method = before


def torchs(rotation: str, group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a rank's zigzag shares [b, s, h, d]; rotation: as `_TorchRing`'s."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _TorchRing.apply(q, k, v, group, rotation).transpose(1, 2)


def no_torch_ring() -> str | None:
    """Why this torch can't run its context parallelism here, or None."""
    try:
        _template()
    except LookupError as error:
        return str(error)
    return None


TRAIN = {
    name: functools.partial(torchs, how) for name, how in (("torch_ring", "ALL_TO_ALL"), ("torch_gather", "ALL_GATHER"))
}
"""torch's context parallelism, with both ways to move keys and values."""
