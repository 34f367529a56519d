"""Programs of a launch, many at a time: all threads of a batch execute the same instruction.

Where programs go different ways, the batch is divided. Where threads of one program do, those that are furthest behind
run alone (instructions of whole warps must not come before they meet again).
"""

import numpy as np

from . import matrix, words
from .boxes import MAPS, Boxes, TensorMap
from .memory import GlobalMemory
from .products import Products
from .shared import SharedMemory
from .syntax import Fault, Program
from .translate import Translator

LANES = 4096  # threads in a batch: enough that Python's part of an instruction does not matter


class Kernel:
    """A compiled kernel, its threads and its bytes of shared memory."""

    def __init__(self, program: Program, threads: int, shared: int, translator: Translator | None = None):
        self.program, self.threads, self.shared = program, threads, shared
        self.translator = translator or Translator(program)

    def run(self, grid: tuple[int, int, int], arguments: list, memory: GlobalMemory) -> None:
        """Run all programs of a grid; arguments: a number or an address for each parameter."""
        values = [_as_parameter(kind, x) for (kind, _), x in zip(self.program.params, arguments)]
        programs = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 3)
        size = max(1, LANES // self.threads)
        try:
            with np.errstate(all="ignore"):
                for i in range(0, len(programs), size):
                    waiting = [Batch.new(self, programs[i : i + size], grid, values, memory)]
                    while waiting:
                        waiting += waiting.pop().run()
        except Fault as fault:
            raise Fault(f"{self.program.name} ({self.program.target}): {fault}") from None


def _as_parameter(kind: str, x) -> np.ndarray | TensorMap:
    if isinstance(x, TensorMap):
        return x
    dtype = np.dtype(words.TYPES[kind])
    if dtype.kind == "f":
        return np.array(x, dtype)
    return np.array(int(x) & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}")


class Batch:
    """Programs that are at the same place. Translated code calls its methods and those of its parts; `registers` are
    its variables."""

    def __init__(self, translator: Translator, memory: GlobalMemory, shared: SharedMemory, values: list, at: int):
        self.translator, self.memory, self.shared, self.values = translator, memory, shared, values
        self.shape = len(shared.bytes), len(shared.warps)
        self.at, self.threads_at = at, None  # the latter: [programs, threads], where threads are apart

    @classmethod
    def new(cls, kernel: Kernel, programs, grid, values, memory) -> "Batch":
        threads = np.arange(kernel.threads, dtype=np.uint32)
        shared = SharedMemory(len(programs), kernel.shared, (threads // 32).astype(np.int8))
        self = cls(kernel.translator, memory, shared, values, 0)
        self.registers = dict(M=self, tid_x=threads[None], tid_y=np.uint32(0), tid_z=np.uint32(0))
        self.registers |= dict(laneid=threads[None] % 32, warpid=threads[None] // 32, ntid_x=np.uint32(kernel.threads))
        for axis, name in enumerate("xyz"):
            self.registers[f"ctaid_{name}"] = programs[:, axis, None].astype(np.uint32)
            self.registers[f"nctaid_{name}"] = np.uint32(grid[axis])
        self.products = Products(*self.shape, self.registers)
        self.boxes = Boxes(len(programs))
        return self

    def part(self, programs: np.ndarray, at: int, threads_at: np.ndarray | None = None) -> "Batch":
        """The programs of a mask, which go on at block `at`."""
        new = Batch(self.translator, self.memory, self.shared.part(programs), self.values, at)
        own = lambda x: isinstance(x, np.ndarray) and x.ndim == 2 and len(x) == self.shape[0] > 1  # noqa: E731
        new.registers = {name: x[programs] if own(x) else x for name, x in self.registers.items()} | {"M": new}
        new.products = self.products.part(programs, new.registers)
        new.boxes = self.boxes.part(programs)
        new.threads_at = threads_at
        return new

    def run(self) -> list["Batch"]:
        """To the end (an empty list), or to where the batch must be divided: its parts."""
        end = len(self.translator.ranges)
        while self.at < end:
            if self.threads_at is not None:
                self._run_apart()
                continue
            block = self._execute(masked=False)
            self.at += 1
            if block.target is None:
                continue
            if block.predicate is None:
                self.at = block.target
                continue
            taken = np.broadcast_to(self.registers[block.predicate] ^ block.negated, self.shape)
            every, some = taken.all(1), taken.any(1)
            if every.all():
                self.at = block.target
            elif some.any():
                return self._divide(taken, every, some, block.target)
        self.shared.finish()
        self.products.finish()
        self.boxes.finish()
        return []

    def _divide(self, taken, every, some, target: int) -> list["Batch"]:
        parts = [self.part(every, target)] if every.any() else []
        if not some.all():
            parts.append(self.part(~some, self.at))
        mixed = some & ~every
        if mixed.any():
            parts.append(self.part(mixed, min(self.at, target), np.where(taken[mixed], target, self.at)))
        return parts

    def _run_apart(self) -> None:
        """One block, by the threads that are furthest behind."""
        self.at = int(self.threads_at.min())
        active = self.threads_at == self.at
        if active.all():
            self.threads_at = None
            return
        self.registers["active"] = active
        block = self._execute(masked=True)
        following = np.full(self.shape, self.at + 1)
        if block.target is not None:
            taken = True if block.predicate is None else self.registers[block.predicate] ^ block.negated
            following = np.where(taken, block.target, following)
        self.threads_at = np.where(active, following, self.threads_at)

    def _execute(self, masked: bool):
        block = self.translator.block(self.at, masked)
        try:
            exec(block.code, self.translator.names, self.registers)
        except NameError as error:
            raise Fault(f"{error.name} is read before it is written, or while a wgmma computes it") from None
        return block

    # what translated code calls

    def argument(self, n: int, dtype: np.dtype):
        x = self.values[n]
        return x.view(dtype) if x.itemsize == dtype.itemsize else x.astype(f"u{dtype.itemsize}").view(dtype)

    def where(self, mask, new, name: str):
        """The new value in some threads, what the register holds in the others."""
        old = self.registers.get(name)
        if old is None:  # nothing: all bits set, NaN for a float
            old = np.array(b"\xff" * new.itemsize).view(new.dtype) if new.dtype.kind != "b" else False
        return np.where(mask, new, old)

    def shuffle(self, how: str, x, by):
        lanes = np.broadcast_to(x, self.shape).reshape(-1, 32)
        if how == "bfly":
            return lanes[:, np.arange(32) ^ int(by)].reshape(self.shape)
        if how != "idx":
            raise Fault(f"not known: shfl.{how}")
        index = np.broadcast_to(by, self.shape).reshape(-1, 32) & 31
        return np.take_along_axis(lanes, index.astype(np.int64), 1).reshape(self.shape)

    def copy(self, to, source, size, kept, mask, line):
        """cp.async; kept: bytes that are read, the others are 0."""
        wanted = mask
        if kept is not None:
            if ((kept != 0) & (kept != size)).any():
                raise Fault(f"line {line}: not known: a copy of a part")
            wanted = kept != 0 if mask is None else mask & (kept != 0)
        (data,) = self.memory.load(source, size, 1, wanted, line)
        if wanted is not None:
            data = np.where(wanted, data, data.dtype.type(0))
        self.shared.start_copy(to, size, data, mask, line)

    def copy_box(self, to, tensor, coordinates, barrier, mask, line):
        """cp.async.bulk.tensor"""
        n = int(np.broadcast_to(tensor, self.shape)[0, 0]) - MAPS
        self.boxes.start(self.shared, self.memory, to, self.values[n], coordinates, barrier, mask, line)

    def add_box(self, tensor, coordinates, source, mask, line):
        """cp.reduce.async.bulk.tensor"""
        n = int(np.broadcast_to(tensor, self.shape)[0, 0]) - MAPS
        self.boxes.add(self.shared, self.values[n], coordinates, source, mask, line)

    def multiply(self, shape, kind, a, b, c, line):
        """mma.sync: c + a @ b of every warp."""
        if shape != "m16n8k16" or kind not in words.FROM:
            raise Fault(f"line {line}: not known: mma {shape} of {kind}")
        product = np.matmul(matrix.fragment_a(a, self.shape, kind), matrix.fragment_b(b, self.shape, kind))
        return [x + y for x, y in zip(c, matrix.rows_to_registers(product))]
