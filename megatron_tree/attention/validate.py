"""Checks of the public functions' arguments. Every message names the argument, its value and what to do."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import DECODE_SCHEDULES, AttnSpec, TreeConfig, check_choice, integer, integers
from ..kernels import PagedKV, Visible
from ..layout import Packed, Segment

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, cross: bool = False) -> None:
    """q [b, s, h, d], k [b, s, h_kv, d], v [b, s, h_kv, d_v], of one dtype, on one device.

    cross: k and v may have another length than q.
    """
    _check_heads(q, k, v, "k", "v")
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
            seen = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a 3-D tensor [tokens, heads, head_dim] of packed documents, got {seen}")


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


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """q [b, s_q, h, d], caches [b, s_local, h_kv, d] and [b, s_local, h_kv, d_v], of one dtype, on one device."""
    _check_heads(q, k_cache, v_cache, "k_cache", "v_cache")
    if k_cache.shape[1] != v_cache.shape[1]:
        raise ValueError(f"k_cache holds {k_cache.shape[1]} slots and v_cache {v_cache.shape[1]}: they must be equal")


def check_runs(shares) -> list[list[tuple[int, int]]]:
    """The positions of queries: lists of runs (first position, count)."""
    try:
        found = [[integers(run, 0) for run in runs] for runs in shares]
    except TypeError:
        found = [[None]]
    if any(run is None or len(run) != 2 for runs in found for run in runs):
        raise ValueError(f"shares={shares!r} must be lists of runs (first position, count), in integers, one per rank")
    return found


def check_segments(given) -> list[Segment] | list[list[Segment]]:
    """Segments of one rank, or a list of them for every rank. A segment may be a tuple, and a list one, too."""
    of_ranks = isinstance(given, (list, tuple)) and any(isinstance(x, (list, tuple)) and not integers(x) for x in given)
    try:
        found = [[integers(s, 0) for s in segments] for segments in (given if of_ranks else [given])]
    except TypeError:
        found = [[None]]
    if any(s is None or len(s) not in (3, 4) for segments in found for s in segments):
        raise ValueError(
            f"key_segments={given!r} must be segments (row, position, length), in integers, or a list of these for "
            "each rank"
        )
    found = [[Segment(*s) for s in segments] for segments in found]
    return found if of_ranks else found[0]


def values_of(k_cache: Tensor, v_cache: Tensor | None, head_dim_v: int | None) -> Tensor:
    """v_cache; None: the first head_dim_v numbers of every key."""
    if (v_cache is None) != (head_dim_v is not None):
        raise ValueError(
            f"head_dim_v={head_dim_v} with v_cache={'None' if v_cache is None else 'given'}: pass values, or None and "
            "how many numbers of a key are its value"
        )
    if v_cache is not None:
        return v_cache
    if not isinstance(k_cache, Tensor) or k_cache.dim() != 4 or not 0 < head_dim_v <= k_cache.shape[3]:
        seen = tuple(k_cache.shape) if isinstance(k_cache, Tensor) else type(k_cache).__name__
        raise ValueError(f"head_dim_v={head_dim_v} must be from 1 to the head_dim of k_cache {seen}")
    return k_cache[..., :head_dim_v]


def check_latents(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, head_dim_v: int | None) -> None:
    """k_cache [b, s_local, 1, any], of which keys and values with head_dim_v are made, like q."""
    seen = tuple(k_cache.shape) if isinstance(k_cache, Tensor) else type(k_cache).__name__
    if v_cache is not None or integer(head_dim_v) is None or not isinstance(k_cache, Tensor) or k_cache.dim() != 4:
        raise ValueError(f"expand makes values of k_cache {seen}: pass v_cache=None and head_dim_v, not {head_dim_v!r}")
    if (k_cache.shape[0], k_cache.shape[2]) != (q.shape[0], 1) or (k_cache.dtype, k_cache.device) != (
        q.dtype,
        q.device,
    ):
        raise ValueError(f"k_cache {seen} {k_cache.dtype} must be [{q.shape[0]}, slots, 1, any] like q, in {q.dtype}")


def _check_heads(
    q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str, *, pages: bool = False, eight_bits: bool = False
) -> None:
    """pages: the first axis of k and v is not the batch. eight_bits: their dtype is not q's."""
    for name, x in (("q", q), (k_name, k), (v_name, v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            seen = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a 4-D tensor [batch, sequence, heads, head_dim], got {seen}")
        if x.dtype not in DTYPES and not (eight_bits and x is not q):
            raise ValueError(f"{name} has dtype {x.dtype}: attention takes fp32, bf16, fp16 or fp64")
        if x.dtype != q.dtype and not eight_bits:
            raise ValueError(f"{name} has dtype {x.dtype} but q has {q.dtype}: cast them to one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on device {x.device} but q is on {q.device}: move them to one device")
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
        seen = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(
            f"sinks must be a floating-point tensor of one logit per query head, [{num_heads}], got {seen}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks is on device {sinks.device} but q is on {q.device}: move them to one device")


def check_decode_schedule(schedule: str, config: TreeConfig) -> None:
    """Raise ``ValueError`` unless the schedule exists and is deterministic if config.deterministic is set."""
    check_choice("schedule", schedule, DECODE_SCHEDULES)
    if config.deterministic and schedule == "allreduce":
        raise ValueError(
            "schedule='allreduce' leaves the order of its sum to the backend, which deterministic=True rules out: "
            "choose 'allgather', 'butterfly', 'scatter' or 'two_level', or 'auto'"
        )


def check_paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table, k_scale, v_scale, cache_seqlens):
    """`PagedKV` of checked arguments, None without a block_table."""
    if block_table is None:
        if k_scale is not None or v_scale is not None:
            raise ValueError("k_scale and v_scale are for pages: also pass block_table")
        return None
    ok = isinstance(block_table, Tensor) and block_table.dtype == torch.int32
    if not ok or block_table.dim() != 2 or block_table.shape[0] != q.shape[0] or not block_table.shape[1]:
        seen = f"{block_table.dtype} {tuple(block_table.shape)}" if isinstance(block_table, Tensor) else block_table
        raise ValueError(f"block_table must be int32 [{q.shape[0]}, pages per row], got {seen}")
    if cache_seqlens is None:
        raise ValueError("block_table needs cache_seqlens, the number of valid slots of each row")
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in (k_cache, v_cache)]
    if [len(shape) for shape in shapes] != [4, 4] or shapes[0][:2] != shapes[1][:2] or 0 in shapes[0][:2]:
        raise ValueError(
            f"k_cache {shapes[0]} and v_cache {shapes[1]} must both be [pages, page_size, heads, head_dim], with the "
            "same number of pages, at least one"
        )
    for name, x in (("block_table", block_table), ("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(x, Tensor) and x.device != q.device:
            raise ValueError(f"{name} is on device {x.device} but q is on {q.device}: move them to one device")
    scaled = [scale is not None for scale in (k_scale, v_scale)]
    eight_bits = [x.dtype in (torch.int8, torch.float8_e4m3fn) for x in (k_cache, v_cache)]
    if scaled != eight_bits or len(set(scaled)) > 1:
        given = " and ".join(name for name, there in zip(("k_scale", "v_scale"), scaled) if there) or "no scale"
        raise ValueError(
            f"k_cache in {k_cache.dtype} and v_cache in {v_cache.dtype} have {given}: pages in int8 or fp8 need both "
            "k_scale and v_scale, other pages neither"
        )
    for name, scale, pages in (("k_scale", k_scale, k_cache), ("v_scale", v_scale, v_cache)):
        if scale is not None and (scale.shape != pages.shape[:3] or scale.dtype != torch.float32):
            raise ValueError(f"{name} {scale.dtype} {tuple(scale.shape)} must be fp32 {list(pages.shape[:3])}")
    _check_heads(q, k_cache, v_cache, "k_cache", "v_cache", pages=True, eight_bits=scaled[0])
    # on an accelerator the values stay there: reading them would stall every step
    if q.device.type == "cpu" and isinstance(cache_seqlens, Tensor) and cache_seqlens.shape == (q.shape[0],):
        with _once((block_table, cache_seqlens), k_cache.shape[:2]) as unknown:
            if unknown and not _is_within(block_table, len(k_cache)):  # then it matters which entries are used
                used = torch.arange(block_table.shape[1]) * k_cache.shape[1] < cache_seqlens[:, None]
                if not _is_within(block_table[used], len(k_cache)):
                    raise ValueError(
                        f"block_table={block_table.tolist()} names pages beyond the {len(k_cache)} of k_cache"
                    )
    return PagedKV(block_table, k_scale, v_scale)


def check_shared(shared, paged, q: Tensor, k_cache: Tensor, spec: AttnSpec, schedule: str) -> None:
    """Raise ``ValueError`` for shared pages that a decode step can't take."""
    if not shared:
        return
    by_position = spec.left is not None or spec.alibi_slopes is not None
    if paged is None or schedule == "ring" or by_position or spec.deterministic:
        raise ValueError(
            "shared needs a block_table, no window, no alibi_slopes, another schedule than 'ring', and not "
            "deterministic=True: put the pages into each row's block_table"
        )
    for rows, table in shared:
        ok = rows.dtype == torch.int64 and rows.dim() == 1 and table.dtype == torch.int32 and table.dim() == 2
        if not ok or len(table) != 1 or 0 in (len(rows), table.shape[1]) or {rows.device, table.device} != {q.device}:
            raise ValueError(
                f"shared must be pairs of rows int64 [m] and pages int32 [1, n] on {q.device}, got {rows.dtype} "
                f"{tuple(rows.shape)} and {table.dtype} {tuple(table.shape)} on {table.device}"
            )
        if q.device.type == "cpu":
            with _once((rows, table), (len(k_cache), len(q))) as unknown:
                if unknown and not (_is_within(rows, len(q)) and _is_within(table, len(k_cache))):
                    raise ValueError(
                        f"shared: rows {rows.tolist()} must be below {len(q)} and pages {table.tolist()} below "
                        f"{len(k_cache)}"
                    )


def _is_within(x: Tensor, end: int) -> bool:
    """Whether integers are from 0 to end - 1."""
    if not x.numel():
        return True
    low, high = x.aminmax()
    return int(low) >= 0 and int(high) < end


_CHECKED = 64  # checks of values that are remembered
_checked: dict[tuple, tuple] = {}


@contextlib.contextmanager
def _once(tensors: tuple[Tensor, ...], about: tuple) -> Iterator[bool]:
    """Whether the values of these tensors are still to be checked: the layers of a step share block tables and lengths.
    When the context ends without an error they are remembered, until a tensor is written to or freed."""
    key = (about, *map(id, tensors))
    tracked = not any(x.is_inference() for x in tensors)  # those have no version
    versions = tuple(x._version for x in tensors) if tracked else ()
    known = _checked.get(key)
    if tracked and known and known[0] == versions and all(a() is b for a, b in zip(known[1], tensors)):
        yield False
        return
    yield True
    if tracked:
        _checked[key] = versions, tuple(map(weakref.ref, tensors))
        if len(_checked) > _CHECKED:
            del _checked[next(iter(_checked))]


def check_visible(q: Tensor, s_local: int, q_positions, cache_positions, cache_seqlens, spec: AttnSpec) -> Visible:
    """What the queries see of this rank's slots, from checked arguments; positions as [b, s_q] and [b, s_local]."""
    b, s_q = q.shape[:2]
    if (q_positions is None) != (cache_positions is None):
        given = "q_positions" if cache_positions is None else "cache_positions"
        raise ValueError(f"only {given} is given: pass q_positions and cache_positions, or neither")
    if q_positions is None and (s_q > 1 or spec.left is not None or spec.alibi_slopes is not None):
        slopes = "" if spec.alibi_slopes is None else " and alibi_slopes"
        raise ValueError(
            f"q has {s_q} tokens with window_size={spec.window_size}{slopes}: pass q_positions and cache_positions, "
            "which decide what each query sees (without them a single query sees every valid slot)"
        )
    if q_positions is not None:
        q_positions = _rows("q_positions", q_positions, b, s_q, q.device)
        cache_positions = _rows("cache_positions", cache_positions, b, s_local, q.device)
    if cache_seqlens is not None:
        ok = isinstance(cache_seqlens, Tensor) and not cache_seqlens.is_floating_point()
        if not ok or tuple(cache_seqlens.shape) != (b,):
            seen = (
                f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)}"
                if isinstance(cache_seqlens, Tensor)
                else cache_seqlens
            )
            raise ValueError(f"cache_seqlens must be an integer tensor of one length per batch row, [{b}], got {seen}")
        if cache_seqlens.device != q.device:
            raise ValueError(f"cache_seqlens is on device {cache_seqlens.device} but q is on {q.device}")
        # on an accelerator the values stay there: reading them would stall every step
        if q.device.type == "cpu" and b:
            with _once((cache_seqlens,), (s_local,)) as unknown:
                if unknown and not _is_within(cache_seqlens, s_local + 1):
                    seen = cache_seqlens.tolist()
                    raise ValueError(f"cache_seqlens={seen} must be within 0 and the cache's {s_local} slots")
    return Visible(lengths=cache_seqlens, q_positions=q_positions, k_positions=cache_positions)


def _rows(name: str, positions, b: int, n: int, device) -> Tensor:
    ok = isinstance(positions, Tensor) and positions.dtype in (torch.int64, torch.int32)
    if not ok or tuple(positions.shape) not in ((n,), (b, n), (1, n)):
        seen = (
            f"{positions.dtype} {tuple(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        raise ValueError(f"{name} must be an integer tensor of shape [{n}] or [{b}, {n}], got {seen}")
    if positions.device != device:
        raise ValueError(f"{name} is on device {positions.device} but q is on {device}: move them to one device")
    return positions.to(torch.int64).expand(b, n)
