"""SHA-256 of files in a list beside them, as `sha256sum` writes and checks it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from ..files import whole_file

_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")


def sha256(path: Path) -> str:
    """Of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_digests(listing: Path, digests: dict[str, str]) -> None:
    """Write a list of {name: SHA-256}; the names are those of files in its folder."""
    with whole_file(listing) as part:
        part.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))


def read_digests(listing: Path) -> dict[str, str]:
    """{name: SHA-256} of a list; empty where there is none. Raises: ValueError for a damaged one."""
    if not listing.is_file():
        return {}
    lines = listing.read_bytes().decode("utf-8", "replace").split("\n")
    found = [_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not all(found):
        raise ValueError(f"{listing} is damaged: make it anew (sha256sum FILE ... > {listing.name})")
    return {match[2]: match[1] for match in found}


def check_digests(files: Iterable[tuple[Path, str]], way_out: str) -> None:
    """Raise ValueError for the first of (file, SHA-256) that holds other bytes; files that are gone are left out."""
    for path, digest in files:
        if path.is_file() and sha256(path) != digest:
            raise ValueError(f"{path} holds other bytes than were written, by its SHA-256: {way_out}")
