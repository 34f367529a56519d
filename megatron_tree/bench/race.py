"""Times candidates for the tile sizes of the Triton kernels on this GPU, to fill the table in configs.py."""

from __future__ import annotations

import contextlib

from ..kernels.triton import configs
from ..kernels.triton.configs import Tiles
from .kernel_cases import inputs, truth_of, verify
from .kernels import Timing, clock, contenders
from .results import WrongResult

RACED = (16384,)  # sequence lengths of the cases that are raced
CANDIDATES = {
    "fwd": [Tiles(128, n, w, s) for n, w in ((128, 8), (64, 8), (32, 4)) for s in (2, 3)] + [Tiles(64, 64, 4, 3)],
    "dq": [Tiles(m, n, w, 2) for m, n, w in ((128, 128, 8), (128, 64, 8), (128, 32, 8), (64, 64, 4))]
    + [Tiles(128, 64, 8, 3), Tiles(128, 32, 4, 3)],
    "dkdv": [Tiles(m, n, w, 2) for m, n, w in ((64, 128, 8), (128, 128, 8), (64, 64, 8), (64, 64, 4), (32, 64, 4))]
    + [Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3)],
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


def race(case, device, dtype, wrong: list[str]) -> list[Timing]:
    """Time every candidate that compiles; prints the ranking. wrong: receives the errors of wrong results.

    The candidates for dq and dkdv are timed by the whole backward.
    """
    rows = []
    given = inputs(case, device, dtype)
    truth = truth_of(case, given)
    (call,) = contenders(case, ["triton"], given, others=False).values()
    for kernel in ("fwd",) if case.kind == "fwd" else ("dq", "dkdv"):
        found = []
        for tiles in CANDIDATES[kernel]:
            with pinned(kernel, tiles):
                try:
                    verify(case, f"ours, {kernel} {tuple(tiles)}", call(), truth, dtype)
                    found.append((clock(call, device, seconds=0.25), tiles))
                except Exception as error:  # does not fit: triton raises several kinds of errors
                    print(f"  {kernel} {tuple(tiles)}: {type(error).__name__}")
                    wrong += [str(error)] if isinstance(error, WrongResult) else []
        found.sort()
        print(f"\nrace {kernel}, {case.label}: " + ", ".join(f"{tuple(t)} {s * 1e3:.3f} ms" for s, t in found[:4]))
        for seconds, tiles in found:
            name = f"{kernel} " + "x".join(map(str, tiles))
            rows.append(Timing(case.label, "race", name, seconds * 1e3, case.flops / seconds / 1e12, "TFLOP/s"))
    return rows
