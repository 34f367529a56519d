"""The cache folder; atomic writing of files; strict reading of YAML and JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where this user keeps what was made or measured on this machine: $MEGATRON_TREE_CACHE, or megatron_tree in the
    user's cache folder."""
    if folder := os.environ.get("MEGATRON_TREE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_tree"


@contextlib.contextmanager
def whole_file(path: Path):
    """A temporary path to write to; it is renamed to `path` if the block succeeds, and deleted if it raises."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


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
        raise ValueError(f"{path} can't be read as YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} can't be read as YAML: it is nested too deep") from None


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
