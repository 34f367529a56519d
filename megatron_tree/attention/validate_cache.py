"""Checks of the cache that `tree_decode` and `tree_prefill` read, dense or in pages; messages as in validate.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import DECODE_SCHEDULES, AttnSpec, TreeConfig, check_choice
from ..kernels import KVCache
from .validate import check_device, check_heads, describe

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def check_decode_schedule(schedule: str, config: TreeConfig) -> None:
    """Raise ``ValueError`` unless the schedule exists and is deterministic if config.deterministic is set."""
    check_choice("schedule", schedule, DECODE_SCHEDULES)
    if config.deterministic and schedule == "allreduce":
        raise ValueError(
            "schedule='allreduce' leaves the order of its sum to the backend, which deterministic=True rules out: "
            "choose 'allgather', 'butterfly', 'scatter' or 'two_level', or 'auto'"
        )


def check_cache(q: Tensor, cache: KVCache) -> None:
    """Raise ``ValueError`` unless the keys, values, scales and block table fit each other and q [b, s_q, h, d]."""
    k, v, head_dim_v = cache.k, cache.v, cache.head_dim_v
    if (v is None) != (head_dim_v is not None):
        raise ValueError(
            f"head_dim_v={head_dim_v} with v_cache={'None' if v is None else 'given'}: pass values, or None and "
            "how many numbers of a key are its value"
        )
    if v is None and (not isinstance(k, Tensor) or k.dim() != 4 or not 0 < head_dim_v <= k.shape[3]):
        raise ValueError(f"head_dim_v={head_dim_v} must be from 1 to the head_dim of k_cache {describe(k)}")
    v, scaled = cache.values, False
    if cache.block_table is not None:
        scaled = _check_pages(q, cache, v)
    elif cache.k_scale is not None or cache.v_scale is not None:
        raise ValueError("k_scale and v_scale are for pages: also pass block_table")
    check_heads(q, k, v, "k_cache", "v_cache", pages=cache.block_table is not None, eight_bits=scaled)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k_cache holds {k.shape[1]} slots and v_cache {v.shape[1]}: they must be equal")


def _check_pages(q: Tensor, cache: KVCache, v: Tensor) -> bool:
    """Whether the pages are in 8 bits; ``ValueError`` for a bad block table, pages or scales."""
    table, k, b = cache.block_table, cache.k, q.shape[0]
    ok = isinstance(table, Tensor) and table.dtype == torch.int32
    if not ok or table.dim() != 2 or table.shape[0] != b or not table.shape[1]:
        raise ValueError(f"block_table must be int32 [{b}, pages per row], got {describe(table)}")
    check_device("block_table", table, q)
    if cache.lengths is None:
        raise ValueError("block_table needs cache_seqlens, the number of valid slots of each row")
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in (k, v)]
    if [len(shape) for shape in shapes] != [4, 4] or shapes[0][:2] != shapes[1][:2] or 0 in shapes[0][:2]:
        raise ValueError(
            f"k_cache {shapes[0]} and v_cache {shapes[1]} must both be [pages, page_size, heads, head_dim], with the "
            "same number of pages, at least one"
        )
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    scaled = [scale is not None for scale in scales.values()]
    if scaled != [x.dtype in EIGHT_BITS for x in (k, v)] or len(set(scaled)) > 1:
        given = " and ".join(name for name, scale in scales.items() if scale is not None) or "no scale"
        raise ValueError(
            f"k_cache in {k.dtype} and v_cache in {v.dtype} have {given}: pages in int8 or fp8 need both "
            "k_scale and v_scale, other pages neither"
        )
    for name, scale in scales.items() if scaled[0] else ():
        if scale.shape != k.shape[:3] or scale.dtype != torch.float32:
            raise ValueError(f"{name} must be fp32 {list(k.shape[:3])}, got {describe(scale)}")
        check_device(name, scale, q)
    if _is_beyond(table, len(k)) and isinstance(cache.lengths, Tensor) and cache.lengths.shape == (b,):
        used = torch.arange(table.shape[1]) * k.shape[1] < cache.lengths[:, None]
        if _is_beyond(table[used], len(k)):
            raise ValueError(f"block_table={table.tolist()} names pages beyond the {len(k)} of k_cache")
    return scaled[0]


def check_seen_slots(q: Tensor, cache: KVCache, spec: AttnSpec) -> KVCache:
    """The cache with positions as int64 [b, s_q] and [b, s]; ``ValueError`` unless lengths and positions fit it."""
    (b, s_q), slots, lengths = q.shape[:2], cache.num_slots, cache.lengths
    q_positions, k_positions = cache.q_positions, cache.k_positions
    if (q_positions is None) != (k_positions is None):
        given = "q_positions" if k_positions is None else "cache_positions"
        raise ValueError(f"only {given} is given: pass q_positions and cache_positions, or neither")
    by_position = s_q > 1 or spec.left is not None or spec.alibi_slopes is not None
    if q_positions is None and cache.selected is None and by_position:
        slopes = "" if spec.alibi_slopes is None else " and alibi_slopes"
        raise ValueError(
            f"q has {s_q} tokens with window_size={spec.window_size}{slopes}: pass q_positions and cache_positions, "
            "which decide what each query sees (without them a single query sees every valid slot)"
        )
    if lengths is not None:
        ok = isinstance(lengths, Tensor) and not lengths.is_floating_point()
        if not ok or tuple(lengths.shape) != (b,):
            raise ValueError(
                f"cache_seqlens must be an integer tensor of one length per batch row, [{b}], got {describe(lengths)}"
            )
        check_device("cache_seqlens", lengths, q)
        if _is_beyond(lengths, slots + 1):
            raise ValueError(f"cache_seqlens={lengths.tolist()} must be within 0 and the cache's {slots} slots")
    if q_positions is None:
        return cache
    q_positions = _rows("q_positions", q_positions, b, s_q, q)
    k_positions = _rows("cache_positions", k_positions, b, slots, q)
    return cache._replace(q_positions=q_positions, k_positions=k_positions)


def _rows(name: str, positions, b: int, n: int, q: Tensor) -> Tensor:
    ok = isinstance(positions, Tensor) and positions.dtype in (torch.int64, torch.int32)
    if not ok or tuple(positions.shape) not in ((n,), (b, n), (1, n)):
        raise ValueError(f"{name} must be an integer tensor of shape [{n}] or [{b}, {n}], got {describe(positions)}")
    check_device(name, positions, q)
    return positions.to(torch.int64).expand(b, n)


def check_shared(q: Tensor, cache: KVCache, spec: AttnSpec, schedule: str) -> None:
    """Raise ``ValueError`` for shared pages that a decode step can't take."""
    by_position = spec.left is not None or spec.alibi_slopes is not None
    if cache.shared and (cache.block_table is None or schedule == "ring" or by_position or spec.deterministic):
        raise ValueError(
            "shared needs a block_table, no window, no alibi_slopes, another schedule than 'ring', and not "
            "deterministic=True: put the pages into each row's block_table"
        )
    num_pages = len(cache.k)
    for rows, table in cache.shared:
        ok = rows.dtype == torch.int64 and rows.dim() == 1 and table.dtype == torch.int32 and table.dim() == 2
        if not ok or len(table) != 1 or 0 in (len(rows), table.shape[1]) or {rows.device, table.device} != {q.device}:
            raise ValueError(
                f"shared must be pairs of rows int64 [m] and pages int32 [1, n] on {q.device}, got {describe(rows)} "
                f"and {describe(table)} on {table.device}"
            )
        if _is_beyond(rows, len(q)) or _is_beyond(table, num_pages):
            raise ValueError(
                f"shared: rows {rows.tolist()} must be below {len(q)} and pages {table.tolist()} below {num_pages}"
            )


