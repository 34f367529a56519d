"""Descriptors for the copy engine (TMA): keys and values of the forward (`Tiles.boxes`), and dq (`Tiles.fused`)."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import configs

ARCHES = ("sm90", "sm100", "interpreter")


def arguments(k: Tensor, v: Tensor, tiles: configs.Tiles, arch: str) -> dict:
    """K_BOXES and V_BOXES for k and v [b, s, h_kv, d]: None where `tiles` or the GPU has no boxes, where a head has two
    tiles of columns, and where the engine can't take the address or strides: positive multiples of 16 bytes. And
    SPECIALIZED, which needs boxes.
    """
    wanted = tiles.boxes and arch in ARCHES
    descriptors = [_descriptor(x, tiles.n) for x in (k, v)] if wanted else [None]
    if None in descriptors:
        return dict(K_BOXES=None, V_BOXES=None, SPECIALIZED=False)
    return dict(K_BOXES=descriptors[0], V_BOXES=descriptors[1], SPECIALIZED=tiles.specialized and arch == "sm100")


def of_dq(dq: Tensor, tiles: configs.Tiles, arch: str, deterministic: bool) -> TensorDescriptor | None:
    """DQ_BOXES for dq [b, s, h, d]: None where dq has a kernel of its own, for the same reasons."""
    return _descriptor(dq, tiles.m) if tiles.fused and arch in ARCHES and not deterministic else None


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    size, (columns, rest) = x.element_size(), configs.split_head_dim(x.shape[-1])
    strides = list(x.stride())
    for i in reversed(range(x.dim() - 1)):
        if x.shape[i] == 1:  # torch may have put any number there
            strides[i] = strides[i + 1] * x.shape[i + 1]
    if rest or x.shape[-1] * size % 16 or x.data_ptr() % 16 or any(s <= 0 or s * size % 16 for s in strides[:-1]):
        return None
    return TensorDescriptor(x, list(x.shape), strides, [1, rows, 1, columns])
