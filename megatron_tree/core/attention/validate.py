"""What the arguments of the public functions ask for, and checks of them.

From the arguments of the public functions: the mathematics of a call, an `AttnSpec`, its mask as slices, and the dtype
of its tensors under autocast. Then checks of arguments, caches and, with `TreeConfig(check="finite")`, values. Every
message names the argument, its value and what to do.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Ranks
from ..config import DECODE_SCHEDULES, TreeConfig, check_choice, integer, integers
from ..kernels import KVCache
from ..layout import Dispatched, Layout, Packed, ReadOnce, Segment, Sharding, sequences_of
from ..spec import SLICES, AttnSlice, AttnSpec, Dropout
from ..tape import static

_NOTHING = contextlib.nullcontext()
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def make_spec(
    q: Tensor,
    causal: bool | None,
    softmax_scale: float | None,
    window_size,
    softcap: float,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool | str = False,
    *,
    ranges: bool = False,
    alibi_slopes: Tensor | None = None,
) -> AttnSpec:
    """The call's `AttnSpec` from checked arguments; softmax_scale defaults to 1 / sqrt(head_dim), causal to True.

    ranges: the mask is given as ranges, which leave nothing to causal and window_size. q has all query heads.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if (
        isinstance(softmax_scale, bool)
        or not isinstance(softmax_scale, (int, float))
        or not math.isfinite(softmax_scale)
    ):
        raise ValueError(f"softmax_scale={softmax_scale!r} must be a finite number (or None for 1 / sqrt(head_dim))")
    if not isinstance(softcap, (int, float)) or not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap={softcap!r} must be a number >= 0; 0 turns it off")
    window = integers(window_size, -1)
    if window is None or len(window) != 2:
        raise ValueError(f"window_size={window_size!r} must be (left, right), each an integer >= 0 or -1 for unbounded")
    dropout = _dropout(dropout_p, dropout_seed)
    if ranges and (causal is not None or window != (-1, -1) or dropout):
        raise ValueError(
            f"ranges are the whole mask: leave causal={causal} and window_size={window} out"
            + (f"; and dropout_p={dropout_p} can't be combined with ranges: set it to 0" if dropout else "")
        )
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, q)
    if ranges and slopes is not None:
        raise ValueError("alibi_slopes can't be combined with ranges: leave one of the two out")
    return AttnSpec(
        softmax_scale=float(softmax_scale),
        causal=not ranges and (causal is None or bool(causal)),
        window_size=window,
        softcap=float(softcap),
        alibi_slopes=slopes,
        dropout=dropout,
        deterministic=deterministic,
    )


def _dropout(p: float, seed: int | None) -> Dropout | None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"dropout_p={p!r} must be a probability, 0 <= dropout_p < 1; 0 turns it off")
    if p == 0:
        return None
    if (number := integer(seed)) is None or not 0 <= number < 1 << 63:
        raise ValueError(
            f"dropout_seed={seed!r} must be an integer from 0 to 2**63 - 1 when dropout_p={p}: draw a new one for "
            "every call, the same on all ranks of cp_group"
        )
    return Dropout(float(p), number)


def _slopes(slopes: Tensor, q: Tensor) -> tuple[tuple[float, ...], ...]:
    """alibi_slopes, fp32 [h] or [b, h], as in `AttnSpec`; a tensor is read once, which stalls an accelerator."""
    batch, heads = q.shape[0], q.shape[-2]
    ok = isinstance(slopes, Tensor) and slopes.dtype == torch.float32
    if not ok or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        seen = f"{slopes.dtype} {tuple(slopes.shape)}" if isinstance(slopes, Tensor) else type(slopes).__name__
        raise ValueError(
            f"alibi_slopes must be an fp32 tensor of one slope per query head, [{heads}], or for each row of the batch "
            f"as well, [{batch}, {heads}], got {seen}"
        )
    if slopes.requires_grad:
        raise ValueError("alibi_slopes get no gradient: pass alibi_slopes.detach(), or fixed slopes")
    return _read_slopes(slopes)


@ReadOnce
def _read_slopes(slopes: Tensor) -> tuple[tuple[float, ...], ...]:
    rows = tuple(map(tuple, slopes.reshape(-1, slopes.shape[-1]).tolist()))
    if not all(math.isfinite(slope) for row in rows for slope in row):
        raise ValueError(f"alibi_slopes={slopes.tolist()} must be finite numbers")
    return rows


