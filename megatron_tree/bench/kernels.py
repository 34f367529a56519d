"""Attention kernels of one device beside torch's own: correctness first, then TFLOP/s and GB/s, medians, in one run."""

from __future__ import annotations

import argparse
import pathlib
import platform
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .. import energy, kernels
from ..config import AttnSpec
from ..kernels import Visible
from ..shard import Segment
from .report import Row, clock, write_results

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RULE = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}  # allowed multiple of the dense low-precision error


class WrongResult(RuntimeError):
    """A kernel's result is further from the truth than the rule allows: no speed is printed."""


class Case(NamedTuple):
    """One shape; causal for "fwd" and "bwd", one query per row for "decode"."""

    kind: str
    b: int
    s: int
    h: int
    h_kv: int
    d: int

    @property
    def label(self) -> str:
        return f"{self.kind} b{self.b} s{self.s} h{self.h}/{self.h_kv} d{self.d}"

    @property
    def flops(self) -> float:
        whole = 4 * self.b * self.h * self.s * self.s * self.d / 2
        return {"fwd": whole, "bwd": 2.5 * whole, "decode": 4 * self.b * self.h * self.s * self.d}[self.kind]

    def kv_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.b * self.s * self.h_kv * self.d * dtype.itemsize


GPU_CASES = [
    *(Case(kind, 1, 16384, 32, 8, d) for kind in ("fwd", "bwd") for d in (64, 128)),
    *(Case(kind, 2, 4096, 32, 32, 128) for kind in ("fwd", "bwd")),
    Case("fwd", 1, 8192, 16, 16, 256),
    *(Case("decode", 1, s, 64, 8, 128) for s in (131072, 524288, 1048576)),
    Case("decode", 32, 8192, 32, 8, 128),
]
RACED = [("fwd", 16384, 128), ("bwd", 16384, 128)]
CPU_CASES = [Case("fwd", 1, 1024, 4, 2, 64), Case("bwd", 1, 1024, 4, 2, 64), Case("decode", 1, 16384, 8, 2, 64)]
CHECKED = [Case("fwd", 1, 640, 4, 2, 64), Case("fwd", 1, 640, 4, 2, 128), Case("fwd", 1, 320, 2, 1, 256)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench kernels`."""
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--only", choices=("fwd", "bwd", "decode"), nargs="+", default=("fwd", "bwd", "decode"))
    parser.add_argument("--race", action="store_true", help="time other tile sizes of the Triton kernels, too (GPU)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-results/kernels"))


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or run it on a machine with one")
    if args.race and args.device == "cpu":
        raise ValueError("--race needs a GPU: tile sizes of the Triton kernels mean nothing on a CPU")
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    backends = ("triton", "aten") if device.type == "cuda" else ("aten", "reference")
    print(f"checking {', '.join(backends)} against float64 ({args.dtype}, {device}) ...", flush=True)
    for backend in backends:
        for case in CHECKED:
            print(f"  {backend:>9} {check(case, backend, device, dtype)}", flush=True)
    rows: list[Row] = []
    for case in GPU_CASES if device.type == "cuda" else CPU_CASES:
        if case.kind in args.only:
            rows += time_case(case, backends, device, dtype)
    if args.race:
        from .race import race

        rows += race([c for c in GPU_CASES if c.kind in args.only and (c.kind, c.s, c.d) in RACED], device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    write_results(args.out, rows, {"device": name, "dtype": args.dtype, "torch": torch.__version__})


def inputs(case: Case, device, dtype) -> list[Tensor]:
    """q, k, v, dout [b, s, heads, d]; one query for decode."""
    g = torch.Generator(device).manual_seed(0)
    s_q = 1 if case.kind == "decode" else case.s
    shapes = ((s_q, case.h), (case.s, case.h_kv), (case.s, case.h_kv), (s_q, case.h))
    return [torch.randn(case.b, s, h, case.d, device=device, dtype=dtype, generator=g) for s, h in shapes]


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


def contenders(case: Case, backends, device, dtype) -> dict[str, Callable[[], object]]:
    """Everything that computes this case, by name; each a call without arguments."""
    q, k, v, dout = inputs(case, device, dtype)
    spec = AttnSpec(softmax_scale=case.d**-0.5)
    whole = (Segment(0, 0, case.s),)
    calls: dict[str, Callable[[], object]] = {}
    if case.kind == "decode":
        for backend in backends:
            if device.type != "cuda" or backend == "triton":
                calls[f"ours, {backend}"] = lambda b=backend: kernels.attn_decode(
                    q, k, v, visible=Visible(), spec=spec, backend=b
                )
    else:
        segments = dict(q_segments=whole, k_segments=whole, spec=spec)
        for backend in backends:
            if case.kind == "fwd":
                calls[f"ours, {backend}"] = lambda b=backend: kernels.attn_fwd(q, k, v, **segments, backend=b)
            else:
                out, lse = kernels.attn_fwd(q, k, v, **segments, backend=backend)
                delta = (out.float() * dout.float()).sum(-1).transpose(1, 2).contiguous()
                state = (dout, q, k, v, lse.float(), delta)
                calls[f"ours, {backend}"] = lambda b=backend, s=state: kernels.attn_bwd(*s, **segments, backend=b)
    rivals = {"torch flash": SDPBackend.FLASH_ATTENTION}
    if device.type == "cuda":
        rivals["torch cuDNN"] = SDPBackend.CUDNN_ATTENTION
    leaves = [x.transpose(1, 2).detach().requires_grad_(case.kind == "bwd") for x in (q, k, v)]
    for name, backend in rivals.items():
        calls[name] = _sdpa_call(case, backend, leaves, dout.transpose(1, 2))
    if device.type == "cuda" and case.kind != "decode":
        calls["FlexAttention"] = _flex_call(case, leaves, dout.transpose(1, 2))
    return calls


def _sdpa_call(case: Case, backend: SDPBackend, leaves, dout):
    def forward():
        with sdpa_kernel(backend):
            return sdpa(*leaves, is_causal=case.kind != "decode", enable_gqa=case.h != case.h_kv)

    return _backward_of(forward, leaves, dout) if case.kind == "bwd" else forward


def _flex_call(case: Case, leaves, dout):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.s, case.s, device=leaves[0].device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward():
        return compiled(*leaves, block_mask=mask, enable_gqa=case.h != case.h_kv)

    return _backward_of(forward, leaves, dout) if case.kind == "bwd" else forward


def _backward_of(forward, leaves, dout):
    """The backward alone, the forward's graph kept; built at the first call, so that a refusal shows there."""
    graph = []

    def backward():
        if not graph:
            graph.append(forward())
        return torch.autograd.grad(graph[0], leaves, dout, retain_graph=True)

    return backward


def time_case(case: Case, backends, device, dtype) -> list[Row]:
    """Time every contender and the device's own limits (copy, matrix product); prints a table."""
    print(f"\n{case.label}, {str(dtype).removeprefix('torch.')}", flush=True)
    rows = []
    for name, call in {**contenders(case, backends, device, dtype), **_limits(case, device, dtype)}.items():
        try:
            seconds = clock(call, device)
        except Exception as error:  # a rival that refuses this shape: each library has its own kind of error
            if name.startswith("ours"):
                raise
            print(f"  {name:<16} not available: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        limit = _limit_rate(name, case, dtype, seconds)
        rate = limit or (
            (case.kv_bytes(dtype) / seconds / 1e9, "GB/s")
            if case.kind == "decode"
            else (case.flops / seconds / 1e12, "TFLOP/s")
        )
        rows.append(Row(case.label, case.kind, name, seconds * 1e3, *rate))
    ours = rows[0].rate
    for row in rows:
        print(f"  {row.name:<16} {row.ms:9.3f} ms {row.rate:9.4g} {row.unit:<8} ours / this {ours / row.rate:5.2f}")
    return rows


def _limits(case: Case, device, dtype) -> dict[str, Callable[[], object]]:
    if case.kind == "decode":
        n = min(case.kv_bytes(dtype), 1 << 30)
        a = torch.empty(n, dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        return {"device copy": lambda: b.copy_(a)}
    n = 8192 if device.type == "cuda" else 1024
    x, y = torch.randn(2, n, n, device=device, dtype=dtype)
    return {"matrix product": lambda: x @ y}


def _limit_rate(name: str, case: Case, dtype, seconds: float) -> tuple[float, str] | None:
    """The rate of a limit; a copy moves each byte twice. None for a contender."""
    if name == "device copy":
        return 2 * min(case.kv_bytes(dtype), 1 << 30) / seconds / 1e9, "GB/s"
    if name == "matrix product":
        n = 8192 if torch.cuda.is_available() else 1024
        return 2 * n**3 / seconds / 1e12, "TFLOP/s"
    return None
