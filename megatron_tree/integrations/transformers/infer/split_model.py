"""A Transformers model whose weights are split over all ranks: parameters are cut, and modules join their results.

Partial sums of output projections, MLPs and experts are added up over all ranks, in rank order, so every rank has the
same bits. The rank that owns a vocabulary row embeds it for the others; logits and latents are gathered. Attention
needs a `TreeCache` with the same head shares. Long chunks of prompts are run by `WeightGathering`.

A model in memory is cut (`split_model`). Of one in safetensors files no rank reads or holds the whole weights: it is
made without weights (`empty_model`), its layout is planned (weight_layout.py), and `read_pieces` fills it with slices
of the files. Where a checkpoint has other names than the model, or one tensor for each expert, Transformers' own tables
of conversions say which tensors a parameter is made of.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
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
from transformers.pytorch_utils import Conv1D

from transformers import GenerationConfig

from ....core.cache.gathered import Parts, Piece, even_shares
from ....core.cache.weight_gathering import SplitFeedForward, SplitLayer, WeightGathering, current_pass
from ....core.comm import Ranks
from ..models import auto_class, load_config, naming
from .recurrent_heads import RecurrentHeads, attribute
from .weight_layout import WeightLayout

WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"


def split_model(model, layout: WeightLayout, ranks: Ranks) -> None:
    """Keep this rank's pieces of a model, in place, and connect it to the other ranks'.

    ranks: all that share the weights.
    """
    for names in tied_parameters(model):
        whole = model.get_parameter(names[0])
        set_parameter(model, names, layout.piece_of(names[0], whole.data))
    connect(model, layout, ranks)


def tied_parameters(model) -> list[list[str]]:
    """The names of every parameter, several for a tied one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def set_parameter(model, names: list[str], value: Tensor) -> None:
    """Replace a parameter, under all its names, by one without a gradient."""
    parameter = nn.Parameter(value, requires_grad=False)
    for name in names:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, parameter)


def connect(model, layout: WeightLayout, ranks: Ranks) -> None:
    """Let the modules of a model that holds this rank's pieces join their results; sets `model.weight_gathering`.

    With recurrent layers it is None: all ranks run all tokens, each those of its heads.
    """
    sizes = _module_sizes(model, layout)
    for module, name, _, local in sizes:
        setattr(module, name, local)
    for module in model.modules():
        if isinstance(module, Conv1D):  # its own forward has the width from before
            module.forward = functools.partial(_projected, module)
    for name in layout.summed:
        module = model.get_submodule(name)
        module.forward = _summed(module, ranks)
    for name, (width, counts) in layout.norms.items():
        norm = model.get_submodule(name)
        options = {"width": width, "counts": counts, "ranks": ranks}
        norm.forward = functools.partial(_norm, norm, norm.forward, **options)
    for name, share in layout.recurrent.items():
        norm = attribute(model.get_submodule(name), share.rule.norm)
        if share.splits_key_heads and isinstance(getattr(norm, "weight", None), nn.Parameter):
            norm.forward = functools.partial(_gated_norm, norm, share=share, ranks=ranks)
    for name, rows in layout.tables.items():
        table = model.get_submodule(name)
        table.forward = _embedded(table, layout.share(rows), rows, ranks)
    gathered = [(model.get_submodule(name), n) for name, n in layout.gathered.items()]
    for module, num_columns in ((model.get_output_embeddings(), layout.num_logits), *gathered):
        widths = even_shares(num_columns, layout.world)
        module.register_forward_hook(functools.partial(_gathered, widths=widths, ranks=ranks))
    model.weight_gathering = None if layout.recurrent else _weight_gathering(model, layout, ranks, sizes)


