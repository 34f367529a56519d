"""wgmma: products that run on their own from their start to their wait.

- Accumulators under way do not exist: to read or to write one ends in a Fault.
- Registers must have passed a wgmma.fence since they were last written by anything but wgmma.
- Operands in shared memory are read at the wait, and must still be what they were at the start.
"""

from typing import NamedTuple

import numpy as np

from . import words
from .matrix import Operand, fragment_a, rows_from_registers, rows_to_registers
from .shared import SharedMemory
from .syntax import Fault


class Product(NamedTuple):
    """d (named registers) = add * d + a @ b.T of each warpgroup; a: registers or an operand [64, 16], b: [n, 16]."""

    names: tuple[str, ...]
    n: int
    kind: str
    a: object
    b: Operand
    add: np.ndarray  # [programs, warpgroups]
    transposed: tuple[bool, bool]
    seen: list[np.ndarray]  # bits of the operands at the start
    line: int

    def part(self, programs):
        a = self.a._replace(start=self.a.start[programs]) if isinstance(self.a, Operand) else self.a[programs]
        b = self.b._replace(start=self.b.start[programs])
        return self._replace(a=a, b=b, add=self.add[programs], seen=[x[programs] for x in self.seen])


class Products:
    """Of one batch."""

    def __init__(self, programs: int, threads: int, registers: dict):
        self.shape, self.groups_shape = (programs, threads), (programs, threads // 128, 128)
        self.registers = registers  # of the batch, by name
        self.fenced: dict[str, object] = {}
        self.values: dict[str, np.ndarray] = {}  # of accumulators under way
        self.open: list[Product] = []
        self.groups: list[list[Product]] = []

    def part(self, programs, registers: dict) -> "Products":
        new = Products(int(np.sum(programs)), self.shape[1], registers)
        new.fenced = {name: registers.get(name) for name in self.fenced}
        new.values = {name: np.broadcast_to(x, self.shape)[programs] for name, x in self.values.items()}
        new.open = [x.part(programs) for x in self.open]
        new.groups = [[x.part(programs) for x in group] for group in self.groups]
        return new

    def fence(self) -> None:
        self.fenced = dict(self.registers)

    def start(self, memory: SharedMemory, n, kind, names, sources, a, b, add, transposed, line) -> None:
        for name in (*names, *sources):
            if name not in self.values and self.registers.get(name) is not self.fenced.get(name):
                raise Fault(f"line {line}: {name} was written after the last wgmma.fence")
        if names[0] not in self.values:
            self.values |= {name: self.registers.pop(name, None) for name in names}
        split = lambda x: np.broadcast_to(x, self.shape).reshape(self.groups_shape)  # noqa: E731
        operands = [(Operand.of(split(b), line), n, transposed[1])]
        if isinstance(a, list):
            a = fragment_a(a, self.shape, kind).reshape(*self.groups_shape[:2], 64, 16)
        else:
            a = Operand.of(split(a), line)
            operands.append((a, 64, transposed[0]))
        seen = []
        for operand, rows, is_transposed in operands:
            bits, access = operand.read(memory, rows, is_transposed, line)
            memory.check_fenced(access)
            seen.append(bits)
        add = split(add)
        if (add != add[..., :1]).any():
            raise Fault(f"line {line}: threads of a warpgroup differ in whether they add")
        self.open.append(Product(names, n, kind, a, operands[0][0], add[..., 0], transposed, seen, line))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, memory: SharedMemory, pending: int, line: int) -> None:
        """All but the last `pending` groups are computed; accumulators that no other has become registers again."""
        done = []
        while len(self.groups) > pending:
            done += self.groups.pop(0)
        for names in dict.fromkeys(x.names for x in done):
            self._compute(memory, [x for x in done if x.names == names])
        busy = {name for x in [*self.open, *(y for group in self.groups for y in group)] for name in x.names}
        for name in [x for x in self.values if x not in busy]:
            if name in self.registers:
                raise Fault(f"line {line}: {name} was written while a wgmma was computing it")
            self.registers[name] = self.fenced[name] = self.values.pop(name)

    def _compute(self, memory: SharedMemory, chain: list[Product]) -> None:
        """Products into the same accumulators, one after another."""
        names, total, unset = chain[0].names, None, [self.values[name] is None for name in chain[0].names]
        if not any(unset):
            shape = (*self.shape[:1], self.groups_shape[1], 128)
            total = rows_from_registers([self._split(self.values[name]) for name in names], shape)
            total = total.reshape(*shape[:2], 64, -1)
        for x in chain:
            b, _ = x.b.read(memory, x.n, x.transposed[1], x.line)
            bits = [b]
            if isinstance(x.a, Operand):
                a, _ = x.a.read(memory, 64, x.transposed[0], x.line)
                bits, a = [b, a], words.FROM[x.kind](a)
            else:
                a = x.a
            if not all(np.array_equal(now, then) for now, then in zip(bits, x.seen)):
                raise Fault(f"line {x.line}: an operand of wgmma changes before it is waited for")
            product = np.matmul(a, words.FROM[x.kind](b).swapaxes(-1, -2))
            if x.add.any():
                if total is None:
                    raise Fault(f"line {x.line}: accumulators that were never set")
                product += np.where(x.add[..., None, None], total, np.float32(0))
            total = product
        registers = rows_to_registers(total.reshape(*total.shape[:2], 4, 16, -1))
        self.values |= {name: r.reshape(self.shape) for name, r in zip(names, registers)}

    def _split(self, x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, self.shape).reshape(self.groups_shape)

    def finish(self) -> None:
        if self.values:
            raise Fault("the program ends before its products were waited for")
