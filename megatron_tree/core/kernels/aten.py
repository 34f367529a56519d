"""torch's own flash kernels as a backend: they return lse, and their backward takes the *global* out and lse.

Masks are cut into blocks (blocks.py): fully visible ones, square causal ones and, for sliding windows on the CPU,
strips with an explicit mask. The kernels' backward reads `out` only to form delta = rowsum(dout * out). So it gets an
`out` made to have the global delta, and the true one need not be sent.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Segment, join
from ..merge import NEG_INF, empty_state, state_dtype
from ..spec import AttnSpec
from .blocks import DIAGONAL, FULL, MASKED, Block, split, window_mask
from .kv_cache import KVCache, begins, decode_masked
from .states import merge_into

_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
GPUS = ("cuda",)  # tests have others
STRIP_ROWS, STRIP_KEYS = 64, 128  # of a square on the diagonal, forward and backward on a CPU
MOST_STRIP_ROWS = 768  # from there on strips of rows save less than their masks cost


def unsupported(q, k, v, spec: AttnSpec, *, flowing_lse: bool, masked: bool, decodes: bool) -> str | None:
    """Why this backend can't take the call, or None if it can; see `kernels.choose`."""
    if flowing_lse and _on_gpu(q):
        return "a gradient that flows through lse"
    if spec.softcap:
        return "softcap"
    if spec.dropout:
        return "dropout"
    if spec.alibi_slopes is not None:
        return "alibi_slopes"
    if spec.softmax_scale <= 0:
        return f"softmax_scale={spec.softmax_scale} (it hides keys by -inf before it scales)"
    if not _on_gpu(q):
        what = f"dtype {q.dtype}" if q.device.type == "cpu" else f"device type {q.device.type}"
        return None if q.device.type == "cpu" and q.dtype in _CPU_DTYPES else what
    if spec.deterministic:
        return "deterministic=True on CUDA (its backward adds up in any order, its decode is split by the batch)"
    if q.dtype not in _CUDA_DTYPES:
        return f"dtype {q.dtype} (flash on CUDA takes bf16 and fp16)"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head_dim {max(q.shape[-1], v.shape[-1])} above 256"
    if spec.left is not None or spec.right not in (None, 0):
        return "window_size"
    if masked:
        return f"lengths or positions of a cache on {q.device.type}: its flash kernels take no mask"
    return None


def attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_segments,
    k_segments,
    spec: AttnSpec,
    out_dtype: torch.dtype | None = None,
    block_fwd: Callable | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Backend.attn_fwd`; out_dtype changes nothing. block_fwd: as `_block_fwd` (libraries.py)."""
    block_fwd = block_fwd or _block_fwd
    q_segments, k_segments = tuple(q_segments), tuple(k_segments)
    if q_segments == k_segments and (by_position := _by_position(q_segments, q.shape[1], q.device)):
        order, back, segments = by_position
        q, k, v = (x.index_select(1, order) for x in (q, k, v))
        out, lse = attn_fwd(q, k, v, q_segments=segments, k_segments=segments, spec=spec, block_fwd=block_fwd)
        return out.index_select(1, back), lse.index_select(2, back)
    blocks, (b, s_q, h, _) = _blocks(q_segments, k_segments, spec), q.shape
    if len(blocks) == 1 and blocks[0].q_len == s_q and blocks[0].kind != MASKED:
        return block_fwd(q, k[:, blocks[0].k_rows], v[:, blocks[0].k_rows], blocks[0], None, spec)
    out, lse = empty_state((b, s_q, h, v.shape[-1]), dtype=state_dtype(q.dtype), device=q.device)
    begun = bytearray(s_q)  # 1: rows that hold a state
    for same_rows in [[x] for x in blocks] if _on_gpu(q) else _together(blocks, h, *k.shape[2:], v.shape[3]):
        block = same_rows[0]
        rows, mask = block.q_rows, _mask(block, q, spec)
        o, l = block_fwd(q[:, rows], _side_by_side(k, same_rows), _side_by_side(v, same_rows), block, mask, spec)
        if 1 in begun[rows]:
            merge_into((out[:, rows], lse[..., rows]), (o, l))
        else:
            out[:, rows], lse[..., rows] = o, l
        begun[rows] = b"\1" * block.q_len
    return out, lse


@functools.lru_cache(maxsize=256)
def _blocks(q_segments: tuple, k_segments: tuple, spec: AttnSpec) -> tuple[Block, ...]:
    """`split`, once for all groups of heads and all layers."""
    return tuple(split(q_segments, k_segments, spec))


@functools.lru_cache(maxsize=256)
def _by_position(
    segments: tuple, num_rows: int, device: torch.device
) -> tuple[Tensor, Tensor, tuple[Segment, ...]] | None:
    """The order of the rows by position, the way back, and the segments they then form; None where these are as many.

    For a rank that holds whole documents in several shards, as after an exchange of heads: fewer and larger blocks take
    less time than the copies.
    """
    by_position = sorted(segments, key=lambda x: (x.seq, x.pos))
    first_rows = itertools.accumulate((x.length for x in by_position), initial=0)
    joined = join(x._replace(row=row) for x, row in zip(by_position, first_rows))
    if not joined or 2 * len(joined) > len(segments) or sum(x.length for x in joined) != num_rows:
        return None
    order = torch.cat([torch.arange(x.row, x.row + x.length) for x in by_position])
    return order.to(device), order.argsort().to(device), joined


@functools.lru_cache(maxsize=256)
def _together(blocks: tuple[Block, ...], h: int, h_kv: int, d: int, d_v: int) -> list[list[Block]]:
    """The blocks; fully visible ones of the same rows in one list where a CPU takes less memory traffic to copy their
    keys side by side than to merge their states."""
    by_rows: dict[tuple, list[Block]] = {}
    for block in blocks:
        by_rows.setdefault((block.q_row, block.q_len) if block.kind == FULL else block, []).append(block)
    joined = []
    for same in by_rows.values():
        numbers = sum(block.k_len for block in same) * h_kv * (d + d_v)
        merged = (len(same) - 1) * same[0].q_len * h * d_v
        joined += [same] if numbers <= 4 * merged else [[block] for block in same]
    return joined


def _side_by_side(x: Tensor, blocks: list[Block]) -> Tensor:
    """The rows of some blocks' keys or values x [b, s, h_kv, d]."""
    return x[:, blocks[0].k_rows] if len(blocks) == 1 else torch.cat([x[:, block.k_rows] for block in blocks], 1)


def attn_decode(q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
    """See `Backend.attn_decode`."""
    return decode_masked(attn_masked, q, cache, spec)


def attn_masked(q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Partial attention under a mask: keep bool [s_q, s_k], [b, s_q, s_k] or None (all visible). CPUs only."""
    if k.shape[1] == 0:
        return empty_state((*q.shape[:3], v.shape[-1]), dtype=state_dtype(q.dtype), device=q.device)
    s_q, h_kv = q.shape[1], k.shape[2]
    group, mask = q.shape[2] // h_kv, None
    if keep is not None:
        if _on_gpu(q):
            raise ValueError(f"backend='aten' takes no mask on {q.device.type}: use backend='auto' or 'reference'")
        mask = _additive(keep if keep.dim() == 3 else keep[None], q.dtype)[:, None]
        mask = mask.repeat_interleave(group, 2) if mask.shape[2] > 1 else mask
    # the kernels read a KV head once for every query head: as rows of one head they share it
    rows = q.unflatten(2, (h_kv, group)).transpose(2, 3).flatten(1, 2)  # [b, s_q * group, h_kv, d]
    out, lse = _block_fwd(rows, k, v, None, mask, spec)
    out = out.unflatten(1, (s_q, group)).transpose(2, 3).flatten(2, 3)
    return out, lse.unflatten(2, (s_q, group)).transpose(2, 3).flatten(1, 2)


def attn_bwd(
    dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, block_bwd: Callable | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.attn_bwd`. block_bwd: computes a block, as `_block_bwd` does."""
    block_bwd = block_bwd or _block_bwd
    q_segments, k_segments = tuple(q_segments), tuple(k_segments)
    if q_segments == k_segments and (by_position := _by_position(q_segments, q.shape[1], q.device)):
        order, back, segments = by_position
        rows = (x.index_select(1, order) for x in (dout, q, k, v))
        statistics = (x.index_select(2, order) for x in (lse, delta))
        options = dict(q_segments=segments, k_segments=segments, spec=spec, block_bwd=block_bwd)
        return tuple(x.index_select(1, back) for x in attn_bwd(*rows, *statistics, **options))
    blocks, dtype = _blocks(q_segments, k_segments, spec), state_dtype(q.dtype)
    out = out_with_delta(dout, delta)
    lse = torch.where(lse == NEG_INF, -NEG_INF, lse)  # rows that see nothing: exp(s - inf) = 0
    if (
        len(blocks) == 1
        and blocks[0].q_len == q.shape[1]
        and blocks[0].k_len == k.shape[1]
        and blocks[0].kind != MASKED
    ):
        return tuple(x.to(dtype) for x in block_bwd(dout, out, q, k, v, lse, blocks[0], None, spec))
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    for block in blocks:
        rows, cols = block.q_rows, block.k_rows
        of_rows, mask = (dout[:, rows], out[:, rows], q[:, rows]), _mask(block, q, spec)
        grads = block_bwd(*of_rows, k[:, cols], v[:, cols], lse[..., rows], block, mask, spec)
        for total, at, grad in zip((dq, dk, dv), (rows, cols, cols), grads):
            total[:, at] += grad
    return dq, dk, dv


def attn_bwd_through_lse(dout, q, k, v, lse, delta, **call) -> tuple[Tensor, Tensor, Tensor]:
    """`attn_bwd` where lse has a gradient, so that dout may be 0 where delta is not: v gets a column of zeros, and dout
    one of ones, which changes no gradient and gives delta a place in `out_with_delta`."""
    dq, dk, dv = attn_bwd(F.pad(dout, (0, 1), value=1.0), q, k, F.pad(v, (0, 1)), lse, delta, **call)
    return dq, dk, dv[..., :-1]


def _mask(block: Block, q: Tensor, spec: AttnSpec) -> Tensor | None:
    if block.kind != MASKED:
        return None
    q_pos = torch.arange(block.q_pos, block.q_pos + block.q_len, device=q.device)
    k_pos = torch.arange(block.k_pos, block.k_pos + block.k_len, device=q.device)
    return _additive(window_mask(q_pos, k_pos, spec), q.dtype)[None, None]


def _additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, NEG_INF)


def _on_gpu(x: Tensor) -> bool:
    return x.device.type in GPUS


def width(q: Tensor, v: Tensor) -> int:
    """The one head_dim that flash kernels take for q, k and v (MLA's differ); on GPUs a multiple of 8."""
    d = max(q.shape[-1], v.shape[-1])
    return -(-d // 8) * 8 if _on_gpu(q) else d


def widen(d: int, *tensors: Tensor) -> list[Tensor]:
    """Zero-pad head_dim to d.

    Flash kernels also need a unit stride there (the CPU's forward silently misreads anything else), and on GPUs rows
    that begin at multiples of 16 bytes: any other address is an error after which the process can't use its GPU.
    """
    on_gpu, widened = _on_gpu(tensors[0]), []
    for x in tensors:
        x = x if x.shape[-1] == d else F.pad(x, (0, d - x.shape[-1]))
        readable = x.stride(-1) == 1 and not (on_gpu and _is_misaligned(x))
        widened.append(x if readable else x.clone(memory_format=torch.contiguous_format))
    return widened


def _is_misaligned(x: Tensor) -> bool:
    rows = (stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()) if size > 1)
    return any(start % 16 for start in (x.data_ptr(), *rows))


def _block_fwd(q, k, v, block, mask, spec: AttnSpec, *, empty_rows: bool = True) -> tuple[Tensor, Tensor]:
    """out [b, q, h, d_v] in the inputs' dtype, lse [b, h, q] with -inf for rows that see nothing.

    empty_rows: the mask may leave rows that see nothing.
    """
    d_v = v.shape[-1]
    causal = block is not None and block.kind == DIAGONAL
    if causal and not _on_gpu(q) and STRIP_ROWS < q.shape[1] <= MOST_STRIP_ROWS:
        return _diagonal_fwd(q, k, v, spec)
    v = k if d_v < k.shape[-1] and begins(v, k) else v  # instead of a copy of v that is as wide
    q, k, v = widen(width(q, v), q, k, v)
    if not _on_gpu(q):
        bhsd = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *bhsd, 0.0, causal, attn_mask=mask, scale=spec.softmax_scale
        )
        out = out.transpose(1, 2)
    else:
        out, lse = flash_forward(q, k, v, causal, spec.softmax_scale)
    if mask is not None and empty_rows:  # torch's CPU kernel writes lse 0 where a row sees nothing
        lse = torch.where((mask == NEG_INF).all(-1), NEG_INF, lse)
    return out[..., :d_v], lse


