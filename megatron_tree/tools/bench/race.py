"""Times candidates for the tile sizes of the Triton kernels on this GPU, to fill the table in configs.py."""

from __future__ import annotations

import contextlib

from ...core.kernels.triton import configs, host
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
    + [Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 2, boxes=True), Tiles(128, 128, 8, 3, boxes=True)]
    + [Tiles(128, n, w, s, boxes=True, specialized=True) for n, w, s in ((128, 8, 2), (64, 4, 3))],
    "dq": [Tiles(m, n, w, 2) for m, n, w in ((128, 128, 8), (128, 64, 8), (128, 32, 8), (64, 64, 4))]
    + [Tiles(128, 64, 8, 3), Tiles(128, 32, 4, 3)],
    "dkdv": [Tiles(m, n, w, 2) for m, n, w in ((64, 128, 8), (128, 128, 8), (64, 64, 8), (64, 64, 4), (32, 64, 4))]
    + [Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3)]
    + [Tiles(64, n, 8, stages, fused=True) for n, stages in ((128, 2), (128, 3), (64, 2))],
}


@contextlib.contextmanager
def pinned(kernel: str, tiles: Tiles):
    """Use these tiles for one kernel while the context is open."""
    original = configs.tiles
    configs.tiles = lambda name, *args: tiles if name == kernel else original(name, *args)
    try:
        yield
    finally:
        configs.tiles = original


def race(case: KernelCase, kernel: str, candidates: list[Tiles], emit: Emit, *, device, dtype) -> None:
    """Time those candidates for "fwd", "dq" or "dkdv" that compile, the last two by the whole backward.

    Prints the ranking. Raises `WrongResult` if a result was wrong.
    """
    given = inputs(case, device, dtype)
    truth = truth_of(case, given)
    call = ours(case, "triton", given)
    times, wrong = [], []
    for tiles in candidates:
        if tiles.specialized and host.arch(device) != "sm100":
            continue
        with pinned(kernel, tiles):
            try:
                verify(case, f"ours, {kernel} {tiles.label}", call(), truth, dtype)
                seconds = clock(call, device, seconds=0.25)
            except Exception as error:  # does not fit: triton raises several kinds of errors
                said = f"{kernel} {tiles.label}: {type(error).__name__}: {error}"
                print("  " + said.splitlines()[0][:160], flush=True)
                if not device_works():
                    raise RuntimeError(f"{said}; later candidates were not timed") from error
                wrong += [str(error)] if isinstance(error, WrongResult) else []
                continue
        times.append((seconds, tiles))
        rate = case.flops / seconds / 1e12
        emit(KernelTiming(case.label, "race", f"{kernel} {tiles.label}", seconds * 1e3, rate, "TFLOP/s"))
    ranking = ", ".join(f"{t.label} {s * 1e3:.3f} ms" for s, t in sorted(times))
    print(f"\nrace {kernel}, {case.label}: {ranking or 'no candidate ran'}", flush=True)
    if wrong:
        raise WrongResult("; ".join(wrong))