def make_slices(ranges: Sequence, queries: Sharding, keys: Sharding) -> tuple[AttnSlice, ...]:
    """Checked slices from (q_range, k_range) or (q_range, k_range, kind) each.

    Raises: ``ValueError`` for a slice that is not as in `AttnSlice`, ranges beyond the sequences, and slices that show
        a query the same key twice.
    """
    if isinstance(ranges, (str, bytes)) or not isinstance(ranges, Sequence):
        raise ValueError(f"ranges={ranges!r} must be a list of AttnSlice or (q_range, k_range, kind)")
    lengths = []
    for sharding in (queries, keys):
        documents = sharding.layout if isinstance(sharding.layout, (Packed, Dispatched)) else None
        if documents is not None and len(documents.lengths) != 1:
            raise ValueError(
                f"ranges are positions in one sequence, but layout={documents!r}: make them slices of one document"
            )
        lengths.append(sharding.seq_len if documents is None else documents.lengths[0])
    return _checked(tuple(_slice(i, given) for i, given in enumerate(ranges)), *lengths)


def _slice(i: int, given) -> AttnSlice:
    parts = tuple(given) if isinstance(given, (tuple, list)) else ()
    spans = [integers(span) for span in parts[:2]]
    pairs = len(parts) in (2, 3) and all(span is not None and len(span) == 2 for span in spans)
    if pairs and (parts[2:] or SLICES)[0] in SLICES:
        return AttnSlice(*spans, *parts[2:])
    raise ValueError(
        f"ranges[{i}]={given!r} must be ((q_first, q_end), (k_first, k_end), kind) with integers and a kind of "
        f"{', '.join(map(repr, SLICES))}"
    )


@functools.lru_cache(maxsize=64)
def _checked(slices: tuple[AttnSlice, ...], seq_len: int, seq_len_kv: int) -> tuple[AttnSlice, ...]:
    for i, piece in enumerate(slices):
        for name, span, end in (("q_range", piece.q_range, seq_len), ("k_range", piece.k_range, seq_len_kv)):
            if not 0 <= span[0] <= span[1] <= end:
                raise ValueError(f"ranges[{i}]: {name}={span} is not within a sequence of {end} tokens")
    open_ones: list[AttnSlice] = []
    for piece in sorted(piece for piece in slices if piece.pairs):
        open_ones = [other for other in open_ones if piece.q_range[0] < other.q_range[1]]
        twice = next((other for other in open_ones if _overlap(piece, other)), None)
        if twice is not None:
            raise ValueError(
                f"ranges: {tuple(twice)} and {tuple(piece)} show a query the same key, which would count twice: "
                "cut one of them"
            )
        open_ones.append(piece)
    return slices


def _overlap(a: AttnSlice, b: AttnSlice) -> bool:
    """Whether a (query, key) pair is in both: they share queries and keys, and a distance between the two."""
    (q_first, q_end), (k_first, k_end) = (
        (max(x[0], y[0]), min(x[1], y[1])) for x, y in zip((a.q_range, a.k_range), (b.q_range, b.k_range))
    )
    if q_first >= q_end or k_first >= k_end:
        return False
    least = max([k_first - q_end + 1, *(-piece.left for piece in (a, b) if piece.left is not None)])
    most = min([k_end - 1 - q_first, *(piece.right for piece in (a, b) if piece.right is not None)])
    return least <= most


def autocast(*tensors: Tensor | None) -> tuple:
    """A context without autocast, and the tensors in the dtype of the autocast that is enabled for the first one.

    float64 stays, as in torch, and so does what is no tensor of that device. Without autocast nothing changes.
    """
    first = tensors[0]
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return _NOTHING, *tensors
    dtype = torch.get_autocast_dtype(device)
    cast = (isinstance(x, Tensor) and x.dtype in _CAST and x.device.type == device for x in tensors)
    tensors = (x.to(dtype) if casts else x for x, casts in zip(tensors, cast, strict=True))
    return torch.autocast(device, enabled=False), *tensors


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


