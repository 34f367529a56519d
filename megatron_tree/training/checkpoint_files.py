"""The files of checkpoints: which folder is complete, and which one to continue from. No tensors here.

    SAVE/iter_0000100/                       a checkpoint, with files.json: the SHA-256 of each of its files
    SAVE/iter_0000100.unfinished/            one that is being written, or whose writer was killed
    SAVE/release/                            weights alone, of `megatron-tree convert` or Megatron-LM's tools
    SAVE/latest_checkpointed_iteration.txt   the newest to load, as in Megatron-LM: a number or "release"

`files.json` is written after all other files, and the folder is renamed after that. Megatron-LM writes no `files.json`:
a folder without it counts as complete if the tracker, which Megatron-LM writes last, names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from ..files import read_json, whole_file, writing

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name
MANIFEST = "files.json"
RELEASE = "release"  # Megatron-LM's name
FORMAT_FILES = (".metadata", "common.pt", "metadata.json")  # of Megatron-core's format
_MAX_DIGITS = 18
_PREFIX, _UNFINISHED = "iter_", ".unfinished"


def checkpoint_folder(folder: str | Path, iteration: int | None) -> Path:
    """folder/iter_0000100; without an iteration folder/release."""
    return Path(folder) / (RELEASE if iteration is None else f"{_PREFIX}{iteration:07d}")


def begin(final: Path) -> Path:
    """An empty folder to write the checkpoint `final` into. Unfinished ones are deleted."""
    unfinished = final.with_name(final.name + _UNFINISHED)
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        _recover(final.parent)
        for left in final.parent.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(left)
        unfinished.mkdir()
    return unfinished


def finish(final: Path, keep: int | None) -> None:
    """Rename the full folder of `begin` to `final`, point the tracker to it, and delete all but the newest `keep`."""
    unfinished = final.with_name(final.name + _UNFINISHED)
    files = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
    with whole_file(unfinished / MANIFEST) as part:
        part.write_text(json.dumps(files, indent=1) + "\n")
    _recover(final.parent)
    with whole_file(final.parent / TRACKER) as part:
        part.write_text(f"{RELEASE if final.name == RELEASE else _iteration(final)}\n")
    if keep is not None:
        older = [path for path in _checkpoints(final.parent) if _iteration(path) <= _iteration(final)]
        for path in older[keep:]:
            shutil.rmtree(path)


def fault_of(checkpoint: Path, *, named: bool = False) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if nothing is.

    named: the tracker names it, so it may be Megatron-LM's.
    """
    if named and not (checkpoint / MANIFEST).exists() and all((checkpoint / name).is_file() for name in FORMAT_FILES):
        return None
    try:
        for name, digest in read_json((checkpoint / MANIFEST).read_bytes()).items():
            if _sha256(checkpoint / name) != digest:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} can't be read ({error.strerror})"
    except (ValueError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def newest(folder: str | Path) -> tuple[str | None, list[str]]:
    """The newest checkpoint that the tracker allows and that has no fault.

    Returns: (its folder, or None if there are no checkpoints; a warning for each newer one that is damaged).
    Raises: ValueError if the tracker is damaged, or no checkpoint that it allows can be loaded.
    """
    folder = Path(folder)
    _recover(folder)
    candidates, tracker, named, warnings = _checkpoints(folder), folder / TRACKER, None, []
    if tracker.is_file():
        text = tracker.read_bytes().decode("ascii", "replace").strip()
        if text == RELEASE:
            named = folder / RELEASE
            candidates = [named]
        elif text.isdecimal() and len(text) <= _MAX_DIGITS:
            named = checkpoint_folder(folder, int(text))
            candidates = [path for path in candidates if _iteration(path) <= int(text)]
        else:
            raise ValueError(f"{tracker} holds {text[:40]!r} instead of a number: write the iteration to continue from")
    for path in candidates:
        if (fault := fault_of(path, named=path == named)) is None:
            return str(path), warnings
        warnings.append(f"warning: checkpoint {path} is damaged: {fault}")
    if named is None and not candidates:
        return None, []
    raise ValueError(
        f"no checkpoint in {str(folder)!r} can be loaded ({'; '.join(warnings) or f'none up to {named.name}'}): "
        f"restore one, or write an iteration into {tracker}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(paths, key=_iteration, reverse=True)


def _iteration(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _recover(folder: Path) -> None:
    """Rename every folder whose files are complete, in place of an older checkpoint of the same iteration."""
    for manifest in folder.glob(f"*{_UNFINISHED}/{MANIFEST}"):
        final = manifest.parent.with_name(manifest.parent.name.removesuffix(_UNFINISHED))
        if final.exists():
            shutil.rmtree(final)
        os.replace(manifest.parent, final)
