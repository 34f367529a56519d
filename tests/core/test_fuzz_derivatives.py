"""Tangents and second derivatives under drawn masks, layouts, grids and schedules, against the float64 energy.

support/fuzz.py says how to run more of it, and how to run a failure again.
"""

import pytest

from support.fuzz import CALLS, attack
from support.fuzz_derivatives import check, derived_calls, run

WORLDS = (1, 2, 3, 4)


@pytest.mark.parametrize("world", WORLDS)
def test_any_call_matches_the_oracle(world):
    attack(run, check, world, derived_calls(world), CALLS["fast"] // 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [*WORLDS, 6])
def test_thousands_of_calls_match_the_oracle(world):
    attack(run, check, world, derived_calls(world), CALLS["slow"] // 8)
