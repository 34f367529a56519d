"""A basic block of PTX -> Python source that computes it for all threads of all programs of a batch.

A register is a variable whose value is never changed in place: an array that broadcasts to [programs, threads]. What
all programs or all threads share stays small. A 32-bit register is fp32 or unsigned, as most instructions take it.
"""

import copy
import re
import struct
from typing import NamedTuple

import numpy as np

from . import matrix, words
from .arithmetic import PLAIN, expression
from .boxes import MAPS
from .syntax import Fault, Instruction, Program, elements, is_register
from .words import SIZES, TYPES

DTYPES = {name: np.dtype(name) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")}


class Block(NamedTuple):
    """Code to run, and the branch at its end: target None where there is none."""

    code: object
    predicate: str | None
    negated: bool
    target: int | None


class Translator:
    """Blocks of a program, translated when they are first run."""

    def __init__(self, program: Program):
        self.program, self.ranges, self.floats = program, program.blocks(), program.floats()
        self.number = {r.start: n for n, r in enumerate(self.ranges)}
        self.names = {
            "np": np,
            "W": words,
            "X": matrix,
            "True_": np.True_,
            "False_": np.False_,
            **DTYPES,
        }  # of the translated code
        self._known: dict[bytes, str] = {}
        self._maps = {name: n for n, (kind, name) in enumerate(program.params) if kind == "align"}  # descriptors
        self._blocks: dict[tuple[int, bool], Block] = {}

    def changed(self, program: Program, place: int) -> "Translator":
        """For the same program with another instruction in one place: only its block is translated again."""
        new = copy.copy(self)
        new.program = program
        new._blocks = {key: block for key, block in self._blocks.items() if place not in self.ranges[key[0]]}
        return new

    def block(self, number: int, masked: bool) -> Block:
        """masked: only the threads of the array `active` run it."""
        if (number, masked) not in self._blocks:
            instructions = self.program.instructions[self.ranges[number].start : self.ranges[number].stop]
            last = instructions[-1] if instructions and instructions[-1].ends_block else None
            source = [line for i in instructions if i is not last for line in self._instruction(i, masked)]
            code = compile("\n".join(source), f"{self.program.name}, block {number}", "exec")
            target = None
            if last:
                at = self.program.labels[last.operands[0]] if last.parts[0] == "bra" else -1
                target = self.number.get(at, len(self.ranges))
            predicate = self.variable(last.predicate) if last and last.predicate else None
            self._blocks[number, masked] = Block(code, predicate, bool(last and last.negated), target)
        return self._blocks[number, masked]

    def variable(self, register: str) -> str:
        return register[1:].replace(":", "_in_").replace(".", "_")

    def stored(self, register: str) -> str:
        """numpy dtype of a register's variable."""
        dtype = TYPES[self.program.kind(register)]
        if dtype == "?" or dtype[1] != "4":
            return dtype.replace("i", "u").replace("f", "u")
        return "f4" if register in self.floats else "u4"

    def value(self, operand: str, t: str) -> str:
        """Expression of an operand as an array of type t."""
        if operand.startswith("!"):
            return f"(~{self.value(operand[1:], t)})"
        if is_register(operand):
            name, stored, dtype = self.variable(operand), self.stored(operand), TYPES[t]
            if stored == dtype:
                return name
            if stored[1:] == dtype[1:]:
                return f"{name}.view({dtype})"
            return f"{name}.view({stored.replace('f', 'u')}).astype(u{dtype[1]}).view({dtype})"  # its lower part
        if operand.startswith("%"):
            return operand[1:].replace(".", "_")
        return self._constant(operand, t)

    def _constant(self, text: str, t: str) -> str:
        if t == "pred":
            return "True_" if int(text, 0) else "False_"
        if text in self._maps:
            return f"np.uint64({MAPS + self._maps[text]})"
        if text == "global_smem":
            text = "0"  # shared memory begins at address 0
        size = SIZES[t]
        if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            raw = bytes.fromhex(found.group(1))[::-1]
        else:
            raw = (int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        if len(raw) != size:
            raw = struct.pack("<f", struct.unpack("<d", raw)[0])
        key = TYPES[t].encode() + raw
        name = self._known.setdefault(key, f"K{len(self._known)}")
        self.names[name] = np.frombuffer(raw, TYPES[t])[0]
        return name

    def _put(self, register: str, t: str, text: str, mask: str | None) -> list[str]:
        if register == "_":
            return []
        name, stored = self.variable(register), self.stored(register)
        if stored != TYPES[t]:
            if stored[1:] == TYPES[t][1:]:
                text = f"({text}).view({stored})"
            else:  # a wider register: extended by sign or by zeros
                text = f"({text}).astype({TYPES[t][0].replace('f', 'u')}{stored[1]}).view({stored})"
        return [f"{name} = {text}" if mask is None else f"{name} = M.where({mask}, {text}, '{name}')"]

    def _instruction(self, i: Instruction, masked: bool) -> list[str]:
        mask = None
        if i.predicate:
            mask = ("~" if i.negated else "") + self.variable(i.predicate)
        if masked:
            mask = f"active & {mask}" if mask else "active"
        operation = i.parts[0]
        if operation == "mov":
            return self._move(i, mask)
        if operation == "cvta" and "param" in i.parts:
            return self._put(i.operands[0], "b64", self.value(i.operands[1], "b64"), mask)
        if operation in PLAIN:
            t, text = expression(i, self.value)
            return self._put(i.operands[0], t, text, mask)
        if operation in ("ld", "st"):
            return self._memory(i, mask)
        if operation == "shfl" and mask is None:
            how, by = i.parts[2], self.value(i.operands[2], "b32")
            text = f"M.shuffle('{how}', {self.value(i.operands[1], 'b32')}, {by})"
            return self._put(i.operands[0].split("|")[0], "b32", text, None)
        if i.name.startswith("cp.async.c") and operation == "cp" and i.parts[2] in ("ca", "cg"):
            kept = self.value(i.operands[3], "b32") if len(i.operands) > 3 else "None"
            to, source = self._address(i.operands[0], "b32"), self._address(i.operands[1], "b64")
            return [f"M.copy({to}, {source}, {int(i.operands[2], 0)}, {kept}, {mask}, {i.line})"]
        if i.name.startswith(("cp.async.bulk.tensor", "cp.reduce", "mbarrier")) and "try_wait" not in i.parts:
            return self._arrival(i, mask)
        if mask is not None:
            raise Fault(f"{i.name} by some threads of a warp only, line {i.line}")
        return self._collective(i)

    def _move(self, i: Instruction, mask: str | None) -> list[str]:
        t, to, source = i.parts[-1], *(elements(x) for x in i.operands)
        bits = 8 * SIZES[t] // max(len(to), len(source))
        if len(source) > 1:
            wide = f"u{SIZES[t]}"
            text = " | ".join(
                f"({self.value(x, f'u{bits}')}.astype({wide}) << {wide}.type({n * bits}))" for n, x in enumerate(source)
            )
            return self._put(to[0], f"u{8 * SIZES[t]}", text, mask)
        if len(to) > 1:
            whole, part, lines = self.value(source[0], f"u{8 * SIZES[t]}"), f"u{bits // 8}", []
            for n, x in enumerate(to):
                lines += self._put(x, f"u{bits}", f"({whole} >> u{SIZES[t]}.type({n * bits})).astype({part})", mask)
            return lines
        if is_register(to[0]) and is_register(source[0]) and t != "pred":
            t = {"f4": "f32"}.get(self.stored(source[0]), f"u{8 * SIZES[t]}")
        return self._put(to[0], t, self.value(source[0], t), mask)

    def _address(self, operand: str, t: str) -> str:
        base, offset = re.fullmatch(r"\[\s*(\S+?)\s*(?:\+\s*(-?\w+))?\s*\]", operand).groups()
        address = self.value(base, t)
        return address if int(offset or "0", 0) == 0 else f"{address} + {self._constant(offset, t)}"

    def _memory(self, i: Instruction, mask: str | None) -> list[str]:
        t, space = i.parts[-1], i.parts[1].split("::")[0]
        unsigned = f"u{8 * SIZES[t]}"
        if space == "param":
            n = [name for _, name in self.program.params].index(i.operands[1].strip("[] "))
            return self._put(i.operands[0], t, f"M.argument({n}, {TYPES[t]})", mask)
        if space not in ("global", "shared"):
            raise Fault(f"not known: {i.name}")
        memory, pointer = ("memory", "b64") if space == "global" else ("shared", "b32")
        if i.parts[0] == "ld":
            registers, address = elements(i.operands[0]), self._address(i.operands[1], pointer)
            lines = [f"x = M.{memory}.load({address}, {SIZES[t]}, {len(registers)}, {mask}, {i.line})"]
            for n, register in enumerate(registers):
                extend = f"x[{n}].view({TYPES[t]})" if t[0] == "s" else f"x[{n}]"
                lines += self._put(register, t if t[0] == "s" else unsigned, extend, mask)
            return lines
        values = ", ".join(self.value(x, unsigned) for x in elements(i.operands[1]))
        address = self._address(i.operands[0], pointer)
        return [f"M.{memory}.store({address}, {SIZES[t]}, [{values}], {mask}, {i.line})"]

    def _arrival(self, i: Instruction, mask: str | None) -> list[str]:
        """Copies by descriptor, and barriers for them."""
        ends = ".shared::cta.b64"
        if i.name.startswith("cp.reduce"):
            kind = i.name.replace(i.parts[5], "?")
            if kind != "cp.reduce.async.bulk.tensor.?.global.shared::cta.add.bulk_group":
                raise Fault(f"not known: {i.name}")
            tensor, coordinates = i.operands[0].strip("[] ").split(",", 1)
            at = ", ".join(self.value(x, "b32") for x in elements(coordinates.strip()))
            source = self._address(i.operands[1], "b32")
            return [f"M.add_box({self.value(tensor, 'b64')}, [{at}], {source}, {mask}, {i.line})"]
        if i.name.startswith("cp.async.bulk.tensor"):
            if i.parts[5:] != ("shared::cta", "global", "mbarrier::complete_tx::bytes"):
                raise Fault(f"not known: {i.name}")
            tensor, coordinates = i.operands[1].strip("[] ").split(",", 1)
            at = ", ".join(self.value(x, "b32") for x in elements(coordinates.strip()))
            to, barrier = (self._address(x, "b32") for x in (i.operands[0], i.operands[2]))
            return [f"M.copy_box({to}, {self.value(tensor, 'b64')}, [{at}], {barrier}, {mask}, {i.line})"]
        barrier = self._address(i.operands[i.parts[1] == "arrive"], "b32")
        if i.name == f"mbarrier.init{ends}":
            return [f"M.boxes.init(M.shared, {barrier}, {int(i.operands[1], 0)}, {mask}, {i.line})"]
        if i.name == f"mbarrier.inval{ends}":
            return [f"M.boxes.invalidate(M.shared, {barrier}, {mask}, {i.line})"]
        if i.name == f"mbarrier.arrive.expect_tx{ends}" and i.operands[0] == "_":
            return [f"M.boxes.expect(M.shared, {barrier}, {int(i.operands[2], 0)}, {mask}, {i.line})"]
        raise Fault(f"not known: {i.name} {i.operands}")

    def _collective(self, i: Instruction) -> list[str]:
        """What a warp, a warpgroup or a program does as one."""
        name, ops = i.name, [elements(x) for x in i.operands]
        array = lambda registers, t: "[" + ", ".join(self.value(x, t) for x in registers) + "]"  # noqa: E731
        if i.parts[0] in ("ldmatrix", "stmatrix"):
            (at, registers) = (i.operands[1], ops[0]) if i.parts[0] == "ldmatrix" else (i.operands[0], ops[1])
            at, transposed = self._address(at, "b32"), "trans" in i.parts
            if i.parts[0] == "stmatrix":
                return [f"X.store_matrices(M.shared, {at}, {array(registers, 'b32')}, {transposed}, {i.line})"]
            lines = [f"x = X.load_matrices(M.shared, {at}, {len(registers)}, {transposed}, {i.line})"]
            return lines + [y for n, x in enumerate(registers) for y in self._put(x, "b32", f"x[{n}]", None)]
        if i.parts[0] == "mma":
            a, b, c = (array(x, t) for x, t in zip(ops[1:], ("b32", "b32", "f32")))
            lines = [f"x = M.multiply('{i.parts[3]}', '{i.parts[-2]}', {a}, {b}, {c}, {i.line})"]
            return lines + [y for n, x in enumerate(ops[0]) for y in self._put(x, "f32", f"x[{n}]", None)]
        if name == "elect.sync" and i.operands[1] == "-1":
            return self._put(i.operands[0].split("|")[1], "pred", "laneid == 0", None)
        if name == "mbarrier.try_wait.parity.shared::cta.b64":
            address, parity = self._address(i.operands[1], "b32"), self.value(i.operands[2], "b32")
            return self._put(i.operands[0], "pred", f"M.boxes.wait(M.shared, {address}, {parity}, {i.line})", None)
        if name.startswith("wgmma.mma_async"):
            return self._wgmma(i, ops, array)
        simple = {
            "bar.sync": "M.shared.barrier()",
            "bar.warp.sync": "pass",
            "cp.async.commit_group": "M.shared.commit()",
            "cp.async.wait_group": "M.shared.wait({0}, {line})",
            "fence.proxy.async.shared::cta": "M.shared.fence()",
            "fence.proxy.async": "M.shared.fence()",
            "wgmma.fence.sync.aligned": "M.products.fence()",
            "cp.async.bulk.commit_group": "M.boxes.commit_sums()",
            "cp.async.bulk.wait_group.read": "M.boxes.wait_for_sums(M.shared, M.memory, {0}, {line})",
            "wgmma.commit_group.sync.aligned": "M.products.commit()",
            "wgmma.wait_group.sync.aligned": "M.products.wait(M.shared, {0}, {line})",
        }.get(name)
        if simple is None or (name == "bar.sync" and i.operands != ("0",)):
            raise Fault(f"not known: {name} {i.operands}")
        return [simple.format(*i.operands, line=i.line)]

    def _wgmma(self, i: Instruction, ops: list[list[str]], array) -> list[str]:
        """d, a, b, whether to add to d, signs of a and b, and which of a and b lie transposed in shared memory."""
        from_registers = i.operands[1].startswith("{")
        a = array(ops[1], "b32") if from_registers else self.value(i.operands[1], "b64")
        signs, transposed = i.operands[4:6], i.operands[6:]
        if signs != ("1", "1"):
            raise Fault(f"not known: {i.name} with signs {signs}")
        flags = [bool(int(x)) for x in transposed] or [False, False]
        flags = [False, *flags] if len(flags) == 1 else flags
        if any(self.stored(x) != "f4" for x in ops[0]):
            raise Fault(f"accumulators of line {i.line} are not fp32")
        n, names = int(re.search(r"n(\d+)k16", i.parts[4]).group(1)), tuple(self.variable(x) for x in ops[0])
        sources = tuple(self.variable(x) for x in ops[1]) if from_registers else ()
        b, add = self.value(i.operands[2], "b64"), self.value(i.operands[3], "pred")
        return [
            f"M.products.start(M.shared, {n}, '{i.parts[-1]}', {names}, {sources}, {a}, {b}, {add}, {flags}, {i.line})"
        ]
