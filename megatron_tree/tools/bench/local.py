"""Decoding on one CPU, without ranks: our kernel in C beside a plain loop that reads the cache, and torch's kernel.

Times are the least of many, taken in turns. "of reading": the kernel's time over the plain loop's. "of products": its
multiply-adds over those that the processor can do in registers.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import kernels
from ...core.compiled import NotCompiled, compiled
from ...core.kernels import KVCache
from ..calibrate.kernel_cases import DTYPES, PAGE, Call, KernelCase, WrongResult, in_pages, inputs, truth_of, verify
from .results import Curve, Panel, Results, metadata

OPTIONS = ("-O3", "-march=native", "-shared", "-fPIC")
ROUNDS = 1 << 20  # of multiply-adds in registers
CPU = torch.device("cpu")


class LocalTime(NamedTuple):
    """One case on some threads: a line of results.csv."""

    case: str
    dtype: str
    threads: int
    native_ms: float
    reading_ms: float
    aten_ms: float | None
    """None: not timed, because it takes no such cache."""
    of_reading: float
    of_products: float
    gb_per_s: float
    """Of keys, values and scales, by our kernel."""


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out.

    Raises: ValueError for a case that can't be, or without a C compiler. WrongResult before any speed of a case.
    """
    try:
        library = ctypes.CDLL(str(compiled(Path(__file__).with_name("reading.c"), *OPTIONS)))
    except NotCompiled as error:
        raise ValueError(f"there is nothing to time: {error}") from None
    library.read_words.argtypes, library.read_words.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint32
    library.multiply.argtypes, library.multiply.restype = [ctypes.c_int64], ctypes.c_float
    cases = [_case(*case) for case in args.cases]
    results = Results(args.out, metadata("local", processor=_processor()))
    before = torch.get_num_threads()
    print(f"{_processor()}; times are the least of many\n")
    print(f"{'':<38} threads  native ms  reading  of it    aten  GB/s  of products")
    try:
        for (case, dtype), threads in itertools.product(cases, args.threads):
            torch.set_num_threads(threads)
            row = _time(case, dtype, threads, library, args.budget)
            results.add(row)
            aten = "" if row.aten_ms is None else f"{row.aten_ms:.3g}"
            times = f"{row.native_ms:>10.3g} {row.reading_ms:>8.3g} {row.of_reading:>6.2f} {aten:>7}"
            name = f"{row.case.removeprefix('decode b1 ')}, {row.dtype}"
            print(f"{name:<38} {threads:>7} {times} {row.gb_per_s:>5.3g} {row.of_products:>12.2f}", flush=True)
    finally:
        torch.set_num_threads(before)
    panels = [_panel(threads, [r for r in results.rows if r.threads == threads]) for threads in args.threads]
    results.finish({"results.png": [panels]}, f"decoding, {_processor()}")


def _case(heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: str, form: str) -> tuple[KernelCase, str]:
    if heads % kv_heads:
        raise ValueError(f"--cases: {kv_heads} KV heads must divide {heads} heads")
    if (form == "paged" or dtype in ("int8", "fp8")) and tokens % PAGE:
        raise ValueError(f"--cases: {tokens} tokens: must be a multiple of a page's {PAGE}")
    if form == "latent" and head_dim <= 64:
        raise ValueError(f"--cases: a latent of {head_dim}: must have more than 64 numbers, which are no values")
    cache = f"paged {dtype}" if dtype in ("int8", "fp8") else form
    return KernelCase("decode", 1, tokens, heads, kv_heads, head_dim, cache), dtype


def _time(case: KernelCase, dtype: str, threads: int, library: ctypes.CDLL, budget_s: float) -> LocalTime:
    of_q = DTYPES.get(dtype, torch.float32)
    given = inputs(case, CPU, of_q)
    q, k, v = given[:3]
    cache = in_pages(k, v, PAGE, case.eight_bits) if case.cache.startswith("paged") else KVCache(k, v)
    truth = truth_of(case, given)
    calls: dict[str, Call] = {}
    for backend in ("native", "aten"):
        call = functools.partial(kernels.attn_decode, q, cache, case.spec, backend)
        try:
            result = call()
        except ValueError as error:
            if backend == "native":
                raise ValueError(f"{case.label}, {dtype}: {error}") from None
            continue  # torch has no kernel for it
        verify(case, f"ours, {backend}", result, truth, of_q)
        calls[backend] = call
    stored = [cache.k, *(x for x in (cache.v, cache.k_scale, cache.v_scale) if x is not None)]
    stored = stored[:1] if case.cache == "latent" else stored
    with ThreadPoolExecutor(threads) as pool:
        calls["reading"] = functools.partial(_read, stored, threads, pool, library)
        calls["products"] = lambda: library.multiply(ROUNDS)
        right = sum(int(x.flatten().view(torch.int32).sum(dtype=torch.int64)) for x in stored) % (1 << 32)
        if calls["reading"]() != right:
            raise WrongResult(f"the plain loop does not read all of {case.label}, {dtype}")
        seconds = _least(calls, budget_s)
    products = case.s * case.h * (case.d + case.d_v) / seconds["native"]
    most = threads * ROUNDS * library.multiply(ROUNDS) / 2 / seconds["products"]
    return LocalTime(
        case.label, dtype, threads, *(1e3 * seconds[name] for name in ("native", "reading")),
        aten_ms=1e3 * seconds["aten"] if "aten" in seconds else None,
        of_reading=seconds["native"] / seconds["reading"],
        of_products=products / most,
        gb_per_s=sum(x.nbytes for x in stored) / 1e9 / seconds["native"],
    )  # fmt: skip


def _read(stored: list[Tensor], threads: int, pool: ThreadPoolExecutor, library: ctypes.CDLL) -> int:
    """The sum of all words of contiguous tensors, modulo 2^32; each thread reads a part of every tensor."""

    def part(i: int) -> int:
        total = 0
        for x in stored:
            first, last = (x.nbytes // 4 * n // threads for n in (i, i + 1))
            total += library.read_words(x.data_ptr() + 4 * first, last - first)
        return total

    return sum(pool.map(part, range(threads)) if threads > 1 else [part(0)]) % (1 << 32)


def _least(calls: dict[str, Call], budget_s: float, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """The least seconds of each call; they take turns, five times at least, and one that is slow has fewer."""
    least, spent = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, 0.0)
    turns = 0
    while turns < 5 or sum(spent.values()) < budget_s:
        for name, call in calls.items():
            if turns >= 5 and spent[name] > budget_s / len(calls):
                continue
            begun = clock()
            call()
            took = clock() - begun
            least[name], spent[name] = min(least[name], took), spent[name] + took
        turns += 1
    return least


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "a processor")


def _panel(threads: int, rows: list[LocalTime]) -> Panel:
    names = [f"{row.case.removeprefix('decode b1 ')}, {row.dtype}" for row in rows]
    curves = [Curve(what, names, [getattr(row, f"{what}_ms") for row in rows]) for what in ("native", "reading")]
    known = [(name, row.aten_ms) for name, row in zip(names, rows) if row.aten_ms is not None]
    return Panel("ms", "", [*curves, *([Curve("aten", *zip(*known))] if known else [])], f"{threads} threads")
