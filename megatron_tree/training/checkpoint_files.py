"""The files of checkpoints: which folder is whole, which one is in force, which ones are old. No tensors here.

    SAVE/iter_0000100/                       a checkpoint, with files.json: the name and size of each of its files
    SAVE/iter_0000100.unfinished/            one that is being written, or whose writer was killed
    SAVE/iter_0000100.replaced/              the former one of the same iteration, until the new one is there
    SAVE/latest_checkpointed_iteration.txt   the one in force, as in Megatron-LM

`files.json` is written when all other files are, and the folder renamed after that. So a folder that was left halfway,
or lost files or parts of them since, is told from a good one by its sizes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ..files import whole_file

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name
MANIFEST = "files.json"
_PREFIX, _UNFINISHED, _REPLACED = "iter_", ".unfinished", ".replaced"


def checkpoint_folder(folder: str | Path, iteration: int) -> Path:
    """folder/iter_0000100."""
    return Path(folder) / f"{_PREFIX}{iteration:07d}"


def begin(final: Path) -> Path:
    """An empty folder to write the checkpoint `final` into. What killed writers left is cleared away."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _restore_replaced(final.parent)
    for left in final.parent.glob(f"{_PREFIX}*{_UNFINISHED}"):
        shutil.rmtree(left)
    unfinished = final.with_name(final.name + _UNFINISHED)
    unfinished.mkdir()
    return unfinished


def finish(final: Path, keep: int | None) -> None:
    """Put what was written into the folder of `begin` in force, and delete all checkpoints but the newest `keep`."""
    unfinished, replaced = (final.with_name(final.name + ending) for ending in (_UNFINISHED, _REPLACED))
    sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
    (unfinished / MANIFEST).write_text(json.dumps(sizes, indent=1) + "\n")
    if final.exists():
        os.replace(final, replaced)
    os.replace(unfinished, final)
    shutil.rmtree(replaced, ignore_errors=True)
    with whole_file(final.parent / TRACKER) as part:
        part.write_text(f"{_iteration(final)}\n")
    if keep is not None:
        older = [path for path in _checkpoints(final.parent) if _iteration(path) <= _iteration(final)]
        for path in older[keep:]:
            shutil.rmtree(path)


def fault_of(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if nothing is."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was not written to its end"
    except ValueError:
        return f"its {MANIFEST} is damaged"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def newest_good(folder: str | Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint that is not newer than the one in force.

    Returns: (its folder, or None if there is none; a warning for each newer one that was passed over).
    Raises: ValueError if there are checkpoints, but none of them is whole.
    """
    folder = Path(folder)
    _restore_replaced(folder)
    candidates = _checkpoints(folder)
    tracker = folder / TRACKER
    if tracker.is_file():
        text = tracker.read_text().strip()
        if not text.isdecimal():
            raise ValueError(
                f"{tracker} holds {text!r} instead of a number: write the iteration to continue from there"
            )
        candidates = [path for path in candidates if _iteration(path) <= int(text)]
    warnings = []
    for path in candidates:
        fault = fault_of(path)
        if fault is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is no good: {fault}")
    if warnings:
        raise ValueError(f"no checkpoint in {str(folder)!r} is whole: " + "; ".join(warnings))
    return None, []


def _checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(found, key=_iteration, reverse=True)


def _iteration(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _restore_replaced(folder: Path) -> None:
    """Undo a replacement that was interrupted between its two renamings; finish one that was interrupted later."""
    for replaced in folder.glob(f"{_PREFIX}*{_REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if final.exists():
            shutil.rmtree(replaced)
        else:
            os.replace(replaced, final)
