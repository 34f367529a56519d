"""The cache folder; atomic writing of files, and what is said where it fails; strict reading of YAML and JSON."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_SPACE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
TORCH_WRITER = "inline_container.cc"  # in all that torch.save says of a write that failed
LEAST_FREE = 1 << 20  # bytes on a disk that is not full


def cache_folder() -> Path:
    """Where this user keeps what was made or measured on this machine: $MEGATRON_TREE_CACHE, or megatron_tree in the
    user's cache folder."""
    if folder := os.environ.get("MEGATRON_TREE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_tree"


class NotWritten(OSError):
    """A file or a folder that could not be written. The text is a sentence that names where."""


@contextlib.contextmanager
def writing(path: Path, *others: type[BaseException]):
    """Faults of the file system become `NotWritten` while `path`, a file or a folder, is written: those that Python
    reports, errors of libraries, which often say less, and `others`, errors that mean nothing else there."""
    try:
        yield
    except NotWritten:
        raise
    except (Exception, *others) as error:
        if (fault := _fault(error, path, others)) is None:
            raise
        place = f"no space left on {path.parent}" if fault in NO_SPACE else f"{path.parent} can't be written to"
        raise NotWritten(f"{place}: {path.name} is not written ({fault})") from error


def _fault(error: BaseException, path: Path, others: tuple[type[BaseException], ...]) -> str | None:
    """What is wrong with the file system; None for other errors."""
    if isinstance(error, OSError):
        network = isinstance(error, (ConnectionError, TimeoutError))
        return None if network or error.errno is None else os.strerror(error.errno)
    text = str(error)
    if (told := next((fault for fault in NO_SPACE if fault in text), None)) is not None:
        return told
    if not isinstance(error, others) and TORCH_WRITER not in text:
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    files = [path] if path.is_file() else path.rglob("*")
    if limit != resource.RLIM_INFINITY and any(file.stat().st_size >= limit for file in files):
        return os.strerror(errno.EFBIG)
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    if shutil.disk_usage(there).free < LEAST_FREE:
        return os.strerror(errno.ENOSPC)
    return f"{type(error).__name__}: {text.strip().splitlines()[-1]}"


def why_uncreatable(folder: Path) -> str | None:
    """Why a folder of an absolute path can't be made or written to; None if it can."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is no folder"
    try:  # permissions don't tell of all file systems
        with tempfile.TemporaryDirectory(dir=there):
            return None
    except OSError as error:
        return f"{there} can't be written to ({reason(error)})"


def check_free(folder: Path) -> None:
    """Raise ValueError for a folder to be made that is there and not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists: name another folder to write, or delete it")


@contextlib.contextmanager
def whole_file(path: Path):
    """A temporary path to write to; it is renamed to `path` if the block succeeds, and deleted if it raises. What is no
    file (/dev/stdout, /dev/null) is written to as it is, and a link stays one.

    Raises: `NotWritten` for faults of the file system.
    """
    if path.exists() and not path.is_file():
        with writing(path):
            yield path
        return
    path = path.resolve() if path.is_symlink() else path
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path):
    """As `whole_file`, of a new folder."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            part.replace(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def append(fd: int, data: bytes, path: Path) -> None:
    """Write data at the end of the open file `path`, all of it or, if that raises `NotWritten`, nothing."""
    end = os.fstat(fd).st_size
    with writing(path):
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        except BaseException:
            os.ftruncate(fd, end)
            raise


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file: plain values, lists and mappings.

    Raises: ``ValueError`` with the file's name if it can't be read, is not valid YAML, or has a duplicate key.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Rejects duplicate keys, and aliases, with which a few bytes can expand without limit."""

        def construct_mapping(self, node, deep=False):
            mapping = super().construct_mapping(node, deep)
            if len(mapping) < len(node.value):
                raise yaml.constructor.ConstructorError(None, None, "duplicate key", node.start_mark)
            return mapping

        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                raise yaml.composer.ComposerError(None, None, "aliases are not read", self.peek_event().start_mark)
            return super().compose_node(parent, index)

    try:
        return Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except (OSError, ValueError, OverflowError, LookupError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} can't be read as YAML: {reason(error)}") from error
    except RecursionError:
        raise ValueError(f"{path} can't be read as YAML: it is nested too deep") from None


def reason(error: Exception) -> str:
    """Why a file could not be read, in one line without the file's name."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return getattr(error, "strerror", None) or " ".join(str(error).replace('"<unicode string>", ', "").split())


def read_json(data: str | bytes) -> Any:
    """`json.loads` that also raises ``ValueError`` for duplicate keys and for nesting that is too deep."""
    try:
        return json.loads(data, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_deepspeed_config(option: str, path: str) -> dict[str, Any]:
    """DeepSpeed's options from a JSON file. Raises: ``ValueError`` with the option and the file."""
    try:
        config = read_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}={path!r} is not a readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{option}={path!r} in that file must be an object of DeepSpeed's options")
    return config


def _object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("duplicate key")
    return mapping


def check_text(name: str, value: object) -> None:
    """Raise ``ValueError`` for text with an unpaired UTF-16 surrogate: JSON allows it, but no tokenizer accepts it."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: character {error.start} is an unpaired UTF-16 surrogate: write both halves"
        ) from None


def digest_of(value: Any) -> str:
    """Hexadecimal SHA-256 of a value as JSON, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
