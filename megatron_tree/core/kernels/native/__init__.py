"""Our C kernel for decoding on a CPU: it reads the cache once, dense, in pages or by lists of selected slots. It is
compiled on first use.

Keys are split every CHUNK slots, selected ones every SELECTED_CHUNK, whatever the batch and the number of threads: so
are the bits of a row.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ...compiled import NotCompiled, compiled
from ...spec import AttnSpec
from ...tape import launch
from ..kv_cache import KVCache

CHUNK, SELECTED_CHUNK = 1024, 256  # slots of a task
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}
_TYPES[torch.float8_e4m3fn] = "E4M3"
_QUERIES = (torch.float32, torch.bfloat16, torch.float16)
_BYTES_OF_A_THREAD = 1 << 20  # less is not worth waking one up
_OPTIONS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_SIZES = (
    *("batch", "num_queries", "heads", "kv_heads", "d", "d_v"),
    *("slots", "chunk", "num_chunks", "page_size", "table_row"),
    *("q_row", "q_token", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head"),
    *("ks_page", "ks_slot", "ks_head", "vs_page", "vs_slot", "vs_head"),
    *("q_pos_row", "q_pos_token", "k_pos_row", "k_pos_slot", "left", "right", "slopes_row"),
    *("sharers", "selected_row"),
)
_POINTERS = ("q", "k", "v", "k_scale", "v_scale", "table", "selected", "lengths", "q_pos", "k_pos")
_POINTERS += ("slopes", "parts", "out")


class _Call(ctypes.Structure):
    """`Call` of blocks.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


_ADDRESSES = struct.Struct(f"{len(_POINTERS)}P")


def unsupported(q, k, v, spec: AttnSpec, *, flowing_lse: bool, masked: bool, decodes: bool) -> str | None:
    """Why this backend can't take the call, or None if it can; see `kernels.choose`. Any mask is supported."""
    if not decodes:
        return "anything but decoding"
    if q.device.type != "cpu":
        return f"device type {q.device.type}"
    if q.dtype not in _QUERIES:
        return f"dtype {q.dtype}"
    if k.dtype != v.dtype or k.dtype not in _TYPES:
        return f"k in {k.dtype} with v in {v.dtype}"
    loaded = _library(k.dtype)
    return f"anything here: {loaded}" if isinstance(loaded, str) else None


