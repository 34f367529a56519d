"""The public functions: check the input, plan, run. Start reading here.

`tree_attn_func` is attention over a sequence sharded across cp_group, `tree_attn_varlen_func` the same for packed
documents; decode.py and prefill.py have those over a sharded KV cache. Tensors are [batch, sequence, heads, head_dim]
as in flash-attn. Bad input raises ``ValueError`` before anything is sent. If arguments differ between ranks, all ranks
raise the same ``ValueError``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .. import comm, kernels
from ..config import TreeConfig, check_choice
from ..layout import (
    LAYOUTS,
    Dispatched,
    Layout,
    Packed,
    Sharding,
    check_layout,
    document_bounds,
    documents_over,
    packed_layout,
)
from ..plan import Shape
from ..spec import AttnSlice, AttnSpec
from . import passes
from .autograd import attention
from .call import AttentionCall, Inputs, PlannedAttention
from .sequences import layouts_of, sharding_of
from .validate import (
    autocast,
    check_cross_documents,
    check_cross_layouts,
    check_finite_shares,
    check_heads,
    check_lengths,
    check_packed,
    check_selected,
    check_sinks,
    check_ulysses,
    make_slices,
    make_spec,
)


@comm.public_call
def tree_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp_group,
    causal: bool | None = None,
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    ranges: Sequence[AttnSlice] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    selected: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    layout: Layout = "zigzag",
    layout_kv: Layout | None = None,
    config: TreeConfig | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention over a sequence sharded across ranks. Collective over cp_group.

    It can be differentiated twice, backward, forward (torch.func.jvp, torch.autograd.forward_ad) and one within the
    other, if all ranks do so (docs/derivatives.md).

    Args:
        q: [b, s/p, h, d], this rank's shard of the queries; any strides, fp32, bf16, fp16 or fp64.
        k, v: [b, s/p, h_kv, d] and [b, s/p, h_kv, d_v]; h_kv divides h (GQA, MQA). In cross attention (causal=False, no
            window) the shard of another sequence, of any length; with ranges, too.
        cp_group: the process group over which the sequence is sharded, or a 1-D DeviceMesh; None for one rank.
        causal: a query sees keys at its own and earlier positions. Default True, without ranges.
        softmax_scale: default 1 / sqrt(d).
        window_size: (left, right) keys seen to either side of the query's own position; -1 is unbounded.
        ranges: any other mask, as `AttnSlice`s that don't overlap, the same on all ranks; instead of causal and
            window_size. Positions count from the start of the whole sequence; balancing the work is up to the layout.
        softcap: logits become softcap * tanh(logits / softcap); 0 turns it off.
        sinks: [h] logits with value 0 that join every query's softmax. Their gradient is this rank's part: sum it over
            cp_group as for any replicated parameter.
        alibi_slopes: fp32 [h] or [b, h], the same on all ranks, without a gradient: slope * |query position - key
            position| is taken off a logit after softcap, as in flash-attn. Not with ranges or in cross attention.
        selected: int32 [b, s/p, m], the same m on all ranks: positions of the keys that each of this rank's queries
            sees, among those that the rest of the mask shows; -1: none. `tree_select_func` finds them. They travel with
            the queries, 4 m bytes each. Heads are not exchanged (ulysses_size). Not with ranges.
        dropout_p: probability that a weight is dropped. The mask depends only on dropout_seed, sequence, head and
            positions, not on ranks, schedule or backend. lse is computed without dropout.
        dropout_seed: an integer, the same on all ranks, different in every call.
        layout: "zigzag" (Megatron's), "contiguous" (the lengths of `shard_sequence`, which the ranks tell each other in
            a small message), a tuple of every rank's length (contiguous), or a `Dispatched`: any chunks on any rank;
            several documents are the same in every row.
        layout_kv: of k and v in cross attention, with as many documents as layout; default: layout.
        config: `TreeConfig`; default: the file in $MEGATRON_TREE_CONFIG, else the planner chooses.
        return_lse: also return lse [b, h, s/p], fp32, natural log, differentiable; -inf for a query that sees nothing.
        return_max_logit: also return the largest logit of each head, [h], fp32, over the batch and the whole sequence,
            with softmax_scale and softcap, without sinks; not differentiable, not with alibi_slopes. It costs one more
            product of queries and keys, in torch.

    Under torch.autocast q, k and v are cast as for torch's scaled_dot_product_attention.

    Returns: out [b, s/p, h, d_v] in q's dtype (and lse) (and the largest logits).
    Raises: ValueError for bad input or arguments that differ between ranks; CommError if a rank failed or does not
        respond.
    Source: Tree Attention (arXiv 2408.04093), on a grid of ranks (docs/design.md, section 2).
    """
    outside, q, k, v = autocast(q, k, v)
    ranks = comm.Ranks.of(cp_group, q.device, config)
    if layout_kv is None:
        layout, layout_kv = layouts_of(layout, ranks, "tree_attn_func", q=q, k=k)
    else:
        (layout,), (layout_kv,) = (
            layouts_of(x, ranks, "tree_attn_func", **of) for x, of in ((layout, {"q": q}), (layout_kv, {"k": k}))
        )
    with ranks.call("tree_attn_func", differentiable=True) as call, outside:
        layout, layout_kv = (check_layout(x, ranks.size) for x in (layout, layout_kv))
        inputs, key = Inputs(q, k, v, sinks, selected), None
        # tensors that are part of the mask may be written to between calls; without them calls that are alike stay so
        if ranges is selected is alibi_slopes is None and not dropout_p and not return_max_logit:
            key = inputs.key(ranks, layout, layout_kv, causal, softmax_scale, repr(window_size), softcap, return_lse)
            if (planned := PlannedAttention.again(call, ranks, key)) is not None:
                return _results(inputs, planned)
        check_heads(q, k, v, "k", "v")
        options = dict(deterministic=config.deterministic, ranges=ranges is not None, alibi_slopes=alibi_slopes)
        spec = make_spec(q, causal, softmax_scale, window_size, softcap, dropout_p, dropout_seed, **options)
        check_lengths(q, k, v, cross=not spec.by_position)
        if layout != layout_kv:
            check_cross_layouts(layout, layout_kv, spec)
        queries, keys = sharding_of(q, "q", ranks, layout), sharding_of(k, "k", ranks, layout_kv)
        if ranges is not None:
            spec = dataclasses.replace(spec, ranges=make_slices(ranges, queries, keys))
        return _attend(call, ranks, inputs, spec, queries, keys, return_lse, return_max_logit, key=key)


