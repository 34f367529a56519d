"""The backend's functions: they launch the kernels with tables of tiles and segments."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ... import dropout
from ...merge import NEG_INF, empty_state
from ...spec import AttnSpec
from .. import fastest
from . import bwd, common, configs, fwd

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
MAX_LATENT = 576  # of decoding in half precision with one KV head
MAX_BATCH = 65535  # of a grid's third dimension
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
MAX_DUAL_FP32 = 128  # wider tiles of values and tangents spill registers, and exceed the memory of sm_86
BOX_ARCHES = ("sm90", "sm100", "interpreter")  # that have a copy engine (TMA)
DEVICES = ("cuda", "cpu") if common.INTERPRET.value else ("cuda",)  # tests on compiled kernels have others


class HeadDims(NamedTuple):
    """head_dim d of q and k, e of v. dual: of dual tensors (duals.py), which have twice as many columns."""

    d: int
    e: int
    dual: bool = False

    @classmethod
    def of(cls, q: Tensor, v: Tensor, dual: bool = False) -> HeadDims:
        return cls(q.shape[-1] >> dual, v.shape[-1] >> dual, dual)

    @property
    def width(self) -> int:
        return max(self.d, self.e, 16)

    @property
    def constants(self) -> dict:
        """How the kernels cover columns: see common.py."""
        (d0, d1), (e0, e1) = (configs.split_head_dim(x, self.dual) for x in (self.d, self.e))
        return dict(D=self.d, D0=d0, D1=d1, E=self.e, E0=e0, E1=e1)


def on_its_device(function):
    """Triton launches on the current GPU: run the function with its first tensor's GPU as the current one."""

    @functools.wraps(function)
    def call(x: Tensor, *args, **kwargs):
        with torch.cuda.device_of(x):
            return function(x, *args, **kwargs)

    return call


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return common.INTERPRET.value


def unsupported(q, k, v, spec: AttnSpec, *, flowing_lse: bool, masked: bool, decodes: bool) -> str | None:
    """Why this backend can't take the call, or None if it can; see `kernels.choose`. All options are supported."""
    if q.device.type not in DEVICES:
        return f"device type {q.device.type} (outside of Triton's interpreter)"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype}"
    if interpreting() and q.dtype == torch.bfloat16:
        return "bf16 in Triton's interpreter, which computes it wrongly"
    width, latent = max(q.shape[-1], v.shape[-1]), decodes and k.shape[2] == 1 and k.element_size() == 2
    if width > (MAX_LATENT if latent else MAX_HEAD_DIM):
        return f"head_dim {width} above {MAX_HEAD_DIM} (decoding bf16 or fp16 with one KV head: {MAX_LATENT})"
    if any(x.dtype not in (q.dtype, *EIGHT_BITS) for x in (k, v)):
        return f"q in {q.dtype} with k in {k.dtype} and v in {v.dtype}"
    if q.shape[0] > MAX_BATCH:
        return f"a batch of {q.shape[0]}, above {MAX_BATCH}"
    return None


def takes_duals(dtype: torch.dtype, width: int) -> bool:
    """See `Backend.for_duals`."""
    return dtype != torch.float32 or width <= MAX_DUAL_FP32


def attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """See `Backend.attn_fwd`; one launch."""
    b, s_q, h, _ = q.shape
    shape = (b, s_q, h, v.shape[-1])
    if b and k_segments and sum(s.length for s in q_segments) == s_q:  # the kernel writes every row
        out = torch.empty(shape, dtype=torch.float32 if out_dtype is None else out_dtype, device=q.device)
        lse = torch.empty((b, h, s_q), dtype=torch.float32, device=q.device)
    else:
        out, lse = empty_state(shape, device=q.device)
        out = out if out_dtype is None else out.to(out_dtype)
    write_state(out, lse, q, k, v, q_segments=q_segments, k_segments=k_segments, spec=spec)
    return out, lse


def attn_jvp(
    q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None
) -> tuple[Tensor, Tensor]:
    """See `Backend.for_duals`; one launch. out is fp32, whatever out_dtype: r - mu out cancels digits."""
    out, lse = empty_state((*q.shape[:3], v.shape[-1] + 1), device=q.device)
    write_state(out, lse, q, k, v, q_segments=q_segments, k_segments=k_segments, spec=spec, dual=True)
    return out, lse


