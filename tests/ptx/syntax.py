"""PTX text -> instructions, basic blocks and registers."""

import collections
import itertools
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .words import SIZES


class Fault(RuntimeError):
    """The program does what it must not, or something that this emulator does not know."""


class Instruction(NamedTuple):
    """`@%p1 ld.global.b32 %r1, [%rd1];` is ("%p1", False, ("ld", "global", "b32"), ("%r1", "[%rd1]"), line)."""

    predicate: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    line: int

    @property
    def name(self) -> str:
        return ".".join(self.parts)

    @property
    def ends_block(self) -> bool:
        return self.parts[0] in ("bra", "ret")


@dataclass
class Program:
    """One kernel. Blocks are ranges of instructions; a branch names a block, and the number of blocks is the end."""

    name: str
    target: str
    params: list[tuple[str, str]]  # (type, name)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)  # of inline assembly's scopes: name -> type
    prefixes: dict[str, str] = field(default_factory=dict)  # %r -> b32

    def kind(self, register: str) -> str:
        """Declared type of a register."""
        return self.registers.get(register) or self.prefixes[register.rstrip("0123456789")]

    def blocks(self) -> list[range]:
        starts = {0, len(self.instructions)}
        starts |= {self.labels[i.operands[0]] for i in self.instructions if i.parts[0] == "bra"}
        starts |= {n + 1 for n, i in enumerate(self.instructions) if i.ends_block}
        edges = sorted(starts)
        return [range(a, b) for a, b in itertools.pairwise(edges)]

    def floats(self) -> set[str]:
        """32-bit registers that mostly hold fp32; all others are kept as unsigned integers."""
        votes = collections.Counter()
        for i in self.instructions:
            types = [t for t in i.parts if t in SIZES]
            if i.parts[0] == "cvt":
                sides = zip(types[-2:], (i.operands[:1], i.operands[1:]))
            elif i.parts[0] == "mma" or i.parts[:2] == ("wgmma", "mma_async"):
                sides = [("f32", (i.operands[0], i.operands[-1])), ("s32", i.operands[1:-1])]
            else:
                sides = [(types[-1], i.operands)] if types else []
            for t, operands in sides:
                step = {"f": 1, "b": 0}.get(t[0], -1) if t in ("f32", "b32", "s32", "u32") else 0
                for register in (x for op in operands for x in elements(op)):
                    votes[register] += step
        return {r for r, n in votes.items() if n > 0}


def elements(operand: str) -> list[str]:
    """`{%r1, %r2}` -> its registers; any other operand alone."""
    return [x.strip() for x in operand.strip("{} ").split(",")] if operand.startswith("{") else [operand]


def is_register(operand: str) -> bool:
    return bool(re.fullmatch(r"%[a-z]+\d+|%[a-z]\w*:\d+", operand))


def _split(text: str) -> tuple[str, ...]:
    """Operands, cut at the commas outside of brackets."""
    return tuple(x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text) if x.strip())


_TOKEN = re.compile(r"\s*(?:([\w$]+):(?!:)|([{}])|((?:\.reg|\.section|[^\s{}.])[^;]*|\.[^;]*);)")
_STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)


def parse(ptx: str) -> Program:
    """The kernel in a module; raises Fault where the text can't be read."""
    lines = re.sub(r"//[^\n]*|^\s*\.(?:loc|file|pragma)\b[^\n]*", "", ptx, flags=re.M)
    entry = re.search(r"\.entry\s+(\w+)\s*\(", lines)
    body = lines.index("\n{", entry.end())
    params = re.findall(r"\.param \.(\w+)[^\n,]*?(\w+_param_\d+)", lines[entry.end() : body])
    program = Program(entry.group(1), re.search(r"\.target (sm_\w+)", lines).group(1), params)
    at, line, scopes, count = body + 1, lines.count("\n", 0, body + 1) + 1, [], 0
    while True:
        token = _TOKEN.match(lines, at)
        if token is None:
            raise Fault(f"{program.name}: cannot read {lines[at : at + 80]!r}")
        line += lines.count("\n", at, token.start(token.lastindex))
        label, brace, statement = token.groups()
        if brace == "{":
            scopes.append({})
            count += 1
        elif brace == "}":
            scopes.pop()
            if not scopes:
                return program
        elif label:
            if len(scopes) > 1:  # of inline assembly, which may be there several times
                scopes[-1][label] = f"{label}:{count}"
                label = scopes[-1][label]
            program.labels[label] = len(program.instructions)
        elif statement.startswith(".reg"):
            _declare(program, statement, scopes[-1] if len(scopes) > 1 else None, count)
        else:
            program.instructions.append(_instruction(program, statement, scopes, line))
        line += lines.count("\n", token.start(token.lastindex), token.end())
        at = token.end()


def _declare(program: Program, statement: str, scope: dict | None, count: int) -> None:
    kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*?)\s*", statement, re.S).groups()
    for name in re.split(r"\s*,\s*", names):
        many = re.fullmatch(r"(%?\w+?)<(\d+)>", name)
        if scope is None:
            program.prefixes[many.group(1)] = kind
            continue
        for plain in [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]:
            scope[plain] = f"%{plain}:{count}"
            program.registers[scope[plain]] = kind


def _instruction(program: Program, statement: str, scopes: list[dict], line: int) -> Instruction:
    negated, predicate, name, rest = _STATEMENT.fullmatch(statement.strip()).groups()
    local = {k: v for scope in scopes for k, v in scope.items()}
    if local:
        rest = re.sub(r"(?<![%\w.$])[A-Za-z_]\w*", lambda m: local.get(m.group(0), m.group(0)), rest)
    return Instruction(local.get(predicate, predicate), bool(negated), tuple(name.split(".")), _split(rest), line)
