"""Attention over several ranks as others do it: contenders of `bench train`.

They compute with their own kernels, so they need --compute real, and the planner has no prediction for them.
torch's public `context_parallel` dispatches to CUDA's attention operators only. So the template behind it is called
with torch's flash operator for CPUs: the same loop, exchanges and merges, forward and backward.
It has no tangents. For these the rival is what anyone would write: every rank gathers keys, values and their tangents
and differentiates dense attention of its queries.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.layout import shard_positions
from ...core.merge import state_dtype

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


def all_gather(group, inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """out and its tangent, of a rank's zigzag shares of q, k and v [b, s, h, d] and of their tangents."""
    (q, *kv), (qt, *kvt) = inputs, tangents
    rank, world, s = dist.get_rank(group), dist.get_world_size(group), q.shape[1]
    packed = torch.cat((*kv, *kvt), -1).transpose(0, 1).contiguous()  # [s, b, h, 4 d]
    whole = packed.new_empty((world * s, *packed.shape[1:]))
    dist.all_gather_into_tensor(whole, packed, group=group)
    k, v, kt, vt = whole.transpose(0, 1).chunk(4, -1)
    positions = [shard_positions(s * world, r, world) for r in range(world)]
    seen = positions[rank][:, None] >= torch.cat(positions)
    return torch.func.jvp(functools.partial(_dense, seen=seen), (q, k, v), (qt, kt, vt))


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    dtype = state_dtype(q.dtype)
    queries = q.to(dtype).unflatten(2, (k.shape[2], -1)) * q.shape[-1] ** -0.5
    s = torch.einsum("bqngd,bknd->bngqk", queries, k.to(dtype)).masked_fill(~seen, float("-inf"))
    return torch.einsum("bngqk,bknd->bqngd", s.softmax(-1), v.to(dtype)).flatten(2, 3).to(q.dtype)


JVP = {"all_gather": all_gather}
