"""Checkpoints in Megatron-core's distributed format: complete or not there, readable in another parallel layout.

    SAVE/iter_0000100/                       a complete checkpoint; files.json names its files with their SHA-256
    SAVE/iter_0000200.unfinished/            left over when a writer was killed
    SAVE/release/                            weights alone, of `megatron-tree convert` or Megatron-LM's tools
    SAVE/latest_checkpointed_iteration.txt   the newest to load, as in Megatron-LM: a number or "release"

`files.json` is written after all other files, and the folder is renamed after that. Megatron-LM writes no `files.json`:
a folder without it counts as complete if the tracker, which Megatron-LM writes last, names it.

Checkpoints are read, never run: somebody else's file must not be able to start a program here. The format holds
pickles in three places. `common.pt` and the tensors are read by `torch.load` with weights_only=True. Objects of single
ranks are not, unless a variable of torch's forces it. The index `.metadata` is read by plain unpickling, so it is read
here first by an unpickler that knows only the records of an index.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import pickle  # noqa: TID251
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.safe_globals import SAFE_GLOBALS
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

from ...core.comm import Ranks
from ...core.comm.wire import share_check
from ...core.files import read_json, whole_file, writing
from ...integrations.megatron.compat import loading_torch_adam, no_manager_process
from ...launching import as_typed
from .arguments import NEW_MODEL, model_options, write_model
from .model import Trainee

METADATA = {  # how Megatron-core cuts the state into tensors
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
OF_RUN = ("bf16", "use_distributed_optimizer", "seq_length", "seed")  # what a resumed run must not change
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name
MANIFEST = "files.json"
RELEASE = "release"  # Megatron-LM's name
FORMAT_FILES = (".metadata", "common.pt", "metadata.json")  # of Megatron-core's format
_MAX_DIGITS = 18
_PREFIX, _UNFINISHED = "iter_", ".unfinished"
INDEX = ".metadata"
_RECORDS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
_VALUES = (("torch", "Size"), ("torch.serialization", "_get_layout"))


def save_checkpoint(trainee: Trainee, args: argparse.Namespace, *, iteration: int, samples: int, digest: str) -> Path:
    """Write model, optimizer, schedule and data position. All ranks call it.

    The files are written into a folder with a temporary name, which is renamed at the end: an
    interrupted save leaves the previous checkpoint as the newest.

    Returns: the checkpoint's folder, args.save/iter_0000100.
    """
    state = {
        "samples": samples,
        "data_digest": digest,
        "opt_param_scheduler": trainee.scheduler.state_dict(),
        **_sharded_state(trainee, is_loading=False),
    }
    final = checkpoint_folder(args.save, iteration)
    unfinished = on_first_rank(lambda: start_writing(final, args), args)
    write_state(state, unfinished, args, iteration=iteration)
    on_first_rank(lambda: finish(final, args.keep_checkpoints), args)
    return final


def start_writing(final: Path, args: argparse.Namespace) -> str:
    """Write the model's options, and make an empty folder for what is to become the checkpoint `final`."""
    unfinished = begin(final)
    write_model(args, final.parent)
    return str(unfinished)


def write_state(state: dict[str, Any], folder: str, args: argparse.Namespace, *, iteration: int) -> None:
    """Write a state and the options of its model in Megatron-core's format. All ranks call it."""
    state = {
        **state,
        "iteration": iteration,
        "options": model_options(args) | {name: getattr(args, name) for name in OF_RUN},
        "checkpoint_version": 3.0,  # without it Megatron-LM assumes one of its oldest
    }
    with no_manager_process(), writing(Path(folder), CheckpointException):
        dist_checkpointing.save(state, folder, content_metadata=METADATA)  # it ends in a barrier


