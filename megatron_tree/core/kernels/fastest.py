"""Which backend was measured fastest on a GPU: the shipped table, and over it the user's own.

    {"NVIDIA H200": {"128": "cudnn"}}       the largest head_dim, and the backend of forward and backward

`bench kernels` writes the first (fastest.json, here), `calibrate` the second (fastest.json in `files.cache_folder`).
No GPU has been measured by us yet, so the table that is shipped is empty, and "auto" takes Triton's kernels.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

from ..files import cache_folder, read_json, whole_file

TABLE = Path(__file__).with_name("fastest.json")
NAMES = ("triton", "aten", "cudnn", "fa3", "fa4")


def user_table() -> Path:
    """Where the user's own table is, if there is one."""
    return cache_folder() / TABLE.name


@functools.lru_cache
def table() -> dict[str, dict[str, str]]:
    """{name of a GPU: {largest head_dim: backend}}. Raises ``ValueError`` if a file holds anything else."""
    return _read(TABLE) | (_read(user_table()) if user_table().is_file() else {})


def keep(gpu: str, backends: dict[str, str]) -> Path:
    """Put what was measured on a GPU, {largest head_dim: backend}, into the user's own table; returns its path."""
    path = user_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    others = _read(path) if path.is_file() else {}
    with whole_file(path) as part:
        part.write_text(json.dumps(others | {gpu: backends}, indent=1) + "\n")
    table.cache_clear()
    return path


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        content = read_json(path.read_bytes())
        for gpu, of_width in content.items():
            for width, name in of_width.items():
                if not width.isdecimal() or name not in NAMES:
                    wanted = f"a head_dim and one of {', '.join(NAMES)}"
                    raise ValueError(f"{gpu}: {width}: {name!r} must be {wanted}")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return content


def for_device(device: torch.device, head_dim: int) -> tuple[str, ...]:
    """The backend that was fastest on this GPU for the next measured head_dim; () if there is none."""
    return for_gpu(name_of(device), head_dim) if table() else ()


def for_gpu(gpu: str, head_dim: int) -> tuple[str, ...]:
    """`for_device` by the GPU's name."""
    widths = sorted((int(width), name) for width, name in table().get(gpu, {}).items() if int(width) >= head_dim)
    return tuple(name for _, name in widths[:1])


@functools.lru_cache
def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
