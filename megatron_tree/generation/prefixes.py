"""Beginnings of prompts that the cache holds already: found by the hash of their pages, kept while there is room."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class Prefixes:
    """Which rows of the cache hold which tokens, by handle. On the leader only.

    Rows are of requests that run, or kept after their request has ended; those that were used least recently go first.

    page_size: tokens of a page, whose key is a hash that covers all tokens before it, too.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._keys: dict[int, list[bytes]] = {}
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

    def put(self, handle: int, tokens: Sequence[int], salt: str = "") -> None:
        """A row holds these tokens now, for prompts with the same salt."""
        self.forget(handle)
        self._keys[handle] = self.keys(tokens, salt)
        for key in self._keys[handle]:
            self._holders.setdefault(key, {})[handle] = None

    def keep(self, handle: int, tokens: Sequence[int], salt: str = "") -> bool:
        """A row's request has ended. False if another kept row holds all its pages: it need not stay."""
        self.put(handle, tokens, salt)
        keys = self._keys[handle]
        if not keys or any(other in self._kept for other in self._holders[keys[-1]] if other != handle):
            self.forget(handle)
            return False
        self._kept[handle] = len(tokens)
        return True

    def find(self, keys: Sequence[bytes]) -> tuple[int, int] | None:
        """(handle, tokens) of the row that shares the longest beginning, whole pages; it counts as used now."""
        longest = None
        for number, key in enumerate(keys, 1):
            holders = self._holders.get(key)
            if not holders:
                break
            longest = next(reversed(holders)), number * self._page_size
        if longest is not None and longest[0] in self._kept:
            self._kept.move_to_end(longest[0])
        return longest

    def forget(self, handle: int) -> None:
        """A row goes, or is used by a request that will change it."""
        self._kept.pop(handle, None)
        for key in self._keys.pop(handle, ()):
            holders = self._holders[key]
            del holders[handle]
            if not holders:
                del self._holders[key]

    def keys(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Of whole pages, each with all before it; others with another salt."""
        data, size = np.asarray(tokens, dtype=np.int64).tobytes(), 8 * self._page_size
        keys, key = [], salt.encode("utf-8", "surrogatepass")
        for end in range(size, len(data) + 1, size):
            key = hashlib.sha256(key + data[end - size : end]).digest()
            keys.append(key)
        return keys
