"""The nested grid in real processes: hosts in any order, every nesting, head chunks, both transports."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.attention import call as attend
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.core.plan import default_topology, place
from megatron_tree.core.plan.plans import grids, inner_grids
from support.attention import make_inputs, oracle, run_one, worst_error
from support.decoding import decode_inputs, decode_oracle, same_everywhere
from support.hosts import Hosts
from support.ranks import largest, run_distributed
from support.rounding import error, rounding

PLACES = {  # host of every rank
    "2 x 2": (0, 0, 1, 1),
    "2 x 2, interleaved": (0, 1, 1, 0),
    "3 + 1": (0, 0, 0, 1),
    "3 x 2": (0, 0, 1, 1, 2, 2),
    "2 x 3": (0, 1, 0, 1, 0, 1),
}


def _nested(rank, world, hosts, transport):
    """Every grid x nesting x head chunks against the oracle; returns the worst error and how many were nested."""
    inputs = make_inputs(4 * world, (8, 4))
    truth = oracle(*inputs)
    plan_training, worst, nested = attend.plan_training, 0.0, 0
    with Hosts(hosts):
        placement = place(default_topology("gloo"), comm.Ranks.of(dist.group.WORLD).hosts)
        cases = [(grid, inner) for grid in grids(world) for inner in inner_grids(grid, placement.block)]
        for i, (grid, inner) in enumerate(cases):
            head_chunks = 1 + 3 * (i % 2)

            def pinned(*args, inner=inner, **kwargs):
                plan = plan_training(*args, **kwargs)
                forward, backward = (
                    dataclasses.replace(p, arrangement=p.arrangement._replace(inner=inner))
                    for p in (plan.forward, plan.backward)
                )
                return dataclasses.replace(plan, forward=forward, backward=backward)

            with mock.patch.object(attend, "plan_training", pinned):
                config = TreeConfig(grid=grid, head_chunks=head_chunks, transport=transport, timeout_s=30)
                worst = largest((worst, worst_error(*run_one(inputs, "zigzag", config, {}), truth)))
            nested += inner != (1, 1)
        for config in (TreeConfig(schedule="ring"), TreeConfig(grid=(1, world), grid_backward=(world, 1))):
            worst = largest((worst, worst_error(*run_one(inputs, "zigzag", config, {}), truth)))
        uneven = (3, 0, 5, 1, 2, 4)[:world]  # padded on the wire, in every chunk of heads
        inputs = make_inputs(sum(uneven), (4, 2))
        truth = oracle(*inputs)
        for grid in grids(world):
            config = TreeConfig(grid=grid, head_chunks=2, transport=transport)
            worst = largest((worst, worst_error(*run_one(inputs, uneven, config, {}), truth)))
    return worst, nested


@pytest.mark.parametrize(
    ("place", "transport"), [*((place, "direct") for place in PLACES), ("2 x 2, interleaved", "builtin")]
)
def test_every_nesting_matches_the_oracle(place, transport):
    for worst, nested in run_distributed(_nested, len(PLACES[place]), PLACES[place], transport, timeout=300):
        assert worst < 1e-12
        assert (nested > 0) == (place != "3 + 1")


def _decode_over_hosts(rank, world, hosts):
    q, k, v = decode_inputs(2, 1, 5 * world, dtype=torch.float32)
    mine, worst, truth = slice(5 * rank, 5 * rank + 5), 0.0, decode_oracle(q, k, v, None)[0]
    with Hosts(hosts):
        for transport in ("direct", "builtin"):
            config = TreeConfig(transport=transport)
            for schedule in DECODE_SCHEDULES:
                out = tree_decode(
                    q, k[:, mine], v[:, mine], cp_group=dist.group.WORLD, schedule=schedule, config=config
                )
                worst = largest((worst, error(out, truth)))
                assert same_everywhere(out), schedule
    return worst


@pytest.mark.parametrize("place", ["2 x 2, interleaved", "2 x 3"])
def test_decode_over_hosts(place):
    world = len(PLACES[place])
    assert largest(run_distributed(_decode_over_hosts, world, PLACES[place])) < rounding(5 * world)
