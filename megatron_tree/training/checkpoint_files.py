"""The files of checkpoints: which folder is complete, and which one to continue from. No tensors here.

    SAVE/iter_0000100/                       a checkpoint, with files.json: size and SHA-256 of each of its files
    SAVE/iter_0000100.unfinished/            one that is being written, or whose writer was killed
    SAVE/iter_0000100.replaced/              the previous one of the same iteration, until the new one is complete
    SAVE/release/                            weights alone, of `megatron-tree convert` or Megatron-LM's tools
    SAVE/latest_checkpointed_iteration.txt   the newest to load, as in Megatron-LM: a number or "release"

`files.json` is written after all other files, and the folder renamed after that: a folder that is incomplete, or whose
files have changed since, is recognized and not loaded. Megatron-LM writes no such list; what it has written to its end
is named by its `latest_checkpointed_iteration.txt`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from ..files import digest_of, read_json, whole_file

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name
MANIFEST = "files.json"
RELEASE = "release"  # Megatron-LM's name
FORMAT_FILES = (".metadata", "common.pt", "metadata.json")  # of Megatron-core's format
_DIGITS = 18  # of an iteration at most
_PREFIX, _UNFINISHED, _REPLACED = "iter_", ".unfinished", ".replaced"


def checkpoint_folder(folder: str | Path, iteration: int | None) -> Path:
    """folder/iter_0000100; without an iteration folder/release."""
    if iteration is None:
        return Path(folder) / RELEASE
    return Path(folder) / f"{_PREFIX}{iteration:07d}"


def begin(final: Path) -> Path:
    """An empty folder to write the checkpoint `final` into. Unfinished ones are deleted."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _restore_replaced(final.parent)
    for left in final.parent.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(left)
    unfinished = final.with_name(final.name + _UNFINISHED)
    unfinished.mkdir()
    return unfinished


def finish(final: Path, keep: int | None) -> None:
    """Rename the full folder of `begin` to `final`, point the tracker to it, and delete all but the newest `keep`."""
    unfinished, replaced = (final.with_name(final.name + ending) for ending in (_UNFINISHED, _REPLACED))
    paths = sorted(unfinished.iterdir())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
    (unfinished / MANIFEST).write_text(json.dumps({"files": files, "sha256": digest_of(files)}, indent=1) + "\n")
    if final.exists():
        os.replace(final, replaced)
    os.replace(unfinished, final)
    shutil.rmtree(replaced, ignore_errors=True)
    with whole_file(final.parent / TRACKER) as part:
        part.write_text(f"{RELEASE if final.name == RELEASE else _iteration(final)}\n")
    if keep is not None:
        older = [path for path in _checkpoints(final.parent) if _iteration(path) <= _iteration(final)]
        for path in older[keep:]:
            shutil.rmtree(path)


def fault_of(checkpoint: Path, *, named: bool = False) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if nothing is.

    named: the tracker names it. Then one without a list of its files counts as Megatron-LM's.
    """
    if named and not (checkpoint / MANIFEST).exists() and all((checkpoint / name).is_file() for name in FORMAT_FILES):
        return None
    try:
        manifest = read_json((checkpoint / MANIFEST).read_bytes())
        if manifest["sha256"] != digest_of(manifest["files"]):
            return f"{MANIFEST} has changed since it was written"
        for name, about in manifest["files"].items():
            path = checkpoint / name
            if path.stat().st_size != about["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {about['bytes']}"
            if _sha256(path) != about["sha256"]:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} can't be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def newest(folder: str | Path) -> tuple[str | None, list[str]]:
    """The newest checkpoint that the tracker allows and that has no fault.

    Returns: (its folder, or None if there are no checkpoints; a line on each newer one).
    Raises: ValueError if the tracker is damaged, or there are only checkpoints that are passed over.
    """
    folder = Path(folder)
    _restore_replaced(folder)
    found, tracker, lines = _checkpoints(folder), folder / TRACKER, []
    text = tracker.read_bytes().decode("ascii", "replace").strip() if tracker.is_file() else None
    if text == RELEASE:
        found, text = [folder / RELEASE], None
    if text is not None and not (text.isdecimal() and len(text) <= _DIGITS):
        raise ValueError(f"{tracker} holds {text[:40]!r} instead of a number: write the iteration to continue from")
    for path in found:
        named = path.name == RELEASE or (text is not None and _iteration(path) == int(text))
        if text is not None and _iteration(path) > int(text):
            lines.append(f"{path} is ignored: {tracker} says {text}")
        elif (fault := fault_of(path, named=named)) is None:
            return str(path), lines
        else:
            lines.append(f"warning: checkpoint {path} is damaged: {fault}")
    if found:
        raise ValueError(
            f"no checkpoint in {str(folder)!r} can be loaded ({'; '.join(lines)}): restore one, or write an iteration "
            f"into {TRACKER}"
        )
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
    for replaced in folder.glob(f"*{_REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if final.exists():
            shutil.rmtree(replaced)
        else:
            os.replace(replaced, final)