def load_checkpoint(trainee: Trainee, args: argparse.Namespace, *, digest: str) -> tuple[int, int, list[str]]:
    """With `resume` continue the run in `save`; else, or if there is none, take the weights in `load`. All ranks call
    it.

    Returns: (iteration, samples consumed, lines to print); zeros if no run is continued.
    Raises: ValueError if there are no weights to load, all are damaged, or they belong to another model or other data.
    """
    notes: list[str] = []
    if args.resume:
        checkpoint, notes = on_first_rank(lambda: newest(args.save), args)
        if checkpoint is not None:
            return _continue(trainee, args, checkpoint, digest, notes)
        notes = [f"no checkpoint in {args.save} yet: starting a new run"]
    elif args.save is not None and (Path(args.save) / TRACKER).is_file():
        notes = [f"{args.save} has checkpoints of another run, which this one overwrites: --resume continues it"]
    if args.load is None:
        return 0, 0, notes
    checkpoint, warnings = on_first_rank(lambda: newest(args.load), args)
    if checkpoint is None:
        raise ValueError(
            f"--load {args.load!r} has no checkpoint: name a folder that --save wrote, or leave --load out"
        )
    on_first_rank(lambda: check_index(Path(checkpoint)), args)
    common = read_common(checkpoint)
    _compare(common["options"], args, NEW_MODEL, checkpoint)
    load_weights(unwrap_model(trainee.model), checkpoint)
    trainee.optimizer.reload_model_params()
    return 0, 0, [*notes, *warnings, f"weights of {checkpoint}; the run starts at iteration 0"]


def _continue(
    trainee: Trainee, args: argparse.Namespace, checkpoint: str, digest: str, notes: list[str]
) -> tuple[int, int, list[str]]:
    on_first_rank(lambda: check_index(Path(checkpoint)), args)
    common = read_common(checkpoint)
    _compare(common["options"], args, (*NEW_MODEL, *OF_RUN), checkpoint)
    if common["data_digest"] != digest:
        raise ValueError(
            f"the training data are not those that {checkpoint} was trained on: use the same text (for the standard "
            "library the same Python release), or start a new run from its weights with --load"
        )
    if (done := common["iteration"]) >= args.train_iters:
        raise ValueError(f"train_iters={args.train_iters}, but {checkpoint} has already done {done}")
    with weights_only(), loading_torch_adam(trainee.optimizer):
        state = dist_checkpointing.load(_sharded_state(trainee, is_loading=True), checkpoint)
        unwrap_model(trainee.model).load_state_dict(state["model"], strict=True)
        trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(common["opt_param_scheduler"])
    return done, common["samples"], [*notes, f"continuing from {checkpoint}"]


def read_common(checkpoint: str) -> dict[str, Any]:
    """What is not sharded. The index must have been checked (`check_index`)."""
    with weights_only():
        return dist_checkpointing.load_common_state_dict(checkpoint)


def load_weights(model: torch.nn.Module, checkpoint: str, metadata: dict[str, Any] = METADATA) -> None:
    """Load the parameters of a GPTModel from a checkpoint that fits it. All ranks of its process groups call it."""
    with weights_only():
        state = dist_checkpointing.load(model_state(model, metadata), checkpoint)
        model.load_state_dict(state["model"], strict=True)


def model_state(model: torch.nn.Module, metadata: dict[str, Any] = METADATA) -> dict[str, Any]:
    """The parameters of a GPTModel as Megatron-core writes and reads them."""
    return {"model": model.sharded_state_dict(metadata=_with_group(metadata))}


def _sharded_state(trainee: Trainee, *, is_loading: bool) -> dict[str, Any]:
    model = model_state(unwrap_model(trainee.model))
    optimizer = trainee.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_with_group(METADATA))
    return {**model, "optimizer": optimizer}


