"""Rows of a sharded KV cache in files, so that a prompt is run once and reused.

    FOLDER/cache.json               what it is: layers, dtype, rows, fingerprint of the model, size and sha256 of files,
                                    and its own sha256
    FOLDER/rank_00000.safetensors   the tokens that rank 0 held; of each kind of layers `runs.KIND` int64 [m, 3] (row,
                                    first position, count), and of each layer k, v (scales, index keys) [tokens, h_kv,
                                    ...], with head groups the KV heads of rank 0's group; here also the rows' tokens
                                    and the states of recurrent layers, `state.ROW.NAME`

A folder is complete or absent: ranks write into `.FOLDER.part`, and when all are done one of them renames it. Any
number of ranks with any block size can read it, since tokens are stored with their positions; each rank reads those
that it will hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..comm import Ranks, group_rank, group_size
from ..comm.wire import share_all
from ..config import TreeConfig
from ..files import NotWritten, digest_of, read_json, writing
from . import ShardedCache
from .gathered import Piece
from .states import RowState, whole_state

_CHECKED = TreeConfig(check="always", timeout_s=1800.0)  # for the slowest rank to write or verify its files
CHUNK = 4096  # tokens that are read at once
_STATE, _STATE_RUNS = "state.", "state_runs."
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
    layer = text.per_layer_config[0] if hasattr(text, "per_layer_config") else text  # of one kind, where they differ
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return (
        f"{type(model).__name__}, {text.num_hidden_layers} layers, {heads} KV heads, hidden_size {text.hidden_size}, "
        f"{model.dtype}, weights {digest.hexdigest()[:16]}"
    )


def save_rows(
    store: ShardedCache,
    rows: list[int],
    folder: str | Path,
    tokens: list[Tensor],
    *,
    cp_group,
    fingerprint: str,
    weights_group=None,
    state_pieces: dict[str, Piece] | None = None,
) -> None:
    """Write rows of a cache to a shared file system. Collective: all ranks pass the same arguments.

    Args:
        rows: ids. tokens: by row, the tokens it holds, int64 [n], the same on all ranks.
        folder: must not exist.
        fingerprint: of the model, such as `model_fingerprint` before its weights are split; loading needs the same.
        cp_group: the ranks that share the tokens of this rank's KV heads. weights_group: all ranks, where they are
            several such head groups, neighbouring ranks each.
        state_pieces: by name this rank's part of the rows' recurrent states, where the ranks share these; None: each
            rank has them whole.
    Raises: ValueError on all ranks: an existing folder, tokens that don't match the rows, or files that can't be
        written. At most `.FOLDER.part` is left then; the next save to this folder removes it.
    """
    everyone, (num_groups, _) = weights_group or cp_group, _head_group(cp_group, weights_group)
    folder, ranks = Path(folder), Ranks.of(everyone, config=_CHECKED)
    rank, world = ranks.rank, ranks.size
    part = folder.with_name(f".{folder.name}.part")
    lengths = [store.book.rows[row].length for row in rows]
    with ranks.call("save of a cache") as call:
        if [list(x.shape) for x in tokens] != [[n] for n in lengths] or any(x.dtype != torch.int64 for x in tokens):
            seen = [f"{list(x.shape)} {x.dtype}" for x in tokens]
            raise ValueError(f"tokens={seen} must be int64, of each row as many as the cache holds: {lengths}")
        if rank == 0 and folder.exists():
            raise ValueError(f"folder={str(folder)!r} exists already: choose another one, or delete it")
        if rank == 0:
            with _writing(folder):
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
        digest = hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in tokens)).hexdigest()[:16]
        values = {"folder": str(folder), "digest of tokens": digest, "fingerprint": fingerprint}
        call.agree(lengths=tuple(lengths), **values)
    with ranks.call("save: all files are written") as call, _writing(folder):
        written = _write(part / file_of(rank), store, rows, tokens if rank == 0 else [], state_pieces)
        (part / f"{file_of(rank)}.json").write_text(json.dumps(written))
        call.agree()
    with ranks.call("save: the folder has its name") as call, _writing(folder):
        if rank == 0:
            about = describe(store, part, world, num_groups, lengths, fingerprint)
            (part / DESCRIPTION).write_text(json.dumps(about, indent=1))
            os.replace(part, folder)
        call.agree()
    share_all(None, ranks)  # until then rank 0 must stay: it hosts the store


@contextlib.contextmanager
def _writing(folder: Path):
    try:
        with writing(folder):
            yield
    except NotWritten as error:
        raise ValueError(str(error)) from error


def load_rows(
    store: ShardedCache,
    folder: str | Path,
    *,
    cp_group,
    fingerprint: str,
    weights_group=None,
    state_pieces: dict[str, Piece] | None = None,
    device="cpu",
) -> tuple[list[int], list[Tensor]]:
    """Add rows from files to a cache. Collective: all ranks pass the same arguments; any number of ranks.

    cp_group, weights_group, state_pieces: as in `save_rows`; the rows may have been saved with more or fewer head
    groups, and with whole states or others' parts.
    Returns: (ids of the new rows, their tokens int64 [n] each, on the CPU).
    Raises: ValueError on all ranks, with nothing added: a cache or fingerprint of another model, another dtype, files
        that are missing, cut short or damaged.
    """
    everyone, (num_groups, head_group) = weights_group or cp_group, _head_group(cp_group, weights_group)
    folder, ranks = Path(folder), Ranks.of(everyone, config=_CHECKED)
    rank, world = ranks.rank, ranks.size
    with ranks.call("load of a cache") as call:
        about = read_description(folder)
        check_fit(store, about, num_groups, folder, fingerprint)
        names = [file_of(i) for i in range(about["world"])]
        for name in names:
            check_size(folder / name, about["files"][name]["bytes"])
        for name in names[rank::world]:
            check_digest(folder / name, about["files"][name]["sha256"])
        call.agree(folder=str(folder), lengths=tuple(about["lengths"]), fingerprint=fingerprint)
    rows: list[int] = []
    try:
        with (
            ranks.call("load: all rows are there") as call,
            naming(folder),
            contextlib.ExitStack() as stack,
        ):
            files = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in names]
            saved = _SavedRows(folder, about, files, store, num_groups, head_group, state_pieces, device)
            tokens = [files[0].get_tensor(f"tokens.{i}") for i in range(len(about["lengths"]))]
            for i in range(len(tokens)):
                rows.append(store.book.add())
                saved.load(rows[-1], i)
            call.agree()
    except BaseException:
        for row in rows:
            store.remove(row)
        raise
    return rows, tokens


def _write(path: Path, store: ShardedCache, rows: list[int], tokens: list[Tensor], state_pieces) -> dict:
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
        local = slots[store.kind_of[layer]]
        for name, x in pages.tensors.items():
            shape = (len(local), *x.shape[2:])
            entries.append((f"{name}.{layer}", shape, x.dtype, lambda p=pages, n=name, at=local: p.read(n, at)))
    entries += [(name, x.shape, x.dtype, lambda x=x: x) for name, x in _states(store, rows, tokens, state_pieces)]
    header, at = {}, 0
    for name, shape, dtype, _ in entries:
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
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


def _states(store: ShardedCache, rows: list[int], tokens: list[Tensor], state_pieces) -> Iterator[tuple[str, Tensor]]:
    """What a rank writes of the recurrent states: its parts, and where they belong; whole ones the first rank."""
    for i, row in enumerate(rows if tokens or state_pieces else []):
        if (state := store.book.rows[row].state) is not None:
            yield from ((f"{_STATE}{i}.{name}", x) for name, x in state.tensors.items())
    for name, piece in (state_pieces or {}).items():
        yield f"{_STATE_RUNS}{name}", torch.tensor(piece.runs)


class _Source(NamedTuple):
    """Files of the ranks at one place of neighbouring head groups: the same tokens, the KV heads of one group each."""

    files: list
    begin: Fraction
    """Where the heads that are needed begin among the heads of the files, in whole files, and how many they are."""
    length: Fraction

    def read(self, name: str, numbers: Tensor) -> Tensor:
        """Some tokens of a tensor [tokens, h_kv, ...], with the heads that are needed."""
        of_files = [file.get_tensor(name)[numbers] for file in self.files]
        num_heads = of_files[0].shape[1]
        return torch.cat(of_files, 1).narrow(1, int(self.begin * num_heads), int(self.length * num_heads))


def _sources(files: list, saved_groups: int, num_groups: int, head_group: int) -> list[_Source]:
    """Where a rank of one of num_groups head groups finds its heads in the files of `saved_groups` head groups."""
    size, length = len(files) // saved_groups, Fraction(saved_groups, num_groups)
    groups = range(int(head_group * length), math.ceil((head_group + 1) * length))
    begin = head_group * length - groups[0]
    return [_Source([files[group * size + place] for group in groups], begin, length) for place in range(size)]


def _head_group(cp_group, weights_group) -> tuple[int, int]:
    """(number of head groups, this rank's)."""
    if weights_group is None:
        return 1, 0
    size = group_size(cp_group)
    return group_size(weights_group) // size, group_rank(weights_group) // size


class _SavedRows:
    """The rows of a folder; this rank reads what its cache is to hold."""

    def __init__(
        self, folder: Path, about: dict, files: list, store: ShardedCache, num_groups, head_group, pieces, device
    ):
        self._folder, self._about, self._store, self._files = folder, about, store, files
        self._num_groups, self._state_pieces, self._device = num_groups, pieces, device
        self._dtype = next((dtype for dtype in SAFETENSORS_DTYPES if str(dtype) == about["dtype"]), None)
        self._sources = _sources(files, about["head_groups"], num_groups, head_group)
        self._places = [self._places_of(kind) for kind in range(len(store.book.windows))]

    def _places_of(self, kind: int) -> list[tuple[Tensor, Tensor]]:
        """By source, of a kind's tokens: (rows int64 [n], positions int64 [n])."""
        places = []
        for source in self._sources:
            row, first, count = source.files[0].get_tensor(f"runs.{kind}").unbind(1)
            before = count.cumsum(0) - count
            within = torch.arange(int(count.sum())) - before.repeat_interleave(count)
            places.append((row.repeat_interleave(count), first.repeat_interleave(count) + within))
        return places

    def load(self, row: int, index: int) -> None:
        """Load saved row `index` in chunks, so that of a window there is never more than it and a chunk."""
        store, length, of_row = self._store, self._about["lengths"][index], []
        for of_kind in self._places:
            numbers = [(rows == index).nonzero().flatten() for rows, _ in of_kind]
            of_row.append([(positions[n], n) for (_, positions), n in zip(of_kind, numbers, strict=True)])
        for begin in range(0, length, CHUNK):
            append, chosen = store.append([row], min(CHUNK, length - begin)), []
            for kind, window in enumerate(store.book.windows):
                positions, slots = store.kept(append, kind)
                seen = positions >= (0 if window is None else length - window + 1)
                chosen.append([_matches(*saved, positions[seen], slots[seen]) for saved in of_row[kind]])
                if sum(len(numbers) for numbers, _ in chosen[-1]) != int(seen.sum()):
                    where = f"tokens of row {index} between {begin} and {length}"
                    raise ValueError(f"{self._folder} is damaged: {where} are missing")
            for layer in range(len(store.layers)):
                self._load_layer(layer, chosen[store.kind_of[layer]])
        store.book.forget(store.book.rows[row])
        store.book.rows[row].state = self._state(index, length)

    def _load_layer(self, layer: int, chosen: list[tuple[Tensor, Tensor]]) -> None:
        """chosen: by source, numbers of the tokens to read, and their slots."""
        store, shapes, nothing = self._store, self._about["shapes"][layer], (1, 0)  # latents are whole in k
        local = [(shapes.get(x, nothing)[0] // self._num_groups, *shapes.get(x, nothing)[1:]) for x in ("k", "v")]
        like = [torch.empty(1, 1, *shape, dtype=self._dtype, device=self._device) for shape in local]
        store.layers[layer].reserve(store.num_pages(store.kind_of[layer]), *like)
        if "index_k" in shapes:
            store.layers[layer].reserve_index(torch.empty(shapes["index_k"], dtype=self._dtype, device=self._device))
        for source, (numbers, slots) in zip(self._sources, chosen, strict=True):
            if len(slots):
                tensors = {name: source.read(f"{name}.{layer}", numbers).to(self._device) for name in shapes}
                store.layers[layer].put(slots.to(self._device), tensors)

    def _state(self, index: int, length: int) -> RowState | None:
        parts = defaultdict(list)
        for file in self._files:
            names = set(file.keys())
            for key in sorted(name for name in names if name.startswith(f"{_STATE}{index}.")):
                name = key.removeprefix(f"{_STATE}{index}.")
                runs = file.get_tensor(_STATE_RUNS + name).tolist() if _STATE_RUNS + name in names else None
                parts[name].append((file.get_tensor(key), runs))
        whole = {name: whole_state(of_ranks) for name, of_ranks in parts.items()}
        pieces = self._state_pieces or {}
        tensors = {name: pieces[name].of(x) if name in pieces else x for name, x in whole.items()}
        return RowState(length, {name: x.to(self._device) for name, x in tensors.items()}) if tensors else None


def _matches(positions: Tensor, numbers: Tensor, wanted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the wanted positions that are among `positions` (rising): (their numbers, their slots)."""
    if not len(positions):
        return numbers, slots[:0]
    at = torch.searchsorted(positions, wanted).clamp(max=len(positions) - 1)
    hit = positions[at] == wanted
    return numbers[at[hit]], slots[hit]


FORMAT = 3
DESCRIPTION = "cache.json"
SAFETENSORS_DTYPES = {
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
    if about["dtype"] not in map(str, SAFETENSORS_DTYPES) and any(about["lengths"]):
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
