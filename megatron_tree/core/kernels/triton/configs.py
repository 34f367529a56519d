"""Tile sizes per head_dim and architecture: a table, not an autotuner, so that nothing recompiles at run time.

How they were chosen, from what the compiler makes of them (docs/kernels.md):
- 128 queries or keys stay in registers where they fit: what passes by is read from L2 once for each of them.
- Blocks of 4 warps, two to a multiprocessor, where their registers allow it: the softmax of one overlaps the matrix
  products of the other. Else 8 warps and tiles as large as possible: fewest instructions for each product.
- At least two stages, so that loads run ahead, within the shared memory of a block (227 KiB on sm_90 and sm_100, 163
  on sm_80, 99 on sm_86, sm_89 and sm_120, 64 on gfx942); a third one where it costs nothing but memory.
- On sm_90 products have at least 64 rows: with fewer, Triton does not use wgmma.
- No spilled registers in the loop over unmasked tiles, but for a few accesses where a tile without any would be slower.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Tiles(NamedTuple):
    """One kernel's launch: query rows, key rows, warps, software-pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int
    boxes: bool = False
    """Whether the forward loads keys and values by the copy engine of sm_90 and later (TMA), where they allow it."""
    specialized: bool = False
    """Whether some warps of sm_100 only load or only multiply in the forward's loop over unmasked tiles."""
    fused: bool = False
    """Whether the kernel of dk and dv also adds up dq, by the copy engine; not where bits have to be the same."""

    @property
    def label(self) -> str:
        return (
            f"{self.m}x{self.n} w{self.warps} s{self.stages}"
            + " boxes" * self.boxes
            + " specialized" * self.specialized
            + " with dq" * self.fused
        )


def power_of_2(n: int) -> int:
    """The smallest one that is n at least."""
    return 1 << (n - 1).bit_length()


@functools.lru_cache
def split_head_dim(d: int, dual: bool = False) -> tuple[int, int]:
    """head_dim as two powers of two of at least 16 that cover it with the fewest columns (the second may be 0).
    dual: one that covers the values, and as many columns for tangents."""
    whole = max(power_of_2(d), 16)
    if dual:
        return whole, whole
    half = whole // 2
    rest = max(power_of_2(d - half), 16) if d > half else 0
    return (half, rest) if half >= 16 and half + rest < whole else (whole, 0)


