"""The files of checkpoints: which folder is whole, which one is in force, which ones are old. No tensors here.

    SAVE/iter_0000100/                       a checkpoint, with files.json: size and SHA-256 of each of its files
    SAVE/iter_0000100.unfinished/            one that is being written, or whose writer was killed
    SAVE/iter_0000100.replaced/              the former one of the same iteration, until the new one is there
    SAVE/latest_checkpointed_iteration.txt   the one in force, as in Megatron-LM

`files.json` is written when all other files are, and the folder renamed after that. So a folder that was left halfway,
lost files since, or holds other bytes than were written, is told from a good one. Digests are worked out by all ranks,
each for its share of the files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ..files import digest_of, read_json, whole_file
from .digests import sha256

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name
MANIFEST = "files.json"
_DIGITS = 18  # of an iteration at most
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


def contents(folder: Path) -> dict[str, int]:
    """Name and size of every file in a folder."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def digests_of(folder: Path, sizes: dict[str, int], rank: int = 0, world: int = 1) -> dict[str, str]:
    """SHA-256, hexadecimal, of this rank's share of some files: they are dealt out, the largest first."""
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name))[rank::world]:
        found[name] = sha256(folder / name)
    return found


def finish(final: Path, sizes: dict[str, int], digests: dict[str, str], keep: int | None) -> None:
    """Put what was written into the folder of `begin` in force, and delete all checkpoints but the newest `keep`.

    sizes, digests: from `contents` and `digests_of`, of every file.
    """
    unfinished, replaced = (final.with_name(final.name + ending) for ending in (_UNFINISHED, _REPLACED))
    files = {name: {"bytes": size, "sha256": digests[name]} for name, size in sizes.items()}
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
        if manifest and "sha256" not in manifest and all(isinstance(size, int) for size in manifest.values()):
            return f"its {MANIFEST} is of an older version, which kept no digests: save it anew with this one"
        if manifest["sha256"] != digest_of(manifest["files"]):
            raise ValueError(MANIFEST)
        known = {name: (about["bytes"], about["sha256"]) for name, about in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was not written to its end"
    except OSError as error:
        return f"its {MANIFEST} can't be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"its {MANIFEST} is damaged"
    sizes = {name: size for name, (size, _) in known.items()}
    try:
        for name, size in sizes.items():
            path = checkpoint / name
            if Path(name).name != name or not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        for name, digest in digests_of(checkpoint, sizes, rank, world).items():
            if digest != known[name][1]:
                return f"{name} holds other bytes than were written: its sha256 is {digest[:16]}..."
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} can't be read ({error.strerror})"
    return None


def candidates(folder: str | Path) -> tuple[list[Path], list[str]]:
    """Checkpoints that may be good, the newest first, and a note for each one that is newer than the one in force.

    Raises: ValueError if the tracker file is damaged.
    """
    folder = Path(folder)
    _restore_replaced(folder)
    found, tracker = _checkpoints(folder), folder / TRACKER
    if not tracker.is_file():
        return found, []
    text = tracker.read_bytes().decode("ascii", "replace").strip()
    if not text.isdecimal() or len(text) > _DIGITS:
        raise ValueError(
            f"{tracker} holds {text[:40]!r} instead of a number: write the iteration to continue from there"
        )
    newer = [path for path in found if _iteration(path) > int(text)]
    if found and len(newer) == len(found):
        raise ValueError(
            f"{tracker} says {text}, but the oldest checkpoint is {found[-1]}: write the iteration to go on from"
        )
    return found[len(newer) :], [f"{path} is left out: {tracker} says {text}" for path in newer]


def newest_good(found: list[Path], fault: Callable[[Path], str | None] = fault_of) -> tuple[Path | None, list[str]]:
    """The first of `candidates` that is whole.

    Returns: (its folder, or None if there are no candidates; a warning for each newer one that was passed over).
    Raises: ValueError if there are candidates, but none of them is whole.
    """
    warnings = []
    for path in found:
        what = fault(path)
        if what is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is no good: {what}")
    if warnings:
        raise ValueError(f"no checkpoint in {str(found[0].parent)!r} is whole: " + "; ".join(warnings))
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
