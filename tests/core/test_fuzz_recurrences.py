"""Recurrent layers and their derivatives of any order under drawn layouts, against the whole sequence on one rank.

support/fuzz.py says how to run more of it, and how to run a failure again.
"""

import pytest

from support.fuzz import CALLS, attack
from support.fuzz_recurrences import check, derived_layers, run

WORLDS = (1, 2, 3, 4)


@pytest.mark.parametrize("world", WORLDS)
def test_any_call_matches_the_whole_sequence(world):
    attack(run, check, world, derived_layers(world), CALLS["fast"] // 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_calls_match_the_whole_sequence(world):
    attack(run, check, world, derived_layers(world), CALLS["slow"] // 8, mean_session=1.5)
