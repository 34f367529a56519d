"""Decoding and prefill over drawn caches, against the float64 oracle, and lives of a cache against plain lists.

fuzz.py says how to run more of it, and how to run a failure again.
"""

import pytest

from support.fuzz import CALLS, attack
from support.fuzz_cache import LIVES, check_decode, check_life, decodes, run_decode, run_life

WORLDS = (1, 2, 3, 4)


@pytest.mark.parametrize("world", WORLDS)
def test_decode_over_any_shards(world):
    attack(run_decode, check_decode, world, decodes(world), CALLS["fast"] // 16)


@pytest.mark.parametrize("world", WORLDS)
def test_a_life_of_a_cache(world):
    attack(run_life, check_life, world, LIVES, CALLS["fast"] // 16)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_decodes_and_lives(world):
    attack(run_decode, check_decode, world, decodes(world), CALLS["slow"] // 16)
    attack(run_life, check_life, world, LIVES, CALLS["slow"] // 16)
