"""Heads exchanged for tokens over u ranks, the grid or the ring among the others: exact, and what it sends."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_attn_func
from megatron_tree.core import comm
from megatron_tree.core.attention import call as attend
from megatron_tree.core.plan import HeadSplit, default_topology, place
from megatron_tree.core.plan.plans import grids, head_splits
from support.attention import make_inputs, oracle, run_one, worst_error
from support.hosts import Hosts
from support.ranks import largest, on_ranks, run_distributed

HEADS = [(8, 8), (8, 2), (4, 1), (9, 3), (5, 5), (6, 2), (12, 3)]
PLACES = {"4 ranks of 1 host": (0, 0, 0, 0), "2 x 2": (0, 1, 0, 1), "3 x 2": (0, 0, 1, 1, 2, 2)}


@pytest.mark.parametrize(("num_heads", "num_heads_kv"), HEADS)
@pytest.mark.parametrize("u", [1, 2, 3, 4, 8])
def test_units_hold_every_head_once(num_heads, num_heads_kv, u):
    split = HeadSplit.of(num_heads, num_heads_kv, u)
    assert split.u * split.n * split.queries >= num_heads and split.n * u >= num_heads_kv * split.copies
    assert num_heads_kv * split.copies * split.queries == num_heads
    if num_heads % u == 0 and (num_heads_kv % u == 0 or u % num_heads_kv == 0):
        assert split.padding == 1 and u * split.n == max(num_heads_kv, u)


class Placed:
    """The planner places the ranks that exchange heads like this, while the context is open.

    schedules: of forward and backward; default: the chosen ones.
    """

    def __init__(self, heads, schedules=(None, None)):
        self.heads, self.schedules, self.real = heads, schedules, attend.plan_training

    def __enter__(self):
        attend.plan_training = self._plan

    def __exit__(self, *_):
        attend.plan_training = self.real

    def _plan(self, *args, **kwargs):
        plan = self.real(*args, **kwargs)
        found = []
        for table, chosen, schedule in zip(plan.candidates, (plan.forward, plan.backward), self.schedules):
            placed = [c for c in table if c.arrangement.heads == self.heads]
            if schedule:
                found.append(next(c for c in placed if c.schedule == schedule))
            else:
                like = next(c for c in placed if (c.schedule, c.grid) == (chosen.schedule, chosen.grid))
                found.append(dataclasses.replace(like, head_chunks=chosen.head_chunks))
        return dataclasses.replace(plan, forward=found[0], backward=found[1])


def _placements(rank, world, hosts, transport):
    """Every u and its places across nodes and inside them, with every schedule, against the oracle."""
    worst, seen = 0.0, set()
    block = place(default_topology("gloo"), hosts).block
    with Hosts(hosts):
        cases = itertools.product([u for u in range(2, world + 1) if world % u == 0], HEADS[:4])
        for i, (u, heads) in enumerate(cases):
            if u > heads[0]:
                continue
            inputs = make_inputs(4 * world, heads, d=6, d_v=4)
            truth = oracle(*inputs)
            n = HeadSplit.of(*heads, u).n
            groups = max(g for g in range(1, 3) if n % g == 0)
            options = [
                dict(head_chunks=groups),
                dict(schedule="ring"),
                dict(grid=(1, world // u), grid_backward=(world // u, 1)),
            ]
            for places in head_splits(u, world // block, block):
                with Placed(places):
                    config = TreeConfig(ulysses_size=u, transport=transport, timeout_s=30, **options[i % 3])
                    worst = largest((worst, worst_error(*run_one(inputs, "zigzag", config, {}), truth)))
                seen.add(places)
    return worst, seen


@pytest.mark.parametrize(("where", "transport"), [*((x, "direct") for x in PLACES), ("2 x 2", "builtin")])
def test_every_placement_matches_the_oracle(where, transport):
    for worst, seen in run_distributed(_placements, len(PLACES[where]), PLACES[where], transport, timeout=300):
        assert worst < 1e-12
        if where == "2 x 2":
            assert seen == {(2, 1), (1, 2), (2, 2)}


@contextlib.contextmanager
def _recorded():
    """Lists that become tensors or indices meanwhile: on a GPU the host waits there until all before is computed."""
    found, of_list, item = [], torch.tensor, torch.Tensor.__getitem__

    def tensor(data, **options):
        found.append(data)
        return of_list(data, **options)

    def getitem(x, index):
        found.extend(i for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, list))
        return item(x, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.Tensor, "__getitem__", getitem)
        yield found


@on_ranks(4, fresh=True)  # a patched __getitem__ leaves its mark on the type
def test_repeated_calls_make_no_tensors_of_lists(world):
    with Hosts((0, 1, 0, 1)):  # teams' ranks are not in rising order
        for places, heads in itertools.product(((2, 1), (1, 2), (2, 2)), HEADS[:4]):
            inputs = [x.float() for x in make_inputs(2 * world, heads)[:3]]
            config = TreeConfig(ulysses_size=places[0] * places[1], transport="builtin", timeout_s=30, tune=False)
            with Placed(places):
                for repeated in (False, True):
                    q, k, v = (x[:, :2].clone().requires_grad_() for x in inputs)
                    with _recorded() as found:
                        out = tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config)
                        out.sum().backward()
                    assert not (found and repeated), (places, heads, found)


@on_ranks(4)
def test_one_pass_may_be_a_ring_and_the_other_a_grid(world):
    worst = 0.0
    for i, (schedules, heads) in enumerate(itertools.product((("ring", "grid"), ("grid", "ring")), HEADS[:4])):
        inputs = make_inputs(4 * world, heads)
        with Hosts((0, 0, 1, 1)), Placed(((1, 2), (2, 1))[i % 2], schedules):
            errors = worst_error(
                *run_one(inputs, "zigzag", TreeConfig(ulysses_size=2, timeout_s=30), {}), oracle(*inputs)
            )
        worst = largest((worst, errors))
    assert worst < 1e-12, worst


B, ROWS, D, D_V = 2, 6, 8, 4


def _traffic(rank, world, heads):
    h, h_kv = heads
    q, k, v = (torch.randn(B, ROWS, *n, requires_grad=True) for n in ((h, D), (h_kv, D), (h_kv, D_V)))
    found = {}
    for u in (2, 4):
        for cells in grids(world // u):
            config = TreeConfig(ulysses_size=u, grid=cells, head_chunks=1)
            with comm.record() as forward:
                out = tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config)
            with comm.record() as backward:
                out.backward(torch.ones_like(out))
            found[u, cells] = [sum(sent.bytes for sent in log) for log in (forward, backward)]
    return found


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (4, 1)])
def test_it_sends_what_the_formulas_say(heads):
    """docs/design.md, section 2: every rank is sent the KV heads that it needs, once."""
    h, h_kv = heads
    for found in run_distributed(_traffic, 4, heads):
        for (u, (a, b)), (forward, backward) in found.items():
            kv = max(h_kv, u) * (D + D_V)
            exchanged = (u - 1) / u * (h * (D + D_V) + kv), (u - 1) / u * (h * (D + D_V + 1) + kv)
            gathered = (a - 1) * h * (D + D_V + 1) + (b - 1) * kv, (a - 1) * h * (2 * D + D_V + 2) + (b - 1) * 2 * kv
            assert [forward, backward] == [4 * B * ROWS * (x + y) for x, y in zip(exchanged, gathered)], (u, a, b)