@comm.public_call
def tree_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    cu_seqlens_padded: Tensor | Sequence[int] | None = None,
    cu_seqlens_kv: Tensor | Sequence[int] | None = None,
    cu_seqlens_kv_padded: Tensor | Sequence[int] | None = None,
    max_seqlen: int | None = None,
    cp_group,
    causal: bool | None = None,
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    selected: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    layout: str | Sequence[int] | Dispatched = "documents",
    config: TreeConfig | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`tree_attn_func` for documents packed one after another: no query sees a key of another document.

    By default every document is padded to a multiple of 2p tokens and sharded zigzag on its own, as in Megatron and
    TransformerEngine; `shard_sequence` with `packed_layout(...)` makes these shards. Documents may be empty.

    Args:
        q: [t/p, h, d], this rank's shard of all t rows, including padding. k: [t/p, h_kv, d], v: [t/p, h_kv, d_v].
        cu_seqlens: integers [n + 1], from 0: the boundaries of the documents without padding. Not needed with a layout
            from `dispatch_documents`.
        cu_seqlens_padded: the boundaries of the documents with their padding; default: no padding. Rows after the last
            document are padding.
        cu_seqlens_kv, cu_seqlens_kv_padded: of k and v in cross attention (causal=False, no window), where document i
            of q sees document i of k; default: q's.
        max_seqlen: length of the longest document of q; optional, checked if given.
        layout: "documents" (above); what `dispatch_documents` returns (short documents whole on one rank, no padding);
            or the packed rows are cut as a whole: "zigzag" (t a multiple of 2p; Megatron's inter-document masking),
            "contiguous" (any t, as `shard_sequence` cuts it) or a tuple of every rank's rows, as in `tree_attn_func`.
        selected: int32 [t/p, m]: positions within the query's document.
        Others as in `tree_attn_func`.

    Returns: out [t/p, h, d_v] (and lse [h, t/p]) (and the largest logits [h]). Padding rows see nothing but a sink;
        their out and gradients are 0. Their q, k, v and dout may be NaN.
    Raises: as `tree_attn_func`, and ValueError for a padded length that is not a multiple of 2p.
    """
    outside, q, k, v = autocast(q, k, v)
    ranks = comm.Ranks.of(cp_group, q.device, config)
    (cut,) = layouts_of(layout, ranks, "tree_attn_varlen_func", dim=0, q=q)
    with ranks.call("tree_attn_varlen_func", differentiable=True) as call, outside:
        check_packed(q, k, v)
        world, own = ranks.size, q.shape[0]
        counts = (own,) * world
        if isinstance(cut, (tuple, list)):
            layout = counts = check_layout(cut, world)
            if own != counts[ranks.rank]:
                raise ValueError(
                    f"q has {own} rows on rank {ranks.rank} but layout={counts} gives it {counts[ranks.rank]}"
                )
        if more := max(counts) - own:  # a rank's rows and padding, as many as the longest shard has
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v))
            selected = None if selected is None else F.pad(selected, (0, 0, 0, more), value=-1)
        documents = _documents(layout, cu_seqlens, cu_seqlens_padded, num_rows=sum(counts), world=world)
        longest = max(documents.lengths, default=0)
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(f"max_seqlen={max_seqlen} is less than the longest document of cu_seqlens, {longest}")
        q, k, v = (x[None] for x in (q, k, v))
        check_heads(q, k, v, "k", "v")
        selected = selected[None] if isinstance(selected, Tensor) else selected
        options = dict(deterministic=config.deterministic, alibi_slopes=alibi_slopes)
        spec = make_spec(q, causal, softmax_scale, window_size, softcap, dropout_p, dropout_seed, **options)
        of_keys = documents
        if cu_seqlens_kv is not None:
            if not isinstance(documents, Packed):
                raise ValueError(f"cu_seqlens_kv needs layout='documents', not {layout!r}: leave one of the two out")
            of_keys = packed_layout(cu_seqlens_kv, cu_seqlens_kv_padded, num_rows=k.shape[1] * world)
            counts = tuple(len(document_bounds("cu_seqlens", x)) - 1 for x in (cu_seqlens, cu_seqlens_kv))
            check_cross_documents(documents, of_keys, counts, spec)
        check_lengths(q, k, v, cross=cu_seqlens_kv is not None)
        queries, keys = sharding_of(q, "q", ranks, documents), sharding_of(k, "k", ranks, of_keys)
        inputs = Inputs(q, k, v, sinks, selected)
        results = _attend(call, ranks, inputs, spec, queries, keys, return_lse, return_max_logit)
    out, *others = results if isinstance(results, tuple) else (results,)
    if return_lse:
        others[0] = others[0][0, :, :own]
    return (out[0, :own], *others) if others else out[0, :own]


def _documents(
    layout: str | tuple[int, ...] | Dispatched, cu_seqlens, cu_seqlens_padded, *, num_rows: int, world: int
) -> Packed | Dispatched:
    """The layout of packed documents that have num_rows rows on all ranks together."""
    if isinstance(layout, Dispatched):
        if cu_seqlens is not None and packed_layout(cu_seqlens, cu_seqlens_padded).lengths != layout.lengths:
            raise ValueError(
                f"cu_seqlens has other documents than the layout, which was made for {layout!r}: call "
                "dispatch_documents with this batch's cu_seqlens, or leave cu_seqlens out"
            )
        return layout
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is missing: pass the documents' boundaries, or a layout from dispatch_documents")
    documents = packed_layout(cu_seqlens, cu_seqlens_padded, num_rows=num_rows)
    if layout == "documents":
        return documents
    if not isinstance(layout, tuple):
        check_choice("layout", layout, ("documents", *LAYOUTS))
    return documents_over(documents.lengths, documents.padded, world, layout)


def _attend(
    collective: comm.CollectiveCall,
    ranks: comm.Ranks,
    inputs: Inputs,
    spec: AttnSpec,
    queries: Sharding,
    keys: Sharding,
    return_lse: bool,
    return_max_logit: bool,
    *,
    key: tuple | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """What the public functions return, of tensors whose shapes are checked: the remaining checks, agree, plan, run.

    key: as of `PlannedAttention.again`.
    """
    q, k, v, sinks, selected = inputs
    config = ranks.config
    check_sinks(sinks, q)
    check_ulysses(config.ulysses_size, ranks.size, q.shape[2])
    check_selected(selected, q, spec, config.ulysses_size)
    for name, given in (("alibi_slopes", spec.alibi_slopes), ("selected", selected)):
        if return_max_logit and given is not None:
            raise ValueError(f"return_max_logit=True does not take {name}: leave one of the two out")
    if return_max_logit and config.deterministic == "ranks":
        raise ValueError("return_max_logit=True does not take deterministic='ranks': leave one of the two out")
    backend = kernels.choose(q, k, v, spec, config.backend, selects=selected is not None)
    check_finite_shares(ranks, queries, keys, q=q, k=k, v=v, sinks=sinks)
    call = AttentionCall(
        batch=q.shape[0],
        shape=Shape(q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
        dtype=q.dtype,
        spec=spec,
        queries=queries,
        keys=keys,
        sinks=sinks is not None,
        selected=None if selected is None else selected.shape[2],
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        **inputs.derivatives,
        config=config,
        topology=ranks.fingerprint,
    )
    agreement = call.agree(collective, ranks.transport)
    if return_max_logit:
        backend, largest = backend.with_largest_logits(q)
    rehearse = functools.partial(passes.rehearse, *inputs[:4])
    planned = PlannedAttention.of(call, agreement, ranks, backend, selected, rehearse, key)
    results = _results(inputs, planned)
    if return_max_logit:  # every pair of a query and a key was in one rank's block
        results = (*(results if return_lse else (results,)), ranks.reduce(largest, "max"))
    return results


def _results(inputs: Inputs, planned: PlannedAttention) -> Tensor | tuple[Tensor, Tensor]:
    out, lse = attention(*inputs[:4], planned)
    return (out, lse) if planned.return_lse else out
