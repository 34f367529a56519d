"""Forwards that run again in the middle of a backward: they take the plan of the first time, from the first step on."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_tree import TreeConfig, shard_sequence, tree_attn_func
from megatron_tree.core.comm.group import GroupState
from support.hosts import Hosts
from support.ranks import run_distributed
from support.tried_plans import taken, tried

SEQ, HEADS, HEADS_KV, DIM = 64, 4, 2, 16
PLANNED, TUNED = TreeConfig(tune=False), TreeConfig()
recomputed = functools.partial(checkpoint, use_reentrant=False)


def _policy(ctx, op, *args, **kwargs):
    """Saves all products, attention's and what is outside of it."""
    saves = any(name in str(op) for name in ("mm", "flash", "empty", "copy"))
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(recomputed, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy))


def _nested(layer, x):
    return recomputed(lambda x: recomputed(layer, x) * 1.01, x)


RUNS = {
    "kept": lambda layer, x: layer(x),
    "recomputed": recomputed,
    "by a new graph": functools.partial(checkpoint, use_reentrant=True),
    "selective": selective,
    "nested": _nested,
}


class Model:
    """Layers that attend over a sharded sequence; a weight for each."""

    def __init__(self, layers, run, config):
        generator = torch.Generator().manual_seed(2)
        width = HEADS * DIM
        self.weights = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(layers)]
        self.run, self.config = run, config
        for weight in self.weights:
            weight.requires_grad_()

    def __call__(self, x):
        for weight in self.weights:
            x = x + self.run(functools.partial(self._layer, weight), x)
        return x

    def _layer(self, weight, x):
        q = (x @ weight).unflatten(-1, (HEADS, DIM))
        k, v = q[:, :, :HEADS_KV], q[:, :, -HEADS_KV:]
        return tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=self.config).flatten(2)

    def gradients(self):
        """Of all weights, which they lose."""
        grads = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        return torch.stack(grads)


def _batch(number):
    x = torch.randn(1, SEQ, HEADS * DIM, generator=torch.Generator().manual_seed(number))
    return shard_sequence(x, dist.group.WORLD, 1).requires_grad_()  # reentrant checkpoints look at their inputs only


def _loss(model, number):
    return model(_batch(number)).square().mean()


def _one(model):
    _loss(model, 0).backward()


def _accumulated(model):
    for number in range(3):
        _loss(model, number).backward()


def _pipelined(model):
    """One forward, one backward: three forwards are open at a time."""
    losses = [_loss(model, 0), _loss(model, 1)]
    for number in (2, 3):
        losses.append(_loss(model, number))
        losses.pop(0).backward()
    for loss in losses:
        loss.backward()


def _evaluated(model):
    """Evaluations, with and without a graph, while a forward waits for its backward."""
    loss = _loss(model, 0)
    with torch.no_grad():
        _loss(model, 1)
    _loss(model, 2)
    loss.backward()


def _retained(model):
    loss = _loss(model, 0)
    loss.backward(retain_graph=True)
    _loss(model, 1).backward()
    loss.backward()


SCHEDULES = {function.__name__[1:]: function for function in (_one, _accumulated, _pipelined, _evaluated, _retained)}
STEPS = 3


def _errors(layers, how, schedule, tuned):
    """The relative error of all gradients, in every step."""
    step = SCHEDULES[schedule]
    want = Model(layers, RUNS["kept"] if how != "nested" else (lambda layer, x: layer(x) * 1.01), PLANNED)
    step(want)
    want = want.gradients()
    model, errors = Model(layers, RUNS[how], tuned), []
    for _ in range(STEPS):
        step(model)
        got = model.gradients()
        errors.append(float((got - want).abs().max() / want.abs().max()))
    return errors


def _ranks(rank, world, hosts, cases, pick):
    """Errors of all cases, and the plans that were measured."""
    found = {}
    others = [{"ulysses_size": 1, "grid": (1, world)}, {"ulysses_size": 1, "grid": (world, 1)}, {"ulysses_size": 2}]
    with Hosts([r * hosts // world for r in range(world)]), tried(*others), taken(pick):
        for layers, how, schedule in cases:
            state = GroupState.of(dist.group.WORLD)
            state.tuned.clear()
            state.planned.clear()
            found[layers, how, schedule] = _errors(layers, how, schedule, TUNED)
        plans = {str(plan.forward) for plan in GroupState.of(dist.group.WORLD).tuned.values()}
    return found, plans


def _check(world, hosts, cases, pick):
    for found, plans in run_distributed(_ranks, world, hosts, cases, pick):
        assert max(map(max, found.values())) < 2e-5, found
        assert len(plans) == 1


@pytest.mark.parametrize("pick", [0, 1, 3])
def test_every_way_to_run_a_forward_again(pick):
    _check(2, 1, [(6, how, "one") for how in RUNS], pick)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_of_forwards_and_backwards(schedule):
    _check(2, 2, [(6, "recomputed", schedule)], 3)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("pick", range(4))
def test_many_layers(hosts, pick):
    ways = itertools.product((8, 24, 48), ("recomputed", "selective"), SCHEDULES)
    twice = ("selective", "retained")  # torch refuses a second backward of selective checkpoints
    _check(4, hosts, [way for way in ways if way[1:] != twice], pick)


def _as_it_is(rank, world):
    """What the planner tries by itself, on four hosts."""
    with Hosts(range(world)):
        errors = _errors(24, "recomputed", "one", TreeConfig(topology="ethernet"))
        return errors, len(GroupState.of(dist.group.WORLD).tuned)


def test_a_deep_model_with_the_defaults():
    for errors, measured in run_distributed(_as_it_is, 4):
        assert max(errors) < 2e-5, errors
        assert measured == 1
