"""Runs of own tokens of a Transformers model whose weights are split over ranks, see `cache.own_tokens`."""

from __future__ import annotations

from torch import nn

from ...cache.gathered import Parts
from ...cache.own_tokens import Block, Layer, OwnTokens
from .rank_layout import Layout


def own_tokens_of(model, layout: Layout, group, own_numbers: list, **wire) -> OwnTokens:
    """What runs of a split model need; own_numbers: see `OwnTokens`."""
    layers, head = [_layer(model, layout, name) for name in layout.attentions], model.get_output_embeddings()
    held = {p.name for layer in layers for parts in layer.weights for p in parts}
    for name in {*layout.pieces, *layout.of_first_rank} - held:
        owner = model.get_submodule(name.rpartition(".")[0])
        assert owner is head or isinstance(owner, nn.Embedding), f"{name} is outside of all layers"
    heads, width = layout.heads, model.dtype.itemsize
    d = getattr(model.get_submodule(layout.attentions[0]), "head_dim", 0)
    num_heads = heads.num_groups * (sum(heads.shares) + heads.num_heads_kv)
    return OwnTokens(
        model,
        group,
        layers,
        head,
        own_numbers=own_numbers,
        head_groups=heads.num_groups,
        hidden=model.get_input_embeddings().weight.shape[1] * width,
        heads=2 * num_heads * d * width,
        gathered=sum(layout.gathered.values()) * width,
        **wire,
    )


def _layer(model, layout: Layout, attention: str) -> Layer:
    """The layer that an attention belongs to; weights that belong to no block are gathered with attention's."""
    parts = attention.split(".")
    name = ".".join(parts[: max(i for i, part in enumerate(parts) if part.isdigit()) + 1])
    split = [p for p in (*layout.pieces, *layout.of_first_rank) if p.startswith(f"{name}.")]
    blocks = []
    for summed in layout.summed:
        is_projection = f"{summed}.weight" in layout.pieces
        block = summed.rpartition(".")[0] if is_projection else summed
        if not block.startswith(f"{name}.") or f"{block}.".startswith(f"{attention}."):
            continue
        inside = [p for p in split if p.startswith(f"{block}.")]
        blocks.append(Block(block, model.get_submodule(summed), tuple(_parts(layout, p) for p in inside)))
        split = [p for p in split if p not in inside]
    return Layer(name, tuple(_parts(layout, p) for p in split), tuple(blocks))


def _parts(layout: Layout, name: str) -> Parts:
    shape = layout.whole_shapes[name]
    if name in layout.of_first_rank:
        return Parts.of_first_rank(name, shape, layout.world)
    return Parts.of(name, shape, [pieces[name] for pieces in layout.pieces_by_rank])
