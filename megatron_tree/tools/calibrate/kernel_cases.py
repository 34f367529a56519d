"""Attention kernels of one device: inputs, our backends and torch's on them, compared with float64 and timed.

`bench kernels` shows the times; `keep_fastest` writes the fastest backend into the user's table for backend="auto".
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.benchmark import Timer

from ...core import kernels
from ...core.cache.pages import LayerPages, quantize
from ...core.kernels import KVCache, fastest
from ...core.kernels.libraries import LIBRARIES
from ...core.layout import Segment
from ...core.spec import AttnSpec
from .other_kernels import others

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE = 64  # tokens of a page
RULE = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}  # allowed multiple of the dense low-precision error


class WrongResult(RuntimeError):
    """A result differs from the truth by more than allowed: no speed is printed."""


WINDOW, DOCUMENTS = 1024, 8  # of the masks "window" and "packed"


class KernelCase(NamedTuple):
    """One shape; causal for "fwd" and "bwd", one query per row for "decode". d 192 has values of 128, as MLA."""

    kind: str
    b: int
    s: int
    h: int
    h_kv: int
    d: int
    cache: str = ""  # of decode: "", "paged", "paged int8", "paged fp8", or "latent": values that begin the keys
    mask: str = ""
    """Of "fwd" and "bwd", causal all of them: "", "window", "packed" (documents of equal length), or "zigzag": the cell
    of one of two ranks' queries with the other's keys, whose out is fp32 to be merged."""

    @property
    def label(self) -> str:
        shape = f"{self.kind} b{self.b} s{self.s} h{self.h}/{self.h_kv} d{self.d}"
        return " ".join(filter(None, (shape, self.cache, self.mask)))

    @property
    def d_v(self) -> int:
        return self.d - 64 if self.cache == "latent" or self.d == 192 else self.d

    @property
    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """Of queries and of keys."""
        n = self.s // (DOCUMENTS if self.mask == "packed" else 2)
        if self.mask == "packed":
            of_both = (tuple(Segment(i * n, 0, n, i) for i in range(DOCUMENTS)),) * 2
        elif self.mask == "zigzag":
            of_both = ((Segment(0, n, n), Segment(n, 2 * n, n)), (Segment(0, 0, n), Segment(n, 3 * n, n)))
        else:
            of_both = ((Segment(0, 0, self.s),),) * 2
        return dict(zip(("q_segments", "k_segments"), of_both))

    @property
    def spec(self) -> AttnSpec:
        window = dict(window_size=(WINDOW - 1, 0)) if self.mask == "window" else {}
        return AttnSpec(softmax_scale=self.d**-0.5, **window)

    @property
    def flops(self) -> float:
        keys = {"window": 2 * min(WINDOW, self.s), "packed": self.s // DOCUMENTS}.get(self.mask, self.s)
        whole = 2 * self.b * self.h * self.s * keys / 2 * (self.d + self.d_v)
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


Call = Callable[[], object]
"""Computes a case."""
Emit = Callable[[KernelTiming], None]


def inputs(case: KernelCase, device, dtype) -> list[Tensor]:
    """q, k, v, dout [b, s, heads, d]; one query for decode. On "meta" they have no numbers."""
    g = None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(0)
    s_q = 1 if case.kind == "decode" else case.s
    of_keys = (case.s, case.h_kv, case.d_v)
    shapes = ((s_q, case.h, case.d), (case.s, case.h_kv, case.d), of_keys, (s_q, case.h, case.d_v))
    q, k, v, dout = (torch.randn(case.b, *shape, device=device, dtype=dtype, generator=g) for shape in shapes)
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
    q, k, v, dout = (x[:, :, heads] for x, heads in zip(given, _heads(case)))
    if case.eight_bits:
        (k, k_scale), (v, v_scale) = quantize(k, case.eight_bits), quantize(v, case.eight_bits)
        k, v = k.double() * k_scale[..., None], v.double() * v_scale[..., None]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    if case.kind == "decode":
        state = kernels.attn_decode(q, KVCache(k, v), case.spec, backend="reference")
        return {"out": state[..., : case.d_v]}
    options = dict(**case.segments, spec=case.spec, backend="reference")
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


def relative_error(result: Tensor, truth: Tensor) -> float:
    """The worst row's error: |result - truth| over |truth| + the rows' root mean square, norms over the last axis."""
    result, truth = result.double(), truth.double()
    norms = truth.norm(dim=-1)
    floor = norms.square().mean().sqrt()
    return ((result - truth).norm(dim=-1) / (norms + floor).clamp_min(1e-300)).max().item()


def rounding(case: KernelCase, dtype: torch.dtype) -> float:
    """Two units of the dtype and sqrt(s) units of fp32: the error of sums of s terms."""
    return 2 * torch.finfo(dtype).eps + case.s**0.5 * torch.finfo(torch.float32).eps


def _heads(case: KernelCase) -> tuple[list[int], ...]:
    """The heads of q, k, v and dout that are checked."""
    group = case.h // case.h_kv
    of_keys = sorted({0, case.h_kv - 1})
    of_queries = [h * group + i for h in of_keys for i in range(group)]
    return of_queries, of_keys, of_keys, of_queries


def ours(case: KernelCase, backend: str, given) -> Call:
    """One of our backends over `given` (q, k, v, dout); for "bwd" the backward alone, with delta."""
    q, k, v, dout = given
    if case.kind == "decode":
        cache = in_pages(k, v, PAGE, case.eight_bits) if case.cache.startswith("paged") else KVCache(k, v)
        return functools.partial(kernels.attn_decode, q, cache, case.spec, backend)
    options = dict(**case.segments, spec=case.spec, backend=backend)
    forward = functools.partial(kernels.attn_fwd, q, k, v, **options)
    if case.mask == "zigzag":

        def forward():
            call = dict(**case.segments, spec=case.spec, out_dtype=torch.float32)
            return kernels.choose(q, k, v, case.spec, backend).attn_fwd(q, k, v, **call)

    if case.kind == "fwd":
        return forward
    state = functools.cache(lambda: [x.float() for x in forward()])

    def backward():
        out, lse = state()
        return kernels.attn_bwd(dout, q, k, v, lse, kernels.attn_delta(dout, out), **options)

    return backward


def torchs(case: KernelCase, given) -> dict[str, Call]:
    """torch's scaled_dot_product_attention with its flash kernel and, on GPUs, with cuDNN, by name."""
    if case.cache or case.mask:
        return {}
    q, k, v, dout = (x.transpose(1, 2) for x in given)
    leaves = [x.detach().requires_grad_(case.kind == "bwd") for x in (q, k, v)]
    options = dict(is_causal=case.kind != "decode", enable_gqa=case.h != case.h_kv)

    def call_of(backend: SDPBackend) -> Call:
        def forward():
            with sdpa_kernel(backend):
                return sdpa(*leaves, **options)

        once = functools.cache(forward)
        gradients = functools.partial(torch.autograd.grad, inputs=leaves, grad_outputs=dout, retain_graph=True)
        return (lambda: gradients(once())) if case.kind == "bwd" else forward

    names = {"torch flash": SDPBackend.FLASH_ATTENTION}
    if q.device.type == "cuda":
        names["torch cuDNN"] = SDPBackend.CUDNN_ATTENTION
    return {name: call_of(backend) for name, backend in names.items()}


