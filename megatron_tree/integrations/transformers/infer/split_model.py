"""A Transformers model whose weights are split over all ranks: parameters are cut, and modules join their results.

Partial sums of output projections, MLPs and experts are added up over all ranks, in rank order, so every rank has the
same bits. The rank that owns a vocabulary row embeds it for the others; logits and latents are gathered. Attention
needs a `TreeCache` with the same head shares. Long chunks of prompts are run by `WeightGathering`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....cache.gathered import Parts, Piece, even_shares
from ....cache.weight_gathering import SplitFeedForward, SplitLayer, WeightGathering, current_pass
from ....comm import Ranks
from .recurrent_heads import HeadShare, attribute
from .weight_layout import WeightLayout


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
        elif hasattr(attention, "c_attn"):
            widths = [attention.head_dim * n for n in (num_heads, num_heads_kv, num_heads_kv)]
            sizes.append((attention, "split_size", attention.split_size, widths))
    for name, share in layout.recurrent.items():
        sizes += _recurrent_sizes(model.get_submodule(name), share)
    return sizes


def _recurrent_sizes(layer, share: HeadShare) -> Iterator[tuple[object, str, object, object]]:
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


def _gated_norm(norm, x: Tensor, gate: Tensor, *, share: HeadShare, ranks: Ranks) -> Tensor:
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
    for name in {*layout.pieces, *layout.of_first_rank} - held:
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
    split = [p for p in (*layout.pieces, *layout.of_first_rank) if p.startswith(f"{name}.")]
    feed_forwards = []
    for summed in layout.summed:
        is_projection = f"{summed}.weight" in layout.pieces
        part = summed.rpartition(".")[0] if is_projection else summed
        if not part.startswith(f"{name}.") or f"{part}.".startswith(f"{attention}."):
            continue
        inside = [p for p in split if p.startswith(f"{part}.")]
        weights = tuple(_parts(layout, p) for p in inside)
        feed_forwards.append(SplitFeedForward(part, model.get_submodule(summed), weights))
        split = [p for p in split if p not in inside]
    return SplitLayer(name, tuple(_parts(layout, p) for p in split), tuple(feed_forwards))


def _parts(layout: WeightLayout, name: str) -> Parts:
    shape = layout.whole_shapes[name]
    if name in layout.of_first_rank:
        return Parts.of_first_rank(name, shape, layout.world)
    return Parts.of(name, shape, [pieces[name] for pieces in layout.pieces_by_rank])
