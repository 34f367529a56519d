"""Matrix instructions: fragments in registers, matrices of 8 x 8 in shared memory, wgmma and its descriptors.

A fragment of 16-bit numbers: lane 4 g + t of a warp holds columns 2 t and 2 t + 1 of row g, two numbers in a register.
Products are exact in fp32 and summed in fp32; a GPU's order of summation is its own.
"""

import functools
from typing import NamedTuple

import numpy as np

from . import words
from .shared import SEVERAL, Access, SharedMemory
from .syntax import Fault


def _bits(registers: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Registers of 32 bits [..., lanes] as pairs of 16 bits [..., warps, g, t, register, 2]."""
    stacked = np.stack([np.broadcast_to(r, shape) for r in registers], -1)
    return stacked.view(np.uint16).reshape(*shape[:-1], shape[-1] // 32, 8, 4, len(registers), 2)


def fragment_a(registers: list[np.ndarray], shape: tuple[int, ...], kind: str) -> np.ndarray:
    """[..., warps, 16, 16]; registers: rows g and g + 8 of columns 2 t.., then of columns 2 t + 8.."""
    pairs = _bits(registers, shape)
    pairs = pairs.reshape(*pairs.shape[:-2], 2, 2, 2)  # [..., g, t, column half, row half, 2]
    whole = np.ascontiguousarray(np.moveaxis(pairs, (-2, -3), (-5, -3)))  # [..., row half, g, column half, t, 2]
    return words.FROM[kind](whole.reshape(*whole.shape[:-5], 16, 16))


def fragment_b(registers: list[np.ndarray], shape: tuple[int, ...], kind: str) -> np.ndarray:
    """[..., warps, 16, 8]: lane 4 g + t holds rows 2 t.. of column g, then rows 2 t + 8.."""
    pairs = _bits(registers, shape)  # [..., g, t, half, 2]
    whole = np.ascontiguousarray(np.moveaxis(pairs, -2, -3))  # [..., g, half, t, 2]
    return words.FROM[kind](whole.reshape(*whole.shape[:-3], 16)).swapaxes(-1, -2)


def rows_to_registers(product: np.ndarray) -> list[np.ndarray]:
    """[..., warps, 16, n] fp32 -> 4 registers of every 8 columns: row g (columns 2 t and 2 t + 1), row g + 8."""
    *outer, warps, _, n = product.shape
    parts = product.reshape(*outer, warps, 2, 8, n // 8, 4, 2)  # row half, g, block of columns, t, 2
    parts = np.ascontiguousarray(np.moveaxis(parts, (-3, -5, -1), (0, 1, 2)))
    return list(parts.reshape(n // 2, *outer, warps * 32))


def rows_from_registers(registers: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The inverse: accumulators of a warp's 16 rows as [..., warps, 16, n]."""
    *outer, lanes = shape
    stacked = np.stack([np.broadcast_to(r, shape) for r in registers])
    parts = stacked.reshape(len(registers) // 4, 2, 2, *outer, lanes // 32, 8, 4)
    parts = np.moveaxis(parts, (0, 1, 2), (-3, -5, -1))
    return np.ascontiguousarray(parts).reshape(*outer, lanes // 32, 16, 2 * len(registers))


def load_matrices(memory: SharedMemory, address, count: int, transposed: bool, line: int) -> list[np.ndarray]:
    """ldmatrix: lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i."""
    access, shape = _rows(memory, address, count, line)
    rows = memory.read(access).view(np.uint16).reshape(*shape, count, 8, 8)
    rows = np.ascontiguousarray(rows.swapaxes(-1, -2) if transposed else rows)
    return [x.reshape(shape[0], -1) for x in np.moveaxis(rows.view(np.uint32), -3, 0).copy()]


def store_matrices(memory: SharedMemory, address, values: list[np.ndarray], transposed: bool, line: int) -> None:
    access, shape = _rows(memory, address, len(values), line)
    full = np.stack([np.broadcast_to(x, (shape[0], 32 * shape[1])) for x in values], 1)
    rows = full.reshape(shape[0], len(values), shape[1], 8, 4).swapaxes(1, 2).copy().view(np.uint16)
    rows = np.ascontiguousarray(rows.swapaxes(-1, -2) if transposed else rows)
    memory.write(access, rows.view(np.complex128).reshape(access.address.shape))


def _rows(memory: SharedMemory, address, count: int, line: int) -> tuple[Access, tuple[int, int]]:
    programs, warps = len(memory.bytes), len(memory.warps) // 32
    rows = np.broadcast_to(address, (programs, 32 * warps)).reshape(programs, warps, 32)[..., : 8 * count]
    of_warp = np.repeat(np.arange(warps), 8 * count)
    return memory.access(rows.reshape(programs, -1), 16, None, line, of_warp), (programs, warps)


class Operand(NamedTuple):
    """A wgmma descriptor, by program and warpgroup: where the operand begins; strides in bytes; swizzle mode."""

    start: np.ndarray  # [programs, warpgroups]
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def of(cls, descriptor: np.ndarray, line: int) -> "Operand":
        """descriptor: [programs, warpgroups, threads], the same in all threads of a warpgroup."""
        if (descriptor != descriptor[..., :1]).any():
            raise Fault(f"line {line}: threads of a warpgroup give different descriptors")
        one = descriptor[..., 0]
        rest = np.unique(one >> np.uint64(16))
        if len(rest) != 1:
            raise Fault(f"line {line}: descriptors differ in more than their start")
        fields = int(rest[0])
        if (fields >> 33) & 7:
            raise Fault(f"line {line}: not known: a descriptor with a base offset")
        start = (one & np.uint64(0x3FFF)).astype(np.int64) * 16
        return cls(start, (fields & 0x3FFF) * 16, ((fields >> 16) & 0x3FFF) * 16, fields >> 46)

    def read(self, memory: SharedMemory, rows: int, transposed: bool, line: int) -> tuple[np.ndarray, Access]:
        """Bits [programs, warpgroups, rows, 16], and what was read."""
        offsets = _chunks(self.swizzle, self.leading, self.stride, transposed, rows)
        address = self.start[..., None] + offsets
        address = address ^ (((address >> 7) & ((8 >> _SHIFT[self.swizzle]) - 1)) << 4)
        flat = address.reshape(len(address), -1)
        access = memory.access(flat.astype(np.uint32), 16, None, line, np.full(flat.shape[1], SEVERAL))
        bits = memory.read(access).view(np.uint16).reshape(*self.start.shape, -1, 8)
        if not transposed:  # chunks [rows, 2] of 8 columns
            return bits.reshape(*self.start.shape, rows, 16), access
        whole = bits.reshape(*self.start.shape, rows // 8, 16, 8)  # of 8 rows at one column
        return np.ascontiguousarray(whole.swapaxes(-1, -2)).reshape(*self.start.shape, rows, 16), access


_SHIFT = {0: 3, 1: 0, 2: 1, 3: 2}  # swizzle mode -> chunks of 16 bytes in its width: 8 >> shift


@functools.lru_cache
def _chunks(swizzle: int, leading: int, stride: int, transposed: bool, rows: int) -> np.ndarray:
    """Offsets, before the swizzle, of the chunks of 16 bytes of an operand of 16 columns (or rows, if transposed)."""
    wide = 8 >> _SHIFT[swizzle]
    if not transposed:
        i, j = np.arange(rows)[:, None], np.arange(2)
        if swizzle == 0:
            return (i % 8 * 16 + i // 8 * stride + j * leading).ravel()
        return (i % 8 * wide * 16 + i // 8 * stride + j * 16).ravel()
    i, j = np.arange(rows // 8)[:, None], np.arange(16)
    if swizzle == 0:
        return (i * stride + j % 8 * 16 + j // 8 * leading).ravel()
    return (i % wide * 16 + i // wide * leading + j % 8 * wide * 16 + j // 8 * stride).ravel()
