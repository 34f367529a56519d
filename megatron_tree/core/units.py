"""Quantities as text: parsed for command lines (errors are ``argparse.ArgumentTypeError``), formatted for output."""

from __future__ import annotations

import argparse
import re

_COUNTS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BYTES = {"": 1, "b": 1, **{f"{u}b": 10**e for u, e in zip("kmgt", (3, 6, 9, 12))}}
_BYTES |= {f"{u}ib": 1 << e for u, e in zip("kmgt", (10, 20, 30, 40))}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_count(text: str) -> int:
    """A positive integer: "16", "128k" or "1M", with k, M and G as powers of 1024."""
    return _parse_whole(text, _COUNTS, "must be a positive integer, for instance 16, 128k or 1M")


def parse_bytes(text: str) -> int:
    """A positive number of bytes: "500MB", "2GiB"."""
    return _parse_whole(text, _BYTES, "must be a positive number of bytes, for instance 500MB or 2GiB")


def parse_seconds(text: str) -> float:
    """A time in seconds: "200us", "1ms", "0.5s"; 0 needs no unit."""
    value = 0.0 if _is_zero(text) else _parse(text, _SECONDS)
    if value is None:
        units = ", ".join(_SECONDS)
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, for instance 200us or 1ms (units: {units})")
    return value


def parse_bits_per_second(text: str) -> float:
    """A rate in bits per second: "100mbit", "1gbit", "1 Gbit/s"."""
    value = _parse(text.lower().removesuffix("/s"), _BITS)
    if value is None or value < 1:
        units = ", ".join(_BITS)
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate, for instance 100mbit or 1gbit (units: {units})")
    return value


def parse_grid(text: str, wrong: str = "is not a grid: write AxB, for instance 2x4") -> tuple[int, int]:
    """ "2x4" as (2, 4). The error is `text` and `wrong`."""
    match = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
    return int(match[1]), int(match[2])


def parse_nodes_by_ranks(text: str) -> tuple[int, int]:
    """ "4x2" as (4 nodes, 2 ranks on each)."""
    return parse_grid(text, "is not NODESxRANKS, for instance 4x2: 4 nodes with 2 ranks each")


def format_seconds(value: float) -> str:
    """A time with 3 significant digits and a unit, such as "1.25 ms"."""
    unit, scale = next((u for u in (("s", 1), ("ms", 1e-3)) if value >= u[1]), ("us", 1e-6))
    return f"{value / scale:.3g} {unit}"


def format_bytes(value: float) -> str:
    """Bytes with 3 significant digits and a decimal unit, such as "24.1 MB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} bytes"


def _parse(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e-?\d+)?) ?([a-z]*)", text.lower().strip())
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


def _is_zero(text: str) -> bool:
    return _parse(text, {"": 1.0}) == 0


def _parse_whole(text: str, units: dict[str, int], wrong: str) -> int:
    value = _parse(text, units)
    if value is None or not 1 <= value < float("inf") or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
    return int(value)
