"""Which backend was measured fastest on a GPU: the table fastest.json, which `bench kernels` writes.

    {"NVIDIA H200": {"128": "cudnn"}}       the largest head_dim, and the backend of forward and backward

No GPU has been measured yet, so the table that is shipped is empty, and "auto" takes Triton's kernels.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from ..files import read_json

TABLE = Path(__file__).with_name("fastest.json")
NAMES = ("triton", "aten", "cudnn", "fa3", "fa4")


@functools.lru_cache
def table() -> dict[str, dict[str, str]]:
    """{name of a GPU: {largest head_dim: backend}}. Raises ``ValueError`` if the file holds anything else."""
    found = read_json(TABLE.read_bytes())
    for gpu, of_width in found.items():
        for width, name in of_width.items():
            if not width.isdecimal() or name not in NAMES:
                raise ValueError(f"{TABLE}: {gpu}: {width}: {name!r} must be a head_dim and one of {', '.join(NAMES)}")
    return found


def of_device(device: torch.device, head_dim: int) -> tuple[str, ...]:
    """The backend that was fastest on this GPU for the next measured head_dim; () if there is none."""
    return of_gpu(_name(device.index or 0), head_dim) if table() else ()


def of_gpu(gpu: str, head_dim: int) -> tuple[str, ...]:
    """`of_device` by the GPU's name."""
    widths = sorted((int(width), name) for width, name in table().get(gpu, {}).items() if int(width) >= head_dim)
    return tuple(name for _, name in widths[:1])


@functools.lru_cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)