def check_cross_layouts(queries: Layout, keys: Layout, spec: AttnSpec) -> None:
    """Raise ``ValueError`` unless queries can attend to keys that lie otherwise, as documents of the same number."""
    if spec.by_position and not (isinstance(queries, tuple) and isinstance(keys, tuple)):
        raise ValueError(
            f"layout_kv={keys!r} differs from layout={queries!r} with causal={spec.causal} and window_size="
            f"{spec.window_size}: keys that lie otherwise are cross attention, which needs causal=False, no window and "
            "no slopes"
        )
    counts = [len(getattr(x, "lengths", (0,))) for x in (queries, keys)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"layout has {counts[0]} documents and layout_kv {counts[1]}: a query sees keys of the document with its "
            "own number, so the numbers must be equal"
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


EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def check_decode_schedule(schedule: str, config: TreeConfig) -> None:
    """Raise ``ValueError`` unless the schedule exists and is deterministic if config.deterministic is set."""
    check_choice("schedule", schedule, DECODE_SCHEDULES)
    if config.deterministic == "ranks":
        if schedule not in ("auto", "allreduce"):
            raise ValueError(
                f"schedule={schedule!r} merges states of ranks, which deterministic='ranks' rules out: choose "
                "'allreduce', whose sums are of integers there, or 'auto'"
            )
    elif config.deterministic and schedule == "allreduce":
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


def check_selected_slots(q: Tensor, cache: KVCache, spec: AttnSpec, schedule: str) -> None:
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
    """Whether integers are known not to be from 0 to end - 1. On an accelerator nobody looks, it would stall, nor in
    steps that are replayed with other values."""
    if x.device.type != "cpu" or not x.numel() or static.get():
        return False
    low, high = x.aminmax()
    return int(low) < 0 or int(high) >= end


def check_finite_shares(ranks: Ranks, queries: Sharding, keys: Sharding, **tensors) -> None:
    """With config.check "finite": raise ``ValueError`` for NaN or infinities in this rank's q, k, v, dout or sinks.

    Padding is not checked and may contain anything. These are the rows of no segment of the sharding: thd padding, the
    ends of a padded batch's rows, and what Megatron's padding mask hides.
    """
    if ranks.config.check != "finite":
        return
    rank = ranks.rank
    for name, x in tensors.items():
        used = None
        if name != "sinks" and x is not None:
            segments = (keys if name in ("k", "v") else queries).segments((rank,))
            used = (sequences_of(segments, x.shape[1], device=x.device) >= 0)[None]
        _check_finite(rank, name, x, used)


def check_finite_cache(ranks: Ranks, q: Tensor, cache: KVCache, sinks: Tensor | None) -> None:
    """`check_finite_shares` for a cache. Slots beyond cache_seqlens, in pages not owned and at position -1 may contain
    anything. For pages the index in the message is [row, slot, head, column]; slots count along the row's pages.
    Of selected slots, it is [query, entry, head, column]."""
    if ranks.config.check != "finite":
        return
    rank = ranks.rank
    _check_finite(rank, "q", q)
    _check_finite(rank, "sinks", sinks)
    if cache.selected is not None:
        cache = cache.with_selected(slice(None), q.dtype)
    for i in range(len(cache.k) if cache.block_table is None else len(q)):
        row = cache.row(i, q.dtype)
        used = None if row.k_positions is None else row.k_positions >= 0
        _check_finite(rank, "k_cache", row.k, used, i)
        _check_finite(rank, "v_cache", row.v, used, i)


def check_finite_index(ranks: Ranks, q: Tensor, weights: Tensor, cache: KVCache) -> None:
    """`check_finite_cache` for an index and its keys, a cache of one head: [row, slot, head, column]."""
    if ranks.config.check != "finite":
        return
    rank = ranks.rank
    _check_finite(rank, "index_q", q)
    _check_finite(rank, "index_weights", weights)
    for i in range(q.shape[0]):
        row = cache.row(i, q.dtype)
        _check_finite(rank, "index_k", row.k, row.k_positions >= 0, i)


def _check_finite(rank: int, name: str, x: Tensor | None, used: Tensor | None = None, first_row: int = 0) -> None:
    """used: bool [b or 1, s], the rows of x [b, s, ...] to check."""
    if x is None or not x.numel():
        return
    bad = ~torch.isfinite(x)
    if used is not None:
        bad &= used.unflatten(1, (used.shape[1], *(1 for _ in x.shape[2:])))
    if bad.any():
        at = bad.nonzero()[0].tolist()
        value = x[tuple(at)].item()
        at[0] += first_row
        places = "1 place" if (number := int(bad.sum())) == 1 else f"{number} places"
        raise ValueError(
            f"{name} on rank {rank} of cp_group holds NaN or infinities in {places}, the first at "
            f"{name}{at} = {value}: check the code that computes {name} on that rank (found by check='finite')"
        )
