"""Checkpoints are read, never run: somebody else's file must not be able to start a program here.

Megatron-core's format holds pickles in three places. `common.pt` and the tensors are read by `torch.load` with
weights_only=True. Objects of single ranks are not, unless a variable of torch's forces it. The index `.metadata` is
read by plain unpickling, so it is read here first by an unpickler that knows only the records of an index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import pickle
from pathlib import Path
from unittest import mock

import torch
from megatron.core.safe_globals import SAFE_GLOBALS

INDEX = ".metadata"
_RECORDS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
_VALUES = (("torch", "Size"), ("torch.serialization", "_get_layout"))


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
