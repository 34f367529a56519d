"""Small operations that follow the device, and not the backend of a call: on GPUs each is one Triton kernel, elsewhere
the operations of merge.py."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from .. import merge

ACCELERATORS = ("cuda",)  # torch's name for CUDA and ROCm devices, on which Triton's kernels run


def triton_for(x: Tensor) -> ModuleType | None:
    """Triton's module for a small operation on x, or None."""
    return _triton() if x.device.type in ACCELERATORS and x.dtype != torch.float64 else None


@functools.lru_cache
def _triton() -> ModuleType | None:
    """None where Triton is not installed."""
    return importlib.import_module(".triton", __package__) if importlib.util.find_spec("triton") else None


def merge_packed(packed: Tensor) -> Tensor:
    """Equation (4): merge packed states [n, ..., d_v + 1] (fp32 or fp64), in order, to one [..., d_v + 1]."""
    triton = triton_for(packed)
    return triton.merge_packed(packed.contiguous()) if triton else merge.merge_packed(packed)


def merge_into(acc: merge.State, part: merge.State) -> None:
    """Merge the state `part` into the state `acc`, in place."""
    if triton := triton_for(acc[1]):
        triton.merge_into(*acc, *part)
    else:
        merge.merge_into(acc, part)


class StateReducer(merge.StateReducer):
    """The same on its device."""

    def merge(self, parts: Tensor) -> Tensor:
        """Merge [n, ..., d + w] from the wire to [..., d + 1] in `dtype`, in order."""
        triton = triton_for(parts) if self.dtype == torch.float32 else None
        return triton.merge_packed(parts.contiguous()) if triton else super().merge(parts)


def write_eight_bits(slots: Tensor, k: Tensor, v: Tensor, pages, scales, largest: float) -> bool:
    """Put tokens k [n, h, d] and v [n, h, d_v] into slots int64 [n] of the pages of keys and of values, in int8 or fp8,
    and their scales beside them. Returns whether the device has a kernel that does so; if not, nothing was done."""
    triton = triton_for(k)
    if triton is None or (pages[0].dtype != torch.int8 and not _has_fp8(k.device)):
        return False
    triton.write_eight_bits(slots, k, v, pages, scales, largest)
    return True


def _has_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or (not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9))
