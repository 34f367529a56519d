"""Our C sources, compiled on first use and kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from .files import cache_folder


class NotCompiled(RuntimeError):
    """A source that can't be compiled here; the message says why."""


def compiled(source: Path, *options: str, libraries: tuple[str, ...] = ()) -> Path:
    """Path of what the C compiler makes of a source: made anew for other sources in its folder, options or processors.

    Raises: NotCompiled if there is no C compiler, if it fails, or if the result can't be kept.
    """
    files = (path.read_bytes() for path in sorted(source.parent.glob("*.[ch]")))  # it includes headers beside it
    about = [*files, *map(str.encode, options), _processor().encode()]
    cache = cache_folder()
    result = cache / f"{source.stem}-{hashlib.sha256(b'|'.join(about)).hexdigest()[:16]}"
    if os.access(result, os.X_OK):
        return result
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NotCompiled(f"{source.name} needs a C compiler (cc, gcc or clang) once")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            part = Path(folder) / source.stem
            command = [compiler, *options, "-o", part, source, *libraries]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise NotCompiled(f"{compiler} can't compile {source}:\n{done.stderr}")
            part.replace(result)  # another process may have done the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(
            f"can't keep {result.name} in {cache}: {error}; set MEGATRON_TREE_CACHE to another folder"
        ) from error
    return result


def _processor() -> str:
    """What -march=native depends on: a home directory may be shared by machines with other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"
