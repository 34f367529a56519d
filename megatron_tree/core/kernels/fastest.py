"""What was measured to be fastest on a GPU: the shipped table, and over it the user's own.

    {"NVIDIA H200": {"128": "cudnn",                 the largest head_dim, and the backend of forward and backward
                     "dkdv 128": [64, 128, 8, 3]}}   a Triton kernel of this head_dim, and its tiles (triton/configs.py)

Shipped is fastest.json, here; no GPU has been measured by us yet, so it is empty. `bench kernels` and `calibrate` write
the user's, fastest.json in `files.cache_folder`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

from ..config import integers
from ..files import cache_folder, read_json, whole_file

TABLE = Path(__file__).with_name("fastest.json")
NAMES = ("triton", "aten", "cudnn", "fa3", "fa4")


def user_table() -> Path:
    """Where the user's own table is, if there is one."""
    return cache_folder() / TABLE.name


@functools.lru_cache
def table() -> dict[str, dict[str, str | list[int]]]:
    """By the name of a GPU, what this module's docstring shows. Raises ``ValueError`` if a file holds anything else."""
    return _over(_read(TABLE), _read(user_table()) if user_table().is_file() else {})


def _over(table: dict, other: dict) -> dict:
    return table | {gpu: table.get(gpu, {}) | entries for gpu, entries in other.items()}


def keep(gpu: str, entries: dict[str, str | list[int]]) -> Path:
    """Put what was measured on a GPU into the user's own table, backends in the place of all earlier ones; returns its
    path."""
    path = user_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    others = _read(path) if path.is_file() else {}
    if any(map(str.isdecimal, entries)):
        others[gpu] = {name: x for name, x in others.get(gpu, {}).items() if not name.isdecimal()}
    with whole_file(path) as part:
        part.write_text(json.dumps(_over(others, {gpu: entries}), indent=1) + "\n")
    table.cache_clear()
    return path


def _read(path: Path) -> dict[str, dict[str, str | list[int]]]:
    try:
        content = read_json(path.read_bytes())
        for gpu, entries in content.items():
            for name, value in entries.items():
                *kernel, width = name.rsplit(" ", 1)
                known = len(integers(value, 1) or ()) == 4 if kernel else value in NAMES
                if not width.isdecimal() or not known:
                    wanted = f"a head_dim and one of {', '.join(NAMES)}, or a kernel, a head_dim and four tile sizes"
                    raise ValueError(f"{gpu}: {name}: {value!r} must be {wanted}")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return content


def for_device(device: torch.device, head_dim: int) -> tuple[str, ...]:
    """The backend that was fastest on this GPU for the next measured head_dim; () if there is none."""
    return for_gpu(name_of(device), head_dim) if table() else ()


def for_gpu(gpu: str, head_dim: int) -> tuple[str, ...]:
    """`for_device` by the GPU's name."""
    names = {int(width): name for width, name in table().get(gpu, {}).items() if width.isdecimal()}
    return tuple(names[width] for width in sorted(names) if width >= head_dim)[:1]


def knows(device: torch.device) -> bool:
    """Whether anything was measured on this GPU."""
    return bool(table()) and name_of(device) in table()


def gpu_of(device: torch.device) -> str | None:
    """The name of a GPU of which something may have been measured."""
    return name_of(device) if device.type == "cuda" and table() else None


def tiles_for(gpu: str | None, kernel: str, head_dim: int) -> list[int] | None:
    """The tiles that were fastest for a Triton kernel on the GPU that `gpu_of` names: m, n, warps, stages."""
    return None if gpu is None else table().get(gpu, {}).get(f"{kernel} {head_dim}")


@functools.lru_cache
def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
