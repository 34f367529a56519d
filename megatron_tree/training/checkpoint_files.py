"""The files of checkpoints: which folder is complete, and which one to continue from. No tensors here.

    SAVE/iter_0000100/                       a checkpoint, with files.json: size and SHA-256 of each of its files
    SAVE/iter_0000100.unfinished/            one that is being written, or whose writer was killed
    SAVE/iter_0000100.replaced/              the previous one of the same iteration, until the new one is complete
    SAVE/latest_checkpointed_iteration.txt   the newest to load, as in Megatron-LM

`files.json` is written after all other files, and the folder renamed after that: a folder that is incomplete, or whose
files have changed since, is recognized and not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ..files import digest_of, read_json, whole_file

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name
MANIFEST = "files.json"
_DIGITS = 18  # of an iteration at most
_PREFIX, _UNFINISHED, _REPLACED = "iter_", ".unfinished", ".replaced"


def checkpoint_folder(folder: str | Path, iteration: int) -> Path:
    """folder/iter_0000100."""
    return Path(folder) / f"{_PREFIX}{iteration:07d}"


def begin(final: Path) -> Path:
    """An empty folder to write the checkpoint `final` into. Unfinished ones are deleted."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _restore_replaced(final.parent)
    for left in final.parent.glob(f"{_PREFIX}*{_UNFINISHED}"):
        shutil.rmtree(left)
    unfinished = final.with_name(final.name + _UNFINISHED)
    unfinished.mkdir()
    return unfinished


def describe(folder: Path, rank: int = 0, world: int = 1) -> dict[str, dict]:
    """{name: {"bytes", "sha256"}} of this rank's share of the files: the ranks take turns, from the largest file on."""
    files = sorted(folder.iterdir(), key=lambda path: (-path.stat().st_size, path.name))
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files[rank::world]}


def finish(final: Path, files: dict[str, dict], keep: int | None) -> None:
    """Rename the complete folder of `begin` to `final`, point the tracker to it, and delete all but the newest `keep`.

    files: from `describe`, of every file.
    """
    unfinished, replaced = (final.with_name(final.name + ending) for ending in (_UNFINISHED, _REPLACED))
    (unfinished / MANIFEST).write_text(json.dumps({"files": files, "sha256": digest_of(files)}, indent=1) + "\n")
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


def fault_of(checkpoint: Path, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if nothing is.

    rank, world: every rank compares the sizes of all files, and the digests of its share of them.
    """
    try:
        manifest = read_json((checkpoint / MANIFEST).read_bytes())
        if manifest["sha256"] != digest_of(manifest["files"]):
            raise ValueError(MANIFEST)
        known = {name: (about["bytes"], about["sha256"]) for name, about in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was not completely written"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"its {MANIFEST} is damaged"
    try:
        for name, (size, _) in known.items():
            path = checkpoint / name
            if Path(name).name != name or not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        for name in sorted(known, key=lambda name: (-known[name][0], name))[rank::world]:
            if (digest := _sha256(checkpoint / name)) != known[name][1]:
                return f"{name} has changed since it was written: its sha256 is {digest[:16]}..."
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} can't be read ({error.strerror})"
    return None


def candidates(folder: str | Path) -> tuple[list[Path], list[str]]:
    """Checkpoints to try, the newest first, and a note for each one that is newer than the tracker says.

    Raises: ValueError if the tracker file is damaged.
    """
    folder = Path(folder)
    _restore_replaced(folder)
    found, tracker = _checkpoints(folder), folder / TRACKER
    if not tracker.is_file():
        return found, []
    text = tracker.read_bytes().decode("ascii", "replace").strip()
    if not text.isdecimal() or len(text) > _DIGITS:
        raise ValueError(f"{tracker} holds {text[:40]!r} instead of a number: write the iteration to continue from")
    newer = [path for path in found if _iteration(path) > int(text)]
    if found and len(newer) == len(found):
        raise ValueError(
            f"{tracker} says {text}, but the oldest checkpoint is {found[-1]}: write the iteration to continue from"
        )
    return found[len(newer) :], [f"{path} is ignored: {tracker} says {text}" for path in newer]


def newest_good(found: list[Path], fault: Callable[[Path], str | None] = fault_of) -> tuple[Path | None, list[str]]:
    """The first of `candidates` without a fault.

    Returns: (its folder, or None if there are no candidates; a warning for each newer one).
    Raises: ValueError if there are candidates, but all are damaged.
    """
    warnings = []
    for path in found:
        what = fault(path)
        if what is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged: {what}")
    if warnings:
        raise ValueError(f"all checkpoints in {str(found[0].parent)!r} are damaged: " + "; ".join(warnings))
    return None, []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
