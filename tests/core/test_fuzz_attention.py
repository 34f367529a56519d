"""Training attention under drawn shapes, masks, layouts, grids and schedules, against the float64 oracle.

fuzz.py says how to run more of it, and how to run a failure again.
"""

import pytest

from support.fuzz import CALLS, attack
from support.fuzz_attention import calls_or_refusals, check, run

WORLDS = (1, 2, 3, 4)


@pytest.mark.parametrize("world", WORLDS)
def test_any_call_matches_the_oracle(world):
    attack(run, check, world, calls_or_refusals(world), CALLS["fast"] // 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_calls_match_the_oracle(world):
    attack(run, check, world, calls_or_refusals(world), CALLS["slow"] // 8)
