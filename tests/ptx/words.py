"""Number formats of PTX in numpy: bf16, fp16 and fp8 as bits, and integer operations that C and PTX define."""

import numpy as np

TYPES = {
    "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "u2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8", "pred": "?",
}  # fmt: skip
SIZES = {name: np.dtype(dtype).itemsize for name, dtype in TYPES.items()}
SMALLEST_NORMAL = np.float32(2.0**-126)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    """Nearest, ties to even; NaN is 0x7fff."""
    bits = x.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(x != x, np.uint16(0x7FFF), rounded)


def from_f16(bits):
    return bits.view(np.float16).astype(np.float32)


def to_f16(x):
    return x.astype(np.float16).view(np.uint16)


FROM = {"bf16": from_bf16, "f16": from_f16}
TO = {"bf16": to_bf16, "f16": to_f16}


def _all_e4m3():
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float16).view(np.uint16)


_E4M3 = _all_e4m3()


def f16x2_from_e4m3x2(pair):
    """Two fp8 numbers in 16 bits -> two fp16 numbers in 32 bits."""
    return _E4M3[pair & 255].astype(np.uint32) | (_E4M3[pair >> 8].astype(np.uint32) << 16)


def flush(x):
    """.ftz: subnormal numbers become 0."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def fused(a, b, c):
    """a * b + c in fp32, rounded once."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def upper_half(a, b):
    """Of a product of integers of up to 32 bits; a and b have the same dtype."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.itemsize)).astype(a.dtype)


def quotient(a, b):
    """Integer division towards zero; by zero it gives anything, here the dividend."""
    b = np.where(b == 0, b.dtype.type(1), b)
    if b.dtype.kind == "u":
        return a // b
    size = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -size, size)


def remainder(a, b):
    return a - quotient(a, b) * b


def shift_left(a, by):
    return np.where(by < a.itemsize * 8, a << (by & (a.itemsize * 8 - 1)).astype(a.dtype), a.dtype.type(0))


def shift_right(a, by):
    """Logical for unsigned a, arithmetic for signed; beyond the width everything is shifted out."""
    last = 8 * a.itemsize - 1
    if a.dtype.kind == "i":
        return a >> np.minimum(by, last).astype(a.dtype)
    return np.where(by <= last, a >> (by & last).astype(a.dtype), a.dtype.type(0))


def permute_bytes(a, b, selector):
    """prmt: bytes of the pair (a, b), chosen by the nibbles of selector; its upper bit asks for copies of the sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.uint32(0)
    for i in range(4):
        nibble = (selector >> 4 * i) & 15
        byte = ((both >> np.uint64(8 * (nibble & 7))) & np.uint64(255)).astype(np.uint32)
        if nibble & 8:
            byte = np.where(byte & 128, np.uint32(255), np.uint32(0))
        out = out | (byte << np.uint32(8 * i))
    return out
