"""A Transformers model whose weights are split over all ranks: its parameters are cut, and hooks join the results.

Partial sums of output projections, MLPs and experts are added up over all ranks, in rank order, so every rank has the
same bits. Embeddings look up the rows that a rank has; the LM head's logits and latents are gathered. Attention
itself needs a `TreeCache` with the same head shares (attention.py). Long chunks of prompts are run otherwise
(own_tokens.py).
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn
from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention
from transformers.pytorch_utils import Conv1D

from ...cache.gathered import even_shares
from ...cache.own_tokens import running
from ...comm import gather_rows, sum_over_ranks
from .own_tokens import own_tokens_of
from .rank_layout import Layout


def split_model(model, layout: Layout, group, *, transport: str = "auto", timeout_s: float) -> None:
    """Keep this rank's pieces of a model, in place, and add the hooks. group: all ranks that share the weights.

    transport: of sums and gathers, see `TreeConfig`; weights themselves are gathered by messages.

    Raises: RuntimeError if a parameter has another shape than planned.
    """
    for names in tied_parameters(model):
        whole = model.get_parameter(names[0])
        set_parameter(model, names, layout.piece_of(names[0], whole.data))
    connect(model, layout, group, transport=transport, timeout_s=timeout_s)


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


def connect(model, layout: Layout, group, *, transport: str = "auto", timeout_s: float) -> None:
    """Add the hooks to a model whose parameters are this rank's pieces, and `model.own_tokens`; see `split_model`.

    Raises: RuntimeError if one of them has another shape than planned.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.shape != layout.shapes[name]:
            planned = list(layout.shapes[name])
            raise RuntimeError(f"{name} is {list(parameter.shape)} on rank {layout.rank}, planned {planned}")

    messages = {"transport": transport, "timeout_s": timeout_s}

    own_numbers = []
    num_heads, num_heads_kv = layout.num_queries, layout.heads.num_heads_kv
    own = dict.fromkeys(("num_heads", "num_attention_heads", "n_heads"), num_heads)
    own |= dict.fromkeys(("num_key_value_heads", "num_kv_heads"), num_heads_kv)
    for name in layout.attentions:  # by such numbers models find q, k and v in what projections give
        attention = model.get_submodule(name)
        attention.head_shares = layout.heads.shares
        attention.cached_heads = layout.heads.all_query_heads(layout.rank)
        own_numbers += [(attention, x, getattr(attention, x), n) for x, n in own.items() if hasattr(attention, x)]
        if hasattr(attention, "qkv_proj") and hasattr(attention, "config"):  # CodeGen has none
            attention.config = config = copy.copy(attention.config)
            own_numbers.append((config, "num_attention_heads", config.num_attention_heads, num_heads))
        elif isinstance(attention, JetMoeAttention):
            experts, width = attention.experts, attention.head_dim * num_heads_kv
            own_numbers.append((experts, "hidden_size", experts.hidden_size, width))
        elif hasattr(attention, "c_attn"):
            sizes = [attention.head_dim * n for n in (num_heads, num_heads_kv, num_heads_kv)]
            own_numbers.append((attention, "split_size", attention.split_size, sizes))
    for module, name, _, number in own_numbers:
        setattr(module, name, number)
    for module in model.modules():
        if isinstance(module, Conv1D):  # its own forward has the width from before
            module.forward = functools.partial(_projected, module)
    for name in layout.summed:
        module = model.get_submodule(name)
        module.forward = _summed(module, group, messages)
    for name, (width, counts) in layout.norms.items():
        norm = model.get_submodule(name)
        options = {"width": width, "counts": counts, "group": group, "messages": messages}
        norm.forward = functools.partial(_norm, norm, norm.forward, **options)
    for name, rows in layout.tables.items():
        table = model.get_submodule(name)
        table.forward = _own_rows(table, layout, rows, group, messages)
    head = model.get_output_embeddings()
    gathered = [(model.get_submodule(name), n) for name, n in layout.gathered.items()]
    for module, num_columns in ((head, layout.num_logits), *gathered):
        widths = even_shares(num_columns, layout.world)
        module.register_forward_hook(functools.partial(_gather, widths=widths, group=group, messages=messages))
    model.own_tokens = own_tokens_of(model, layout, group, own_numbers, **messages)


def _projected(projection, x: Tensor) -> Tensor:
    """What a Conv1D gives, of whatever part of its weights it has."""
    rows = torch.addmm(projection.bias, x.reshape(-1, x.shape[-1]), projection.weight)
    return rows.view(*x.shape[:-1], -1)


def _summed(module, group, messages: dict):
    """The forward of a module that returns a partial sum: a hook would take more function calls in every layer."""
    partial = module.forward

    def forward(*args, **kwargs) -> Tensor:
        out = partial(*args, **kwargs)
        if (run := running.get()) is not None:
            return run.sum_up(module, out)
        return sum_over_ranks(out, group, **messages)

    return forward


def _norm(norm, of_whole_rows, x: Tensor, *, width: int, counts: bool, group, messages: dict) -> Tensor:
    """An RMS norm of rows whose `width` numbers are split over the ranks; counts: none of this rank's is another's.

    Whole weights give whole rows.
    """
    if x.shape[-1] == width:
        return of_whole_rows(x)
    numbers = x.float()
    squares = numbers.pow(2).sum(-1, keepdim=True)
    mean = sum_over_ranks(squares if counts else torch.zeros_like(squares), group, **messages) / width
    return (norm.weight * (numbers * torch.rsqrt(mean + norm.variance_epsilon))).to(x.dtype)


def _own_rows(table, layout: Layout, num_rows: int, group, messages: dict):
    """The forward of an embedding that has this rank's rows only: others' rows are added up."""
    look_up, table.padding_idx = table.forward, None
    first, stop = layout.share(num_rows)

    def forward(rows: Tensor) -> Tensor:
        if (run := running.get()) is not None:
            return run.look_up(look_up, rows, first, stop, num_rows)
        own = (rows >= first) & (rows < stop)
        found = look_up((rows - first).clamp(0, stop - first - 1))
        return sum_over_ranks(found * own[..., None], group, **messages)

    return forward


def _gather(module, args, out: Tensor, *, widths: tuple[int, ...], group, messages: dict) -> Tensor:
    """A hook: out [..., own columns] of every rank -> [..., all columns]. Whole weights give them all."""
    if out.shape[-1] == sum(widths):
        return out
    return gather_rows(out.movedim(-1, 0).contiguous(), widths, group, **messages).movedim(0, -1).contiguous()
