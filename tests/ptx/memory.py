"""Global memory of a launch: it ends where the tensors' elements do."""

import numpy as np
import torch

from .syntax import Fault

BASE = 1 << 40  # addresses take 64 bits
GAP = 1024  # bytes between tensors, and their alignment
WORDS = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}  # moved as a whole, whatever they mean


def bytes_of(x: torch.Tensor) -> np.ndarray:
    """uint8 view of a tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()


def elements_of(x: torch.Tensor) -> np.ndarray:
    """bool for each byte of the storage: whether it belongs to an element of x."""
    size = x.untyped_storage().nbytes()
    owned = torch.zeros(size // x.element_size() + 1, dtype=torch.bool)
    shape = [1 if stride == 0 else n for n, stride in zip(x.shape, x.stride())]
    torch.as_strided(owned, shape, x.stride(), x.storage_offset()).fill_(True)
    return np.repeat(owned.numpy(), x.element_size())[:size]


def columns(raw: np.ndarray, count: int) -> np.ndarray:
    """[..., words of count numbers] -> the numbers [count, ...]."""
    if count == 1:
        return raw[None]
    whole = raw[..., None].view(f"u{raw.itemsize // count}")
    return np.ascontiguousarray(np.moveaxis(whole, -1, 0))


def words_of(values: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `columns`; values broadcast to `shape`."""
    size = values[0].itemsize * len(values)
    whole = np.empty((*shape, len(values)), values[0].dtype)
    for n, x in enumerate(values):
        whole[..., n] = x
    return whole.view(WORDS[size])[..., 0]


class GlobalMemory:
    """The tensors that a launch is given, each where its alignment is that of its own address."""

    def __init__(self, tensors: list[torch.Tensor]):
        self._starts, self._storages, top = {}, [], GAP
        for x in tensors:
            storage = x.untyped_storage()
            if storage.data_ptr() not in self._starts:
                self._starts[storage.data_ptr()] = top
                self._storages.append((top, x))
                top += -(-storage.nbytes() // GAP) * GAP + GAP
        self._bytes, self._owned = np.full(top, 0xFF, np.uint8), np.zeros(top, np.uint8)
        for start, x in self._storages:
            raw = bytes_of(x)
            self._bytes[start : start + len(raw)] = raw
        for x in tensors:
            owned, start = elements_of(x), self._starts[x.untyped_storage().data_ptr()]
            self._owned[start : start + len(owned)] |= owned
        self._views = {n: self._bytes.view(dtype) for n, dtype in WORDS.items()}

    def address(self, x: torch.Tensor) -> int:
        return BASE + self._starts[x.untyped_storage().data_ptr()] + x.storage_offset() * x.element_size()

    def give_back(self) -> None:
        """Write what the programs stored into the tensors."""
        for start, x in self._storages:
            raw = bytes_of(x)
            raw[...] = self._bytes[start : start + len(raw)]

    def _index(self, address, size: int, mask, line: int) -> np.ndarray:
        """Index of words of `size` bytes; where mask is False, that of a word of nobody's."""
        at = address.view(np.uint64) - np.uint64(BASE)
        bad = (at > np.uint64(len(self._bytes) - size)) | ((at & np.uint64(size - 1)) != 0)
        if mask is not None:
            bad = bad & mask
        if np.any(bad):
            raise Fault(
                f"line {line}: address {int(np.broadcast_to(at, bad.shape)[bad][0])} is misaligned, or far outside"
            )
        index = (at >> np.uint64(size.bit_length() - 1)).astype(np.int64)
        if mask is not None:
            index = np.where(mask, index, 0)
        owned = self._owned.view(WORDS[min(size, 8)])
        whole = owned[index] if size < 16 else owned.reshape(-1, 2)[index].min(-1)
        lost = whole != np.iinfo(owned.dtype).max // 255
        if mask is not None:
            lost = lost & mask
        if np.any(lost):
            raise Fault(f"line {line}: {np.sum(lost)} accesses of {size} bytes outside of all tensors' elements")
        return index

    def load(self, address, size: int, count: int, mask, line: int) -> np.ndarray:
        """[count, programs, threads] of unsigned numbers of `size` bytes."""
        index = self._index(address, size * count, mask, line)
        return columns(self._views[size * count].take(index), count)

    def add(self, address, data: np.ndarray, mask, line: int) -> None:
        """Add words of four fp32, by all programs that name a place."""
        index = 4 * self._index(address, 16, mask, line)[mask][:, None] + np.arange(4)
        np.add.at(self._bytes.view(np.float32), index, data[mask][:, None].view(np.float32))

    def store(self, address, size: int, values: list[np.ndarray], mask, line: int) -> None:
        index = self._index(address, size * len(values), mask, line)
        if mask is not None:
            index, mask = np.broadcast_arrays(index, mask)
        whole = words_of(values, np.broadcast_shapes(index.shape, *(x.shape for x in values)))
        index = np.broadcast_to(index, whole.shape)
        if mask is not None:
            mask = np.broadcast_to(mask, whole.shape)
            index, whole = index[mask], whole[mask]
        self._views[size * len(values)][index] = whole
