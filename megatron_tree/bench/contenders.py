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
from .kernel_cases import PAGE, Case, Timing, in_pages, inputs, truth_of, verify
from .results import WrongResult

Calls = dict[str, Callable[[], object]]
"""By name, calls without arguments that compute a case."""
Emit = Callable[[Timing], None]


def ours(case: Case, backends, given) -> Calls:
    """Our backends, over `given` (q, k, v, dout)."""
    q, k, v, _ = given
    spec = AttnSpec(softmax_scale=case.d**-0.5)
    if case.kind == "decode":
        cache = in_pages(k, v, PAGE, case.eight_bits) if case.cache.startswith("paged") else KVCache(k, v)
        call = functools.partial(kernels.attn_decode, q, cache, spec)
        return {f"ours, {b}": functools.partial(call, backend=b) for b in backends}
    whole, calls = (Segment(0, 0, case.s),), {}
    segments = dict(q_segments=whole, k_segments=whole, spec=spec)
    for b in backends:
        forward = functools.partial(kernels.attn_fwd, q, k, v, **segments, backend=b)
        backward = functools.partial(_our_backward, given, dict(segments, backend=b))
        in_fp32 = lambda forward=forward: [x.float() for x in forward()]  # noqa: E731
        calls[f"ours, {b}"] = forward if case.kind == "fwd" else _after(in_fp32, backward)
    return calls


def torchs(case: Case, given) -> Calls:
    """torch's scaled_dot_product_attention with its flash kernel and, on GPUs, with cuDNN."""
    if case.cache:
        return {}
    on_gpu = given[0].device.type == "cuda"
    leaves, backward, options = _for_autograd(case, given)
    forward = functools.partial(sdpa, *leaves, is_causal=case.kind != "decode", **options)
    names = {"torch flash": SDPBackend.FLASH_ATTENTION}
    if on_gpu:
        names["torch cuDNN"] = SDPBackend.CUDNN_ATTENTION
    calls = {name: functools.partial(_with_backend, backend, forward) for name, backend in names.items()}
    return {name: _after(call, backward) if case.kind == "bwd" else call for name, call in calls.items()}


def flex(case: Case, given) -> Calls:
    """torch's FlexAttention, compiled: that alone takes a minute."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves, backward, options = _for_autograd(case, given)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.s, case.s, device=given[0].device)
    compiled = torch.compile(flex_attention, dynamic=False)
    call = functools.partial(compiled, *leaves, block_mask=mask, **options)
    return {"FlexAttention": _after(call, backward) if case.kind == "bwd" else call}


def _for_autograd(case: Case, given):
    """q, k and v as torch's functions take them, the backward as a function of their result, and options."""
    *inputs_, dout = given
    leaves = [x.transpose(1, 2).detach().requires_grad_(case.kind == "bwd") for x in inputs_]
    backward = functools.partial(
        torch.autograd.grad, inputs=leaves, grad_outputs=dout.transpose(1, 2), retain_graph=True
    )
    return leaves, backward, dict(enable_gqa=case.h != case.h_kv)


def _with_backend(backend: SDPBackend, call):
    with sdpa_kernel(backend):
        return call()


def _after(forward, backward):
    """The backward alone, a function of the forward's result; the forward runs at the first call."""
    once = functools.cache(forward)
    return lambda: backward(once())


def _our_backward(given, options, state):
    """The whole backward: delta, which torch's kernels compute as well, and the gradients."""
    (*inputs_, dout), (out, lse) = given, state
    return kernels.attn_bwd(dout, *inputs_, lse, kernels.attn_delta(dout, out), **options)


def time_case(case: Case, which: tuple, emit: Emit, *, device: torch.device, dtype: torch.dtype) -> None:
    """Check and time contenders and the device's own limit (a copy, or a matrix product); prints a table.

    which: "flex", "torch", and names of our backends, in this order: "fa3" and "fa4" take the place of torch's flash
    kernel, until the end of the case. Raises `WrongResult` at the end if one of ours was wrong or could not run; the
    times of the others are given to `emit` before. A library that is not here, or refuses the case, is no error.
    """
    print(f"\n{case.label}, {str(dtype).removeprefix('torch.')}", flush=True)
    given = inputs(case, device, dtype)
    truth = truth_of(case, given)
    calls = {}
    for name in which:
        others = {"torch": torchs, "flex": flex}
        calls |= others[name](case, given) if name in others else ours(case, [name], given)
    optional = {f"ours, {name}" for name in LIBRARIES}
    work = (case.kv_bytes(dtype) / 1e9, "GB/s") if case.kind == "decode" else (case.flops / 1e12, "TFLOP/s")
    wrong, first = [], None
    limits = _limits(case, device, dtype)
    for name, (call, amount, unit) in {**{name: (call, *work) for name, call in calls.items()}, **limits}.items():
        try:
            if name not in limits:
                verify(case, name, call(), truth, dtype)
            seconds = clock(call, device)
        except Exception as error:  # this library does not support the shape; each has its own kind of error
            if name.startswith("ours") and not (name in optional and isinstance(error, ValueError)):
                wrong.append(
                    str(error) if isinstance(error, WrongResult) else f"{name}: {type(error).__name__}: {error}"
                )
            said = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"  {name:<16} not available: {said[:90]}", flush=True)
            if not device_works():
                wrong.append(f"{name} left the GPU unusable: {said}")
                break
            continue
        row = Timing(case.label, case.kind, name, seconds * 1e3, amount / seconds, unit)
        first = first or row
        print(
            f"  {name:<16} {row.ms:9.3f} ms {row.rate:9.4g} {unit:<8} {first.name} / this {first.rate / row.rate:5.2f}",
            flush=True,
        )
        emit(row)
    if getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)():
        torch.nn.attention.restore_flash_attention_impl()
    if wrong:
        raise WrongResult("; ".join(wrong))


def device_works() -> bool:
    """Whether this process can still use the GPU: after some errors it never can."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _limits(case: Case, device, dtype) -> dict[str, tuple[Callable[[], object], float, str]]:
    """{name: (call, its amount of work, unit of the rate)}; a copy reads and writes each byte."""
    if case.kind == "decode":
        a = torch.empty(min(case.kv_bytes(dtype), 1 << 30), dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        return {"device copy": (lambda: b.copy_(a), 2 * a.nbytes / 1e9, "GB/s")}
    n = 8192 if device.type == "cuda" else 256
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
