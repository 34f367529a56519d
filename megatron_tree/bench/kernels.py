"""Attention kernels of one device, compared with torch's: correctness first, then TFLOP/s and GB/s (medians)."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import pathlib
import platform
import shlex
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.benchmark import Timer

from .. import kernels
from ..config import AttnSpec
from ..kernels import Visible
from ..layout import Segment
from .figures import Curve, Panel, draw, grouped
from .kernel_cases import CPU_CASES, DTYPES, GPU_CASES, Case, inputs, paged, truth_of, verify
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
    gpu, kinds = torch.cuda.is_available(), ("fwd", "bwd", "decode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--only", choices=kinds, nargs="+", default=kinds)
    parser.add_argument("--race", action="store_true", help="also time other tile sizes of the Triton kernels (GPU)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-results/kernels"))


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or run it on a machine with one")
    if args.race and args.device == "cpu":
        raise ValueError("--race needs a GPU: tile sizes of the Triton kernels mean nothing on a CPU")
    device, dtype, gpu = torch.device(args.device), DTYPES[args.dtype], args.device == "cuda"
    about = {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
        "dtype": args.dtype,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "command": shlex.join(["python", "-m", "megatron_tree.bench", *args.argv]),
    }
    wrong: list[str] = []  # contenders of ours other than the first, which ends the run
    cases = [case for case in (GPU_CASES if gpu else CPU_CASES) if case.kind in args.only]
    with results_kept(args.out, about, lambda rows: _plots(rows, about), keep=BaseException) as rows:
        for case in cases:
            rows += time_case(case, ("triton", "aten") if gpu else ("aten", "reference"), device, dtype, wrong)
        if args.race:
            from .race import RACED, race

            for case in cases:
                rows += race(case, device, dtype, wrong) if case.s in RACED else []
    if wrong:
        raise WrongResult("\n".join(wrong))


def contenders(case: Case, backends, given, *, others: bool = True) -> dict[str, Callable[[], object]]:
    """Everything that computes this case from `given` (q, k, v, dout), by name; each a call without arguments.

    backends: ours. others: torch's kernels as well.
    """
    q, k, v, dout = given
    gpu, spec = q.device.type == "cuda", AttnSpec(softmax_scale=case.d**-0.5)
    if case.kind == "decode":
        *pages, where = paged(case, k, v) if case.cache else (k, v, None)
        call = functools.partial(kernels.attn_decode, q, *pages, visible=Visible(), spec=spec, paged=where)
        left_out = {"aten"} if gpu or case.cache else set()
        calls = {f"ours, {b}": functools.partial(call, backend=b) for b in backends if b not in left_out}
        others = others and not case.cache
    else:
        whole = (Segment(0, 0, case.s),)
        segments, calls = dict(q_segments=whole, k_segments=whole, spec=spec), {}
        for b in backends:
            forward = functools.partial(kernels.attn_fwd, q, k, v, **segments, backend=b)
            backward = functools.partial(_our_backward, given, dict(segments, backend=b))
            in_fp32 = lambda forward=forward: [x.float() for x in forward()]  # noqa: E731
            calls[f"ours, {b}"] = forward if case.kind == "fwd" else _after(in_fp32, backward)
    if not others:
        return calls
    leaves = [x.transpose(1, 2).detach().requires_grad_(case.kind == "bwd") for x in (q, k, v)]
    options = dict(enable_gqa=case.h != case.h_kv)
    forwards = {}
    for name, backend in (("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cuDNN", SDPBackend.CUDNN_ATTENTION)):
        if gpu or backend is SDPBackend.FLASH_ATTENTION:
            call = functools.partial(sdpa, *leaves, is_causal=case.kind != "decode", **options)
            forwards[name] = functools.partial(_with_backend, backend, call)
    if gpu and case.kind != "decode":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.s, case.s, device=q.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        forwards["FlexAttention"] = functools.partial(compiled, *leaves, block_mask=mask, **options)
    backward = functools.partial(
        torch.autograd.grad, inputs=leaves, grad_outputs=dout.transpose(1, 2), retain_graph=True
    )
    for name, forward in forwards.items():
        calls[name] = _after(forward, backward) if case.kind == "bwd" else forward
    return calls


def _with_backend(backend: SDPBackend, call):
    with sdpa_kernel(backend):
        return call()


def _after(forward, backward):
    """The backward alone, a function of the forward's result; the forward runs at the first call."""
    once = functools.cache(forward)
    return lambda: backward(once())


def _our_backward(given, options, state):
    """The whole backward: delta, which torch's kernels compute as well, and the gradients."""
    (*inputs, dout), (out, lse) = given, state
    return kernels.attn_bwd(dout, *inputs, lse, kernels.attn_delta(dout, out), **options)


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
    print("  all results below are right: they were compared with float64")
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
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median


def _plots(rows: list[Timing], about: dict) -> Plots:
    rows = [r for r in rows if r.kind != "race"] or rows
    panels = [
        Panel(
            unit, "", [Curve(name, *zip(*((r.case, r.rate) for r in of))) for name, of in grouped(mine, _name).items()]
        )
        for unit, mine in grouped(rows, lambda r: r.unit).items()
    ]
    return {
        "results.png": functools.partial(draw, panels=[panels], title=", ".join(f"{k} {v}" for k, v in about.items()))
    }


def _name(row: Timing) -> str:
    return row.name
