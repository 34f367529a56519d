"""What computes a case of `bench kernels`: our backends and torch's functions, checked and timed one after another."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.benchmark import Timer

from .. import kernels
from ..config import AttnSpec
from ..kernels import KVCache
from ..kernels.libraries import LIBRARIES
from ..layout import Segment
from .kernel_cases import PAGE, KernelCase, KernelTiming, in_pages, inputs, truth_of, verify
from .results import WrongResult

Call = Callable[[], object]
"""Computes a case."""
Emit = Callable[[KernelTiming], None]


def ours(case: KernelCase, backend: str, given) -> Call:
    """One of our backends over `given` (q, k, v, dout); for "bwd" the backward alone, with delta."""
    q, k, v, dout = given
    spec = AttnSpec(softmax_scale=case.d**-0.5)
    if case.kind == "decode":
        cache = in_pages(k, v, PAGE, case.eight_bits) if case.cache.startswith("paged") else KVCache(k, v)
        return functools.partial(kernels.attn_decode, q, cache, spec, backend)
    whole = (Segment(0, 0, case.s),)
    options = dict(q_segments=whole, k_segments=whole, spec=spec, backend=backend)
    forward = functools.partial(kernels.attn_fwd, q, k, v, **options)
    if case.kind == "fwd":
        return forward
    state = functools.cache(lambda: [x.float() for x in forward()])

    def backward():
        out, lse = state()
        return kernels.attn_bwd(dout, q, k, v, lse, kernels.attn_delta(dout, out), **options)

    return backward


def torchs(case: KernelCase, given) -> dict[str, Call]:
    """torch's scaled_dot_product_attention with its flash kernel and, on GPUs, with cuDNN, by name."""
    if case.cache:
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

    which: "torch" and names of our backends, in this order: "fa3" and "fa4" take the place of torch's flash kernel,
    until the end of the case. Raises `WrongResult` at the end if one of ours was wrong or could not run; the times of
    the others are given to `emit` before. A library that is not here, or refuses the case, is no error.
    """
    print(f"\n{case.label}, {str(dtype).removeprefix('torch.')}", flush=True)
    given = inputs(case, device, dtype)
    truth = truth_of(case, given)
    calls = {}
    for name in which:
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
    if getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)():
        torch.nn.attention.restore_flash_attention_impl()
    if wrong:
        raise WrongResult("; ".join(wrong))


def fastest_backends(rows: list[KernelTiming]) -> dict[str, str]:
    """{head_dim: our backend with the least time of forward and backward}: `kernels.fastest`'s table of a GPU.

    By the first case of a head_dim whose forward and backward were both timed.
    """
    fastest: dict[str, str] = {}
    times = {(row.case, row.name): row.ms for row in rows if row.name.startswith("ours, ")}
    for case in dict.fromkeys(row.case for row in rows if row.kind == "fwd"):
        backward, width = case.replace("fwd", "bwd"), case.rpartition(" d")[2]
        if names := [name for of, name in times if of == case and (backward, name) in times]:
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