@on_its_device
def write_state(
    out: Tensor, lse: Tensor, q, k, v, *, q_segments, k_segments, spec: AttnSpec, dual: bool = False
) -> None:
    """`attn_fwd` (dual: `attn_jvp`) into out [b, s_q, h, d_v], of any dtype, and lse [b, h, s_q], fp32: the rows of
    q_segments."""
    b, _, h, _ = q.shape
    if 0 in (b, len(q_segments), len(k_segments)):
        return
    q, scale = _positive_scale(q, spec.softmax_scale)
    given, dims = operands(Q=q, K=k, V=v), HeadDims.of(q, v, dual)
    tiles = _tiles("fwd", q, dims, spec)
    q_tiles, k_table = tables(q_segments, k_segments, tiles.m, q.device)
    fwd.attn_fwd_kernel[(q_tiles.shape[0], h, b)](
        **given, **_boxes(given["K"], given["V"], tiles, dims, arch(q.device)), OUT=out, LSE=lse,
        **alibi_slopes(spec, q), q_tiles=q_tiles, k_segments=k_table, out_strides=out.stride()[:3],
        lse_strides=lse.stride()[:2], **_fixed(spec, scale, h // k.shape[2], dims, tiles, precision_of(q, dims)),
    )  # fmt: skip


def attn_bwd(dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.attn_bwd`."""
    grads = tuple(torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    accumulate_bwd(dout, q, k, v, lse, delta, grads, q_segments=q_segments, k_segments=k_segments, spec=spec)
    return grads


attn_bwd_jvp = attn_bwd  # of dual tensors, see `Backend.for_duals`: known by lse and delta


@on_its_device
def accumulate_bwd(dout, q, k, v, lse, delta, grads, *, q_segments, k_segments, spec: AttnSpec, own=None) -> None:
    """Add this block's gradients to grads = (dq, dk, dv), fp32. Calls for several cells accumulate.

    own: the segments of queries and of keys that get gradients, if not all do.
    lse and delta [b, h, s] of dual tensors are (lse, mu) and (delta, kappa), [b, h, s, 2].
    """
    dq, dk, dv = grads
    if 0 in (len(q), len(q_segments), len(k_segments)):
        return
    dual = lse.dim() == 4
    lse, mu = lse.unbind(-1) if dual else (lse, None)
    lse2 = torch.where(lse == NEG_INF, -NEG_INF, lse * common.LOG2E.value)  # +inf where nothing is seen: weights are 0
    if dual:
        lse2, delta = torch.stack((lse2, mu), 2), delta.transpose(2, 3)  # [b, h, 2, s]
    lse2, delta = lse2.contiguous(), delta.contiguous()
    given = operands(Q=q, K=k, V=v, DOUT=dout.to(q.dtype)) | alibi_slopes(spec, q)
    given |= dict(LSE2=lse2, DELTA=delta, lse_strides=lse2.stride()[:-1])
    (own_q, own_k), dims = own or (q_segments, k_segments), HeadDims.of(q, v, dual)
    tiles = _tiles("dkdv", q, dims, spec)
    fused = tiles.fused and arch(q.device) in BOX_ARCHES and not dual and not spec.deterministic
    dq_boxes = _descriptor(dq, tiles.m) if fused else None
    if dq_boxes is None:
        _add_dq(given, dq, _tiles("dq", q, dims, spec), dims, q_segments=own_q, k_segments=k_segments, spec=spec)
    _add_dkdv(given | dict(DQ_BOXES=dq_boxes), dk, dv, tiles, dims, q_segments=q_segments, k_segments=own_k, spec=spec)


def _boxes(k: Tensor, v: Tensor, tiles: configs.Tiles, dims: HeadDims, arch: str) -> dict:
    """K_BOXES and V_BOXES for k and v [b, s, h_kv, d]: None where `tiles` or the GPU has no boxes, where a head has two
    tiles of columns, and where the engine can't take the address or strides: positive multiples of 16 bytes. And
    SPECIALIZED, which needs boxes.
    """
    wanted = tiles.boxes and arch in BOX_ARCHES and not dims.dual
    descriptors = [_descriptor(x, tiles.n) for x in (k, v)] if wanted else [None]
    if None in descriptors:
        return dict(K_BOXES=None, V_BOXES=None, SPECIALIZED=False)
    return dict(K_BOXES=descriptors[0], V_BOXES=descriptors[1], SPECIALIZED=tiles.specialized and arch == "sm100")


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    """Of x [b, s, h, d], with boxes of so many rows and all columns of a head, or None: see `_boxes`."""
    size, (columns, rest) = x.element_size(), configs.split_head_dim(x.shape[-1])
    strides = list(x.stride())
    for i in reversed(range(x.dim() - 1)):
        if x.shape[i] == 1:  # torch may have put any number there
            strides[i] = strides[i + 1] * x.shape[i + 1]
    if rest or x.shape[-1] * size % 16 or x.data_ptr() % 16 or any(s <= 0 or s * size % 16 for s in strides[:-1]):
        return None
    return TensorDescriptor(x, list(x.shape), strides, [1, rows, 1, columns])


def _add_dq(given: dict, dq: Tensor, tiles: configs.Tiles, dims: HeadDims, *, q_segments, k_segments, spec) -> None:
    """Add to dq. given: the kernel's tensors and their strides."""
    (b, _, h, _), group = dq.shape, dq.shape[2] // given["K"].shape[2]
    q_tiles, k_table = tables(q_segments, k_segments, tiles.m, dq.device)
    bwd.attn_bwd_dq_kernel[(q_tiles.shape[0], h, b)](
        **given, DQ=dq, q_tiles=q_tiles, k_segments=k_table, dq_strides=dq.stride()[:3],
        **_fixed(spec, spec.softmax_scale, group, dims, tiles, precision_of(given["Q"], dims)),
    )  # fmt: skip


def _add_dkdv(given: dict, dk, dv, tiles: configs.Tiles, dims: HeadDims, *, q_segments, k_segments, spec) -> None:
    """The same for dk and dv."""
    (b, _, h_kv, _), group = dk.shape, given["Q"].shape[2] // dk.shape[2]
    k_tiles, q_table = tables(k_segments, q_segments, tiles.n, dk.device, heaviest_last=True)
    rows = 1 if spec.deterministic else b  # of the batch: bits must not depend on it
    # nor on the number of tiles and heads that a rank has: then one program adds up all heads of a KV head
    parts = 1 if spec.deterministic == "ranks" else _head_parts(k_tiles.shape[0] * h_kv * rows, group, dk.device)
    dk_parts, dv_parts = (dk[None], dv[None]) if parts == 1 else (x.new_zeros(parts, *x.shape) for x in (dk, dv))
    bwd.attn_bwd_dkdv_kernel[(k_tiles.shape[0], h_kv * parts, b)](
        **given, DK=dk_parts, DV=dv_parts, k_tiles=k_tiles, q_segments=q_table, parts=parts,
        dk_part_stride=dk_parts.stride(0), dk_strides=dk_parts.stride()[1:4],
        dv_part_stride=dv_parts.stride(0), dv_strides=dv_parts.stride()[1:4],
        **_fixed(spec, spec.softmax_scale, group, dims, tiles, precision_of(given["Q"], dims)),
    )  # fmt: skip
    if parts > 1:
        dk += dk_parts.sum(0)
        dv += dv_parts.sum(0)


def _head_parts(programs: int, group: int, device: torch.device) -> int:
    """Number of slices of a KV head's query heads, so that there are four programs of dk and dv per multiprocessor.

    Four, because their lengths differ under a causal mask. Each slice has a buffer; sums are in order, no atomics.
    """
    wanted = 4 * multiprocessors(device)
    return next((p for p in range(1, group) if group % p == 0 and p * programs >= wanted), group)


@on_its_device
def attn_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """delta [b, h, s] = rowsum(dout * out) - dlse, fp32; dout and out [b, s, h, d_v], dlse [b, h, s]."""
    b, s, h, e = out.shape
    dout, out = unit_last_stride(dout), unit_last_stride(out)
    delta = torch.empty((b, h, s), dtype=torch.float32, device=out.device)
    dlse = dlse if dlse is None else dlse.contiguous()
    m = 16
    bwd.delta_kernel[(-(-s // m), h, b)](
        DOUT=dout, OUT=out, DLSE=dlse, DELTA=delta, num_rows=s,
        dout_strides=dout.stride()[:3], out_strides=out.stride()[:3], delta_strides=delta.stride()[:2],
        E=e, COLS=configs.power_of_2(e), M=m, HAS_DLSE=dlse is not None,
    )  # fmt: skip
    return delta


@functools.lru_cache(maxsize=1024)
def _fixed(spec: AttnSpec, scale: float, group: int, dims: HeadDims, tiles: configs.Tiles, precision: str) -> dict:
    """A training kernel's scalar arguments, and the constants that it is compiled for.

    Made once for all launches with the same options, and not to be changed.
    """
    left, right = window_sides(spec)
    return dict(
        left=left, right=right, scale=scale, softcap=spec.softcap, **_dropout_arguments(spec),
        GROUP=group, **dims.constants, **mask_flags(spec), DUAL=dims.dual, M=tiles.m, N=tiles.n, STAGES=tiles.stages,
        PRECISION=precision,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def precision_of(q: Tensor, dims: HeadDims) -> str:
    """How fp32 is multiplied in training: "ieee", or as three products of TF32 on NVIDIA's tensor cores ("tf32x3"), if
    torch's switch allows TF32, `torch.set_float32_matmul_precision("high")`; not of wider heads, whose registers would
    spill, and of tangents."""
    if q.dtype != torch.float32 or dims.dual or dims.width > max(configs.TF32X3["fwd"]):
        return "ieee"
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32x3" if allowed and arch(q.device).startswith("sm") else "ieee"


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and a positive scale that give the same logits: the kernel takes the products' maximum before it scales."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale else (torch.zeros_like(q), 1.0)


def unit_last_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """x whose address and strides let Triton load 16 bytes at a time, where head_dim is a multiple of 16."""
    if x.shape[-1] % 16 == 0:
        bits = x.data_ptr()
        for size, stride in zip(x.shape[:-1], x.stride()):
            if size > 1:
                bits |= stride
        if bits % 16:
            return x.clone(memory_format=torch.contiguous_format)
    return unit_last_stride(x)


def _tiles(kernel: str, q: Tensor, dims: HeadDims, spec: AttnSpec) -> configs.Tiles:
    name = f"{kernel}_jvp" if dims.dual else kernel
    plain = q.element_size() == 2 and spec.dropout is None
    if plain and (measured := fastest.tiles_for(fastest.gpu_of(q.device), name, dims.width)):
        return configs.Tiles(*measured)
    options = q.element_size(), spec.dropout is not None, precision_of(q, dims)
    return configs.tiles(name, dims.width, arch(q.device), *options)


def operands(**tensors: Tensor) -> dict:
    """Tensors [b, s, h, d] under a kernel's names for them, copied where Triton reads them badly, and their strides."""
    tensors = {name: _aligned(x) for name, x in tensors.items()}
    return tensors | {f"{name.lower()}_strides": x.stride()[:3] for name, x in tensors.items()}


def window_sides(spec: AttnSpec) -> tuple[int, int]:
    """(left, right) for the kernels, small enough that their sums with positions below 2^30 fit 32 bits."""
    left, right = (common.UNBOUNDED if side is None else side for side in (spec.left, spec.right))
    return min(left, common.UNBOUNDED), min(right, common.UNBOUNDED)


def mask_flags(spec: AttnSpec) -> dict:
    window = spec.left is not None or spec.right not in (None, 0)
    return dict(CAUSAL=spec.right == 0, WINDOW=window, SOFTCAP=spec.softcap > 0, DROPOUT=spec.dropout is not None)


def alibi_slopes(spec: AttnSpec, q: Tensor) -> dict:
    """The argument SLOPES, fp32 [1 or b, h] or None, and its stride between rows of the batch."""
    if spec.alibi_slopes is None:
        return dict(SLOPES=None, slopes_stride=0)
    (slopes,) = _in_use((_slopes_on(spec.alibi_slopes, q.device),))
    return dict(SLOPES=slopes, slopes_stride=slopes.stride(0) if len(slopes) > 1 else 0)


@functools.lru_cache(maxsize=64)
def _slopes_on(slopes: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    return _copied(torch.tensor(slopes, dtype=torch.float32), device)


def _dropout_arguments(spec: AttnSpec) -> dict:
    """The seed's two words, threshold and first head as int32 with the same bits; the factor of kept values."""
    names = ("seed_low", "seed_high", "threshold", "first_head")
    if spec.dropout is None:
        return dict.fromkeys(names, 0) | dict(keep_weight=1.0)
    p, seed, first_head = spec.dropout
    words = (*dropout.seed_words(seed), dropout.threshold(p), first_head)
    signed = (w - (1 << 32) if w >> 31 else w for w in words)
    return dict(zip(names, signed), keep_weight=1.0 / (1.0 - p))


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of this GPU; 1 in the interpreter."""
    return 1 if interpreting() else _multiprocessors_of(device.index or 0)


@functools.lru_cache
def _multiprocessors_of(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.lru_cache
def _arch_of(index: int) -> str:
    if torch.version.hip:
        return "gfx942"
    return configs.arch_of(torch.cuda.get_device_capability(index))


def arch(device: torch.device) -> str:
    return "interpreter" if interpreting() else _arch_of(device.index or 0)


_captured: list = []


def tables(grid, loop, rows: int, device: torch.device, heaviest_last: bool = False) -> tuple[Tensor, Tensor]:
    """`_make_tables`, cached for later calls."""
    return _in_use(_make_tables(tuple(grid), tuple(loop), rows, device, heaviest_last))


def _in_use(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors `_copied` and cached: this stream reads them once they are there, and the cache may drop them meanwhile.
    What a CUDA graph reads is kept."""
    device = tensors[0].device
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            _captured.append(tensors)
        else:
            stream = torch.cuda.current_stream(device)
            stream.wait_stream(_copies(device))
            for x in tensors:
                x.record_stream(stream)
    return tensors


def _copied(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; `_in_use` waits for the copy, and not the host, which would wait for all that the GPU has to do.

    Raises: ``RuntimeError`` while a CUDA graph is captured.
    """
    if device.type != "cuda":
        return x.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "attention of segments that are new in a CUDA graph: run the same call once before capturing it"
        )
    with torch.cuda.stream(_copies(device)):
        return x.pin_memory().to(device, non_blocking=True)


@functools.lru_cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to a GPU."""
    return torch.cuda.Stream(device)


@functools.lru_cache(maxsize=256)
def _make_tables(grid, loop, rows: int, device: torch.device, heaviest_last: bool) -> tuple[Tensor, Tensor]:
    """Tables for a kernel whose programs take tiles of the segments `grid` and loop over the segments `loop`.

    Returns int32 [tiles, 5]: first row, rows, first position, and the range of `loop` of the same sequence; and int32
    [len(loop), 4]: row, length, position, sequence, by sequence. Tiles that run longest come first: under a
    causal mask those are late queries, and (heaviest_last) early keys.
    """
    loop = sorted(loop, key=lambda s: s.seq)
    bounds: dict[int, list[int]] = {}
    for i, s in enumerate(loop):
        bounds.setdefault(s.seq, [i, i])[1] = i + 1
    tiles = [
        (s.row + i, min(rows, s.length - i), s.pos + i, *bounds.get(s.seq, (0, 0)))
        for s in grid
        for i in range(0, s.length, rows)
    ]
    tiles.sort(key=lambda t: t[2] if heaviest_last else -t[2])
    table = [(s.row, s.length, s.pos, s.seq) for s in loop]
    numbers = (torch.tensor(x, dtype=torch.int32).reshape(-1, n) for x, n in ((tiles, 5), (table, 4)))
    return tuple(_copied(x, device) for x in numbers)
