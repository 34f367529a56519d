"""Checks of the public functions' arguments. Every message names the argument, its value and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import AttnSpec, integer, integers
from ..layout import Packed, Segment

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def describe(x: object) -> str:
    """A tensor's dtype and shape, or the type of another object."""
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ``ValueError`` unless x is on q's device."""
    if x.device != q.device:
        raise ValueError(f"{name} is on device {x.device} but q is on {q.device}: move them to one device")


def check_lengths(q: Tensor, k: Tensor, v: Tensor, *, cross: bool = False) -> None:
    """q [b, s, h, d], k [b, s, h_kv, d], v [b, s, h_kv, d_v]. cross: k and v may have another length than q."""
    if k.shape[1] != v.shape[1] or (k.shape[1] != q.shape[1] and not cross):
        raise ValueError(
            f"q, k and v must have the same number of tokens on this rank: q has {q.shape[1]}, k {k.shape[1]}, "
            f"v {v.shape[1]} (shapes are [batch, sequence, heads, head_dim]); only in cross attention, with "
            "causal=False and no window_size or alibi_slopes, may k and v have another length than q"
        )


def check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v of packed documents: [t, heads, head_dim] each."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(
                f"{name} must be a 3-D tensor [tokens, heads, head_dim] of packed documents, got {describe(x)}"
            )


def check_cross_documents(queries: Packed, keys: Packed, counts: tuple[int, int], spec: AttnSpec) -> None:
    """Raise ``ValueError`` unless packed queries can attend to packed keys of other lengths.

    counts: documents of the two, without the rows of padding that follow them.
    """
    if queries == keys:
        return
    if spec.by_position:
        raise ValueError(
            f"cu_seqlens_kv differs from cu_seqlens with causal={spec.causal}, window_size={spec.window_size} and "
            f"alibi_slopes={spec.alibi_slopes}: different documents for k and v are cross attention, which needs "
            "causal=False, no window and no slopes"
        )
    if counts[0] != counts[1]:
        raise ValueError(
            f"cu_seqlens has {counts[0]} documents and cu_seqlens_kv {counts[1]}: the numbers must be equal"
        )


def check_ulysses(size: int | None, world: int, num_heads: int) -> None:
    """Raise ``ValueError`` unless `size` of `world` ranks can share the query heads. None: the planner chooses."""
    if size is None:
        return
    if world % size:
        raise ValueError(f"ulysses_size={size} must divide the {world} ranks of cp_group")
    if size > num_heads:
        raise ValueError(
            f"ulysses_size={size} ranks can't share {num_heads} query heads: choose {num_heads} or fewer, 1 to "
            "exchange no heads, or None to let the planner choose"
        )


def check_runs(shares) -> list[list[tuple[int, int]]]:
    """The positions of queries: lists of runs (first position, count)."""
    try:
        by_rank = [[integers(run, 0) for run in runs] for runs in shares]
    except TypeError:
        by_rank = [[None]]
    if any(run is None or len(run) != 2 for runs in by_rank for run in runs):
        raise ValueError(f"shares={shares!r} must be lists of runs (first position, count), in integers, one per rank")
    return by_rank


def check_segments(given) -> list[Segment] | list[list[Segment]]:
    """Segments of one rank, or a list of them for every rank. A segment may be a tuple, and a list one, too."""
    of_ranks = isinstance(given, (list, tuple)) and any(isinstance(x, (list, tuple)) and not integers(x) for x in given)
    try:
        by_rank = [[integers(s, 0) for s in segments] for segments in (given if of_ranks else [given])]
    except TypeError:
        by_rank = [[None]]
    if any(s is None or len(s) not in (3, 4) for segments in by_rank for s in segments):
        raise ValueError(
            f"key_segments={given!r} must be segments (row, position, length), in integers, or a list of these for "
            "each rank"
        )
    by_rank = [[Segment(*s) for s in segments] for segments in by_rank]
    return by_rank if of_ranks else by_rank[0]


def check_latents(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, head_dim_v: int | None) -> None:
    """k_cache [b, s_local, 1, any], of which keys and values with head_dim_v are made, like q."""
    seen = describe(k_cache)
    if v_cache is not None or integer(head_dim_v) is None or not isinstance(k_cache, Tensor) or k_cache.dim() != 4:
        raise ValueError(f"expand makes values of k_cache {seen}: pass v_cache=None and head_dim_v, not {head_dim_v!r}")
    like_q = k_cache.shape[0] == q.shape[0] and (k_cache.dtype, k_cache.device) == (q.dtype, q.device)
    if not like_q or k_cache.shape[2] != 1:
        raise ValueError(f"k_cache {seen} must be [{q.shape[0]}, slots, 1, any] like q, in {q.dtype}")


def check_heads(
    q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str, *, pages: bool = False, eight_bits: bool = False
) -> None:
    """pages: the first axis of k and v is not the batch. eight_bits: their dtype is not q's."""
    for name, x in (("q", q), (k_name, k), (v_name, v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(f"{name} must be a 4-D tensor [batch, sequence, heads, head_dim], got {describe(x)}")
        if x.dtype not in DTYPES and not (eight_bits and x is not q):
            raise ValueError(f"{name} has dtype {x.dtype}: attention takes fp32, bf16, fp16 or fp64")
        if x.dtype != q.dtype and not eight_bits:
            raise ValueError(f"{name} has dtype {x.dtype} but q has {q.dtype}: cast them to one dtype")
        check_device(name, x, q)
        if x.shape[0] != q.shape[0] and not pages:
            raise ValueError(f"{name} has batch size {x.shape[0]} but q has {q.shape[0]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"{k_name} has {k.shape[2]} heads but {v_name} has {v.shape[2]}")
    if not k.shape[2] or not q.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and {k_name} {k.shape[2]}: the number of KV heads must divide the query heads"
        )
    if k.shape[3] != q.shape[3] or not q.shape[3]:
        raise ValueError(f"{k_name} has head_dim {k.shape[3]} but q has {q.shape[3]}: they must be equal and positive")


def check_sinks(sinks: Tensor | None, q: Tensor, num_heads: int | None = None) -> None:
    """sinks [h] on q's device, floating point, or None. num_heads: h, by default that of q."""
    if sinks is None:
        return
    num_heads = q.shape[2] if num_heads is None else num_heads
    if not isinstance(sinks, Tensor) or tuple(sinks.shape) != (num_heads,) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be a floating-point tensor of one logit per query head, [{num_heads}], got {describe(sinks)}"
        )
    check_device("sinks", sinks, q)


def check_selected(selected: Tensor | None, q: Tensor, spec: AttnSpec, ulysses_size: int | None) -> None:
    """selected int32 [b, s, m] for q [b, s, h, d], or None."""
    if selected is None:
        return
    fits = isinstance(selected, Tensor) and selected.dim() == 3 and selected.shape[:2] == q.shape[:2]
    if not fits or selected.dtype != torch.int32:
        raise ValueError(
            f"selected must be int32 [batch, tokens, keys], the positions of the keys that each of the {q.shape[1]} "
            f"queries of {q.shape[0]} rows sees, got {describe(selected)}"
        )
    check_device("selected", selected, q)
    if spec.ranges is not None:
        raise ValueError("selected can't be combined with ranges: leave one of the two out")
    if ulysses_size not in (None, 1):
        raise ValueError(
            f"ulysses_size={ulysses_size} exchanges heads, but selected keys are for all heads of a query: leave "
            "ulysses_size out"
        )
