"""Plain instructions as Python expressions over numpy arrays: arithmetic, comparisons, conversions, bits."""

from .syntax import Fault, Instruction
from .words import SIZES, TYPES

INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"}
COMPARE["hs"] = ">="
ROUND = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}
HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def expression(i: Instruction, value) -> tuple[str, str]:
    """(type, expression) of what a plain instruction writes to its first operand.

    value(operand, type) is the expression of an operand: an array with the numpy dtype of that type.
    """
    operation = i.parts[0]
    if operation in ("cvt", "setp", "selp", "bfe", "prmt"):
        return _SPECIAL[operation](i, value)
    t = i.parts[-1]
    if t in HALVES:
        return _half(i, t, value)
    if "wide" in i.parts:
        wide = t[0] + str(16 * SIZES[t])
        a, b = (f"{value(x, t)}.astype({TYPES[wide]})" for x in i.operands[1:3])
        return wide, f"{a} * {b}" + (f" + {value(i.operands[3], wide)}" if operation == "mad" else "")
    if t[0] == "s" and operation in ("add", "sub", "mad", "mul") and "hi" not in i.parts:
        t = "u" + t[1:]  # the same bits
    text = _plain(i, operation, t, [value(x, "b32" if n and operation in ("shl", "shr") else t) for n, x in _inputs(i)])
    return t, f"W.flush({text})" if "ftz" in i.parts else text


def _inputs(i: Instruction):
    return enumerate(i.operands[1:])


def _plain(i: Instruction, operation: str, t: str, x: list[str]) -> str:
    dtype, floating = TYPES[t], t[0] == "f"
    if operation == "mul" and "hi" in i.parts:
        if SIZES[t] > 4:
            raise Fault(f"not known: {i.name}")
        return f"W.upper_half({x[0]}, {x[1]})"
    if operation in INFIX:
        return f"{x[0]} {INFIX[operation]} {x[1]}"
    if operation in ("min", "max"):
        propagate = "imum" if "NaN" in i.parts or not floating else ""
        text = f"np.{'' if propagate else 'f'}{operation}{propagate}({x[0]}, {x[1]})"
        return f"np.maximum({text}, {dtype}.type(0))" if "relu" in i.parts else text
    found = {
        "mad": "{0} * {1} + {2}",
        "fma": "W.fused({0}, {1}, {2})",
        "neg": "-{0}",
        "not": "~{0}",
        "abs": "np.abs({0})",
        "ex2": "np.exp2({0})",
        "lg2": "np.log2({0})",
        "rcp": "1 / {0}",
        "sqrt": "np.sqrt({0})",
        "rsqrt": "1 / np.sqrt({0})",
        "div": "{0} / {1}" if floating else "W.quotient({0}, {1})",
        "rem": "W.remainder({0}, {1})",
        "shl": "W.shift_left({0}, {1})",
        "shr": "W.shift_right({0}, {1})",
    }.get(operation)
    if found is None or (operation == "fma" and t != "f32"):
        raise Fault(f"not known: {i.name} {i.operands}")
    return found.format(*x)


def _half(i: Instruction, t: str, value) -> tuple[str, str]:
    """Arithmetic in bf16 or fp16, one number or two: computed in fp32, rounded."""
    kind, pair = t.removesuffix("x2"), t.endswith("x2")
    form = {"fma": "W.fused({0}, {1}, {2})", "neg": "-{0}"}.get(i.parts[0]) or f"{{0}} {INFIX[i.parts[0]]} {{1}}"

    def number(operand, shift):
        bits = f"({value(operand, 'b32')} >> u4.type({shift})).astype(u2)" if pair else value(operand, "b16")
        return f"W.FROM['{kind}']({bits})"

    low, *high = (
        f"W.TO['{kind}']({form.format(*(number(x, s) for x in i.operands[1:]))})" for s in ((0, 16) if pair else (0,))
    )
    return ("b32", f"{low}.astype(u4) | ({high[0]}.astype(u4) << 16)") if pair else ("b16", low)


def _convert(i: Instruction, value) -> tuple[str, str]:
    to, source = i.parts[-2:]
    if source == "e4m3x2":
        return "b32", f"W.f16x2_from_e4m3x2({value(i.operands[1], 'b16')})"
    x = [value(operand, source) for operand in i.operands[1:]]
    if to in ("bf16x2", "f16x2"):
        high, low = (f"W.TO['{to[:-2]}']({y}).astype(u4)" for y in x)
        return "b32", f"({high} << 16) | {low}"
    number = f"W.FROM['{source}']({x[0]})" if source in HALVES else x[0]
    if to in HALVES:
        number = number if source in HALVES or source == "f32" else f"{number}.astype(f4)"
        return "b16", f"W.TO['{to}']({number})"
    if TYPES[to][0] != "f" and (source[0] == "f" or source == "bf16"):
        rounding = next((ROUND[p] for p in i.parts if p in ROUND), None)
        if rounding is None:
            raise Fault(f"not known: {i.name}")
        return to, f"np.{rounding}({number}).astype({TYPES[to]})"
    return to, number if to == source or (source in HALVES and to == "f32") else f"{number}.astype({TYPES[to]})"


def _compare(i: Instruction, value) -> tuple[str, str]:
    t, how = i.parts[-1], i.parts[1]
    a, b = value(i.operands[1], t), value(i.operands[2], t)
    unordered = f"(({a} != {a}) | ({b} != {b}))"
    if how in COMPARE:
        text = f"({a} {COMPARE[how]} {b})"
        if how == "ne" and t[0] == "f":
            text = f"({text} & ~{unordered})"
    elif how in ("nan", "num"):
        text = unordered if how == "nan" else f"~{unordered}"
    elif how[:-1] in COMPARE and how[-1] == "u":
        text = f"(({a} {COMPARE[how[:-1]]} {b}) | {unordered})"
    else:
        raise Fault(f"not known: {i.name}")
    if i.parts[2] in ("and", "or", "xor"):
        text = f"({text} {INFIX[i.parts[2]]} {value(i.operands[3], 'pred')})"
    return "pred", text


def _select(i: Instruction, value) -> tuple[str, str]:
    t = i.parts[-1]
    return t, f"np.where({value(i.operands[3], 'pred')}, {value(i.operands[1], t)}, {value(i.operands[2], t)})"


def _bit_field(i: Instruction, value) -> tuple[str, str]:
    t, (at, length) = i.parts[-1], map(int, i.operands[2:])
    bits, one = 8 * SIZES[t], f"{TYPES[t]}.type"
    x = value(i.operands[1], t)
    return t, f"({x} << {one}({bits - at - length})) >> {one}({bits - length})"


def _permute(i: Instruction, value) -> tuple[str, str]:
    a, b = (value(x, "b32") for x in i.operands[1:3])
    return "b32", f"W.permute_bytes({a}, {b}, {int(i.operands[3].rstrip('U'), 0)})"


_SPECIAL = {"cvt": _convert, "setp": _compare, "selp": _select, "bfe": _bit_field, "prmt": _permute}
PLAIN = {*INFIX, *_SPECIAL, "min", "max", "mad", "fma", "neg", "not", "abs", "div", "rem", "shl", "shr"}
PLAIN |= {"ex2", "lg2", "rcp", "sqrt", "rsqrt"}