def time_case(case: KernelCase, which: tuple, emit: Emit, *, device: torch.device, dtype: torch.dtype) -> None:
    """Check and time contenders and the device's own limit (a copy, or a matrix product); prints a table.

    which: "torch", "others" (other_kernels.py) and names of our backends. Raises `WrongResult` at the end if one of
    ours was wrong or could not run; the times of the others are given to `emit` before. A library that is not here, or
    refuses the case, is no error.
    """
    print(f"\n{case.label}, {str(dtype).removeprefix('torch.')}", flush=True)
    given = inputs(case, device, dtype)
    truth = truth_of(case, given)
    calls = {}
    for name in which:
        if name == "others":
            calls |= _others(case, given)
        else:
            calls |= torchs(case, given) if name == "torch" else {f"ours, {name}": ours(case, name, given)}
    work = (case.kv_bytes(dtype) / 1e9, "GB/s") if case.kind == "decode" else (case.flops / 1e12, "TFLOP/s")
    limits = _limits(case, device, dtype)
    wrong, first = [], None
    for name, (call, amount, unit) in {**{name: (call, *work) for name, call in calls.items()}, **limits}.items():
        try:
            if name not in limits:
                verify(case, name, call(), truth, dtype)
            seconds = clock(call, device)
        except Exception as error:  # each library has its own kinds of error for what it does not take
            kind = type(error).__name__
            print(f"  {name:<16} not available: {(str(error).splitlines() or [kind])[0][:90]}", flush=True)
            refused = isinstance(error, ValueError) and name.removeprefix("ours, ") in LIBRARIES
            if name.startswith("ours") and not refused:
                wrong.append(str(error) if isinstance(error, WrongResult) else f"{name}: {kind}: {error}")
            if not device_works():
                wrong.append(f"{name} left the GPU unusable: {kind}: {error}")
                break
            continue
        row = KernelTiming(case.label, case.kind, name, seconds * 1e3, amount / seconds, unit)
        first = first or row
        ratio = f"{first.name} / this {first.rate / row.rate:5.2f}"
        print(f"  {name:<16} {row.ms:9.3f} ms {row.rate:9.4g} {unit:<8} {ratio}", flush=True)
        emit(row)
    if wrong:
        raise WrongResult("; ".join(wrong))