def _module_sizes(model, layout: WeightLayout) -> list[tuple[object, str, object, object]]:
    """The numbers by which attention modules find q, k and v in what projections give, see `WeightGathering`."""
    sizes = []
    heads, num_heads_kv = layout.heads, layout.heads.num_heads_kv
    num_heads = sum(heads.shares) if layout.repeats_queries else heads.shares[layout.rank % heads.size]
    local = dict.fromkeys(("num_heads", "num_attention_heads"), num_heads)
    local["num_key_value_heads"] = num_heads_kv
    for name in layout.attentions:
        attention = model.get_submodule(name)
        attention.head_shares = layout.heads.shares
        sizes += [(attention, x, getattr(attention, x), n) for x, n in local.items() if hasattr(attention, x)]
        if hasattr(attention, "qkv_proj"):
            attention.config = config = copy.copy(attention.config)
            sizes.append((config, "num_attention_heads", config.num_attention_heads, num_heads))
        elif hasattr(attention, "o_a_proj"):
            groups = attention.o_a_proj.n_groups
            attention.config = config = copy.copy(attention.config)
            of_groups = (config, "o_groups"), (attention.o_a_proj, "n_groups")
            sizes += [(*size, groups, groups // layout.world) for size in of_groups]
        elif hasattr(attention, "c_attn"):
            widths = [attention.head_dim * n for n in (num_heads, num_heads_kv, num_heads_kv)]
            sizes.append((attention, "split_size", attention.split_size, widths))
    for name, share in layout.recurrent.items():
        sizes += _recurrent_sizes(model.get_submodule(name), share)
    return sizes


def _recurrent_sizes(layer, share: RecurrentHeads) -> Iterator[tuple[object, str, object, object]]:
    """Sizes and buffers."""
    for name, blocks in share.rule.sizes.items():
        if (whole := attribute(layer, name)) is not None:
            path, _, last = name.rpartition(".")
            yield layer.get_submodule(path), last, whole, share.width(blocks)
    for name, blocks in share.rule.rows.items():
        if isinstance(whole := getattr(layer, name, None), Tensor) and not isinstance(whole, nn.Parameter):
            dim = whole.shape.index(share.width(blocks, whole=True))
            yield layer, name, whole, Piece(dim, share.runs(blocks)).of(whole)


def _projected(projection, x: Tensor) -> Tensor:
    """The output of a Conv1D with whatever part of its weights it has."""
    rows = torch.addmm(projection.bias, x.reshape(-1, x.shape[-1]), projection.weight)
    return rows.view(*x.shape[:-1], -1)


def _summed(module, ranks: Ranks):
    """The forward of a module that returns a partial sum: a hook would take more function calls in every layer."""
    partial = module.forward

    def forward(*args, **kwargs) -> Tensor:
        out = partial(*args, **kwargs)
        if (gathering := current_pass.get()) is not None:
            return gathering.sum_up(module, out)
        return ranks.sum(out)

    return forward


def _norm(norm, of_whole_rows, x: Tensor, *, width: int, counts: bool, ranks: Ranks) -> Tensor:
    """An RMS norm of rows of `width` numbers that are split over the ranks; counts: this rank's enter the sum."""
    if x.shape[-1] == width:  # weights are whole
        return of_whole_rows(x)
    numbers = x.float()
    squares = numbers.pow(2).sum(-1, keepdim=True)
    mean = ranks.sum(squares if counts else torch.zeros_like(squares)) / width
    return (norm.weight * (numbers * torch.rsqrt(mean + norm.variance_epsilon))).to(x.dtype)


def _gated_norm(norm, x: Tensor, gate: Tensor, *, share: RecurrentHeads, ranks: Ranks) -> Tensor:
    """A gated RMS norm over the value heads of a key head, which several ranks have; x, gate [..., local width]."""
    numbers, gates = x.float(), F.silu(gate.float())
    gates_before = not getattr(norm, "norm_before_gate", False)
    numbers = numbers * gates if gates_before else numbers
    squares = numbers.new_zeros(*x.shape[:-1], share.num_keys)
    squares[..., share.keys[0]] = numbers.pow(2).sum(-1)
    width = share.width(share.rule.rows[share.rule.norm], whole=True) // share.num_keys
    mean = ranks.sum(squares)[..., slice(*share.keys)] / width
    numbers = norm.weight * (numbers * torch.rsqrt(mean + norm.variance_epsilon))
    return (numbers if gates_before else numbers * gates).to(x.dtype)


def _embedded(table, local: tuple[int, int], num_rows: int, ranks: Ranks):
    """The forward of an embedding of which this rank has the rows `local` (start, stop)."""
    look_up, table.padding_idx = table.forward, None
    first, stop = local

    def forward(ids: Tensor) -> Tensor:
        if (gathering := current_pass.get()) is not None:
            return gathering.look_up(look_up, ids, first, stop, num_rows)
        is_local = (ids >= first) & (ids < stop)
        rows = look_up((ids - first).clamp(0, stop - first - 1))
        return ranks.sum(rows * is_local[..., None])

    return forward


def _gathered(module, args, out: Tensor, *, widths: tuple[int, ...], ranks: Ranks) -> Tensor:
    """A hook: out [..., this rank's columns] -> [..., all columns]."""
    if out.shape[-1] == sum(widths):  # weights are whole
        return out
    return ranks.gather_rows(out.movedim(-1, 0).contiguous(), widths).movedim(0, -1).contiguous()


def _weight_gathering(model, layout: WeightLayout, ranks: Ranks, module_sizes: list) -> WeightGathering:
    layers, head = [_layer(model, layout, name) for name in layout.attentions], model.get_output_embeddings()
    held = {p.name for layer in layers for parts in layer.weights for p in parts}
    for name in {*layout.pieces, *layout.from_first_rank} - held:
        owner = model.get_submodule(name.rpartition(".")[0])
        assert owner is head or isinstance(owner, nn.Embedding), f"{name} is outside of all layers"
    heads, width = layout.heads, model.dtype.itemsize
    d = getattr(model.get_submodule(layout.attentions[0]), "head_dim", 0)
    num_heads = heads.num_groups * (sum(heads.shares) + heads.num_heads_kv)
    return WeightGathering(
        model,
        ranks,
        layers,
        head,
        module_sizes=module_sizes,
        head_groups=heads.num_groups,
        hidden=model.get_input_embeddings().weight.shape[1] * width,
        heads=2 * num_heads * d * width,
        gathered=sum(layout.gathered.values()) * width,
    )


def _layer(model, layout: WeightLayout, attention: str) -> SplitLayer:
    """The layer of an attention module; weights outside of feed-forward parts are gathered with attention's."""
    parts = attention.split(".")
    name = ".".join(parts[: max(i for i, part in enumerate(parts) if part.isdigit()) + 1])
    split = [p for p in (*layout.pieces, *layout.from_first_rank) if p.startswith(f"{name}.")]
    feed_forwards = []
    for summed in layout.summed:
        is_projection = f"{summed}.weight" in layout.pieces
        part = summed.rpartition(".")[0] if is_projection else summed
        if not part.startswith(f"{name}.") or f"{part}.".startswith(f"{attention}.") or summed in layout.not_by_token:
            continue
        inside = [p for p in split if p.startswith(f"{part}.")]
        weights = tuple(_parts(layout, p) for p in inside)
        feed_forwards.append(SplitFeedForward(part, model.get_submodule(summed), weights))
        split = [p for p in split if p not in inside]
    return SplitLayer(name, tuple(_parts(layout, p) for p in split), tuple(feed_forwards))


def _parts(layout: WeightLayout, name: str) -> Parts:
    shape = layout.whole_shapes[name]
    if name in layout.from_first_rank:
        return Parts.from_first_rank(name, shape, layout.world)
    return Parts.of(name, shape, [pieces[name] for pieces in layout.pieces_by_rank])


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
            if layout.rank and names[0] in layout.from_first_rank:
                piece = torch.zeros(whole.shape, dtype=whole.dtype)
            else:
                piece = checkpoint.read(name, whole.shape, layout.pieces.get(names[0])).to(whole.dtype)
            set_parameter(model, names, piece)
        for name, buffer in model.named_buffers():
            if name in checkpoint.sources:  # others are made with the model
                buffer.copy_(checkpoint.read(name, buffer.shape, None))


class Checkpoint:
    """The tensors in the safetensors files of a model folder, by the names of the model's parameters and buffers."""

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
        known = model.state_dict()
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
        piece = piece or Piece(0, ((0, *shape[:1]),))
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
            if not shape:
                return file.get_tensor(key)
            lead = (slice(None),) * piece.dim
            parts = [tensor[(*lead, slice(start, stop))] for start, stop in piece.runs]
            return torch.cat(parts, piece.dim) if len(parts) > 1 else parts[0].clone()
