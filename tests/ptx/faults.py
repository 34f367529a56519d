"""Faults in compiled code, one at a time: what a compiler might get wrong, and whether the emulator notices.

A fault is made in the PTX of a kernel, by its kind and its position among the instructions of that kind.
"""

import contextlib
import dataclasses
import re

from . import device
from .machine import Kernel
from .syntax import Instruction, Program

NOTHING = Instruction(None, False, ("bar", "warp", "sync"), ("0",), 0)


def _later(i: Instruction) -> Instruction:
    """The wait lets one more group go on."""
    return i._replace(operands=(str(int(i.operands[0]) + 1),))


def _arrived(i: Instruction) -> Instruction:
    """The barrier is found open at once."""
    return i._replace(parts=("mov", "pred"), operands=(i.operands[0], "1"))


def _shifted(i: Instruction, by: int) -> Instruction:
    """The address in shared memory is another one."""
    n = 0 if i.parts[0] in ("st", "stmatrix") or i.name.startswith("cp.async") else 1
    base, offset = re.fullmatch(r"\[\s*(\S+?)\s*(?:\+\s*(-?\w+))?\s*\]", i.operands[n]).groups()
    operands = list(i.operands)
    operands[n] = f"[{base}+{int(offset or '0', 0) + by}]"
    return i._replace(operands=tuple(operands))


def _descriptor(i: Instruction, flip: int) -> Instruction:
    """Constants that are descriptors of wgmma: the swizzle mode is in the two upper bits."""
    return i._replace(operands=tuple(str(int(x, 0) ^ flip) if _is_descriptor(x) else x for x in i.operands))


def _is_descriptor(operand: str) -> bool:
    return operand.isdigit() and int(operand) >> 62 in (1, 2, 3)


KINDS = {  # name -> (which instructions, what becomes of them)
    "barrier": (lambda i: i.name == "bar.sync", lambda i: NOTHING),
    "proxy fence": (lambda i: i.name.startswith("fence.proxy"), lambda i: NOTHING),
    "register fence": (lambda i: i.name.startswith("wgmma.fence"), lambda i: NOTHING),
    "wait for copies": (lambda i: i.name.startswith("cp.async.wait"), _later),
    "wait for products": (lambda i: i.name.startswith("wgmma.wait"), _later),
    "wait for boxes": (lambda i: i.name.startswith("mbarrier.try_wait"), _arrived),
    "expected bytes": (lambda i: i.name.startswith("mbarrier.arrive.expect"), lambda i: NOTHING),
    "box offset": (lambda i: i.name.startswith("cp.async.bulk.tensor"), lambda i: _shifted(i, 128)),
    "wait for sums": (lambda i: i.name.startswith("cp.async.bulk.wait"), _later),
    "sum offset": (lambda i: i.name.startswith("cp.reduce"), lambda i: _shifted(i, 128)),
    "store offset": (lambda i: i.parts[:2] == ("st", "shared"), lambda i: _shifted(i, 16)),
    "load offset": (lambda i: i.parts[0] == "ldmatrix", lambda i: _shifted(i, 16)),
    "copy offset": (lambda i: i.name.startswith("cp.async.c") and len(i.operands) > 1, lambda i: _shifted(i, 16)),
    "transposition": (lambda i: i.parts[0] == "ldmatrix", lambda i: _toggle(i, "trans")),
    "swizzle": (lambda i: any(map(_is_descriptor, i.operands)), lambda i: _descriptor(i, 1 << 62)),
}


def _toggle(i: Instruction, part: str) -> Instruction:
    parts = tuple(x for x in i.parts if x != part)
    return i._replace(parts=parts if part in i.parts else (*parts[:-2], part, *parts[-2:]))


def places(program: Program, kind: str) -> list[int]:
    """Instructions where a fault of this kind can be made."""
    return [n for n, i in enumerate(program.instructions) if KINDS[kind][0](i)]


@contextlib.contextmanager
def planted(kernel: Kernel, kind: str, place: int):
    """Launches of this kernel run with one fault while the context is open."""
    key = next(k for k, x in device.kernels.items() if x is kernel)
    instructions = list(kernel.program.instructions)
    instructions[place] = KINDS[kind][1](instructions[place])
    program = dataclasses.replace(kernel.program, instructions=instructions)
    device.kernels[key] = Kernel(program, kernel.threads, kernel.shared, kernel.translator.changed(program, place))
    try:
        yield
    finally:
        device.kernels[key] = kernel
