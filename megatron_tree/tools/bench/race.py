"""Times candidates for the tile sizes of the Triton kernels on this GPU; the fastest go into the user's table, from
which launches take them (core/kernels/fastest.py)."""

from __future__ import annotations

import contextlib

from ...core.kernels import fastest
from ...core.kernels.triton import configs, decode, host
from ...core.kernels.triton.configs import Tiles
from ..calibrate.kernel_cases import (
    Emit,
    KernelCase,
    KernelTiming,
    WrongResult,
    clock,
    device_works,
    inputs,
    ours,
    truth_of,
    verify,
)

CANDIDATES = {
    "fwd": [Tiles(128, n, w, s) for n, w in ((128, 8), (64, 8), (32, 4)) for s in (2, 3)]
    + [Tiles(m, 64, 4, s) for m, s in ((64, 3), (128, 2))]  # 128: on sm_100 few barriers, some spills
    + [Tiles(128, 128, 8, s, boxes=True) for s in (2, 3)]
    + [Tiles(128, n, w, s, boxes=True, specialized=True) for n, w, s in ((128, 8, 2), (64, 4, 3))],
    "dq": [Tiles(m, n, w, 2) for m, n, w in ((128, 128, 8), (128, 64, 8), (128, 32, 8), (64, 64, 4))]
    + [Tiles(128, 64, 8, 3), Tiles(128, 32, 4, 3)],
    "dkdv": [Tiles(m, n, w, 2) for m, n, w in ((64, 128, 8), (128, 128, 8), (64, 64, 8), (64, 64, 4), (32, 64, 4))]
    + [Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3)]
    + [Tiles(64, n, 8, stages, fused=True) for n, stages in ((128, 2), (128, 3), (64, 2))],
    "decode": [Tiles(16, n, w, s) for n, w, s in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))],
    "latents": [Tiles(64, n, w, s) for n, w, s in ((32, 8, 2), (32, 4, 2), (16, 8, 2), (32, 8, 1), (64, 8, 1))],
}
PLAIN = dict(boxes=False, specialized=False, fused=False)  # what the table can hold
WORTH = 0.98  # of the time with the table's tiles


@contextlib.contextmanager
def pinned(kernel: str, tiles: Tiles | None):
    """Use these tiles for one kernel while the context is open; None: those that are used anyway."""
    training, decoding = host._tiles, configs.decode_tiles
    if tiles is not None and kernel in ("decode", "latents"):
        configs.decode_tiles = lambda *_: tiles
    elif tiles is not None:
        host._tiles = lambda name, q, dims, *of: (
            tiles if name == kernel and not dims.dual else training(name, q, dims, *of)
        )
    decode._fixed.cache_clear()
    try:
        yield
    finally:
        host._tiles, configs.decode_tiles = training, decoding
        decode._fixed.cache_clear()


def winner(times: list[tuple[float, str, Tiles | None]]) -> Tiles | None:
    """Of (seconds, label, tiles): the fastest that the table can hold, if it is worth it; None: those in use."""
    usual = next((seconds for seconds, _, tiles in times if tiles is None), float("inf"))
    able = [x for x in times if x[2] is not None and x[2] == x[2]._replace(**PLAIN) and x[0] < WORTH * usual]
    return min(able, key=lambda x: x[0])[2] if able else None


def race(case: KernelCase, kernel: str, candidates: list[Tiles], emit: Emit, *, device, dtype) -> None:
    """Time those candidates for a kernel that compile, "dq" and "dkdv" by the whole backward, beside the tiles in use.

    Prints the ranking, and keeps what is faster than these. Raises `WrongResult` if a result was wrong.
    """
    given = inputs(case, device, dtype)
    truth = truth_of(case, given)
    call = ours(case, "triton", given)
    times, wrong = [], []
    for tiles in (None, *candidates):
        label = "in use" if tiles is None else tiles.label
        if tiles is not None and tiles.specialized and host.arch(device) != "sm100":
            continue
        with pinned(kernel, tiles):
            try:
                verify(case, f"ours, {kernel} {label}", call(), truth, dtype)
                seconds = clock(call, device, seconds=0.25)
            except Exception as error:  # does not fit: triton raises several kinds of errors
                said = f"{kernel} {label}: {type(error).__name__}: {error}"
                print("  " + said.splitlines()[0][:160], flush=True)
                if not device_works():
                    raise RuntimeError(f"{said}; later candidates were not timed") from error
                wrong += [str(error)] if isinstance(error, WrongResult) else []
                continue
        times.append((seconds, label, tiles))
        amount, unit = (case.kv_bytes(dtype) / 1e9, "GB/s") if case.kind == "decode" else (case.flops / 1e12, "TFLOP/s")
        emit(KernelTiming(case.label, "race", f"{kernel} {label}", seconds * 1e3, amount / seconds, unit))
    times.sort(key=lambda x: x[0])
    ranking = ", ".join(f"{label} {seconds * 1e3:.3f} ms" for seconds, label, _ in times)
    print(f"\nrace {kernel}, {case.label}: {ranking or 'no candidate ran'}", flush=True)
    if device.type == "cuda" and (best := winner(times)) is not None:
        name = f"decode of {best.m}" if case.kind == "decode" else kernel
        path = fastest.keep(fastest.name_of(device), {f"{name} {max(case.d, case.d_v)}": list(best[:4])})
        print(f"  {best.label} is kept in {path}", flush=True)
    if wrong:
        raise WrongResult("; ".join(wrong))