def flash_forward(q, k, v, causal: bool, scale: float, window=(-1, -1), packing=None) -> tuple[Tensor, Tensor]:
    """torch's flash kernel on GPUs, whichever implementation is active: tensors [b, s, h, d], lse [b, h, s], natural.

    window: (left, right), -1 unbounded; as causal, aligned at the ends. packing: four numbers of `varlen.Packing`, for
    tensors [rows, h, d] and lse [h, rows].
    """
    lengths = packing or (None, None, q.shape[1], k.shape[1])
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=scale, **_window_sides(window)
    )
    return out, lse[..., : q.shape[0 if packing else 1]]


def flash_backward(
    dout, out, q, k, v, lse, causal: bool, scale: float, window=(-1, -1), packing=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward: dq, dk, dv; lse contiguous."""
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # no dropout: never read
    lengths = packing or (None, None, q.shape[1], k.shape[1])
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale, **_window_sides(window)
    )


def _window_sides(window: tuple[int, int]) -> dict:
    return {} if window == (-1, -1) else dict(window_size_left=window[0], window_size_right=window[1])


def _diagonal_fwd(q, k, v, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """`_block_fwd` of a square on the diagonal, in strips of rows with a mask.

    The kernel's own causal mask leaves out only whole pieces of 512 keys: up to twice the work.
    """
    n, parts = q.shape[1], []
    steps = _steps(n, STRIP_ROWS, q.dtype)
    for i in range(0, n, STRIP_ROWS):
        end = min(i + STRIP_ROWS, n)
        mask = steps[None, None, : end - i, n - i : n + end - i]  # row r sees columns up to i + r
        parts.append(_block_fwd(q[:, i:end], k[:, :end], v[:, :end], None, mask, spec, empty_rows=False))
    out, lse = zip(*parts)
    return torch.cat(out, 1), torch.cat(lse, -1)


@functools.lru_cache(maxsize=8)
def _steps(num_keys: int, rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, num_keys + rows]: row r is 0 up to column num_keys + r, and then -inf."""
    keep = torch.ones(rows, num_keys + rows, dtype=torch.bool).tril(num_keys)
    return _additive(keep, dtype)


def _diagonal_bwd(dout, out, q, k, v, lse, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """`_block_bwd` of a square on the diagonal, in strips of keys: a small square with a mask, and the rows below."""
    n, step = q.shape[1], STRIP_KEYS
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    strips = []
    for i in range(0, n, step):
        end = min(i + step, n)
        triangle = _steps(0, step, q.dtype)[None, None, : end - i, : end - i]
        of_strip = None
        for rows, mask in ((slice(i, end), triangle), (slice(end, n), None))[: 1 + (end < n)]:
            of_rows = dout[:, rows], out[:, rows], q[:, rows]
            dq_part, *dkv = _block_bwd(*of_rows, k[:, i:end], v[:, i:end], lse[..., rows], None, mask, spec)
            dq[:, rows] += dq_part
            of_strip = dkv if of_strip is None else [x + y for x, y in zip(of_strip, dkv)]
        strips.append(of_strip)
    return dq, *(torch.cat(x, 1) for x in zip(*strips))


def _block_bwd(dout, out, q, k, v, lse, block, mask, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    d, d_v, causal = q.shape[-1], v.shape[-1], block is not None and block.kind == DIAGONAL
    # the kernel's causal mask saves nothing within 512 keys; in half precision every strip's part would be rounded
    if causal and not _on_gpu(q) and q.dtype == state_dtype(q.dtype) and q.shape[1] > STRIP_KEYS:
        return _diagonal_bwd(dout, out, q, k, v, lse, spec)
    dout, out, q, k, v = widen(width(q, v), dout, out, q, k, v)
    if not _on_gpu(q):
        bhsd = dout.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *bhsd, lse, 0.0, causal, attn_mask=mask, scale=spec.softmax_scale
        )
        dq, dk, dv = (g.transpose(1, 2) for g in grads)
    else:
        dq, dk, dv = flash_backward(dout, out, q, k, v, lse.contiguous(), causal, spec.softmax_scale)
    return dq[..., :d], dk[..., :d], dv[..., :d_v]


def out_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """Some out [b, s, h, d_v] with rowsum(dout * out) = delta [b, h, s]: delta dout / |dout|^2.

    In half precision: delta / dout at dout's largest entry. What rounding leaves goes to the second largest entry,
    unless dout is too small there: rows that see few keys have dout.v - delta near 0, and need delta to more digits
    than a half-precision number has. The entry is at most sqrt(d_v) |true out|: where that is too much for fp16 all
    entries share delta.
    """
    if dout.dtype == delta.dtype:
        norm = torch.linalg.vector_norm(dout, dim=-1, keepdim=True, dtype=torch.float64)  # squares stay above 0
        norm = torch.where(norm == 0, 1.0, norm)
        largest = torch.finfo(dout.dtype).max
        return dout * (delta.transpose(1, 2)[..., None] / norm / norm).clamp(-largest, largest).to(dout.dtype)
    where = _two_largest(dout)
    top = dout.gather(-1, where).to(delta.dtype)
    divisor = torch.where(top == 0, 1.0, top)
    rest, entries = delta.transpose(1, 2)[..., None], []
    for i in range(top.shape[-1]):
        entry = torch.where(top[..., i : i + 1] == 0, 0.0, rest / divisor[..., i : i + 1])
        if entries:
            entry = torch.where(entry.abs() <= entries[0].abs(), entry, 0.0)
        entries.append(entry.to(dout.dtype))
        rest = rest - entries[-1].to(rest.dtype) * top[..., i : i + 1]
    out = torch.zeros_like(dout).scatter_(-1, where, torch.cat(entries, -1))
    delta = delta.transpose(1, 2)[..., None]
    too_large = delta.abs() > torch.finfo(dout.dtype).max * top[..., :1].abs()
    if dout.dtype == torch.float16 and too_large.any():
        share = delta / dout.abs().sum(-1, keepdim=True, dtype=delta.dtype)
        out = torch.where(too_large, dout.sign() * share.to(dout.dtype), out)
    return out


def _two_largest(x: Tensor) -> Tensor:
    """Indices [..., 2] of the entries with the largest magnitudes, or [..., 1]. topk(2) takes thrice as long."""
    size = x.abs()
    first = size.max(-1, keepdim=True).indices
    if x.shape[-1] == 1:
        return first
    return torch.cat((first, size.scatter_(-1, first, -1.0).max(-1, keepdim=True).indices), -1)