def _with_group(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _compare(saved: dict[str, Any], args: argparse.Namespace, names: Iterable[str], checkpoint: str) -> None:
    for name in names:
        if saved.get(name) != (given := getattr(args, name)):
            raise ValueError(
                f"{as_typed(name, given)}, but {checkpoint} was written with {saved.get(name)!r}: use the same value, "
                "or start a new run from its weights with --load"
            )


def on_first_rank(action: Callable[[], Any], args: argparse.Namespace) -> Any:
    """Run `action` on rank 0; all ranks return its result, a JSON value, or raise its error."""
    return share_check(action, Ranks.of(dist.group.WORLD, limit_s=60 * args.distributed_timeout_minutes))


def checkpoint_folder(folder: str | Path, iteration: int | None) -> Path:
    """folder/iter_0000100; without an iteration folder/release."""
    return Path(folder) / (RELEASE if iteration is None else f"{_PREFIX}{iteration:07d}")


def begin(final: Path) -> Path:
    """An empty folder to write the checkpoint `final` into. Unfinished ones are deleted."""
    unfinished = final.with_name(final.name + _UNFINISHED)
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        _recover(final.parent)
        for left in final.parent.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(left)
        unfinished.mkdir()
    return unfinished


def finish(final: Path, keep: int | None) -> None:
    """Rename the full folder of `begin` to `final`, point the tracker to it, and delete all but the newest `keep`."""
    unfinished = final.with_name(final.name + _UNFINISHED)
    files = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
    with whole_file(unfinished / MANIFEST) as part:
        part.write_text(json.dumps(files, indent=1) + "\n")
    _recover(final.parent)
    with whole_file(final.parent / TRACKER) as part:
        part.write_text(f"{RELEASE if final.name == RELEASE else _iteration(final)}\n")
    if keep is not None:
        older = [path for path in _checkpoints(final.parent) if _iteration(path) <= _iteration(final)]
        for path in older[keep:]:
            shutil.rmtree(path)


def fault_of(checkpoint: Path, *, named: bool = False) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if nothing is.

    named: the tracker names it, so it may be Megatron-LM's.
    """
    if named and not (checkpoint / MANIFEST).exists() and all((checkpoint / name).is_file() for name in FORMAT_FILES):
        return None
    try:
        for name, digest in read_json((checkpoint / MANIFEST).read_bytes()).items():
            if _sha256(checkpoint / name) != digest:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} can't be read ({error.strerror})"
    except (ValueError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def newest(folder: str | Path) -> tuple[str | None, list[str]]:
    """The newest checkpoint that the tracker allows and that has no fault.

    Returns: (its folder, or None if there are no checkpoints; a warning for each newer one that is damaged).
    Raises: ValueError if the tracker is damaged, or no checkpoint that it allows can be loaded.
    """
    folder = Path(folder)
    _recover(folder)
    candidates, tracker, named, warnings = _checkpoints(folder), folder / TRACKER, None, []
    if tracker.is_file():
        text = tracker.read_bytes().decode("ascii", "replace").strip()
        if text == RELEASE:
            named = folder / RELEASE
            candidates = [named]
        elif text.isdecimal() and len(text) <= _MAX_DIGITS:
            named = checkpoint_folder(folder, int(text))
            candidates = [path for path in candidates if _iteration(path) <= int(text)]
        else:
            raise ValueError(f"{tracker} holds {text[:40]!r} instead of a number: write the iteration to continue from")
    for path in candidates:
        if (fault := fault_of(path, named=path == named)) is None:
            return str(path), warnings
        warnings.append(f"warning: checkpoint {path} is damaged: {fault}")
    if named is None and not candidates:
        return None, []
    raise ValueError(
        f"no checkpoint in {str(folder)!r} can be loaded ({'; '.join(warnings) or f'none up to {named.name}'}): "
        f"restore one, or write an iteration into {tracker}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(paths, key=_iteration, reverse=True)


def _iteration(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _recover(folder: Path) -> None:
    """Rename every folder whose files are complete, in place of an older checkpoint of the same iteration."""
    for manifest in folder.glob(f"*{_UNFINISHED}/{MANIFEST}"):
        final = manifest.parent.with_name(manifest.parent.name.removesuffix(_UNFINISHED))
        if final.exists():
            shutil.rmtree(final)
        os.replace(manifest.parent, final)


class _IndexReader(pickle.Unpickler):
    """Knows what describes tensors and where they lie, and nothing else."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):
            return _member
        if "." not in name and module in ("torch", "torch.serialization", *_RECORDS):
            value = super().find_class(module, name)
            record = isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum))
            defined_here = record and value.__module__ == module and module in _RECORDS
            if defined_here or (module, name) in _VALUES or isinstance(value, torch.dtype):
                return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in it")


def _member(kind: type, name: str) -> enum.Enum:
    """For getattr, with which Python 3.11.0 to 3.11.3 pickle the members of enums."""
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise pickle.UnpicklingError(f"it names {name} of {kind!r}, which has no place in it")


def check_index(checkpoint: Path) -> None:
    """Raise ValueError if the index of a checkpoint holds anything but descriptions of tensors, or can't be read."""
    path = checkpoint / INDEX
    try:
        with path.open("rb") as file:
            _IndexReader(file).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{path} is no index of a checkpoint of Megatron-core: {error}; take another one") from error


@contextlib.contextmanager
def weights_only():
    """While this is open `torch.load` makes tensors, plain values and what Megatron-core lists as harmless (the
    `argparse.Namespace` and the enums of Megatron-LM's options), whatever its callers ask for."""
    forced = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}
    with mock.patch.dict(os.environ, forced), torch.serialization.safe_globals(SAFE_GLOBALS):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # mock.patch.dict puts it back
        yield