def check_selected(q: Tensor, cache: KVCache, spec: AttnSpec, schedule: str) -> None:
    """Raise ``ValueError`` for selected slots that a decode step can't take."""
    x, (b, s_q) = cache.selected, q.shape[:2]
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != 3 or tuple(x.shape[:2]) != (b, s_q):
        raise ValueError(f"selected must be int32 [{b}, {s_q}, slots of a query], got {describe(x)}")
    check_device("selected", x, q)
    others = {
        "q_positions": cache.q_positions is not None,
        "shared": bool(cache.shared),
        "window_size": spec.left is not None,
        "alibi_slopes": spec.alibi_slopes is not None,
        "schedule='ring'": schedule == "ring",
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise ValueError(f"selected says which slots a query sees: leave out {' and '.join(given)}")
    if _is_beyond(x + 1, cache.num_slots + 1):
        raise ValueError(
            f"selected holds {int(x.min())} to {int(x.max())}: slots of this rank's {cache.num_slots}, from 0, or -1"
        )


def _is_beyond(x: Tensor, end: int) -> bool:
    """Whether integers are known not to be from 0 to end - 1. On an accelerator nobody looks: it would stall."""
    if x.device.type != "cpu" or not x.numel():
        return False
    low, high = x.aminmax()
    return int(low) < 0 or int(high) >= end
