"""Writing files that are whole or not there."""

from __future__ import annotations

import contextlib
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path):
    """A path to write to that takes the name `path` only when the block ends well: a file is whole or not there."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
