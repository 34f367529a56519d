"""Rows of a sharded KV cache in files, so that a prompt is run once and reused.

    FOLDER/cache.json               what it is: layers, dtype, rows, fingerprint of the model, size and sha256 of files,
                                    and its own sha256
    FOLDER/rank_00000.safetensors   the tokens that rank 0 held; of each kind of layers `runs.KIND` int64 [m, 3] (row,
                                    first position, count), and of each layer k, v (and scales) [tokens, h_kv, ...]

A folder is complete or absent: ranks write into `.FOLDER.part`, and when all are done one of them renames it. Any
number of ranks with any block size can read it, since tokens are stored with their positions; each rank reads those
that it will hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..comm import collective_call, group_rank, group_size
from ..comm.wire import share_all
from ..config import TreeConfig
from ..files import digest_of, read_json
from . import ShardedCache

FORMAT = 2
DESCRIPTION = "cache.json"
TIMEOUT_S = 1800.0  # for the slowest rank to write or verify its files
_CHECKED = TreeConfig(check="always", timeout_s=TIMEOUT_S)
CHUNK = 4096  # tokens that are read at once
_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
}
_SAMPLE = 64  # numbers of each weight that go into a fingerprint


def model_fingerprint(model) -> str:
    """A short text that differs between models: class, sizes, dtype, and a digest of some numbers of every weight."""
    text = model.config.get_text_config(decoder=True)
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        step = max(1, weight.numel() // _SAMPLE)
        some = weight.detach().flatten()[::step][:_SAMPLE]
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        digest.update(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return (
        f"{type(model).__name__}, {text.num_hidden_layers} layers, {heads} KV heads, hidden_size {text.hidden_size}, "
        f"{model.dtype}, weights {digest.hexdigest()[:16]}"
    )


def save_rows(
    store: ShardedCache, rows: list[int], folder: str | Path, tokens: list[Tensor], *, cp_group, fingerprint: str
) -> None:
    """Write rows of a cache to a shared file system. Collective: all ranks of cp_group pass the same arguments.

    Args:
        rows: ids. tokens: by row, the tokens it holds, int64 [n], the same on all ranks.
        folder: must not exist.
        fingerprint: of the model, such as `model_fingerprint`; loading the rows needs the same.
    Raises: ValueError on all ranks: an existing folder, tokens that don't match the rows, or files that can't be
        written. At most `.FOLDER.part` is left then; the next save to this folder removes it.
    """
    folder, rank, world = Path(folder), group_rank(cp_group), group_size(cp_group)
    part = folder.with_name(f".{folder.name}.part")
    lengths = [store.book.rows[row].length for row in rows]
    with collective_call("save of a cache", cp_group, _CHECKED) as call:
        if [list(x.shape) for x in tokens] != [[n] for n in lengths] or any(x.dtype != torch.int64 for x in tokens):
            seen = [f"{list(x.shape)} {x.dtype}" for x in tokens]
            raise ValueError(f"tokens={seen} must be int64, of each row as many as the cache holds: {lengths}")
        if rank == 0 and folder.exists():
            raise ValueError(f"folder={str(folder)!r} exists already: choose another one, or delete it")
        if rank == 0:
            with _naming(part):
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
        digest = hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in tokens)).hexdigest()[:16]
        values = {"folder": str(folder), "digest of tokens": digest, "fingerprint": fingerprint}
        call.agree(lengths=tuple(lengths), **values)
    with collective_call("save: all files are written", cp_group, _CHECKED) as call, _naming(part / _file(rank)):
        written = _write(part / _file(rank), store, rows, tokens if rank == 0 else [])
        (part / f"{_file(rank)}.json").write_text(json.dumps(written))
        call.agree()
    with collective_call("save: the folder has its name", cp_group, _CHECKED) as call, _naming(part):
        if rank == 0:
            (part / DESCRIPTION).write_text(json.dumps(_describe(store, part, world, lengths, fingerprint), indent=1))
            os.replace(part, folder)
        call.agree()
    share_all(None, cp_group, timeout_s=TIMEOUT_S)  # until then rank 0 must stay: it hosts the store


def load_rows(
    store: ShardedCache, folder: str | Path, *, cp_group, fingerprint: str, device="cpu"
) -> tuple[list[int], list[Tensor]]:
    """Add rows from files to a cache. Collective: all ranks of cp_group pass the same arguments; any number of ranks.

    Returns: (ids of the new rows, their tokens int64 [n] each, on the CPU).
    Raises: ValueError on all ranks, with nothing added: a cache or fingerprint of another model, another dtype, files
        that are missing, cut short or damaged.
    """
    folder, rank, world = Path(folder), group_rank(cp_group), group_size(cp_group)
    with collective_call("load of a cache", cp_group, _CHECKED) as call:
        about = _read_description(folder)
        _check_fit(store, about, folder, fingerprint)
        names = [_file(i) for i in range(about["world"])]
        for name in names:
            _check_size(folder / name, about["files"][name]["bytes"])
        for name in names[rank::world]:
            _check_digest(folder / name, about["files"][name]["sha256"])
        call.agree(folder=str(folder), lengths=tuple(about["lengths"]), fingerprint=fingerprint)
    rows: list[int] = []
    try:
        with (
            collective_call("load: all rows are there", cp_group, _CHECKED) as call,
            _naming(folder),
            contextlib.ExitStack() as stack,
        ):
            files = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in names]
            places = [_places_of(files, kind) for kind in range(len(store.book.windows))]
            tokens = [files[0].get_tensor(f"tokens.{i}") for i in range(len(about["lengths"]))]
            for i in range(len(tokens)):
                rows.append(store.book.add())
                _load_row(store, rows[-1], i, files, places, about, folder, device)
            call.agree()
    except BaseException:
        for row in rows:
            store.remove(row)
        raise
    return rows, tokens


def _write(path: Path, store: ShardedCache, rows: list[int], tokens: list[Tensor]) -> dict:
    """One safetensors file, tensor by tensor: no copy of the whole cache is made. Returns its size and sha256."""
    slots, entries = [], []  # entries: name, shape, dtype, how to get it
    for kind, window in enumerate(store.book.windows):
        runs, of_kind = [], [torch.zeros(0, dtype=torch.int64)]
        for i, row in enumerate(rows):
            first = 0 if window is None else max(0, store.book.rows[row].length - window + 1)
            for position, slot, count in store.runs(kind, row, first):
                runs.append((i, position, count))
                of_kind.append(torch.arange(slot, slot + count))
        slots.append(torch.cat(of_kind))
        runs = torch.tensor(runs, dtype=torch.int64).reshape(-1, 3)
        entries.append((f"runs.{kind}", runs.shape, runs.dtype, lambda runs=runs: runs))
    entries += [(f"tokens.{i}", x.shape, x.dtype, lambda x=x: x) for i, x in enumerate(tokens)]
    for layer, pages in enumerate(store.layers):
        own = slots[store.kind_of[layer]]
        for name, x in pages.tensors.items():
            shape = (len(own), *x.shape[2:])
            entries.append((f"{name}.{layer}", shape, x.dtype, lambda p=pages, n=name, own=own: p.read(n, own)))
    header, at = {}, 0
    for name, shape, dtype, _ in entries:
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text, *(get for *_, get in entries)):
            if callable(piece):
                piece = memoryview(piece().cpu().contiguous().flatten().view(torch.uint8).numpy())
            digest.update(piece)
            written += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": written, "sha256": digest.hexdigest()}


def _describe(store: ShardedCache, part: Path, world: int, lengths: list[int], fingerprint: str) -> dict:
    files = {}
    for rank in range(world):
        entry = part / f"{_file(rank)}.json"
        if not entry.is_file():
            raise ValueError(f"{entry} is missing: the folder must be on a file system that all ranks share")
        files[_file(rank)] = json.loads(entry.read_text())
        entry.unlink()
        _check_size(part / _file(rank), files[_file(rank)]["bytes"])
    about = {
        "format": FORMAT,
        "world": world,
        "lengths": lengths,
        **_layers(store),
        "fingerprint": fingerprint,
        "shapes": [{name: list(x.shape[2:]) for name, x in pages.tensors.items()} for pages in store.layers],
        "files": files,
    }
    return {**about, "sha256": digest_of(about)}


def _layers(store: ShardedCache) -> dict:
    """What two caches must have in common."""
    return {
        "windows": [store.book.windows[kind] for kind in store.kind_of],
        "stored": str(store.layers[0].stored or "auto"),
        "dtype": str(store.layers[0].dtype),
    }


def _read_description(folder: Path) -> dict:
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"{path} does not exist: folder={str(folder)!r} holds no saved cache, or an incomplete one")
    try:
        about = read_json(path.read_bytes())
        if about["format"] != FORMAT and isinstance(about["format"], int):
            raise _OtherFormat(f"{path} has format {about['format']}, this version reads format {FORMAT}")
        if about.pop("sha256") != digest_of(about):
            raise KeyError("sha256")
        names = [_file(rank) for rank in range(about["world"])]
        ok = all(isinstance(about["files"][name][what], kind) for name in names for what, kind in _OF_A_FILE)
        ok = ok and all(isinstance(n, int) and n >= 0 for n in about["lengths"])
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


_OF_A_FILE = (("bytes", int), ("sha256", str))


def _check_fit(store: ShardedCache, about: dict, folder: Path, fingerprint: str) -> None:
    ours = {**_layers(store), "fingerprint": fingerprint}
    if store.layers[0].dtype is None:  # no tokens yet: any dtype fits
        ours["dtype"] = about["dtype"]
    for what, mine in ours.items():
        if about[what] != mine:
            raise ValueError(
                f"{folder / DESCRIPTION} is of another model or cache: {what}={about[what]!r}, here {mine!r}. Load it "
                "with the model and the cache dtype that it was saved with, or run the prompt again"
            )
    if about["dtype"] not in map(str, _DTYPES) and any(about["lengths"]):
        raise ValueError(f"{folder / DESCRIPTION} is damaged: dtype={about['dtype']!r}")
    for layer, (pages, shapes) in enumerate(zip(store.layers, about["shapes"], strict=True)):
        mine = {name: list(x.shape[2:]) for name, x in pages.tensors.items()}
        if mine and mine != shapes:
            raise ValueError(f"{folder / DESCRIPTION} is of another model: layer {layer} has {shapes}, here {mine}")


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {size}: it was cut short or changed")


def _check_digest(path: Path, sha256: str) -> None:
    with _naming(path), open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path} is damaged: its sha256 is {found[:16]}... instead of {sha256[:16]}...")


def _places_of(files, kind: int) -> list[tuple[Tensor, Tensor]]:
    """By file, of a kind's tokens: (rows int64 [n], positions int64 [n])."""
    found = []
    for file in files:
        row, first, count = file.get_tensor(f"runs.{kind}").unbind(1)
        before = count.cumsum(0) - count
        within = torch.arange(int(count.sum())) - before.repeat_interleave(count)
        found.append((row.repeat_interleave(count), first.repeat_interleave(count) + within))
    return found


