"""The output file of a batch: complete lines, synced to disk, so that a run can continue after a crash."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import append, read_json, writing


class Output:
    """The output file: locked while it is open; all lines are complete, except the last one after a crash.

    Attributes: done: ids with a result, as JSON. seed: that of the batch.
    Raises: ``ValueError`` for a file that may not be written to: it belongs to a run that runs, or was written with
        other options or by something else. Such a file is left as it is.
    """

    def __init__(self, path: str, header: Mapping[str, Any]):
        self._path, self.done = path, set()
        with writing(Path(path)):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"output {path!r} is being written to by another run: wait for its end") from None
            self._header = json.loads(json.dumps(header))
            if self._header["sampling"]["seed"] is None:
                self._header["sampling"]["seed"] = secrets.randbits(63)
            data = Path(path).read_bytes()
            self._size, self._whole = len(data), data.rfind(b"\n") + 1
            self._read(data[: self._whole], header["sampling"]["seed"])
        except BaseException:
            self.close()
            raise
        self.seed = self._header["sampling"]["seed"]

    def _read(self, data: bytes, seed: int | None) -> None:
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            try:
                entry = read_json(line)
                value = entry["job"]["sampling"]["seed"] if number == 1 else key_of(entry["id"])
            except (KeyError, TypeError, ValueError):
                what = "the output of a batch" if number == 1 else "a result: something else wrote it, or it is damaged"
                raise ValueError(
                    f"output {self._path!r}, line {number}, is not {what}; {_WAY_OUT[number == 1]}"
                ) from None
            if number == 1:
                self._header["sampling"]["seed"] = value if seed is None else seed
                self._check_header(entry["job"])
            if _checksum(line[: line.rfind(_CHECKSUM)]) != entry.get("crc32"):
                raise ValueError(
                    f"output {self._path!r}, line {number}, holds other bytes than were written (its crc32 differs); "
                    + _WAY_OUT[number == 1]
                )
            if number > 1:
                self.done.add(value)

    def _check_header(self, header: Mapping[str, Any]) -> None:
        now, then = _flat(self._header), _flat(header)
        other = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
        if other:
            changes = "; ".join(f"{name}={then.get(name)!r} then, {now.get(name)!r} now" for name in other)
            raise ValueError(
                f"output {self._path!r} was written with other options: {changes}. Use the same, or name another file"
            )

    def begin(self) -> None:
        """Prepare it for appending: remove an incomplete last line and write the header."""
        if self._whole < self._size:
            os.ftruncate(self._fd, self._whole)
            left = self._size - self._whole
            print(f"{self._path}: removed an incomplete last line of {left} bytes", file=sys.stderr, flush=True)
        if not self._whole:
            self.append({"job": self._header})

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line with a checksum of its bytes at the end, and sync it to disk."""
        text = json.dumps(entry).encode()[:-1]
        append(self._fd, text + _CHECKSUM + b': "' + _checksum(text).encode() + b'"}\n', Path(self._path))
        with writing(Path(self._path)):
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


_CHECKSUM = b', "crc32"'
_WAY_OUT = {True: "name another file", False: "delete that line, and its request is answered again"}


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def key_of(identity: str | int) -> str:
    """A key that differs for different ids: 1 and "1" are two ids."""
    return json.dumps(identity)


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in options.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
