"""Copies by descriptor (TMA), and the barriers in shared memory (mbarrier) that say when they have arrived.

- A copy arrives when its barrier is waited for, not before: until then its destination holds 0xff.
- A phase of a barrier ends when all arrivals that it counts and all bytes that were expected have come. All threads of
  a program wait together, so a wait for a phase that can't end is a Fault.
- A copy must not overwrite what threads wrote without a fence.proxy.async since. Its write counts as one of the warp
  that starts it; arrival needs no barrier of threads, because every thread waits for itself.
- A box that is added to a tensor must have passed a fence.proxy.async, and is read when it is waited for, not before.
"""

from typing import NamedTuple

import numpy as np

from .memory import BASE
from .shared import CHUNK, Access, SharedMemory
from .syntax import Fault

MAPS = BASE << 1  # addresses of descriptors
COUNT, PENDING, BYTES, PHASE = range(4)  # of a barrier: arrivals of a phase, those to come, bytes to come, number


class TensorMap(NamedTuple):
    """A descriptor that the host made: a tensor and the boxes that are copied; dimensions from the innermost."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    swizzle: int

    @classmethod
    def of(cls, descriptor, made: dict, address: int) -> "TensorMap":
        """made: what the compiler says about this descriptor (tensordesc_meta)."""
        size = made["elem_size"]
        strides = (x * size for x in reversed(descriptor.strides))
        return cls(address, (*descriptor.shape[::-1],), (*strides,), (*made["block_size"][::-1],), made["swizzle"])

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.box)) * self.strides[0]

    def chunks(self, coordinates: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(addresses, whether they lie inside of the tensor) of a box's chunks of 16 bytes [..., chunks], in order."""
        per = CHUNK // self.strides[0]  # elements of a chunk
        grids = np.meshgrid(*(np.arange(0, n, 1 if d else per) for d, n in enumerate(self.box)), indexing="ij")
        address, inside = np.int64(self.address), True
        for d, grid in enumerate(grids):
            at = coordinates[d].astype(np.int64)[..., None] + grid.ravel(order="F")
            if d == 0 and ((at % per != 0).any() or self.shape[0] % per):
                raise Fault("not known: a box that begins or ends inside of 16 bytes")
            address = address + at * self.strides[d]
            inside = inside & (at >= 0) & (at < self.shape[d])
        return address, inside


class Copy(NamedTuple):
    """A copy under way, one for each warp that has started it."""

    access: Access
    data: np.ndarray  # words [programs, warps * chunks]
    barrier: np.ndarray  # [programs, warps]: its address; -1: this warp copies nothing
    nbytes: int


class Sum(NamedTuple):
    """A box that is to be added to global memory."""

    access: Access
    address: np.ndarray  # of its chunks [programs, warps * chunks]
    wanted: np.ndarray  # which of them lie inside of the tensor


