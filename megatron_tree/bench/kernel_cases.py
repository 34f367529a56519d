"""What `bench kernels` times: shapes, inputs, and the comparison of results with float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..cache.pages import LayerPages, quantize
from ..config import AttnSpec
from ..kernels import KVCache
from ..layout import Segment
from .measure import relative_error
from .results import WrongResult

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE = 64  # tokens of a page
RULE = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}  # allowed multiple of the dense low-precision error


class KernelCase(NamedTuple):
    """One shape; causal for "fwd" and "bwd", one query per row for "decode"."""

    kind: str
    b: int
    s: int
    h: int
    h_kv: int
    d: int
    cache: str = ""  # of decode: "", "paged", "paged int8", "paged fp8", or "latent": values that begin the keys

    @property
    def label(self) -> str:
        return " ".join(filter(None, (f"{self.kind} b{self.b} s{self.s} h{self.h}/{self.h_kv} d{self.d}", self.cache)))

    @property
    def d_v(self) -> int:
        return self.d - 64 if self.cache == "latent" else self.d

    @property
    def flops(self) -> float:
        whole = 4 * self.b * self.h * self.s * self.s * self.d / 2
        return {"fwd": whole, "bwd": 2.5 * whole, "decode": 4 * self.b * self.h * self.s * self.d}[self.kind]

    @property
    def eight_bits(self) -> torch.dtype | None:
        """The dtype of a cache in 8 bits."""
        return {"paged int8": torch.int8, "paged fp8": torch.float8_e4m3fn}.get(self.cache)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the KV cache, with its scales."""
        token = self.d * (self.eight_bits or dtype).itemsize + (4 if self.eight_bits else 0)  # a scale in fp32
        return (1 if self.cache == "latent" else 2) * self.b * self.s * self.h_kv * token


class KernelTiming(NamedTuple):
    """One contender in one case: a line of results.csv."""

    case: str
    kind: str
    name: str
    ms: float | None
    """Median; None where nothing was timed."""
    rate: float
    unit: str


HEADS = (32, 8)
GPU_CASES = [
    *(KernelCase(kind, 1, 16384, *HEADS, d) for d in (128, 64) for kind in ("fwd", "bwd")),
    *(KernelCase(kind, 2, 4096, 32, 32, 128) for kind in ("fwd", "bwd")),
    KernelCase("fwd", 1, 8192, 16, 16, 256),
]
GPU_DECODING = [
    *(KernelCase("decode", 1, s, 64, 8, 128) for s in (131072, 524288, 1048576)),
    KernelCase("decode", 32, 8192, *HEADS, 128),
    *(KernelCase("decode", 1, 524288, 64, 8, 128, cache) for cache in ("paged", "paged int8", "paged fp8")),
    KernelCase("decode", 1, 524288, 64, 1, 576, "latent"),
]
TINY_CASES = (
    [KernelCase("fwd", 1, 64, 2, 1, 16), KernelCase("bwd", 1, 64, 2, 1, 16)],
    [
        KernelCase("decode", 1, 128, 4, 2, 16),
        KernelCase("decode", 1, 128, 4, 2, 16, "paged int8"),
        KernelCase("decode", 1, 128, 4, 1, 576, "latent"),
    ],
)
CPU_CASES = [KernelCase("fwd", 1, 1024, 4, 2, 64), KernelCase("bwd", 1, 1024, 4, 2, 64)]
CPU_DECODING = [KernelCase("decode", 1, 16384, 8, 2, 64, cache) for cache in ("", "paged int8")]


def inputs(case: KernelCase, device, dtype) -> list[Tensor]:
    """q, k, v, dout [b, s, heads, d]; one query for decode. On "meta" they have no numbers."""
    g = None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(0)
    s_q = 1 if case.kind == "decode" else case.s
    shapes = ((s_q, case.h), (case.s, case.h_kv), (case.s, case.h_kv), (s_q, case.h))
    q, k, v, dout = (torch.randn(case.b, s, h, case.d, device=device, dtype=dtype, generator=g) for s, h in shapes)
    return [q, k, k[..., : case.d_v] if case.cache == "latent" else v, dout]


