"""Megatron's DSA under context parallelism against its own on one rank: losses, the indexer's loss, all gradients."""

import functools

import pytest

from support.megatron_dsa import DSA, run_dsa, with_options
from support.megatron_models import Case, check

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
DENSE = functools.partial(Case, mla=True, install=True, batch=2, extra=DSA)


@pytest.mark.supports(
    "DSA (experimental_attention_variant)", with_="dense and sparse indexer loss, recomputation; cp = 2, 4"
)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_dsa(world):
    case = functools.partial(DENSE, cp=world)
    sparse = dict(dsa_indexer_use_sparse_loss=True)
    kinds = [{}, {"local_spec": True, "extra": with_options(**sparse)}, {"extra": with_options(**FULL, **sparse)}]
    check(world, [case(**kind) for kind in kinds], run=run_dsa)
