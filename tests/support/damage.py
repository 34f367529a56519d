"""Bytes flipped or cut, the same for a seed, and what may come of reading them."""

import random

import pytest


def examples(fast, nightly):
    """(seed, count): a few examples in the fast suite, many in the slow one."""
    return pytest.mark.parametrize(
        ("seed", "count"),
        [pytest.param(1, fast, id="fast"), pytest.param(2, nightly, id="nightly", marks=pytest.mark.slow)],
    )


def damaged(data, chance):
    """Other bytes than `data`: bits flipped, bytes replaced, cut, cut out, put in, doubled or zeroed."""
    while True:
        made = bytearray(data)
        at = chance.randrange(len(made)) if made else 0
        length = min(len(made) - at, chance.choice((1, 2, 8, 64)))
        match chance.choice(("flip", "flip", "replace", "cut", "cut out", "put in", "double", "zero", "swap")):
            case "flip":
                for _ in range(chance.choice((1, 1, 3))):
                    made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
            case "replace":
                made[at : at + length] = chance.randbytes(length)
            case "cut":
                del made[at:]
            case "cut out":
                del made[at : at + length]
            case "put in":
                made[at:at] = chance.choice((chance.randbytes(length), b"\0", b"\xff\xfe", b"{" * 9, b"-", b"9" * 40))
            case "double":
                made[at:at] = made[at : at + length]
            case "zero":
                made[at : at + length] = bytes(length)
            case "swap":
                other = chance.randrange(len(made))
                made[at], made[other] = made[other], made[at]
        if bytes(made) != data:
            return bytes(made)


def reads(load, *names):
    """What load() returns; None after a ValueError whose text holds one of `names`. Anything else is a fault.

    Errors of decoders are ValueErrors, too: they know nothing of files, so they don't count.
    """
    try:
        return load()
    except ValueError as error:
        told = error
    assert type(told) is ValueError, f"{type(told).__name__}: {told}"
    assert any(str(name) in str(told) for name in names), f"names none of {names}: {told}"
    return None


def chances(seed, count):
    """One source of randomness for each example, so that one can be made again alone."""
    for number in range(count):
        yield random.Random(f"{seed}/{number}")
