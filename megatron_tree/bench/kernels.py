"""Attention kernels of one device, compared with torch's: correctness first, then TFLOP/s and GB/s (medians)."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import pathlib
import platform
import shlex
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .. import kernels
from ..config import AttnSpec
from ..kernels import Visible
from ..layout import Segment
from .figures import figure, grouped, label
from .kernel_cases import CHECKED, CPU_CASES, DTYPES, GPU_CASES, Case, check, inputs, paged, truth_of, verify
from .results import Plots, WrongResult, results_kept

EXAMPLES = """\
examples:
  python -m megatron_tree.bench kernels --device cpu
  python -m megatron_tree.bench kernels --only decode --dtype fp16
  python -m megatron_tree.bench kernels --race --out docs/gpu-results/today
"""


class Timing(NamedTuple):
    """One contender in one case: a line of results.csv."""

    case: str
    kind: str
    name: str
    ms: float
    """Median."""
    rate: float
    unit: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench kernels`."""
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--only", choices=("fwd", "bwd", "decode"), nargs="+", default=("fwd", "bwd", "decode"))
    parser.add_argument("--race", action="store_true", help="also time other tile sizes of the Triton kernels (GPU)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-results/kernels"))


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or run it on a machine with one")
    if args.race and args.device == "cpu":
        raise ValueError("--race needs a GPU: tile sizes of the Triton kernels mean nothing on a CPU")
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    backends = ("triton", "aten") if device.type == "cuda" else ("aten", "reference")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    about = {
        "device": name,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "command": shlex.join(["python", "-m", "megatron_tree.bench", *args.argv]),
    }
    wrong: list[str] = []  # contenders of ours other than the first, which ends the run
    with results_kept(args.out, about, lambda rows: _plots(rows, about), keep=BaseException) as rows:
        backends = _correct_backends(backends, device, dtype, wrong)
        for case in GPU_CASES if device.type == "cuda" else CPU_CASES:
            if case.kind in args.only:
                rows += time_case(case, backends, device, dtype, wrong)
        if args.race:
            from .race import RACED, race

            for case in GPU_CASES:
                if case.kind in args.only and case.s in RACED:
                    rows += race(case, device, dtype, wrong)
    if wrong:
        raise WrongResult("\n".join(wrong))


def _correct_backends(backends, device, dtype, wrong: list[str]) -> list[str]:
    """The backends that pass the check on small shapes; raises if the first one fails."""
    print(f"checking {', '.join(backends)} against float64 ({dtype}, {device}) ...", flush=True)
    right = []
    for backend in backends:
        try:
            for case in CHECKED:
                print(f"  {backend:>9} {check(case, backend, device, dtype)}", flush=True)
            right.append(backend)
        except Exception as error:  # torch's operators raise different kinds of errors
            if backend == backends[0]:
                raise
            wrong.append(f"{backend}: {error}")
            print(f"  {backend:>9} left out: {error}", flush=True)
    return right


def contenders(case: Case, backends, given) -> dict[str, Callable[[], object]]:
    """Everything that computes this case from `given` (q, k, v, dout), by name; each a call without arguments."""
    q, k, v, dout = given
    device, spec = q.device, AttnSpec(softmax_scale=case.d**-0.5)
    if case.kind == "decode":
        backends = [b for b in backends if device.type != "cuda" or b == "triton"]
        if case.cache:
            *pages, where = paged(case, k, v)
            backends = [b for b in backends if b != "aten"]
        else:
            pages, where = (k, v), None
        call = dict(visible=Visible(), spec=spec, paged=where)
        calls = {f"ours, {b}": functools.partial(kernels.attn_decode, q, *pages, **call, backend=b) for b in backends}
        if case.cache:
            return calls
    else:
        whole = (Segment(0, 0, case.s),)
        segments = dict(q_segments=whole, k_segments=whole, spec=spec)
        forwards = {b: functools.partial(kernels.attn_fwd, q, k, v, **segments, backend=b) for b in backends}
        if case.kind == "fwd":
            calls = {f"ours, {b}": call for b, call in forwards.items()}
        else:
            calls = {f"ours, {b}": _our_backward(given, call, segments, b) for b, call in forwards.items()}
    others = {"torch flash": SDPBackend.FLASH_ATTENTION}
    if device.type == "cuda":
        others["torch cuDNN"] = SDPBackend.CUDNN_ATTENTION
    leaves = [x.transpose(1, 2).detach().requires_grad_(case.kind == "bwd") for x in (q, k, v)]
    for name, backend in others.items():
        calls[name] = _sdpa_call(case, backend, leaves, dout.transpose(1, 2))
    if device.type == "cuda" and case.kind != "decode":
        calls["FlexAttention"] = _flex_call(case, leaves, dout.transpose(1, 2))
    return calls


