"""What was measured beside what docs/gpu-results/README.md aims at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..calibrate.kernel_cases import KernelTiming


class Aim(NamedTuple):
    """A rate that one of our backends should reach in one case."""

    name: str
    case: str
    rate: float
    unit: str
    """"TFLOP/s", or "of a copy": the fraction of the device copy's rate beside it."""


AIMS = (
    Aim("forward", "fwd b1 s16384 h32/8 d128", 480.0, "TFLOP/s"),
    Aim("backward", "bwd b1 s16384 h32/8 d128", 320.0, "TFLOP/s"),
    *(Aim("decode", f"decode b1 s{s} h64/8 d128", 0.85, "of a copy") for s in (131072, 524288, 1048576)),
)


def verdict(rows: Iterable[KernelTiming], about: dict) -> str:
    """A table in Markdown: each aim, the fastest of our backends, the fastest of the others, and whether it is met.

    rows: those of the stages "beside" and "decode".
    """
    lines = [f"| {about['device']}, {about['dtype']} | aim | ours | others | met |", "| --- | --- | --- | --- | --- |"]
    for aim in AIMS:
        found = {row.name: row.rate for row in rows if row.case == aim.case and row.kind in ("fwd", "bwd", "decode")}
        limit = found.pop("device copy", None)
        found.pop("matrix product", None)
        if aim.unit == "of a copy":
            found = {name: rate / limit for name, rate in found.items()} if limit else {}
        mine = _best({name: rate for name, rate in found.items() if name.startswith("ours")})
        theirs = _best({name: rate for name, rate in found.items() if not name.startswith("ours")})
        met = "not measured" if mine is None else "yes" if mine[1] >= aim.rate else "**no**"
        cells = (f"{aim.name}: {aim.case}", f"{aim.rate:g} {aim.unit}", _said(mine), _said(theirs), met)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(rates: dict[str, float]) -> tuple[str, float] | None:
    return max(rates.items(), key=lambda x: x[1], default=None)


def _said(best: tuple[str, float] | None) -> str:
    return "" if best is None else f"{best[1]:.3g} ({best[0].removeprefix('ours, ')})"