def attn_decode(q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
    """See `Backend.attn_decode`."""
    shape, sharers, selected = q.shape[:3], 1, cache.selected
    if selected is not None:  # every query is a row
        sharers, q, selected = shape[1], q.flatten(0, 1)[:, None], selected.flatten(0, 1).contiguous()
        cache = cache._replace(lengths=None)
    k, v, k_scale, v_scale, head_dim_v, lengths, q_positions, k_positions, table = cache[:9]
    v = k[..., :head_dim_v] if v is None else v
    q = q if q.dtype == torch.float32 else q.float()
    q, k, v, table = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, table)]
    (b, s_q, h, d), (h_kv, d_v), page_size, item = q.shape, v.shape[2:], k.shape[1], k.element_size()
    slots = selected.shape[1] if selected is not None else page_size * (1 if table is None else table.shape[1])
    chunk = CHUNK if selected is None else SELECTED_CHUNK
    num_chunks = max(1, -(-slots // chunk))
    parts = torch.empty((b, num_chunks, s_q * h, d_v + 2))
    out = torch.empty((b, s_q, h, d_v + 1))
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    if k_positions is not None:
        q_positions, k_positions = q_positions.to(torch.int64), k_positions.to(torch.int64)
    slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)  # fp32
    tensors = (q, k, v, k_scale, v_scale, table, selected, lengths, q_positions, k_positions, slopes, parts, out)
    strides, addresses = [], []
    for x in tensors:
        strides.append(None if x is None else x.stride())
        addresses.append(0 if x is None else x.data_ptr())
    sizes = (b, s_q, h, h_kv, d, d_v, slots, chunk, sharers, max(1, page_size), item, len(spec.alibi_slopes or ()))
    numbers = spec.softmax_scale, spec.softcap, spec.window_size, spec.causal
    call = _Call.from_buffer_copy(_sizes(sizes, *strides[:6], *strides[8:10], *numbers))
    _ADDRESSES.pack_into(call, _Call.q.offset, *addresses)
    library, tasks = _library(k.dtype), b * num_chunks
    bytes_read = b * slots * h_kv * (d + d_v) * item
    threads = min(torch.get_num_threads(), tasks, bytes_read // _BYTES_OF_A_THREAD)
    launch(_run, library, call, tasks, threads)
    return out.view(*shape, d_v + 1)


def _run(library: ctypes.CDLL, call: _Call, tasks: int, threads: int) -> None:
    call_by_address = ctypes.byref(call)
    if threads > 1:
        ends = [tasks * i // threads for i in range(threads + 1)]
        pool = _pool(os.getpid(), torch.get_num_threads())
        failed = any(pool.map(lambda i: library.decode_tasks(call_by_address, ends[i], ends[i + 1]), range(threads)))
    else:
        failed = library.decode_tasks(call_by_address, 0, tasks)
    if failed:
        raise MemoryError("attn_decode: no memory for a task's queries")
    library.merge_tasks(call_by_address)


@functools.lru_cache(maxsize=256)
def _sizes(
    sizes: tuple[int, ...], q, k, v, k_scale, v_scale, table, q_positions, k_positions, scale: float, softcap: float,
    window_size: tuple[int, int], causal: bool,
) -> _Call:  # fmt: skip
    """A call without its pointers, the same in every layer and step of a shape; tensors are given by their strides."""
    b, s_q, h, h_kv, d, d_v, slots, chunk, sharers, page_size, item, rows_of_slopes = sizes
    return _Call(
        batch=b, num_queries=s_q, heads=h, kv_heads=h_kv, d=d, d_v=d_v,
        slots=slots, chunk=chunk, num_chunks=max(1, -(-slots // chunk)), page_size=page_size,
        sharers=sharers, selected_row=slots,
        table_row=0 if table is None else table[0],
        left=max(-1, window_size[0]), right=0 if causal else max(-1, window_size[1]),
        slopes_row=h if rows_of_slopes > 1 else 0,
        scale=scale, softcap=softcap,
        **_strides(("q_row", "q_token", "q_head"), q, 1),
        **_strides(("k_page", "k_slot", "k_head"), k, item),
        **_strides(("v_page", "v_slot", "v_head"), v, item),
        **_strides(("ks_page", "ks_slot", "ks_head"), k_scale, 4),
        **_strides(("vs_page", "vs_slot", "vs_head"), v_scale, 4),
        **_strides(("q_pos_row", "q_pos_token"), q_positions, 1),
        **_strides(("k_pos_row", "k_pos_slot"), k_positions, 1),
    )  # fmt: skip


def _strides(names: tuple[str, ...], strides: tuple[int, ...] | None, item: int) -> dict[str, int]:
    return {} if strides is None else {name: n * item for name, n in zip(names, strides)}


@functools.lru_cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: a parent's did not survive the fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="attn_decode")


@functools.lru_cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The kernel for keys and values of a dtype, or why there is none."""
    library = load_library("decode.c", dtype)
    if not isinstance(library, str):
        library.decode_tasks.argtypes = [ctypes.POINTER(_Call), ctypes.c_int64, ctypes.c_int64]
        library.merge_tasks.argtypes, library.merge_tasks.restype = [ctypes.POINTER(_Call)], None
    return library


def load_library(source: str, dtype: torch.dtype) -> ctypes.CDLL | str:
    """A source beside this file, compiled for numbers of a dtype that it reads, or why it can't be had."""
    try:
        path = compiled(Path(__file__).with_name(source), *_OPTIONS, f"-DTYPE={_TYPES[dtype]}", libraries=("-lm",))
        return ctypes.CDLL(str(path))
    except (NotCompiled, OSError) as error:
        return str(error)
