"""Shared memory of a batch of programs: copies arrive at their wait, and accesses between two barriers are compared.

- Memory that nobody has written, and the destination of a copy that is not waited for, hold 0xff: NaN in every float.
- Two warps must not touch the same bytes between two barriers if one of them writes. (Two warps that write in the same
  instruction may: a layout may hold a number twice.)
- wgmma reads through the asynchronous proxy: what threads wrote must have passed a fence.proxy.async.
"""

from typing import NamedTuple

import numpy as np

from .memory import WORDS, columns, words_of
from .syntax import Fault

SEVERAL = -2  # as a reader: all warps of a warpgroup, of which no single one can be the writer
CHUNK = 16  # bytes, of which fences keep account


class Access(NamedTuple):
    """Addresses [programs, n] of `size` bytes each, by warps [n], where mask [programs, n] is None or True."""

    address: np.ndarray
    size: int
    warps: np.ndarray
    mask: np.ndarray | None
    line: int

    def part(self, programs):
        return self._replace(address=self.address[programs], mask=None if self.mask is None else self.mask[programs])


class Copy(NamedTuple):
    """A cp.async under way."""

    access: Access
    data: np.ndarray  # words [programs, threads]


class SharedMemory:
    """[programs, bytes]; addresses are a program's own."""

    def __init__(self, programs: int, size: int, warps: np.ndarray):
        self.limit, self.warps = size, warps
        self.bytes = np.full((programs, -(-size // CHUNK) * CHUNK + CHUNK), 0xFF, np.uint8)
        self.unfenced = np.zeros((programs, self.bytes.shape[1] // CHUNK), bool)
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.open: list[Copy] = []
        self.groups: list[list[Copy]] = []

    def part(self, programs: np.ndarray) -> "SharedMemory":
        """The memory of some programs of the batch."""
        new = object.__new__(SharedMemory)
        new.limit, new.warps = self.limit, self.warps
        new.bytes, new.unfenced = self.bytes[programs], self.unfenced[programs]
        new.reads, new.writes = ([x.part(programs) for x in log] for log in (self.reads, self.writes))
        halves = lambda copies: [Copy(x.access.part(programs), x.data[programs]) for x in copies]  # noqa: E731
        new.open, new.groups = halves(self.open), [halves(group) for group in self.groups]
        return new

    def access(self, address, size: int, mask, line: int, warps=None) -> Access:
        """Check bounds and alignment; where mask is False the address becomes 0."""
        warps = self.warps if warps is None else warps
        shape = len(self.bytes), len(warps)
        bad = (address > np.uint32(max(self.limit - size, 0))) | ((address & np.uint32(size - 1)) != 0)
        if mask is not None:
            bad, mask = bad & mask, np.broadcast_to(mask, shape)
        if np.any(bad):
            wrong = int(np.broadcast_to(address, shape)[np.broadcast_to(bad, shape)][0])
            raise Fault(
                f"line {line}: {size} bytes at {wrong} of shared memory: misaligned, or beyond {self.limit} bytes"
            )
        address = address.astype(np.int64) if mask is None else np.where(mask, address, 0).astype(np.int64)
        return Access(np.broadcast_to(address, shape), size, warps, mask, line)

    def locate(self, access: Access):
        """(all memory as words of the access' size, index of its words)."""
        size = access.size
        rows = np.arange(len(self.bytes))[:, None] * (self.bytes.shape[1] // size)
        return self.bytes.reshape(-1).view(WORDS[size]), (access.address >> (size.bit_length() - 1)) + rows

    def read(self, access: Access) -> np.ndarray:
        """Words [programs, n]."""
        memory, index = self.locate(access)
        self.reads.append(access)
        return memory.take(index)

    def write(self, access: Access, data: np.ndarray) -> None:
        memory, index = self.locate(access)
        self.writes.append(access)
        rows = np.broadcast_to(np.arange(len(self.bytes))[:, None], index.shape)
        chunk = access.address // CHUNK
        if access.mask is not None:
            index, data, rows, chunk = (x[access.mask] for x in (index, data, rows, chunk))
        memory[index] = data
        self.unfenced[rows, chunk] = True

    def load(self, address, size: int, count: int, mask, line: int) -> np.ndarray:
        return columns(self.read(self.access(address, size * count, mask, line)), count)

    def store(self, address, size: int, values: list[np.ndarray], mask, line: int) -> None:
        access = self.access(address, size * len(values), mask, line)
        self.write(access, words_of(values, access.address.shape))

    # asynchronous copies

    def start_copy(self, address, size: int, data: np.ndarray, mask, line: int) -> None:
        access = self.access(address, size, mask, line)
        self.write(access, np.full(access.address.shape, 0xFF, np.uint8).repeat(size, 1).view(WORDS[size]))
        self.open.append(Copy(access, np.broadcast_to(data, access.address.shape)))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int, line: int) -> None:
        """All but the last `pending` groups arrive."""
        while len(self.groups) > pending:
            for copy in self.groups.pop(0):
                self.write(copy.access._replace(line=line), copy.data)

    # copies by descriptor: what they write has come through the asynchronous proxy

    def overwrite(self, access: Access) -> None:
        """From now on, and until `arrive`, nobody knows what is there."""
        rows = np.broadcast_to(np.arange(len(self.bytes))[:, None], access.address.shape)[access.mask]
        if self.unfenced[rows, access.address[access.mask] // CHUNK].any():
            raise Fault(f"line {access.line}: a copy overwrites what was written without a fence.proxy.async since")
        self.writes.append(access)
        self.arrive(
            access, np.full(access.address.shape, 0xFF, np.uint8).repeat(CHUNK, 1).view(WORDS[CHUNK]), access.mask
        )

    def arrive(self, access: Access, data: np.ndarray, mask: np.ndarray) -> None:
        memory, index = self.locate(access)
        memory[index[mask]] = data[mask]

    # rules

    def fence(self) -> None:
        self.unfenced[...] = False

    def check_fenced(self, access: Access) -> None:
        unfenced = self.unfenced[np.arange(len(self.bytes))[:, None], access.address // CHUNK]
        if (unfenced if access.mask is None else unfenced & access.mask).any():
            raise Fault(f"line {access.line}: wgmma or a copy reads what was written without a fence.proxy.async since")

    def barrier(self) -> None:
        """End of an interval: no two warps may have touched the same bytes, but to read them."""
        if self.writes:
            unit = min(x.size for x in self.writes)
            width = self.bytes.shape[1] // unit
            owner, line_of = np.full(len(self.bytes) * width, -1, np.int8), {}
            for access in self.writes:
                self._compare(access, owner, unit, width, line_of, "written")
                at, warps = _units(access, unit, width)
                owner[at] = warps
                line_of[access.line] = None
            for access in self.reads:
                self._compare(access, owner, unit, width, line_of, "read")
        self.reads, self.writes = [], []

    def _compare(self, access: Access, owner, unit: int, width: int, line_of: dict, what: str) -> None:
        at, warps = _units(access, unit, width)
        found = owner[at]
        clash = (found >= 0) & (found != warps)
        if clash.any():
            others = ", ".join(map(str, line_of))
            raise Fault(
                f"line {access.line}: race: {clash.sum()} pieces of shared memory are {what} that another warp writes "
                f"between the same two barriers (writes in lines {others})"
            )

    def finish(self) -> None:
        self.barrier()
        if any(self.groups) or self.open:
            raise Fault("the program ends before its asynchronous copies were waited for")


def _units(access: Access, unit: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(index of every piece of `unit` bytes that was touched, by which warp)."""
    pieces = max(access.size // unit, 1)
    at = (
        (access.address // unit)[..., None]
        + np.arange(pieces)
        + (np.arange(len(access.address)) * width)[:, None, None]
    )
    warps = np.broadcast_to(access.warps[None, :, None], at.shape)
    if access.mask is not None:
        return at[access.mask].ravel(), warps[access.mask].ravel()
    return at.ravel(), warps.ravel()
