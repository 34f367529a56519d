"""The tensors of a sharded KV cache: pages of keys and values for each layer, in the model's dtype or in 8 bits."""

from __future__ import annotations

import bisect
import functools
import heapq
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels import KVCache, write_eight_bits

GROWTH = 8  # a full pool grows by 1/GROWTH of its size: at most that much memory is spare
CACHE_DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
kept = functools.partial(torch.inference_mode, False)
"""Context in which tensors are made that later calls write to: in inference mode or not, whatever they are made in."""
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def on_device(x: Tensor, device: torch.device | str) -> Tensor:
    """x, which is on the host, on a device. The host does not wait for what a GPU has still to do before."""
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class LayerPages:
    """One layer's pages on one rank.

    Keys [pages, page_size, h_kv, d], values [pages, page_size, h_kv, d_v]. In 8 bits each token and head has a scale,
    fp32 [pages, page_size, h_kv]: its largest absolute value divided by the largest value of the format. The scales of
    a head lie side by side in a page, as kernels read them. Where an index selects keys, its own keys `index_k`
    [pages, page_size, 1, d_i] lie beside them, in their dtype.

    Args:
        page_size: tokens of a page.
        stored: torch.int8, torch.float8_e4m3fn, or None for the dtype of the keys.
        latent: the keys are latents and the values rotary keys, of one head. Attention takes both together as a key,
            whose first part is the value, so they lie side by side in one tensor; in 8 bits in two, for their scales.
            Or the values have no numbers: a key is its value.
    """

    def __init__(self, page_size: int, stored: torch.dtype | None = None, *, latent: bool = False):
        self.page_size, self.stored, self.latent = page_size, stored, latent
        self.moves = 0
        """How often the pages have got other memory."""
        self.reset()

    def reset(self) -> None:
        self.k = self.v = self.k_scale = self.v_scale = self.index_k = None
        self.dtype: torch.dtype | None = None
        self._taken: tuple | None = None
        """Heads, head_dim and dtype of the last tokens that fitted."""

    def reserve(self, num_pages: int, k: Tensor, v: Tensor) -> None:
        """Allocate at least num_pages pages for tokens like k [b, n, h_kv, d] and v [b, n, h_kv, d_v].

        Raises: ValueError if heads, head_dim or dtype differ from those of earlier tokens.
        """
        kinds = k.shape[2:], v.shape[2:], k.dtype
        if self.k is not None and self._taken == kinds and num_pages <= self.k.shape[0]:
            return
        if self.k is None:
            self.dtype = k.dtype
            with kept():
                for name, shape in self._shapes(k, v).items():
                    setattr(self, name, k.new_zeros((0, self.page_size, *shape), dtype=self.stored or k.dtype))
                if self.stored is not None:
                    scales = (2, 0, k.shape[2], self.page_size)
                    self.k_scale, self.v_scale = k.new_zeros(scales, dtype=torch.float32).transpose(2, 3)
        have = {name: tuple(x.shape[2:]) for name, x in self.tensors.items() if name in ("k", "v")}
        if (self._shapes(k, v), k.dtype) != (have, self.dtype):
            raise ValueError(
                f"keys {tuple(k.shape)} and values {tuple(v.shape)} in {k.dtype} don't fit the cache: heads and "
                f"head_dim are {' and '.join(map(str, have.values()))} there, in {self.dtype}"
            )
        self.grow(num_pages)
        self._taken = kinds

    def _shapes(self, k: Tensor, v: Tensor) -> dict[str, tuple[int, int]]:
        """(heads, head_dim) of what is stored for tokens like these."""
        if self.joined:
            return {"k": (k.shape[2], k.shape[3] + v.shape[3])}
        return {"k": tuple(k.shape[2:]), "v": tuple(v.shape[2:])}

    def grow(self, num_pages: int) -> None:
        """Allocate at least num_pages pages, at least one. Does nothing before the first token."""
        have = 0 if self.k is None else self.k.shape[0]
        if self.k is None or (have and num_pages <= have):
            return
        pages = max(num_pages, have + have // GROWTH, 1)
        self.moves += 1
        for name in self.tensors:  # one after another, so that only one tensor at a time exists twice
            old = getattr(self, name)
            # zeros: kernels read whole pages, and unused slots must not be NaN
            with kept():
                if name.endswith("scale"):
                    new = old.new_zeros(pages, *old.mT.shape[1:]).mT
                else:
                    new = old.new_zeros(pages, *old.shape[1:])
            new[:have] = old
            setattr(self, name, new)
            del old, new

    def reserve_index(self, index_k: Tensor) -> None:
        """Allocate as many pages for index keys [..., d_i] as there are for keys, which are reserved first.

        Raises: ValueError if d_i differs from that of earlier tokens.
        """
        if self.index_k is None:
            shape = (len(self.k), self.page_size, 1, index_k.shape[-1])
            with kept():
                self.index_k, self.moves = index_k.new_zeros(shape), self.moves + 1
        if index_k.shape[-1] != self.index_k.shape[-1]:
            raise ValueError(
                f"index keys {tuple(index_k.shape)} don't fit the cache, which has {self.index_k.shape[-1]}"
            )

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put tokens k [n, h_kv, d], v [n, h_kv, d_v] into slots, int64 [n]: page * page_size + offset in the page."""
        if self.stored is not None:
            stored, scales = (self.k, self.v), (self.k_scale, self.v_scale)
            if write_eight_bits(slots, k, v, stored, scales, _LARGEST[self.stored]):
                return
            (k, k_scale), (v, v_scale) = quantize(k, self.stored), quantize(v, self.stored)
            self.put(slots, {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale})
        elif self.latent:
            self.put(slots, {"k": torch.cat((k, v), -1)})
        else:
            self.k.flatten(0, 1)[slots], self.v.flatten(0, 1)[slots] = k, v

    @property
    def head_dim_v(self) -> int | None:
        """As of `KVCache`: how many numbers of a key are its value, all of them, where there are no values."""
        return self.k.shape[3] if self.joined else None

    @property
    def joined(self) -> bool:
        """Whether `k` holds both, and `v` nothing."""
        return self.latent and self.stored is None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """k, v, in 8 bits k_scale and v_scale, and index_k, [pages, page_size, ...]; none before the first token."""
        tensors = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale, "index_k": self.index_k}
        return {name: x for name, x in tensors.items() if x is not None}

    def put(self, slots: Tensor, tokens: dict[str, Tensor]) -> None:
        """Put already quantized tokens, [n, ...] of some of `tensors`, into slots, int64 [n]."""
        for name, x in tokens.items():
            pages = getattr(self, name)
            x, bits = x.to(pages.dtype), _bits(pages)
            if name.endswith("scale"):
                pages[self._place(slots)] = x
            elif bits == pages.dtype:
                pages.flatten(0, 1)[slots] = x
            else:
                pages.flatten(0, 1).view(bits)[slots] = x.view(bits)

    def read(self, name: str, slots: Tensor) -> Tensor:
        """The content of slots, int64 [n], in one of `tensors`, as stored: [n, ...]."""
        pages = self.tensors[name]
        return pages.view(_bits(pages))[self._place(slots.to(pages.device))].view(pages.dtype)

    def _place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Pages and offsets in them."""
        return slots // self.page_size, slots % self.page_size

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (from, to), one at least, which are reserved. Does nothing before the first token."""
        if self.k is None:
            return
        sources, destinations = on_device(torch.tensor(pairs), self.k.device).T
        for pages in self.tensors.values():
            pages = pages.view(_bits(pages))
            pages[destinations] = pages[sources]

    def kv_cache(self, block_table: Tensor, **fields) -> KVCache:
        """The rows of a block table as the kernels take them; fields: others of `KVCache`."""
        return KVCache(self.k, self.v, self.k_scale, self.v_scale, self.head_dim_v, block_table=block_table, **fields)

    def row(self, block_table: Tensor, row: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The first `length` tokens of a row: k [1, length, h_kv, d], v [1, length, h_kv, d_v] in dtype.

        Latents: k [1, length, 1, r + rotary head_dim], None.
        """
        k, v, *_ = self.kv_cache(block_table).row(row, dtype, length)
        return (torch.cat((k, v), -1), None) if self.latent and not self.joined else (k, v)

    def entries(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Latents and rotary keys, side by side, of slots int64 [...]: [..., 1, r + rotary head_dim] in dtype."""
        if self.joined:
            return self.k.flatten(0, 1)[slots]
        k, v, k_scale, v_scale = (self.read(name, slots) for name in ("k", "v", "k_scale", "v_scale"))
        return torch.cat((k.float() * k_scale[..., None], v.float() * v_scale[..., None]), -1).to(dtype)

    def index_row(self, block_table: Tensor, row: int, length: int) -> Tensor:
        """The index keys of the first `length` tokens of a row: [length, d_i]."""
        lengths = torch.full((len(block_table),), length)
        return (
            KVCache(self.index_k, self.index_k, block_table=block_table, lengths=lengths)
            .row(row, self.index_k.dtype, length)
            .k[0, :, 0]
        )

    @property
    def bytes_of_a_token(self) -> int:
        """Bytes of one token's keys, values and scales; 0 before the first token."""
        return sum(x[0, 0].numel() * x.element_size() for x in self.tensors.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages, including free ones."""
        return sum(x.nbytes for x in self.tensors.values())


def _bits(x: Tensor) -> torch.dtype:
    """A dtype that torch can index: not every device has index_put for fp8."""
    return torch.uint8 if x.dtype == torch.float8_e4m3fn else x.dtype


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., d] in 8 bits (int8 or fp8), and the scale fp32 [...] of each vector: their product is about x. d may be
    0: of latent attention without rotary keys."""
    largest = _LARGEST[dtype]
    scale = (x.abs().amax(-1) if x.shape[-1] else x.sum(-1)).float().clamp(min=1e-30) / largest
    scaled = x.float() / scale[..., None]
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype), scale


# pages that rows share: which numbers are used, and where a row's pages are


class PageNumbers:
    """Assigns the lowest free page numbers and counts references; a page without references is free.

    Attributes: capacity: numbers that were assigned.
    """

    def __init__(self):
        self.capacity = 0
        self._free: list[int] = []
        self._references: Counter[int] = Counter()

    @property
    def used(self) -> int:
        """Number of pages that are referenced."""
        return len(self._references)

    def take(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, self.capacity = self.capacity, self.capacity + 1
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        self._references[page] += 1
        return page

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def forget_free(self) -> None:
        """Start again from 0. No page may be referenced any more."""
        assert not self._references, self._references
        self._free.clear()
        self.capacity = 0

    def release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            del self._references[page]
            heapq.heappush(self._free, page)


@dataclass(eq=False, slots=True)
class RowPage:
    """A page of neighbouring tokens of a row, or of rows that share it."""

    rank: int
    holders: int = 1
    """Rows that have it, and `Prefixes`."""
    prefix: int | None = None
    """Its number there."""
    in_windows: dict[int, int] = field(default_factory=dict)
    """By kind of layer with a window: those of its holders that have it there still."""


@dataclass
class PageRuns:
    """Indices of a row's pages on one rank, ascending, as runs of neighbours: prompts make a few, however long."""

    firsts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """How many pages are in earlier runs."""

    def add(self, index: int) -> None:
        """index: behind all others."""
        if self.stops and self.stops[-1] == index:
            self.stops[-1] += 1
        else:
            self.before.append(self.count())
            self.firsts.append(index)
            self.stops.append(index + 1)

    def count(self, stop: int | None = None) -> int:
        """How many pages there are, before index `stop`."""
        i = len(self.firsts) if stop is None else bisect.bisect_left(self.firsts, stop)
        if not i:
            return 0
        last = self.stops[i - 1] if stop is None else min(stop, self.stops[i - 1])
        return self.before[i - 1] + last - self.firsts[i - 1]

    def since(self, index: int) -> list[tuple[int, int]]:
        """Runs (first, stop) of the pages from this one on."""
        i = bisect.bisect_right(self.stops, index)
        return [(max(first, index), stop) for first, stop in zip(self.firsts[i:], self.stops[i:])]

    def cut(self, stop: int) -> None:
        """Drop page `stop` and those behind it."""
        n = bisect.bisect_left(self.firsts, stop)
        del self.firsts[n:], self.stops[n:], self.before[n:]
        if n:
            self.stops[-1] = min(self.stops[-1], stop)

    def copy(self) -> PageRuns:
        return PageRuns(list(self.firsts), list(self.stops), list(self.before))
