"""What `bench kernels` times and checks: shapes, inputs, and results against float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .. import energy, kernels
from ..cache.pages import quantize
from ..config import AttnSpec
from ..kernels import PagedKV, Visible
from ..shard import Segment
from .report import WrongResult

PAGE = 64  # tokens of a page
RULE = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}  # allowed multiple of the dense low-precision error


class Case(NamedTuple):
    """One shape; causal for "fwd" and "bwd", one query per row for "decode"."""

    kind: str
    b: int
    s: int
    h: int
    h_kv: int
    d: int
    cache: str = ""  # of decode: "", "paged", "paged int8" or "paged fp8"

    @property
    def label(self) -> str:
        return " ".join(filter(None, (f"{self.kind} b{self.b} s{self.s} h{self.h}/{self.h_kv} d{self.d}", self.cache)))

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
        return 2 * self.b * self.s * self.h_kv * token


GPU_CASES = [
    *(Case(kind, 1, 16384, 32, 8, d) for kind in ("fwd", "bwd") for d in (64, 128)),
    *(Case(kind, 2, 4096, 32, 32, 128) for kind in ("fwd", "bwd")),
    Case("fwd", 1, 8192, 16, 16, 256),
    *(Case("decode", 1, s, 64, 8, 128) for s in (131072, 524288, 1048576)),
    Case("decode", 32, 8192, 32, 8, 128),
    *(Case("decode", 1, 524288, 64, 8, 128, cache) for cache in ("paged", "paged int8", "paged fp8")),
]
CPU_CASES = [Case("fwd", 1, 1024, 4, 2, 64), Case("bwd", 1, 1024, 4, 2, 64), Case("decode", 1, 16384, 8, 2, 64)]
CPU_CASES.append(Case("decode", 1, 16384, 8, 2, 64, "paged int8"))
CHECKED = [Case("fwd", 1, 640, 4, 2, 64), Case("fwd", 1, 640, 4, 2, 128), Case("fwd", 1, 320, 2, 1, 256)]


def inputs(case: Case, device, dtype) -> list[Tensor]:
    """q, k, v, dout [b, s, heads, d]; one query for decode."""
    g = torch.Generator(device).manual_seed(0)
    s_q = 1 if case.kind == "decode" else case.s
    shapes = ((s_q, case.h), (case.s, case.h_kv), (case.s, case.h_kv), (s_q, case.h))
    return [torch.randn(case.b, s, h, case.d, device=device, dtype=dtype, generator=g) for s, h in shapes]


def paged(case: Case, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, PagedKV]:
    """k and v [b, s, h_kv, d] as pages in a random order, whole or in 8 bits, and where they are."""
    order = torch.randperm(case.b * case.s // PAGE, generator=torch.Generator().manual_seed(1)).to(k.device)
    pages, scales = [], (None, None)
    if case.eight_bits:
        (k, k_scale), (v, v_scale) = quantize(k, case.eight_bits), quantize(v, case.eight_bits)
        scales = k_scale, v_scale
    for x in (k, v, *scales):
        if x is None:
            pages.append(None)
            continue
        to = torch.empty(len(order), PAGE, *x.shape[2:], dtype=x.dtype, device=x.device)
        bits = torch.uint8 if x.dtype == torch.float8_e4m3fn else x.dtype  # torch can't index fp8 everywhere
        to.view(bits)[order] = x.view(bits).reshape(to.shape)
        pages.append(to)
    return *pages[:2], PagedKV(order.view(case.b, -1).int(), *pages[2:])


def check(case: Case, backend: str, device, dtype) -> str:
    """Compare forward and backward with float64 by the 2x/3x rule; returns a line, raises `WrongResult`."""
    q, k, v, dout = inputs(case, device, dtype)
    spec = AttnSpec(softmax_scale=case.d**-0.5)
    whole = (Segment(0, 0, case.s),)
    segments = dict(q_segments=whole, k_segments=whole, spec=spec, backend=backend)
    out, lse = kernels.attn_fwd(q, k, v, **segments)
    delta = (out.float() * dout.float()).sum(-1).transpose(1, 2).contiguous()
    found = dict(zip(RULE, (out, *kernels.attn_bwd(dout, q, k, v, lse.float(), delta, **segments))))
    keep = torch.ones(case.s, case.s, dtype=torch.bool, device=device).tril()
    exact = [x.double() for x in (q, k, v, dout)]
    truth = (
        energy.attention(*exact[:3], spec=spec, keep=keep)[0],
        *energy.attention_grads(*exact, spec=spec, keep=keep),
    )
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        dense = sdpa(*leaves, is_causal=True, enable_gqa=True)
    dense = [x.transpose(1, 2) for x in (dense, *torch.autograd.grad(dense, leaves, dout.transpose(1, 2)))]
    ratios = {}
    for (name, x), t, low in zip(found.items(), truth, dense):
        allowed = max((low.double() - t).abs().max().item(), 4 * torch.finfo(dtype).eps * t.abs().max().item())
        ratios[name] = (x.double() - t).abs().max().item() / allowed
    line = f"{case.label}: error / dense error " + ", ".join(f"{n} {r:.2f}" for n, r in ratios.items())
    if any(not r <= RULE[n] for n, r in ratios.items()):
        raise WrongResult(f"{backend} is wrong: {line} (allowed: out 2, gradients 3)")
    return line


def verify(case: Case, name: str, result, given: list[Tensor]) -> None:
    """Compare what a contender computed of this very case with float64, over the first KV head and its queries.

    result: out, (out, lse), a packed state, or (dq, dk, dv): ours [b, s, heads, d], torch's [b, heads, s, d].
    given: q, k, v, dout. Raises `WrongResult` beyond 2 (gradients 3) times four units of the dtype and what sums of s
    terms in fp32 lose, sqrt(s) of its units.
    """
    group, spec = case.h // case.h_kv, AttnSpec(softmax_scale=case.d**-0.5)
    q, k, v, dout = (x[:, :, :n] for x, n in zip(given, (group, 1, 1, group)))
    if case.eight_bits:
        (k, k_scale), (v, v_scale) = quantize(k, case.eight_bits), quantize(v, case.eight_bits)
        k, v = k.double() * k_scale[..., None], v.double() * v_scale[..., None]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    whole = dict(q_segments=(Segment(0, 0, q.shape[1]),), k_segments=(Segment(0, 0, case.s),), spec=spec)
    if case.kind == "decode":
        truth = {"out": kernels.attn_decode(q, k, v, visible=Visible(), spec=spec, backend="reference")[..., : case.d]}
    else:
        out, lse = kernels.attn_fwd(q, k, v, **whole, backend="reference")
        truth = {"out": out}
    if case.kind == "bwd":
        delta = (out * dout).sum(-1).transpose(1, 2)
        truth = dict(zip(("dq", "dk", "dv"), kernels.attn_bwd(dout, q, k, v, lse, delta, **whole, backend="reference")))
    results = result if isinstance(result, tuple) else (result,)
    if not name.startswith("ours"):
        results = [x.transpose(1, 2) for x in results]
    for (which, t), x in zip(truth.items(), results):
        error = (x[:, :, : t.shape[2], : case.d].double() - t).abs().max() / t.abs().max()
        allowed = RULE[which] * (4 * torch.finfo(given[0].dtype).eps + case.s**0.5 * torch.finfo(torch.float32).eps)
        if not error <= allowed:
            raise WrongResult(f"{name} is wrong: {case.label}: {which} off by {error:.2g}, allowed {allowed:.2g}")