# the wider of the two head dims, at most -> tiles
_SM90 = {
    "fwd": {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 128, 8, 3), 256: Tiles(128, 64, 8, 2)},
    "dq": {64: Tiles(128, 32, 8, 2), 128: Tiles(128, 64, 8, 3), 192: Tiles(128, 64, 8, 2), 256: Tiles(128, 32, 8, 2)},
    "dkdv": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 128, 8, 3), 192: Tiles(32, 64, 8, 2), 256: Tiles(32, 64, 8, 2)},
    "fwd_jvp": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(32, 32, 8, 2)},
    "dq_jvp": {128: Tiles(128, 32, 8, 2), 256: Tiles(32, 32, 8, 2)},
    "dkdv_jvp": {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 32, 8, 2)},
}
_SM100 = {
    "fwd": {64: Tiles(128, 64, 4, 2), 192: Tiles(128, 128, 8, 2), 256: Tiles(128, 64, 8, 2)},
    "dq": {64: Tiles(128, 64, 4, 2), 192: Tiles(128, 64, 8, 2), 256: Tiles(128, 32, 8, 2)},
    "dkdv": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 128, 8, 2), 192: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
    "fwd_jvp": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(32, 32, 8, 2)},
    "dq_jvp": {64: Tiles(128, 32, 8, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 8, 2)},
    "dkdv_jvp": _SM90["dkdv_jvp"],
}
_SM80 = {
    "fwd": {64: Tiles(128, 64, 4, 2), 192: Tiles(128, 32, 4, 2), 256: Tiles(64, 32, 4, 2)},
    "dq": {64: Tiles(128, 32, 4, 2), 128: Tiles(64, 64, 4, 2), 192: Tiles(64, 32, 4, 2), 256: Tiles(64, 64, 8, 2)},
    "dkdv": {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2), 192: Tiles(16, 64, 4, 2), 256: Tiles(64, 64, 8, 2)},
    "fwd_jvp": {64: Tiles(128, 32, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(32, 16, 8, 2)},
    "dq_jvp": {64: Tiles(128, 32, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(32, 16, 8, 2)},
    "dkdv_jvp": _SM90["dkdv_jvp"],
}
_SM86 = {
    "fwd": _SM80["fwd"] | {192: Tiles(128, 64, 8, 2)},
    "dq": _SM80["dq"] | {256: Tiles(32, 32, 8, 2)},
    "dkdv": _SM80["dkdv"] | {256: Tiles(32, 32, 8, 1)},
    "fwd_jvp": _SM80["fwd_jvp"],
    "dq_jvp": _SM80["dq_jvp"] | {128: Tiles(32, 32, 4, 2)},
    "dkdv_jvp": _SM80["dkdv_jvp"],
}
_GFX942 = {
    "fwd": {64: Tiles(128, 64, 4, 1), 128: Tiles(128, 32, 4, 1), 256: Tiles(64, 32, 4, 1)},
    "dq": {64: Tiles(64, 64, 4, 1), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
    "dkdv": {64: Tiles(32, 64, 4, 1), 128: Tiles(32, 64, 4, 1), 256: Tiles(16, 32, 4, 1)},
    "fwd_jvp": {64: Tiles(64, 32, 4, 1), 128: Tiles(64, 16, 4, 1), 256: Tiles(32, 16, 4, 1)},
    "dq_jvp": {64: Tiles(64, 32, 4, 1), 128: Tiles(32, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    "dkdv_jvp": {64: Tiles(32, 64, 4, 1), 128: Tiles(16, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}
# of fp32 as three products of TF32, with the registers of 16 or 32 rows that don't spill on any architecture
TF32X3 = {
    "fwd": {64: Tiles(32, 32, 8, 1), 192: Tiles(16, 32, 4, 1)},
    "dq": {64: Tiles(32, 32, 8, 1), 128: Tiles(16, 32, 4, 1), 192: Tiles(16, 16, 4, 1)},
    "dkdv": {64: Tiles(32, 32, 8, 1), 192: Tiles(16, 16, 4, 1)},
}
ARCHES = {"sm80": _SM80, "sm86": _SM86, "sm90": _SM90, "sm100": _SM100, "gfx942": _GFX942}
_INTERPRETER = Tiles(16, 16, 4, 1)
_SHARED = {"sm80": 164, "sm86": 100, "sm90": 228, "sm100": 228, "gfx942": 64}  # KiB of a multiprocessor
_RESERVED = 1024  # bytes of each block, for the driver


def tiles(
    kernel: str, width: int, arch: str, itemsize: int = 2, dropout: bool = False, precision: str = "ieee"
) -> Tiles:
    """Tiles of "fwd", "dq" or "dkdv" for a head_dim of `width`; of dual tensors "fwd_jvp", "dq_jvp", "dkdv_jvp".

    arch: one of `ARCHES` or "interpreter".

    fp32 inputs (itemsize 4) are multiplied without matrix units, or with slow ones: small tiles, which don't spill.
    precision: of fp32, as of common.dot; "tf32x3" has the head_dims of `TF32X3`.
    Dropout's random words need registers: 64 keys at most, and 8 warps for tiles of 128 x 64.
    """
    if arch == "interpreter":
        return _INTERPRETER
    if precision == "tf32x3":
        return next(tile for w, tile in TF32X3[kernel].items() if width <= w)
    if itemsize > 2:
        columns = 2 * width if kernel.endswith("jvp") else width
        most = 64 if kernel == "dkdv_jvp" else 192
        return Tiles(32, 32, 8, 1) if columns <= most and arch != "gfx942" else Tiles(16, 16, 4, 1)
    table = ARCHES[arch][kernel]
    chosen = next(table[w] for w in sorted(table) if width <= w)
    if dropout:
        chosen = chosen._replace(n=min(chosen.n, 64), warps=8 if chosen.m * chosen.n >= 128 * 64 else chosen.warps)
    return chosen


# of decoding with keys wider than 256 (latents): a key and its value fill the shared memory
_LATENT = {"sm80": Tiles(32, 32, 8, 2), "sm86": Tiles(16, 16, 4, 2), "gfx942": Tiles(16, 16, 4, 1)}
_LATENT |= dict.fromkeys(("sm90", "sm100", "interpreter"), Tiles(64, 32, 8, 2))


def latent_rows(arch: str) -> int:
    """How many query heads share a tile of keys wider than 256."""
    return _LATENT[arch].m


def decode_tiles(rows: int, width: int, arch: str, itemsize: int = 2, scaled: bool = False) -> Tiles:
    """Tiles of decoding for a head_dim of `width`, where `rows` query heads and tokens share a KV head.

    scaled: of keys in 8 bits. Memory is what counts: as many stages as fit beside the rows.
    """
    m = 1 << max(4, (rows - 1).bit_length())
    if width > 256:
        return _LATENT[arch]._replace(m=min(m, _LATENT[arch].m))
    spills = m == 64 and width > 192 and arch in ("sm80", "sm86", "sm100")  # registers, with 4 warps
    warps = 8 if m > 64 or spills else 4
    if itemsize > 2:
        return Tiles(m, 16 if width > 128 or arch == "gfx942" else 64, warps, 2)
    if arch == "gfx942":
        return Tiles(m, 32 if m > 64 and width > 192 else 64, warps, 1)
    if arch == "sm86" and width > 192:
        return Tiles(m, 64 if m <= 64 else 32, warps, 2 if m == 16 else 1)
    converts = scaled and width > 192  # which takes the registers of a third stage
    return Tiles(m, 64, warps, 3 if width <= 128 or (m == 16 and not converts) else 2)


def decode_blocks(tiles: Tiles, columns: tuple[int, int], arch: str, itemsize: int = 2) -> int:
    """Blocks of the decode kernel that a multiprocessor holds; columns: of the tiles of q and k, of v.

    Shared memory limits them: it holds the tiles of k and v that are under way, q, and the weights. Latents fill it.
    """
    if columns[0] > 256:
        return 1
    buffers = max(1, tiles.stages - 1) * tiles.n * sum(columns) * itemsize
    block = buffers + tiles.m * (columns[0] * itemsize + 2 * tiles.n) + _RESERVED
    return max(1, (_SHARED.get(arch, 64) << 10) // block)


def arch_of(capability: tuple[int, int]) -> str:
    """The table's row for an NVIDIA GPU: they differ in shared memory and in matrix instructions."""
    if capability in ((8, 6), (8, 9)) or capability[0] >= 12:
        return "sm86"
    return "sm80" if capability[0] < 9 else "sm90" if capability[0] == 9 else "sm100"
