"""Training hybrid models on shards: losses and gradients are those of one rank, also of their recurrent layers."""

import pytest

from support.ranks import run_distributed

pytest.importorskip("transformers")

from support.hf_architectures import HYBRIDS, random_model
from support.hf_served import check_trained

FAST = ("qwen3_next", "falcon_h1", "jamba", "zaya")  # one of each kind of function


def _marks(name, fast=FAST):
    supports = pytest.mark.supports(f"`{name}`", with_="training on shards; 2 and 4 ranks")
    return [supports] if name in fast else [supports, pytest.mark.slow]


def _all(fast=FAST):
    return [pytest.param(name, marks=_marks(name, fast), id=name) for name in HYBRIDS]


def _training(rank, world, name):
    check_trained(lambda: random_model(name))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", _all())
def test_training(name, world):
    run_distributed(_training, world, name)
