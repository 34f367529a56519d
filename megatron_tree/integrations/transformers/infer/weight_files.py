"""Reads a rank's pieces of a model from its safetensors files: no rank reads or holds the whole weights.

A model is made without weights (`empty_model`), its layout is planned (split_rules.py), and `read_pieces` fills it with
slices of the files. Where a checkpoint has other names than the model, or one tensor for each expert, Transformers' own
tables of conversions say which tensors a parameter is made of.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights

from transformers import GenerationConfig

from ....cache.gathered import Piece
from ..models import auto_class, load_config, naming
from .split_model import set_parameter, tied_parameters
from .weight_layout import WeightLayout

WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"


def empty_model(folder: Path, dtype: torch.dtype | None = None):
    """The model in a folder without its weights, which are on the meta device; dtype: default that of the files."""
    config = load_config(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"model={str(folder)!r} is quantized: weights='sharded' reads fp32, bf16 and fp16 only")
    with naming(folder), no_init_weights(), _parameters_on_meta():
        model = auto_class(config, folder).from_config(config, dtype=dtype or config.dtype or torch.float32)
        model.tie_weights()
        if (Path(folder) / GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


@contextlib.contextmanager
def _parameters_on_meta():
    """Modules made inside have real buffers, but no memory for parameters."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def read_pieces(model, folder: Path, layout: WeightLayout) -> None:
    """Fill a model from `empty_model` with this rank's pieces.

    Raises: ValueError for weights that are missing, of another shape, or converted in ways that slices can't follow.
    """
    with naming(folder):
        checkpoint = Checkpoint(folder, model)
        for names in tied_parameters(model):
            whole = model.get_parameter(names[0])
            name = next((name for name in names if name in checkpoint.sources), names[0])
            if layout.rank and names[0] in layout.of_first_rank:
                piece = torch.zeros(whole.shape, dtype=whole.dtype)
            else:
                piece = checkpoint.read(name, whole.shape, layout.pieces.get(names[0])).to(whole.dtype)
            set_parameter(model, names, piece)


class Checkpoint:
    """The tensors in the safetensors files of a model folder, by the names of the model's parameters."""

    def __init__(self, folder: Path, model):
        self._folder = Path(folder)
        if (self._folder / INDEX).is_file():
            self._files = json.loads((self._folder / INDEX).read_text())["weight_map"]
        else:
            with safe_open(self._folder / WEIGHTS, "pt") as file:
                self._files = dict.fromkeys(file.keys(), WEIGHTS)
        transforms = get_model_conversion_mapping(model)
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        known = dict.fromkeys(name for name, _ in model.named_parameters(remove_duplicate=False))
        self.sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        """For each parameter its tensors, by the pattern of a converter; one under None: it is the tensor itself."""
        for key in sorted(self._files, key=dot_natural_key):
            prefix = model.base_model_prefix
            name, pattern = rename_source_key(key, renamings, converters, prefix, dict.fromkeys(known, True))
            self.sources[name][pattern].append(key)
        self._operations = {p: c for c in converters for p in c.source_patterns}

    def read(self, name: str, shape: torch.Size, piece: Piece | None) -> Tensor:
        """A piece (None: all) of the parameter `name`, whose whole shape this is."""
        sources = self.sources.get(name)
        if not sources:
            raise ValueError(f"its weights lack {name}")
        piece = piece or Piece(0, ((0, shape[0]),))
        if list(sources) == [None]:
            return self._slices(sources[None][0], name, shape, piece)
        converter = self._operations[next(iter(sources))]
        kinds = [type(operation) for operation in converter.operations]
        if kinds == [Concatenate] and converter.operations[0].dim == piece.dim == 0:
            keys = [key for pattern in converter.source_patterns for key in sources[pattern]]
            return self._joined(keys, name, shape, piece)
        merged = kinds and kinds[0] is MergeModulelist and converter.operations[0].dim == 0
        joined = kinds[1:] == [Concatenate] and converter.operations[1].dim == 1
        if not merged or piece.dim == 0 or not (joined or (len(kinds) == 1 and len(sources) == 1)):
            raise ValueError(f"{name} is made by {[kind.__name__ for kind in kinds]}, which can't be read by slices")
        of_experts = zip(*(sources[pattern] for pattern in converter.source_patterns), strict=True)
        if piece.dim == 1:
            return torch.stack([self._joined(keys, name, shape[1:], Piece(0, piece.runs)) for keys in of_experts])
        part, local = torch.Size((shape[1] // len(sources), *shape[2:])), Piece(piece.dim - 1, piece.runs)
        return torch.stack([torch.cat([self._slices(key, name, part, local) for key in keys]) for keys in of_experts])

    def _joined(self, keys: Sequence[str], name: str, shape: torch.Size, piece: Piece) -> Tensor:
        """A piece, some rows, of a parameter whose rows are those of several tensors."""
        parts, at = [], 0
        for key in keys:
            with safe_open(self._folder / self._files[key], "pt") as file:
                rows = file.get_slice(key).get_shape()[0]
            inside = [(max(a, at) - at, min(b, at + rows) - at) for a, b in piece.runs]
            local = Piece(0, tuple(run for run in inside if run[0] < run[1]))
            if local.runs:
                parts.append(self._slices(key, name, torch.Size((rows, *shape[1:])), local))
            at += rows
        if at != shape[0]:
            raise ValueError(f"{', '.join(keys)} have {at} rows, but {name} needs {list(shape)}")
        return torch.cat(parts)

    def _slices(self, key: str, name: str, shape: torch.Size, piece: Piece) -> Tensor:
        with safe_open(self._folder / self._files[key], "pt") as file:
            tensor = file.get_slice(key)
            if list(tensor.get_shape()) != list(shape):
                raise ValueError(f"{key} is {tensor.get_shape()}, but {name} needs {list(shape)}")
            lead = (slice(None),) * piece.dim
            parts = [tensor[(*lead, slice(start, stop))] for start, stop in piece.runs]
            return torch.cat(parts, piece.dim) if len(parts) > 1 else parts[0].clone()