def in_pages(k: Tensor, v: Tensor, page_size: int, stored: torch.dtype | None) -> KVCache:
    """k and v [b, s, h_kv, d] as pages in random order, in their dtype or in 8 bits, with their block table.

    A page more than the table has is there, and nobody should read it.
    """
    b, s = k.shape[:2]
    order = torch.randperm(b * s // page_size, generator=torch.Generator().manual_seed(1)).to(k.device)
    pages = LayerPages(page_size, stored)
    pages.reserve(len(order) + 1, k, v)
    slots = order[:, None] * page_size + torch.arange(page_size, device=k.device)
    pages.write(slots.flatten(), k.flatten(0, 1), v.flatten(0, 1))
    return pages.kv_cache(order.view(b, -1).int())


def truth_of(case: KernelCase, given: list[Tensor]) -> dict[str, Tensor]:
    """The results for `given` (q, k, v, dout) in float64, of the first and the last KV head and their query heads.

    {"out": ...} or {"dq", "dk", "dv": ...}, [b, s, heads, d].
    """
    spec = AttnSpec(softmax_scale=case.d**-0.5)
    q, k, v, dout = (x[:, :, heads] for x, heads in zip(given, _heads(case)))
    if case.eight_bits:
        (k, k_scale), (v, v_scale) = quantize(k, case.eight_bits), quantize(v, case.eight_bits)
        k, v = k.double() * k_scale[..., None], v.double() * v_scale[..., None]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    if case.kind == "decode":
        state = kernels.attn_decode(q, KVCache(k, v), spec, backend="reference")
        return {"out": state[..., : case.d_v]}
    whole = (Segment(0, 0, case.s),)
    options = dict(q_segments=whole, k_segments=whole, spec=spec, backend="reference")
    out, lse = kernels.attn_fwd(q, k, v, **options)
    if case.kind == "fwd":
        return {"out": out}
    delta = (out * dout).sum(-1).transpose(1, 2)
    return dict(zip(("dq", "dk", "dv"), kernels.attn_bwd(dout, q, k, v, lse, delta, **options)))


def verify(case: KernelCase, name: str, result, truth: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compare a contender's result for this case with `truth_of` it, row by row.

    result: out, (out, lse), a packed state, or (dq, dk, dv): ours [b, s, heads, d], torch's [b, heads, s, d].
    Raises `WrongResult` if an error exceeds 2 (gradients: 3) times `rounding`, relative to a row's norm plus the rows'
    root mean square.
    """
    results = result if isinstance(result, tuple) else (result,)
    if not name.startswith("ours"):
        results = [x.transpose(1, 2) for x in results]
    of_queries, of_keys, *_ = _heads(case)
    for (which, t), x in zip(truth.items(), results):
        error = relative_error(x[:, :, of_keys if which in ("dk", "dv") else of_queries, : t.shape[-1]], t)
        allowed = RULE[which] * rounding(case, dtype)
        if not error <= allowed:
            raise WrongResult(f"{name} is wrong: {case.label}: {which} off by {error:.2g}, allowed {allowed:.2g}")


def rounding(case: KernelCase, dtype: torch.dtype) -> float:
    """Two units of the dtype and sqrt(s) units of fp32: the error of sums of s terms."""
    return 2 * torch.finfo(dtype).eps + case.s**0.5 * torch.finfo(torch.float32).eps


def _heads(case: KernelCase) -> tuple[list[int], ...]:
    """The heads of q, k, v and dout that are checked."""
    group = case.h // case.h_kv
    of_keys = sorted({0, case.h_kv - 1})
    of_queries = [h * group + i for h in of_keys for i in range(group)]
    return of_queries, of_keys, of_keys, of_queries
