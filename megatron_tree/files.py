"""Files that are whole or not there, and what people wrote in files, read with care."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole_file(path: Path):
    """A path to write to that takes the name `path` only when the block ends well: a file is whole or not there."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_yaml(path: str | Path) -> Any:
    """What a YAML file says: plain values, lists and mappings.

    Raises: ``ValueError`` that names the file, if it can't be read, is no YAML, or says a thing twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a name that stands in a mapping twice, and aliases: few bytes of them make values without end."""

        def construct_mapping(self, node, deep=False):
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise yaml.constructor.ConstructorError(None, None, "a name stands here twice", node.start_mark)
            return found

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
    """`json.loads` whose errors are ``ValueError``s, of nesting too deep and of a name that stands in an object twice,
    too."""
    try:
        return json.loads(data, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_deepspeed_config(option: str, path: str) -> dict[str, Any]:
    """DeepSpeed's options in a JSON file. Raises: ``ValueError`` that names the option and the file."""
    try:
        config = read_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}={path!r} is no readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{option}={path!r} in that file must be an object of DeepSpeed's options")
    return config


def _object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands in an object twice")
    return found


def check_text(name: str, value: object) -> None:
    """Raise ``ValueError`` for a text with half of a UTF-16 pair: JSON can name it, but it is no character, and no
    tokenizer takes it."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} is half of a pair of UTF-16: write the whole one") from None


def digest_of(value: Any) -> str:
    """SHA-256, hexadecimal, of what JSON makes of a value; the order of names does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
