"""Tile sizes per head_dim and architecture: a table, not an autotuner, so that nothing recompiles at run time.

Why these: the score tile and the accumulators must stay in registers (M x (N + head_dim) fp32 over the warps), and K
and V of STAGES tiles in shared memory (227 KiB on sm_90, 163 KiB on sm_80, 64 KiB on gfx942). Wide heads get narrower
key tiles. docs/kernel-resources.md shows the compiled resources of every row.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """One kernel's launch: query rows, key rows, warps, software-pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


# the wider of the two head dims, at most -> tiles
_SM90 = {
    "fwd": {64: Tiles(128, 128, 8, 2), 128: Tiles(128, 64, 8, 3), 192: Tiles(128, 64, 8, 2), 256: Tiles(128, 32, 8, 2)},
    "dq": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(32, 32, 8, 1)},
    "dkdv": {64: Tiles(64, 128, 8, 2), 128: Tiles(64, 64, 8, 2), 192: Tiles(32, 64, 8, 1), 256: Tiles(64, 32, 8, 1)},
}
_SM100 = {
    "fwd": {64: Tiles(128, 128, 8, 2), 128: Tiles(128, 64, 8, 3), 192: Tiles(128, 32, 8, 2), 256: Tiles(128, 32, 8, 1)},
    "dq": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 64, 8, 1), 256: Tiles(32, 32, 8, 1)},
    "dkdv": {64: Tiles(64, 128, 8, 1), 128: Tiles(64, 64, 8, 1), 192: Tiles(32, 64, 8, 1), 256: Tiles(64, 32, 8, 1)},
}
_SM80 = {
    "fwd": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
    "dq": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
    "dkdv": {64: Tiles(64, 64, 8, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(32, 32, 8, 1)},
}
_GFX942 = {
    "fwd": {64: Tiles(128, 64, 4, 1), 128: Tiles(128, 32, 4, 1), 256: Tiles(64, 32, 4, 1)},
    "dq": {64: Tiles(64, 64, 4, 1), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
    "dkdv": {64: Tiles(32, 64, 4, 1), 128: Tiles(32, 64, 4, 1), 256: Tiles(16, 32, 4, 1)},
}
_DECODE = Tiles(16, 64, 4, 3)  # all query heads of a KV head; more only where a group is larger
_INTERPRETER = Tiles(16, 16, 4, 1)


def tiles(kernel: str, width: int, arch: str, itemsize: int = 2, dropout: bool = False) -> Tiles:
    """Tiles of "fwd", "dq", "dkdv" or "decode" for a head_dim of `width`.

    arch: "sm80", "sm90", "sm100", "gfx942" or "interpreter".

    fp32 inputs (itemsize 4) take twice the memory: they get the row of a head twice as wide, and no pipelining.
    Dropout's random words want registers: 64 keys at most.
    """
    if kernel == "decode":  # the smaller shared memory of gfx942 holds one stage of wide heads, no pipeline
        return _DECODE._replace(stages=1) if arch == "gfx942" else _DECODE
    if arch == "interpreter":
        return _INTERPRETER
    table = {"sm80": _SM80, "sm90": _SM90, "sm100": _SM100, "gfx942": _GFX942}[arch][kernel]
    width = min(width * max(itemsize // 2, 1), 256)
    found = next(table[w] for w in sorted(table) if width <= w)
    if dropout:
        found = found._replace(n=min(found.n, 64))
    return found if itemsize <= 2 else found._replace(stages=1)
