"""Times, rates and sizes of a cluster as people write them, for command lines."""

from __future__ import annotations

import argparse
import re

from ..plan import parse_grid

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def seconds(text: str) -> float:
    """ "200us", "1ms", "0.5s" in seconds; 0 needs no unit. Raises ``argparse.ArgumentTypeError`` for anything else."""
    return _parse(text, _SECONDS, "a time, for instance 200us or 1ms", at_least=0.0)


def bits_per_second(text: str) -> float:
    """ "100mbit", "1gbit", "1 Gbit/s" in bits per second. Raises ``argparse.ArgumentTypeError`` for anything else."""
    return _parse(text.lower().removesuffix("/s"), _BITS, "a rate, for instance 100mbit or 1gbit", at_least=1.0)


def nodes_by_ranks(text: str) -> tuple[int, int]:
    """ "4x2" as (4 nodes, 2 ranks on each). Raises ``argparse.ArgumentTypeError`` for anything else."""
    return parse_grid(text, "is not NODESxRANKS, for instance 4x2: 4 nodes with 2 ranks each")


def _parse(text: str, units: dict[str, float], what: str, *, at_least: float) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e-?\d+)?) ?([a-z]*)", text.lower().strip())
    if match and (match[2] in units or (not match[2] and float(match[1]) == 0)):
        value = float(match[1]) * units.get(match[2], 1.0)
        if value >= at_least:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {what} (units: {', '.join(units)})")