def _our_backward(given, forward, segments, backend):
    """The whole backward: delta, which torch's kernels compute as well, and the gradients. The forward runs once."""
    *inputs, dout = given
    state = []

    def backward():
        if not state:
            state.extend(x.float() for x in forward())
        delta = kernels.attn_delta(dout, state[0])
        return kernels.attn_bwd(dout, *inputs, state[1], delta, **segments, backend=backend)

    return backward


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
    """The backward alone; the forward runs at the first call, and its graph is kept."""
    graph = []

    def backward():
        if not graph:
            graph.append(forward())
        return torch.autograd.grad(graph[0], leaves, dout, retain_graph=True)

    return backward


def time_case(case: Case, backends, device, dtype, wrong: list[str]) -> list[Timing]:
    """Time every contender and the device's own limits (copy, matrix product); prints a table.

    wrong: receives the errors of our contenders; that of the first one is raised.
    """
    print(f"\n{case.label}, {str(dtype).removeprefix('torch.')}", flush=True)
    rows = []
    given = inputs(case, device, dtype)
    truth = truth_of(case, given)
    limits = _limits(case, device, dtype)
    calls = contenders(case, backends, given)
    first = next(iter(calls))
    work = (case.kv_bytes(dtype) / 1e9, "GB/s") if case.kind == "decode" else (case.flops / 1e12, "TFLOP/s")
    for name, (call, amount, unit) in {**{name: (call, *work) for name, call in calls.items()}, **limits}.items():
        try:
            if name not in limits:
                verify(case, name, call(), truth, dtype)
            seconds = clock(call, device)
        except Exception as error:  # this library does not support the shape; each has its own kind of error
            if name == first:
                raise
            if name.startswith("ours"):
                wrong.append(f"{name}, {case.label}: {error}")
            print(f"  {name:<16} not available: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        rows.append(Timing(case.label, case.kind, name, seconds * 1e3, amount / seconds, unit))
    ours = rows[0].rate
    for row in rows:
        print(f"  {row.name:<16} {row.ms:9.3f} ms {row.rate:9.4g} {row.unit:<8} ours / this {ours / row.rate:5.2f}")
    return rows


def _limits(case: Case, device, dtype) -> dict[str, tuple[Callable[[], object], float, str]]:
    """{name: (call, its amount of work, unit of the rate)}; a copy reads and writes each byte."""
    if case.kind == "decode":
        a = torch.empty(min(case.kv_bytes(dtype), 1 << 30), dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        return {"device copy": (lambda: b.copy_(a), 2 * a.nbytes / 1e9, "GB/s")}
    n = 8192 if device.type == "cuda" else 1024
    x, y = torch.randn(2, n, n, device=device, dtype=dtype)
    return {"matrix product": (lambda: x @ y, 2 * n**3 / 1e12, "TFLOP/s")}


def clock(call: Callable[[], object], device: torch.device, *, seconds: float = 0.5) -> float:
    """Median time of one call in seconds, after a warm-up; on a GPU with cold L2, measured by events."""
    call()
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=100, rep=int(seconds * 1000), return_mode="median") / 1e3
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _plots(rows: list[Timing], about: dict) -> Plots:
    shown = [r for r in rows if r.kind != "race"] or rows
    return {"results.png": functools.partial(_draw, rows=shown, title=", ".join(f"{k} {v}" for k, v in about.items()))}


def _draw(path: pathlib.Path, rows: list[Timing], title: str) -> None:
    units = grouped(sorted(rows, key=lambda r: r.unit, reverse=True), lambda r: r.unit)
    with figure(path, 1, len(units), size=(8 * len(units), 5), title=title) as axes:
        for ax, (unit, mine) in zip(axes[0], units.items()):
            cases, names = list(dict.fromkeys(r.case for r in mine)), list(dict.fromkeys(r.name for r in mine))
            for i, name in enumerate(names):
                rates = {r.case: r.rate for r in mine if r.name == name}
                places = [c + i / (len(names) + 1) for c in range(len(cases))]
                ax.bar(places, [rates.get(c, 0) for c in cases], width=1 / (len(names) + 1), label=name)
            label(ax, "", unit)
            ax.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=7)
            ax.legend(fontsize=7)