def _others(case: KernelCase, given: list[Tensor]) -> dict[str, Call]:
    try:
        return others(case, given)
    except Exception as error:  # of a library that can't be loaded here
        print(f"  libraries not available: {type(error).__name__}: {error}"[:120], flush=True)
        return {}


def fastest_backends(rows: list[KernelTiming]) -> dict[str, str]:
    """{head_dim: our backend with the least time of forward and backward}: `kernels.fastest`'s table of a GPU.

    By the first case of a head_dim whose forward and backward were both timed.
    """
    fastest: dict[str, str] = {}
    times = {(row.case, row.name): row.ms for row in rows if row.name.startswith("ours, ")}
    for case in dict.fromkeys(row.case for row in rows if row.kind == "fwd"):
        backward, width = case.replace("fwd", "bwd"), case.rpartition(" d")[2]
        names = [name for of, name in times if of == case and (backward, name) in times]
        if names and width.isdecimal():  # else it has a mask
            best = min(names, key=lambda name: times[case, name] + times[backward, name])
            fastest.setdefault(width, best.removeprefix("ours, "))
    return fastest


def device_works() -> bool:
    """Whether this process can still use the GPU: after some errors it never can."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _limits(case: KernelCase, device, dtype) -> dict[str, tuple[Call, float, str]]:
    """{name: (call, its amount of work, unit of the rate)}; a copy reads and writes each byte."""
    if case.kind == "decode":
        a = torch.empty(min(case.kv_bytes(dtype), 1 << 30), dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        return {"device copy": (lambda: b.copy_(a), 2 * a.nbytes / 1e9, "GB/s")}
    n = 8192 if device.type == "cuda" else 256
    x, y = torch.randn(2, n, n, device=device, dtype=dtype)
    return {"matrix product": (lambda: x @ y, 2 * n**3 / 1e12, "TFLOP/s")}


def clock(call: Call, device: torch.device, *, seconds: float = 0.5) -> float:
    """Median time of one call in seconds, after a warm-up; on a GPU with cold L2, measured by events."""
    call()
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=100, rep=int(seconds * 1000), return_mode="median") / 1e3
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median


COMMON = tuple(KernelCase(kind, 1, 4096, 16, 4, d) for d in (64, 128, 256) for kind in ("fwd", "bwd"))


def keep_fastest(device: torch.device, cases: tuple[KernelCase, ...] = COMMON) -> tuple[tuple[str, str], ...]:
    """Check and time causal attention in bf16 with each backend that takes it, and write the user's table.

    Returns (quantity, value) for printing. Raises `WrongResult` if a result was wrong.
    """
    rows: list[KernelTiming] = []
    with contextlib.redirect_stdout(io.StringIO()):  # tables of all contenders
        for case in cases:
            which = tuple(name for name in fastest.NAMES if _takes(name, case, device))
            time_case(case, which, rows.append, device=device, dtype=torch.bfloat16)
    gpu, names = fastest.name_of(device), fastest_backends(rows)
    path = fastest.keep(gpu, names)
    return (
        *((f"fastest up to head_dim {width}", name) for width, name in names.items()),
        ("kept for backend='auto'", f"{path} ({gpu})"),
    )


def _takes(name: str, case: KernelCase, device: torch.device) -> bool:
    q, k = (torch.empty(1, 1, h, case.d, dtype=torch.bfloat16, device=device) for h in (case.h, case.h_kv))
    try:
        kernels.choose(q, k, k, AttnSpec(softmax_scale=1.0), name)
    except ValueError:  # not installed, or not for this GPU
        return False
    return True