class Boxes:
    """Of one batch."""

    def __init__(self, programs: int):
        self.programs = programs
        self.barriers: dict[int, np.ndarray] = {}  # by address: [programs, 4]
        self.copies: list[Copy] = []
        self.sums: list[Sum] = []
        self.groups: list[list[Sum]] = []

    def part(self, programs: np.ndarray) -> "Boxes":
        new = Boxes(int(programs.sum()))
        new.barriers = {at: x[programs] for at, x in self.barriers.items()}
        parts = (Copy(x.access.part(programs), x.data[programs], x.barrier[programs], x.nbytes) for x in self.copies)
        new.copies = list(parts)
        halves = lambda sums: [Sum(x.access.part(programs), x.address[programs], x.wanted[programs]) for x in sums]  # noqa: E731
        new.sums, new.groups = halves(self.sums), [halves(group) for group in self.groups]
        return new

    def init(self, memory: SharedMemory, address, count: int, mask, line: int) -> None:
        memory.writes.append(memory.access(address, 8, mask, line))
        for at, programs in self._by_address(address, mask):
            state = self.barriers.setdefault(at, np.zeros((self.programs, 4), np.int64))
            if state[programs, COUNT].any():
                raise Fault(f"line {line}: a barrier that is in use is made again")
            state[programs] = count, count, 0, 0

    def invalidate(self, memory: SharedMemory, address, mask, line: int) -> None:
        memory.writes.append(memory.access(address, 8, mask, line))
        for at, programs in self._by_address(address, mask):
            if any((x.barrier[programs] == at).any() for x in self.copies):
                raise Fault(f"line {line}: a barrier ends before its copies were waited for")
            self._state(at, programs, line)[programs] = 0

    def expect(self, memory: SharedMemory, address, nbytes: int, mask, line: int) -> None:
        """An arrival, and so many more bytes to come in this phase."""
        memory.reads.append(memory.access(address, 8, mask, line))
        for at, programs in self._by_address(address, mask):
            state = self._state(at, programs, line)
            state[programs, BYTES] += nbytes
            state[programs, PENDING] -= 1
            self._advance(state)

    def start(self, memory: SharedMemory, source, to, tensor: TensorMap, coordinates, barrier, mask, line: int) -> None:
        """One thread of a warp copies a box from the global memory `source`, or zeros beyond the tensor."""
        some, of_warp = self._starters(memory, mask, line)
        if not some.any():
            return
        shape, barrier = some.shape, np.where(some, of_warp(barrier).astype(np.int64), -1)
        for at in np.unique(barrier[some]):
            self._state(int(at), (barrier == at).any(-1), line)
        memory.reads.append(Access(np.where(some, barrier, 0), 8, np.arange(shape[1]), some, line))
        access, address, wanted = self._box(memory, to, tensor, coordinates, some, of_warp, line)
        (data,) = source.load(address, CHUNK, 1, wanted, line)
        data = np.where(wanted, data, data.dtype.type(0))
        memory.overwrite(access)
        self.copies.append(Copy(access, data, barrier, tensor.nbytes))

    def add(self, memory: SharedMemory, tensor: TensorMap, coordinates, source, mask, line: int) -> None:
        """One thread of a warp adds a box of fp32 to a tensor; what lies beyond the tensor is left out."""
        some, of_warp = self._starters(memory, mask, line)
        if some.any():
            found = Sum(*self._box(memory, source, tensor, coordinates, some, of_warp, line))
            memory.check_fenced(found.access)
            self.sums.append(found)

    def commit_sums(self) -> None:
        self.groups.append(self.sums)
        self.sums = []

    def wait_for_sums(self, memory: SharedMemory, target, pending: int, line: int) -> None:
        """Until all but the last `pending` groups have been read."""
        while len(self.groups) > pending:
            for access, address, wanted in self.groups.pop(0):
                target.add(address, memory.read(access._replace(line=line)), wanted, line)

    def _starters(self, memory: SharedMemory, mask, line: int):
        """(bool [programs, warps]: which warps start something, the function that picks their threads' numbers)."""
        shape = self.programs, len(memory.warps) // 32, 32
        started = np.broadcast_to(True if mask is None else mask, (shape[0], 32 * shape[1])).reshape(shape)
        if (started.sum(-1) > 1).any():
            raise Fault(f"line {line}: several threads of a warp start one copy each: not known")
        lane = started.argmax(-1)[..., None]
        of_warp = lambda x: np.take_along_axis(  # noqa: E731
            np.broadcast_to(x, (shape[0], 32 * shape[1])).reshape(shape), lane, -1
        )[..., 0]
        return started.any(-1), of_warp

    @staticmethod
    def _box(memory: SharedMemory, shared, tensor: TensorMap, coordinates, some, of_warp, line: int):
        """The chunks of a box of each warp: (access in shared memory, global addresses, which are in the tensor)."""
        shared = of_warp(shared).astype(np.int64)
        if (some & (shared % 128 != 0)).any():
            raise Fault(f"line {line}: a box in shared memory is not aligned to 128 bytes")
        address, inside = tensor.chunks([of_warp(x).view(np.int32) for x in coordinates])
        chunks, flat = address.shape[-1], (len(some), -1)
        place = shared[..., None] + CHUNK * np.arange(chunks)
        place = place ^ (((place >> 7) & ((1 << tensor.swizzle) - 1)) << 4)
        place, warps = place.reshape(flat).astype(np.uint32), np.repeat(np.arange(some.shape[1]), chunks)
        access = memory.access(place, CHUNK, np.repeat(some, chunks, -1), line, warps)
        return access, address.reshape(flat).view(np.uint64), (inside & some[..., None]).reshape(flat)

    def wait(self, memory: SharedMemory, address, parity, line: int) -> np.ndarray:
        """Until the phase of this parity has ended: True."""
        memory.reads.append(memory.access(address, 8, None, line))
        parity = np.broadcast_to(parity, (self.programs, len(memory.warps)))
        if (parity != parity[:, :1]).any():
            raise Fault(f"line {line}: threads of a program wait for different phases")
        for at, programs in self._by_address(address, None):
            state = self._state(at, programs, line)
            waiting = programs & ((state[:, PHASE] & 1) == parity[:, 0])
            for copy in self.copies:
                arrived = (copy.barrier == at) & waiting[:, None]
                memory.arrive(copy.access, copy.data, np.repeat(arrived, copy.data.shape[1] // arrived.shape[1], -1))
                state[:, BYTES] -= copy.nbytes * arrived.sum(-1)
                copy.barrier[arrived] = -1
            self._advance(state)
            if stuck := (waiting & ((state[:, PHASE] & 1) == parity[:, 0])).nonzero()[0].tolist():
                pending, missing = state[stuck[0], [PENDING, BYTES]]
                raise Fault(f"line {line}: a wait without end: {pending} arrivals and {missing} bytes are missing")
        self.copies = [x for x in self.copies if (x.barrier >= 0).any()]
        return np.True_

    def finish(self) -> None:
        if self.copies or self.sums or any(self.groups):
            raise Fault("the program ends before its copies by descriptor were waited for")

    def _by_address(self, address, mask):
        """(address, bool [programs]) of every barrier that is named; one in each program."""
        where = np.broadcast_to(True if mask is None else mask, np.broadcast_shapes(np.shape(mask), (self.programs, 1)))
        address, where = np.broadcast_arrays(address, where)
        for at in np.unique(address[where]):
            yield int(at), ((address == at) & where).any(-1)

    def _state(self, at: int, programs: np.ndarray, line: int) -> np.ndarray:
        state = self.barriers.get(at)
        if state is None or not state[programs, COUNT].all():
            raise Fault(f"line {line}: there is no barrier at {at} of shared memory")
        return state

    @staticmethod
    def _advance(state: np.ndarray) -> None:
        ended = (state[:, COUNT] > 0) & (state[:, PENDING] == 0) & (state[:, BYTES] == 0)
        state[ended, PHASE] += 1
        state[ended, PENDING] = state[ended, COUNT]
