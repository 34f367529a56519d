"""What a folder with rows of a cache says about itself: cache.json, and the sizes and digests of its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError

from ..files import digest_of, read_json
from . import ShardedCache

FORMAT = 3
DESCRIPTION = "cache.json"
DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
}


def describe(
    store: ShardedCache, part: Path, world: int, num_groups: int, lengths: list[int], fingerprint: str
) -> dict:
    files = {}
    for rank in range(world):
        entry = part / f"{file_of(rank)}.json"
        if not entry.is_file():
            raise ValueError(f"{entry} is missing: the folder must be on a file system that all ranks share")
        files[file_of(rank)] = json.loads(entry.read_text())
        entry.unlink()
        check_size(part / file_of(rank), files[file_of(rank)]["bytes"])
    about = {
        "format": FORMAT,
        "world": world,
        "head_groups": num_groups,
        "lengths": lengths,
        **_layers(store),
        "fingerprint": fingerprint,
        "shapes": [_shapes(pages, num_groups) for pages in store.layers],
        "files": files,
    }
    return {**about, "sha256": digest_of(about)}


def _shapes(pages, num_groups: int) -> dict[str, list[int]]:
    """By tensor: [h_kv, ...] of all head groups together."""
    return {name: [num_groups * x.shape[2], *x.shape[3:]] for name, x in pages.tensors.items()}


def _layers(store: ShardedCache) -> dict:
    """What two caches must have in common."""
    return {
        "windows": [store.book.windows[kind] for kind in store.kind_of],
        "stored": str(store.layers[0].stored or "auto"),
        "dtype": str(store.layers[0].dtype),
    }


def read_description(folder: Path) -> dict:
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"{path} does not exist: folder={str(folder)!r} holds no saved cache, or an incomplete one")
    try:
        about = read_json(path.read_bytes())
        if about["format"] != FORMAT and isinstance(about["format"], int):
            raise _OtherFormat(f"{path} has format {about['format']}, this version reads format {FORMAT}")
        if about.pop("sha256") != digest_of(about):
            raise KeyError("sha256")
        files = [about["files"][file_of(rank)] for rank in range(about["world"])]
        ok = all(isinstance(file["bytes"], int) and isinstance(file["sha256"], str) for file in files)
        ok = ok and all(isinstance(n, int) and n >= 0 for n in about["lengths"])
        ok = ok and about["world"] % about["head_groups"] == 0
        ok = ok and {"windows", "stored", "dtype", "shapes", "fingerprint"} <= about.keys()
    except _OtherFormat:
        raise
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        ok = False
    if not ok:
        raise ValueError(f"{path} is damaged: save the cache again")
    return about


class _OtherFormat(ValueError):
    """A description that this version does not read."""


def check_fit(store: ShardedCache, about: dict, num_groups: int, folder: Path, fingerprint: str) -> None:
    ours = {**_layers(store), "fingerprint": fingerprint}
    if store.layers[0].dtype is None:  # no tokens yet: any dtype fits
        ours["dtype"] = about["dtype"]
    for what, mine in ours.items():
        if about[what] != mine:
            raise ValueError(
                f"{folder / DESCRIPTION} is of another model or cache: {what}={about[what]!r}, here {mine!r}. Load it "
                "with the model and the cache dtype that it was saved with, or run the prompt again"
            )
    if about["dtype"] not in map(str, DTYPES) and any(about["lengths"]):
        raise ValueError(f"{folder / DESCRIPTION} is damaged: dtype={about['dtype']!r}")
    for layer, (pages, shapes) in enumerate(zip(store.layers, about["shapes"], strict=True)):
        mine = _shapes(pages, num_groups)
        if mine and mine != shapes:
            raise ValueError(f"{folder / DESCRIPTION} is of another model: layer {layer} has {shapes}, here {mine}")


def check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {size}: it was cut short or changed")


def check_digest(path: Path, sha256: str) -> None:
    with naming(path), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(f"{path} is damaged: its sha256 is {digest[:16]}... instead of {sha256[:16]}...")


def file_of(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@contextlib.contextmanager
def naming(path: Path):
    """Errors of the file system and of damaged files become a ``ValueError`` that names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from error
