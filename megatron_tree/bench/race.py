"""Race of tile sizes of the Triton kernels on this GPU: what configs.py should say for it."""

from __future__ import annotations

import contextlib

from ..config import AttnSpec
from ..kernels.triton import configs, host
from ..kernels.triton.configs import Tiles
from ..shard import Segment
from .report import Row, clock

CANDIDATES = {
    "fwd": [Tiles(128, n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3)],
    "dq": [Tiles(m, n, 8, s) for m, n in ((128, 64), (64, 64), (128, 32), (64, 128)) for s in (1, 2, 3)],
    "dkdv": [Tiles(m, n, 8, s) for m, n in ((64, 64), (32, 128), (64, 128), (32, 64)) for s in (1, 2, 3)],
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


def race(cases, device, dtype) -> list[Row]:
    """Time every candidate that compiles; prints the ranking of each case and returns its rows."""
    rows = []
    for case in cases:
        for kernel, call in _calls(case, device, dtype).items():
            found = []
            for tiles in CANDIDATES[kernel]:
                with pinned(kernel, tiles):
                    try:
                        found.append((clock(call, device), tiles))
                    except Exception as error:  # does not fit: triton raises its own kinds
                        print(f"  {kernel} {tuple(tiles)}: {type(error).__name__}")
            found.sort()
            print(f"\nrace {kernel}, {case.label}: " + ", ".join(f"{tuple(t)} {s * 1e3:.3f} ms" for s, t in found[:4]))
            for seconds, tiles in found:
                name = f"{kernel} " + "x".join(map(str, tiles))
                rows.append(Row(case.label, "race", name, seconds * 1e3, case.flops / seconds / 1e12, "TFLOP/s"))
    return rows


def _calls(case, device, dtype) -> dict:
    """What is timed for each kernel of a case; dq and dkdv both as the whole backward."""
    from .kernels import inputs

    q, k, v, dout = inputs(case, device, dtype)
    whole = (Segment(0, 0, case.s),)
    segments = dict(q_segments=whole, k_segments=whole, spec=AttnSpec(softmax_scale=case.d**-0.5))
    if case.kind == "fwd":
        return {"fwd": lambda: host.attn_fwd(q, k, v, **segments)}
    out, lse = host.attn_fwd(q, k, v, **segments)
    delta = host.attn_delta(dout, out)
    return dict.fromkeys(("dq", "dkdv"), lambda: host.attn_bwd(dout, q, k, v, lse, delta, **segments))
