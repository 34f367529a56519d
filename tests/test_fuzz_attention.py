"""Training attention under drawn shapes, masks, layouts, grids and schedules, against the float64 oracle.

fuzz_utils.py says how to run more of it, and how to run a failure again.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuzz_attention
from fuzz_utils import CALLS, fuzz, run_session, sessions

WORLDS = (1, 2, 3, 4)


def attack(world, calls):
    """Run at least `calls` drawn calls on `world` ranks."""
    count = 0

    @fuzz(calls)
    @given(sessions(world, fuzz_attention.calls_or_refusals(world)))
    def session(drawn):
        nonlocal count
        count += len(drawn[1])
        run_session(fuzz_attention.run, fuzz_attention.check, *drawn)

    session()
    assert count >= calls, f"{count} calls: raise the number of sessions"
    return count


@pytest.mark.parametrize("world", WORLDS)
def test_any_call_matches_the_oracle(world):
    attack(world, CALLS["fast"] // 8)
