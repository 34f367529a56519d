"""Beginnings of prompts that the cache holds already: found by the hash of their blocks, kept while there is room."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class Prefixes:
    """Which rows of the cache hold which tokens, by handle. On the leader only.

    Rows are of requests that run, or kept after their request has ended; those that were used least recently go first.

    block: tokens of a block, whose hash covers all tokens before it, too.
    """

    def __init__(self, block: int):
        self._block = block
        self._digests: dict[int, list[bytes]] = {}
        self._holders: dict[bytes, dict[int, None]] = {}
        self._kept: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """How many rows are kept."""
        return len(self._kept)

    @property
    def kept(self) -> list[tuple[int, int]]:
        """(handle, tokens) of the rows that are kept, those used least recently first."""
        return list(self._kept.items())

    def kept_length(self, handle: int) -> int | None:
        """Tokens of a kept row; None for others."""
        return self._kept.get(handle)

    def put(self, handle: int, tokens: Sequence[int]) -> None:
        """A row holds these tokens now."""
        self.forget(handle)
        self._digests[handle] = self.digests(tokens)
        for digest in self._digests[handle]:
            self._holders.setdefault(digest, {})[handle] = None

    def keep(self, handle: int, tokens: Sequence[int]) -> bool:
        """A row's request has ended. False if another kept row holds all its blocks: it need not stay."""
        self.put(handle, tokens)
        digests = self._digests[handle]
        if not digests or any(other in self._kept for other in self._holders[digests[-1]] if other != handle):
            self.forget(handle)
            return False
        self._kept[handle] = len(tokens)
        return True

    def find(self, digests: Sequence[bytes]) -> tuple[int, int] | None:
        """(handle, tokens) of the row that shares the longest beginning, whole blocks; it counts as used now."""
        best = None
        for number, digest in enumerate(digests, 1):
            holders = self._holders.get(digest)
            if not holders:
                break
            best = next(reversed(holders)), number * self._block
        if best is not None and best[0] in self._kept:
            self._kept.move_to_end(best[0])
        return best

    def forget(self, handle: int) -> None:
        """A row goes, or is used by a request that will change it."""
        self._kept.pop(handle, None)
        for digest in self._digests.pop(handle, ()):
            holders = self._holders[digest]
            del holders[handle]
            if not holders:
                del self._holders[digest]

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        """Of whole blocks, each with all before it."""
        data, size = np.asarray(tokens, dtype=np.int64).tobytes(), 8 * self._block
        found, digest = [], b""
        for end in range(size, len(data) + 1, size):
            digest = hashlib.sha256(digest + data[end - size : end]).digest()
            found.append(digest)
        return found
