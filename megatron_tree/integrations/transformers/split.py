"""A Transformers model whose weights are split over all ranks: its parameters are cut, and hooks join the results.

Partial sums of output projections, MLPs and experts are added up over all ranks, in rank order, so every rank has the
same bits. The embedding looks up the rows that a rank has; the LM head's logits and latents are gathered. Attention
itself needs a `TreeCache` with the same head shares (attention.py). Long chunks of prompts are run otherwise
(own_tokens.py).
"""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...comm import gather_sequence, sum_over_ranks
from .own_tokens import OwnTokens, running
from .pieces import Layout, even_shares


def split_model(model, layout: Layout, group, *, timeout_s: float) -> None:
    """Keep this rank's pieces of a model, in place, and add the hooks. group: all ranks that share the weights.

    Raises: RuntimeError if a parameter has another shape than planned.
    """
    for names in tied_parameters(model):
        whole = model.get_parameter(names[0])
        set_parameter(model, names, layout.piece_of(names[0], whole.data))
    connect(model, layout, group, timeout_s=timeout_s)


def tied_parameters(model) -> list[list[str]]:
    """The names of every parameter: several for one that is tied."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return list(found.values())


def set_parameter(model, names: list[str], value: Tensor) -> None:
    """Replace a parameter, under all its names, by one without a gradient."""
    parameter = nn.Parameter(value, requires_grad=False)
    for name in names:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, parameter)


def connect(model, layout: Layout, group, *, timeout_s: float) -> None:
    """Add the hooks to a model whose parameters are this rank's pieces, and `model.own_tokens`.

    Raises: RuntimeError if one of them has another shape than planned.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.shape != layout.shapes[name]:
            planned = list(layout.shapes[name])
            raise RuntimeError(f"{name} is {list(parameter.shape)} on rank {layout.rank}, planned {planned}")

    def add_up(module, args, out: Tensor) -> Tensor:
        if (run := running.get()) is not None:
            return run.sum_up(module, out)
        return sum_over_ranks(out, group, timeout_s=timeout_s)

    for name in layout.summed:
        model.get_submodule(name).register_forward_hook(add_up)
    own_numbers = []
    for name in layout.attentions:
        attention = model.get_submodule(name)
        attention.head_shares = layout.heads.shares
        if hasattr(attention, "qkv_proj"):  # by these numbers the model finds q, k and v in its output
            attention.config = config = copy.copy(attention.config)
            own, own_kv = layout.heads.shares[layout.rank % layout.heads.size], layout.heads.num_heads_kv
            own_numbers.append((config, "num_attention_heads", config.num_attention_heads, own))
            own_numbers.append((attention, "num_key_value_heads", attention.num_key_value_heads, own_kv))
    for module, name, _, own in own_numbers:
        setattr(module, name, own)
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    words.forward = _own_words(words, layout, group, timeout_s)
    gathered = [(model.get_submodule(name), n) for name, n in layout.gathered.items()]
    for module, num_columns in ((head, layout.num_logits), *gathered):
        widths = even_shares(num_columns, layout.world)
        module.register_forward_hook(functools.partial(_gather, widths=widths, group=group, timeout_s=timeout_s))
    model.own_tokens = OwnTokens(model, layout, group, own_numbers, timeout_s)


def _own_words(words, layout: Layout, group, timeout_s: float):
    """The forward of an embedding that has this rank's words only: others' rows are added up."""
    look_up, words.padding_idx = words.forward, None
    first, stop = layout.share(layout.num_words)

    def forward(tokens: Tensor) -> Tensor:
        if (run := running.get()) is not None:
            return run.look_up(look_up, tokens, first, stop, layout.num_words)
        own = (tokens >= first) & (tokens < stop)
        found = look_up((tokens - first).clamp(0, stop - first - 1))
        return sum_over_ranks(found * own[..., None], group, timeout_s=timeout_s)

    return forward


def _gather(module, args, out: Tensor, *, widths: tuple[int, ...], group, timeout_s: float) -> Tensor:
    """A hook: out [..., own columns] of every rank -> [..., all columns]. Whole weights give them all."""
    if out.shape[-1] == sum(widths):
        return out
    mine = F.pad(out, (0, max(widths) - out.shape[-1])).movedim(-1, 0).contiguous()
    whole = gather_sequence(mine, group, timeout_s=timeout_s).unflatten(0, (len(widths), max(widths)))
    return torch.cat([part[:n].movedim(0, -1) for part, n in zip(whole, widths)], -1)
