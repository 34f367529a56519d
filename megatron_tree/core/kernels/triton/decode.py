"""Split-KV decode: few queries over a long shard. A tile has all query heads of a KV head; keys are cut into splits.

Each split writes its packed state; a second launch merges them (merge.py). What a query sees is given by lengths or by
positions; the cache may be paged, and may hold int8 or fp8 with a scale per slot and head. With lengths each row's own
keys are cut, on the device, into equally long splits; those beyond them are empty. So the launches, and the bits, are
the same however wide the table of pages is.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import AttnSpec
from .. import fastest
from ..kv_cache import KVCache
from . import common, configs, host
from .common import LOG2E, alibi, cap_logits, dot, head_of, softmax_end, softmax_step
from .merge import merge_states

KEYS = 64  # a split is a multiple of these
_KEYS = tl.constexpr(KEYS)
MOST_KEYS = 1 << 20  # for as many keys of a row the number of splits is chosen where the device alone knows them
ROWS = {2: 64, 4: 16}  # of a tile, by itemsize; more queries go into further launches
PAGE_SIZES = (16, 32, 64, 128, 256)
SPLIT_KEYS = 1024  # keys of a split where the bits must not depend on the batch: 16 tiles
SPLIT_COST = 4.0  # overhead of a split, in tiles: prologue, partial state, merge


@triton.jit
def _load_keys(base, rows, stride, valid, FROM: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr):
    c = FROM + tl.arange(0, COLS)
    return tl.load(base + rows[:, None] * stride + c[None, :], mask=valid[:, None] & (c < D)[None, :], other=0.0)


# these change as a cache grows, and a decode loop must not recompile
GROWING = ["num_keys", "keys_per_split", "num_splits", "k_pos_stride", "table_stride", "scales_page_stride", "left"]
GROWING += ["sharers"]


@triton.jit(do_not_specialize=GROWING)
def attn_decode_kernel(
    Q, K, V, STATE, LENGTHS, Q_POS, K_POS, BLOCK_TABLE, K_SCALE, V_SCALE, SLOPES, SELECTED, num_keys, keys_per_split,
    s_q, num_splits, sharers, q_strides, k_strides, v_strides, k_pos_stride, table_stride, scales_page_stride,
    scales_strides, slopes_stride, left, scale, softcap,
    GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr,
    NARROW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tile row r is query r // GROUP of head tile * GROUP + r % GROUP; a KV head has PARTS tiles. STATE fp32
    [b, splits, s_q, h, E + 1]. SLOPES fp32 [b, h], ALiBi's, with positions; or None. SELECTED int32 [b, num_keys]:
    the slots that a row reads, -1: none; `sharers` rows read one row of the cache. None: all slots, in order, of a row
    for each. keys_per_split 0: as many as cut the row's own length into num_splits.
    """
    split = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    h_kv = tile // PARTS
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, M)
    query = r // GROUP
    h = tile * GROUP + r % GROUP
    in_q = query < s_q
    q_at = head_of(Q, q_strides, b, h) + query * q_strides[1]
    c0 = tl.arange(0, D0)
    q0 = tl.load(q_at[:, None] + c0[None, :], mask=in_q[:, None] & (c0 < D)[None, :], other=0.0)
    q1 = q0
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
        q1 = tl.load(q_at[:, None] + c1[None, :], mask=in_q[:, None] & (c1 < D)[None, :], other=0.0)
    q_pos = query
    if HAS_POSITIONS:
        q_pos = tl.load(Q_POS + b * s_q + query, mask=in_q, other=-1)
    if SLOPES is not None:
        slope2 = tl.load(SLOPES + b * slopes_stride + h, mask=in_q, other=0.0)[:, None] * LOG2E
    k_base = K + h_kv * k_strides[2]
    v_base = V + h_kv * v_strides[2]
    row = b
    if SELECTED is not None:
        row = b // sharers
    if PAGE == 0:
        k_base += row * k_strides[0]
        v_base += row * v_strides[0]
    acc0 = tl.zeros((M, E0), tl.float32)
    acc1 = acc0
    if E1 > 0:
        acc1 = tl.zeros((M, E1), tl.float32)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    end = num_keys
    if HAS_LENGTHS:
        end = tl.minimum(end, tl.load(LENGTHS + b).to(tl.int32))
    of_row = _KEYS * tl.cdiv(end, _KEYS * num_splits)
    keys_per_split = tl.where(keys_per_split > 0, keys_per_split, of_row)
    start = split * keys_per_split
    end = tl.minimum(end, start + keys_per_split)
    for n in tl.range(start, end, N, num_stages=STAGES):
        slot = n + tl.arange(0, N)
        valid = slot < end
        if SELECTED is not None:
            slot = tl.load(SELECTED + b * num_keys + slot, mask=valid, other=-1)
            valid = slot >= 0
        rows = slot.to(tl.int64)
        if PAGE > 0:
            page = tl.load(BLOCK_TABLE + row * table_stride + slot // PAGE, mask=valid, other=0).to(tl.int64)
            k_rows = page * k_strides[0] + (slot % PAGE) * k_strides[1]
            v_rows = page * v_strides[0] + (slot % PAGE) * v_strides[1]
            scale_rows = page * scales_page_stride + (slot % PAGE) * scales_strides[0] + h_kv * scales_strides[1]
        else:
            k_rows = rows * k_strides[1]
            v_rows = rows * v_strides[1]
        k0 = _load_keys(k_base, k_rows, 1, valid, 0, D0, D)
        if SCALED:
            k0 = k0.to(q0.dtype)
        s = dot(q0, tl.trans(k0), tl.zeros((M, N), tl.float32))
        if D1 > 0:
            k1 = _load_keys(k_base, k_rows, 1, valid, D0, D1, D)
            if SCALED:
                k1 = k1.to(q0.dtype)
            s = dot(q1, tl.trans(k1), s)
        if SCALED:
            s = s * tl.load(K_SCALE + scale_rows, mask=valid, other=0.0)[None, :]
        if SOFTCAP:
            s = cap_logits(s * scale, softcap) * LOG2E
        else:
            s = s * (scale * LOG2E)
        ok = valid[None, :]
        if HAS_POSITIONS:
            k_pos = tl.load(K_POS + b * k_pos_stride + rows, mask=valid, other=-1)
            if SLOPES is not None:
                s -= alibi(slope2, q_pos[:, None], k_pos[None, :])
            valid = k_pos >= 0  # v of the others is not read below: it may be NaN
            ok = valid[None, :] & (k_pos[None, :] <= q_pos[:, None])
            if WINDOW:
                ok = ok & (k_pos[None, :] + left >= q_pos[:, None])
        s = tl.where(ok, s, float("-inf"))
        p, shrink, m, l = softmax_step(s, 1.0, m, l)
        v0 = _load_keys(v_base, v_rows, 1, valid, 0, E0, E)
        if SCALED:
            v_scale = tl.load(V_SCALE + scale_rows, mask=valid, other=0.0)
            if NARROW:  # p * v_scale would leave the range of fp16
                v0 = (v0.to(tl.float32) * v_scale[:, None]).to(q0.dtype)
            else:
                p = p * v_scale[None, :]
                v0 = v0.to(q0.dtype)
        p = common.lower(p, v0)
        acc0 = dot(p, v0, acc0 * shrink[:, None])
        if E1 > 0:
            v1 = _load_keys(v_base, v_rows, 1, valid, E0, E1, E)
            if SCALED:
                if NARROW:
                    v1 = (v1.to(tl.float32) * v_scale[:, None]).to(q0.dtype)
                else:
                    v1 = v1.to(q0.dtype)
            acc1 = dot(p, v1, acc1 * shrink[:, None])
    lse, l = softmax_end(m, l)
    num_heads = tl.num_programs(1) * GROUP
    at = STATE + (((b * num_splits + split) * s_q + query) * num_heads + h) * (E + 1)
    c = tl.arange(0, E0)
    tl.store(at[:, None] + c[None, :], acc0 / l[:, None], mask=in_q[:, None] & (c < E)[None, :])  # dF/dzeta: (3)
    if E1 > 0:
        c = E0 + tl.arange(0, E1)
        tl.store(at[:, None] + c[None, :], acc1 / l[:, None], mask=in_q[:, None] & (c < E)[None, :])
    tl.store(at + E, lse, mask=in_q)


def choose_splits(num_keys: int, programs: int, num_slots: int) -> int:
    """The number of splits with the least time: waves of programs over `num_slots` places, times a split's length.

    programs: programs of one split (batch x KV heads); every split costs its tiles and `SPLIT_COST`.
    """
    return _best_splits(max(1, -(-num_keys // KEYS)), programs, num_slots)


@functools.lru_cache(maxsize=1024)
def _best_splits(tiles: int, programs: int, num_slots: int) -> int:
    best = None
    for splits in range(1, min(tiles, max(1, 4 * num_slots // max(programs, 1))) + 1):
        per_split = -(-tiles // splits)
        waves = math.ceil(programs * splits / num_slots)
        cost = waves * (per_split + SPLIT_COST) + 0.02 * splits
        if best is None or cost < best[0]:
            best = cost, -(-tiles // per_split)
    return best[1]


def check_pages(k: Tensor) -> None:
    """Raise ``ValueError`` for pages [pages, page_size, h_kv, d] that the kernel can't read."""
    if k.shape[1] not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ValueError(
            f"page_size={k.shape[1]}: Triton's kernels take pages of {sizes} tokens; choose one of them as page_size, "
            "or backend='reference'"
        )
    if k.dtype == torch.float8_e4m3fn and k.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(k.device)
        if capability < (8, 9):
            raise ValueError(
                f"pages in fp8 on a GPU of compute capability {'.'.join(map(str, capability))}: Triton's kernels need "
                "8.9 or more for them; choose dtype='int8', or backend='reference'"
            )


def unit_rows(positions: Tensor) -> Tensor:
    """Positions [b, s] that the kernel can address: any row stride (0 for a shared row), unit column stride."""
    return positions if positions.stride(1) == 1 or positions.shape[1] == 1 else positions.contiguous()


@host.on_its_device
def attn_decode(q: Tensor, cache: KVCache, spec: AttnSpec, num_splits: int | None = None) -> Tensor:
    """See `Backend.attn_decode`. Pages hold 16 to 256 tokens, a power of two; others raise ``ValueError``.

    num_splits: default chosen to fill the GPU; with spec.deterministic one for every SPLIT_KEYS keys. With lengths at
        most so many.
    """
    if cache.block_table is not None:
        check_pages(cache.k)
    q, k, v = (host.unit_last_stride(x) for x in (q, cache.k, cache.values))
    rows = ROWS[q.element_size()]
    group, parts, latents = q.shape[2] // k.shape[2], 1, host.HeadDims.of(q, v).width > host.MAX_HEAD_DIM
    if latents:
        rows = configs.latent_rows(host.arch(q.device))
    if latents or q.element_size() == 4:  # whose larger tiles don't fit
        parts = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= rows)
    cache = _addressable(cache, k, v)
    if cache.selected is not None:
        return _over_lists(q, cache, spec, num_splits, parts)
    n = max(1, rows * parts // group)
    if q.shape[1] <= n:
        return _launch(q, cache, spec, num_splits, parts)
    states = []
    for some in (slice(i, i + n) for i in range(0, q.shape[1], n)):
        part = cache if cache.q_positions is None else cache._replace(q_positions=cache.q_positions[:, some])
        states.append(_launch(q[:, some], part, spec, num_splits, parts))
    return torch.cat(states, 1)


def _over_lists(q: Tensor, cache: KVCache, spec: AttnSpec, num_splits: int | None, parts: int) -> Tensor:
    """`attn_decode` of selected slots: every query is a row of its own, of so many as a grid has."""
    step, states = max(1, host.MAX_BATCH // q.shape[1]), []
    for some in (slice(i, i + step) for i in range(0, len(q), step)):
        k, v, table = cache.k, cache.v, cache.block_table
        if table is None:
            k, v = k[some], v if v is None else v[some]
        else:
            table = table[some]
        part = cache._replace(k=k, v=v, block_table=table, lengths=None, selected=cache.selected[some].contiguous())
        states.append(_launch(q[some].flatten(0, 1)[:, None], part, spec, num_splits, parts))
    return torch.cat(states).view(*q.shape[:3], -1)


def _addressable(cache: KVCache, k: Tensor, v: Tensor) -> KVCache:
    """The cache with these keys and values, and strides of the other tensors that the kernel can address."""
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if k_scale is not None and k_scale.stride() != v_scale.stride():
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    k_positions, table = (None if x is None else unit_rows(x) for x in (cache.k_positions, cache.block_table))
    return cache._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale, k_positions=k_positions, block_table=table)


def _launch(q: Tensor, cache: KVCache, spec: AttnSpec, num_splits: int | None, parts: int) -> Tensor:
    """parts: into which the query heads of a KV head are cut."""
    k, v, k_scale, v_scale, _, lengths, q_positions, k_positions, table, _, selected = cache
    b, s_q, h, d = q.shape
    num_tiles, e = parts * k.shape[2], v.shape[-1]
    page, num_keys = 0 if table is None else k.shape[1], cache.num_slots if selected is None else selected.shape[2]
    flags = (lengths is not None, k_positions is not None, k_scale is not None)
    machine = host.arch(q.device), fastest.gpu_of(q.device)
    fixed, blocks = _fixed(spec, h // num_tiles, parts, s_q, host.HeadDims(d, e), page, flags, q.dtype, machine)
    num_slots = blocks * host.multiprocessors(q.device)
    num_splits, keys_per_split = _splits(
        num_keys, b * num_tiles, num_splits, spec.deterministic, num_slots, by_length=lengths is not None
    )
    slopes = host.alibi_slopes(spec, q)
    state = torch.empty((b, num_splits, s_q, h, e + 1), dtype=torch.float32, device=q.device)
    attn_decode_kernel[(num_splits, num_tiles, b)](
        Q=q, K=k, V=v, STATE=state,
        LENGTHS=lengths if lengths is None else lengths.contiguous(),
        Q_POS=q_positions if q_positions is None else q_positions.contiguous(),
        K_POS=k_positions, BLOCK_TABLE=table, K_SCALE=k_scale, V_SCALE=v_scale,
        **slopes, SELECTED=selected, num_keys=num_keys, keys_per_split=keys_per_split, s_q=s_q, num_splits=num_splits,
        sharers=1 if selected is None else selected.shape[1],
        q_strides=q.stride()[:3], k_strides=k.stride()[:3], v_strides=v.stride()[:3],
        k_pos_stride=0 if k_positions is None else k_positions.stride(0),
        table_stride=0 if table is None else table.stride(0),
        scales_page_stride=0 if k_scale is None else k_scale.stride(0),
        scales_strides=(0, 0) if k_scale is None else k_scale.stride()[1:],
        **fixed,
    )  # fmt: skip
    return state[:, 0] if num_splits == 1 else merge_states(state, 1)


@functools.lru_cache(maxsize=1024)
def _fixed(
    spec: AttnSpec,
    group: int,
    parts: int,
    s_q: int,
    dims: host.HeadDims,
    page: int,
    flags: tuple[bool, bool, bool],
    dtype: torch.dtype,
    machine: tuple[str, str | None],
) -> tuple[dict, int]:
    """The arguments that do not change while a cache grows, and the blocks that a multiprocessor holds.

    Made once, and not to be changed. flags: whether there are lengths, positions of keys, and scales. machine: a row of
    `configs.ARCHES`, and `fastest.gpu_of`.
    """
    arch, gpu = machine
    has_lengths, has_positions, scaled = flags
    heads, itemsize = dims.constants, dtype.itemsize
    tiles = configs.decode_tiles(group * s_q, dims.width, arch, itemsize, scaled)
    if itemsize == 2 and not scaled and (measured := fastest.tiles_for(gpu, f"decode of {tiles.m}", dims.width)):
        tiles = configs.Tiles(*measured)
    blocks = configs.decode_blocks(tiles, (heads["D0"] + heads["D1"], heads["E0"] + heads["E1"]), arch, itemsize)
    return dict(
        left=host.window_sides(spec)[0], scale=spec.softmax_scale, softcap=spec.softcap,
        GROUP=group, PARTS=parts, **heads, M=tiles.m, N=tiles.n,
        HAS_LENGTHS=has_lengths, HAS_POSITIONS=has_positions, WINDOW=spec.left is not None,
        SOFTCAP=spec.softcap > 0, PAGE=page, SCALED=scaled, NARROW=scaled and dtype == torch.float16,
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    ), blocks  # fmt: skip


def _splits(
    num_keys: int, programs: int, num_splits: int | None, deterministic: bool, num_slots: int, by_length: bool
) -> tuple[int, int]:
    """How many splits, and the keys of each, 0 where each row's own length is cut; num_slots: programs that the GPU
    holds at a time."""
    if num_splits is None and deterministic:
        return max(1, -(-num_keys // SPLIT_KEYS)), SPLIT_KEYS
    tiles = max(1, -(-num_keys // KEYS))
    if num_splits is None:
        num_splits = choose_splits(MOST_KEYS if by_length else num_keys, programs, num_slots)
    if by_length:
        return min(num_splits, tiles), 0
    return num_splits, KEYS * -(-tiles // num_splits)