def _load_row(store: ShardedCache, row: int, index: int, files, places, about: dict, folder: Path, device) -> None:
    """This rank's tokens of the saved row `index`, in chunks: of a window there is never more than it and a chunk."""
    length, of_row = about["lengths"][index], []
    for of_kind in places:
        numbers = [(rows == index).nonzero().flatten() for rows, _ in of_kind]
        of_row.append([(positions[n], n) for (_, positions), n in zip(of_kind, numbers, strict=True)])
    dtype = next((dtype for dtype in _DTYPES if str(dtype) == about["dtype"]), None)
    for begin in range(0, length, CHUNK):
        append = store.append([row], min(CHUNK, length - begin))
        chosen = []
        for kind, window in enumerate(store.book.windows):
            positions, slots = store.kept(append, kind)
            seen = positions >= (0 if window is None else length - window + 1)
            chosen.append([_found(*own, positions[seen], slots[seen]) for own in of_row[kind]])
            if sum(len(numbers) for numbers, _ in chosen[-1]) != int(seen.sum()):
                raise ValueError(f"{folder} is damaged: tokens of row {index} between {begin} and {length} are missing")
        for layer, shapes in enumerate(about["shapes"]):
            pages, kind = store.layers[layer], store.kind_of[layer]
            nothing = (1, 0)  # of latents: they are whole in k
            like = [torch.empty(1, 1, *shapes.get(x, nothing), dtype=dtype, device=device) for x in ("k", "v")]
            pages.reserve(store.book.numbers[kind].capacity, *like)
            for file, (numbers, slots) in zip(files, chosen[kind], strict=True):
                if len(slots):
                    found = {name: file.get_tensor(f"{name}.{layer}")[numbers].to(device) for name in shapes}
                    pages.put(slots.to(device), found)
    store.book.forget(row)


def _found(positions: Tensor, numbers: Tensor, wanted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the wanted positions that are among `positions` (rising): (their numbers, their slots)."""
    if not len(positions):
        return numbers, slots[:0]
    at = torch.searchsorted(positions, wanted).clamp(max=len(positions) - 1)
    hit = positions[at] == wanted
    return numbers[at[hit]], slots[hit]


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@contextlib.contextmanager
def _naming(path: Path):
    """Errors of the file system and of damaged files become a ``ValueError`` that names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from error
