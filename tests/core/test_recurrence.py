"""Recurrent layers over shards against the recurrence run token by token, in float64: values and all gradients."""

import itertools
import random
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_tree import (
    Decay,
    dispatch_documents,
    dispatch_prefix_tree,
    packed_layout,
    prefix_tree,
    shard_sequence,
    tree_convolution,
    tree_recurrence,
    tree_scan,
    unshard_sequence,
)
from megatron_tree.core.comm import record
from megatron_tree.core.layout import Dispatched
from megatron_tree.core.recurrence.shift import tree_shift
from support.prefix_trees import grown, in_a_tree
from support.ranks import on_ranks, run_distributed
from support.recurrences import decaying, delta_inputs, delta_rule

B, H, D, D_V, T = 2, 3, 4, 5, 24
UNEVEN = {1: (24,), 2: (24, 0), 3: (5, 0, 19), 4: (0, 7, 0, 17)}
DOCUMENTS = (3, 17, 1, 2, 25)
EXACT = 1e-12  # float64, sums of some tens of terms


def relative(got, want):
    return float((got - want).abs().max().detach() / want.abs().max().detach()) if got.numel() else 0.0


def documents_of(name, world):
    """(layout, lengths of the documents in the whole sequence, with padding)."""
    if name == "dispatched":
        layout = dispatch_documents([0, *itertools.accumulate(DOCUMENTS)], dist.group.WORLD)
        return layout, DOCUMENTS
    padded = [-(-n // (2 * world)) * 2 * world for n in DOCUMENTS]
    return packed_layout(*([0, *itertools.accumulate(x)] for x in (padded, padded))), padded


def runs_of_one(world):
    """One document in runs, as a prompt lies in a cache: two on every rank but the last, which has padding alone."""
    holders = max(1, world - 1)
    c = T // (2 * holders)
    shares = tuple(((r * c, c), (T - (r + 1) * c, c)) for r in range(holders)) + ((),) * (world - holders)
    return Dispatched((T,), (T,), shares, 2 * c + 1)


class Case:
    """Inputs of a whole sequence, and what the recurrence makes of them."""

    def __init__(self, kernel, lengths, *, state=False):
        inputs, v = delta_inputs(B, sum(lengths), H, D, D_V, seed=len(lengths))
        if kernel == "decay of rows":
            inputs[2] = inputs[2][..., None] * torch.linspace(0.5, 2, D, dtype=v.dtype)
        self.kernel = delta_rule if kernel == "delta rule" else decaying
        self.inputs = inputs if kernel == "delta rule" else inputs[:3]
        draw = torch.Generator().manual_seed(1)
        self.v, self.up = v, torch.randn(v.shape, generator=draw, dtype=v.dtype)
        self.state = torch.randn(B, H, D, D_V, generator=draw, dtype=v.dtype) if state else None
        leaves = [x.clone().requires_grad_() for x in self.leaves]
        outs, begin = [], 0
        for n in lengths:
            rows = slice(begin, begin + n)
            initial = leaves[-1] if state else None
            out, final = self.kernel(
                [x[:, rows] for x in leaves[: len(self.inputs)]], leaves[len(self.inputs)][:, rows], initial
            )
            outs.append(out)
            begin += n
        self.out = torch.cat(outs, 1)
        self.final = final.detach() if state else None
        self.grads = torch.autograd.grad(self.loss(self.out, final if state else None, self.up), leaves)

    @property
    def leaves(self):
        return [*self.inputs, self.v, *([] if self.state is None else [self.state])]

    def loss(self, out, final, up, ranks=1):
        return (out * up).sum() + (0 if final is None else (final**2).sum() / ranks)

    def error(self, layout, schedule="auto", recompute=False):
        """The largest of the errors of out, the final state and all gradients on this rank."""
        group, n = dist.group.WORLD, len(self.inputs)

        def share(x):
            return shard_sequence(x.detach(), group, 1, layout)

        leaves = [share(x).requires_grad_() for x in (*self.inputs, self.v)]
        leaves += [] if self.state is None else [self.state.clone().requires_grad_()]
        options = dict(head_dim=D, cp_group=group, layout=layout, schedule=schedule)

        def run(*leaves):
            decay = None if self.kernel is delta_rule else Decay(leaves[2], leaves[0])
            state = dict(initial_state=leaves[-1], return_final_state=True) if len(leaves) > n + 1 else {}
            return tree_recurrence(self.kernel, leaves[:n], leaves[n], decay=decay, **state, **options)

        out, final = checkpoint(run, *leaves, use_reentrant=False) if recompute else run(*leaves)
        loss = self.loss(out, final, share(self.up), dist.get_world_size())
        grads = list(torch.autograd.grad(loss, leaves, materialize_grads=True))
        pairs = [(out, share(self.out)), *((g, share(w)) for g, w in zip(grads[: n + 1], self.grads))]
        if self.state is not None:
            dist.all_reduce(grads[-1])
            pairs += [(final, self.final), (grads[-1], self.grads[-1])]
        return max(relative(got.detach(), want) for got, want in pairs)


KERNELS = ("delta rule", "decay", "decay of rows")


def _sequences(rank, world):
    errors = {}
    for kernel, state in itertools.product(KERNELS, (False, True)):
        case = Case(kernel, (T,), state=state)
        layouts = "zigzag", "contiguous", UNEVEN[world], runs_of_one(world)
        for layout, schedule in itertools.product(layouts, ("gather", "exchange")):
            errors[kernel, state, layout, schedule] = case.error(layout, schedule)
    errors["recomputed"] = Case("delta rule", (T,), state=True).error("zigzag", recompute=True)
    return errors


def _documents(rank, world):
    errors = {}
    for kernel, name in itertools.product(KERNELS[:2], ("dispatched", "packed")):
        layout, lengths = documents_of(name, world)
        case = Case(kernel, lengths)
        for schedule in ("gather", "exchange", "auto"):
            errors[kernel, name, schedule] = case.error(layout, schedule)
    return errors


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [_sequences, _documents])
def test_outputs_states_and_gradients(run, world):
    for errors in run_distributed(run, world):
        assert {name: error for name, error in errors.items() if error > EXACT} == {}


def test_a_tree_on_one_rank_needs_no_maps():
    """Kernels begin with the states, in one call for all segments of one depth and length."""
    tree, shapes = prefix_tree(in_a_tree(prompt=6, answers=8, length=3)), []
    layout, inputs = dispatch_prefix_tree(tree, None), delta_inputs(1, 5 + 8 * 4, H, D, D_V, seed=0)

    def kernel(inputs, v, state):
        shapes.append((tuple(v.shape), state is None))
        return delta_rule(inputs, v, state)

    tree_recurrence(kernel, *inputs, head_dim=D, cp_group=None, layout=layout)
    assert shapes == [((1, 5, H, D_V), True), ((8, 4, H, D_V), False)]


def _rounding(inputs, v, state):
    """The delta rule in float32, with inputs and outputs in their dtype."""
    out, final = delta_rule([x.float() for x in inputs], v.float(), state)
    return out.to(v.dtype), final


def _low_precision(rank, world):
    """Errors of out and gradients over those of one rank in the same precision."""
    group, dtype = dist.group.WORLD, torch.bfloat16
    case = Case("delta rule", (96,))
    leaves = [x.to(dtype) for x in case.leaves]
    up = case.up.to(dtype)
    exact = [x.double().requires_grad_() for x in leaves]
    truth, _ = delta_rule(exact[:-1], exact[-1], None)
    truths = [truth, *torch.autograd.grad((truth * up).sum(), exact)]
    dense = [x.clone().requires_grad_() for x in leaves]
    out, _ = _rounding(dense[:-1], dense[-1], None)
    rounded = [out, *torch.autograd.grad((out * up).sum(), dense)]
    local = [shard_sequence(x, group, 1).requires_grad_() for x in leaves]
    out, _ = tree_recurrence(_rounding, local[:-1], local[-1], head_dim=D, cp_group=group)
    found = [out, *torch.autograd.grad((out * shard_sequence(up, group, 1)).sum(), local)]
    whole = [unshard_sequence(x, group, 1) for x in found]
    return [relative(a, c) / relative(b, c) for a, b, c in zip(whole, rounded, truths)]


def test_low_precision_within_the_rule():
    for out, *grads in run_distributed(_low_precision, 4):
        assert out <= 2 and max(grads) <= 3, (out, grads)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks()
def test_halos_of_a_convolution(world):
    """The largest errors of a causal convolution of 8 taps and its gradient, by layout."""
    group, weight, errors = dist.group.WORLD, torch.linspace(-1, 1, 8, dtype=torch.float64), {}

    def convolve(x):  # [b, t, c], zeros before them
        padded = F.pad(x.mT.flatten(0, 1), (7, 0))
        return F.conv1d(padded[:, None], weight[None, None]).view(len(x), 3, -1).mT

    draw = torch.Generator().manual_seed(0)
    for name in ("zigzag", "contiguous", UNEVEN[world], runs_of_one(world), "dispatched", "packed"):
        packed = name in ("dispatched", "packed")
        layout, lengths = documents_of(name, world) if packed else (name, (T,))
        x, up = (torch.randn(B, sum(lengths), 3, generator=draw, dtype=torch.float64) for _ in range(2))
        before = torch.randn(B, 7, 3, generator=draw, dtype=torch.float64)
        first = torch.zeros_like(before) if packed else before.requires_grad_()
        want = torch.cat(
            [convolve(torch.cat((first, part), 1))[:, 7:] for part in x.requires_grad_().split(tuple(lengths), 1)], 1
        )
        leaves = [x] if packed else [x, before]
        wanted = torch.autograd.grad((want * up).sum(), leaves)
        local = shard_sequence(x.detach(), group, 1, layout).requires_grad_()
        given = {} if packed else dict(before=before.detach().requires_grad_(), return_final=True)
        out, final = tree_convolution(convolve, local, 7, cp_group=group, layout=layout, **given)
        leaves = [local, *([] if packed else [given["before"]])]
        grads = torch.autograd.grad((out * shard_sequence(up, group, 1, layout)).sum(), leaves, materialize_grads=True)
        pairs = [(out, want), (grads[0], wanted[0])]
        errors[name] = max(relative(a, shard_sequence(b, group, 1, layout)) for a, b in pairs)
        if not packed:
            dist.all_reduce(grads[1])
            errors[name] = max(errors[name], relative(grads[1], wanted[1]), relative(final, x[:, -7:]))
    assert {name: error for name, error in errors.items() if error > EXACT} == {}, errors


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_the_row_after_each(world):
    group = dist.group.WORLD
    for name in ("zigzag", "contiguous", UNEVEN[world], runs_of_one(world), "dispatched", "packed"):
        layout, lengths = documents_of(name, world) if name in ("dispatched", "packed") else (name, (T,))
        x = torch.arange(1, 2 * sum(lengths) + 1).view(2, -1)
        want = torch.cat([F.pad(part[:, 1:], (0, min(1, part.shape[1]))) for part in x.split(tuple(lengths), 1)], 1)
        got = tree_shift(shard_sequence(x, group, 1, layout), cp_group=group, layout=layout)
        assert torch.equal(got, shard_sequence(want, group, 1, layout)), name
    for seed in range(8):
        tree = prefix_tree(grown(random.Random(seed), 7, vocab=2))
        layout, x = dispatch_prefix_tree(tree, group), torch.arange(1, tree.input_ids.shape[1] + 1)
        after = {(int(a), int(b)) for row in tree.row_index for a, b in itertools.pairwise(row) if b >= 0}
        sums = torch.zeros_like(x).index_add(0, *(torch.tensor(rows) for rows in zip(*((a, b + 1) for a, b in after))))
        first = torch.tensor([min((b + 1 for a, b in after if a == row), default=0) for row in range(len(x))])
        for want, summed in ((sums, True), (first, False)):
            shard = shard_sequence(x[None], group, 1, layout)
            got = tree_shift(shard, cp_group=group, layout=layout, sums=summed)
            assert torch.equal(got, shard_sequence(want[None], group, 1, layout)), seed


@on_ranks(2)
def test_forward_mode():
    case = Case("delta rule", (T,))
    tangent = torch.randn(case.v.shape, generator=torch.Generator().manual_seed(2), dtype=case.v.dtype)
    _, want = torch.func.jvp(lambda v: delta_rule(case.inputs, v, None)[0], (case.v,), (tangent,))
    inputs, v, vt, want = (
        [shard_sequence(x, dist.group.WORLD, 1) for x in xs] for xs in (case.inputs, [case.v], [tangent], [want])
    )
    options = dict(head_dim=D, cp_group=dist.group.WORLD)
    _, got = torch.func.jvp(lambda v: tree_recurrence(delta_rule, inputs, v, **options)[0], tuple(v), tuple(vt))
    worst = relative(got, want[0])
    assert worst < EXACT, worst


def _sent(rank, world, schedule, final):
    update = torch.randn(1 if rank == world - 1 else 2, B, H, D, D_V)
    transition = torch.randn(*update.shape[:-1], D)
    with record() as log:
        tree_scan(transition, update, cp_group=dist.group.WORLD, schedule=schedule, return_final_state=final)
    return sum(entry.bytes for entry in log if entry.op == "all_to_all")


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("schedule", ["gather", "exchange"])
def test_bytes(schedule, final):
    world, rows = 4, B * H
    shares = [rows * (r + 1) // world - rows * r // world for r in range(world)]
    segments = [2, 2, 2, 1]
    for rank, sent in enumerate(run_distributed(_sent, world, schedule, final)):
        maps = segments[rank] - (rank == 0 and not final)  # rank 0 has the last segment
        if schedule == "gather":
            words = (world - 1) * rows * maps * (D * D + D * D_V)
        else:
            others = [r for r in range(world) if r != rank]
            words = sum(shares[r] for r in others) * maps * (D * D + D * D_V)
            words += shares[rank] * sum(segments[r] - (r == 0) + final for r in others) * D * D_V
        assert sent == 4 * words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "no such kernel"),
        (dict(head_dim=0), "head_dim=0"),
        (dict(head_dim=3), "maps"),
        (dict(layout=(1, 1)), "layout=(1, 1) gives it 1"),
        (dict(schedule="tree"), "schedule='tree'"),
        (dict(initial_state=torch.zeros(1)), "initial_state must be [b, h, d, d_v] = [2, 3, 4, 5], got [1]"),
        (dict(return_final_state=True), "return_final_state"),
    ],
)
@on_ranks(2)
def test_errors_reach_all_ranks(rank, world, change, words):
    """The error of a call that rank 1 makes with other options, or whose kernel fails on rank 1."""
    inputs, v = delta_inputs(B, T // world, H, D, D_V, seed=0)
    options = dict(head_dim=D, cp_group=dist.group.WORLD) | (change if rank == 1 else {})

    def kernel(inputs, v, state):
        if rank == 1 and not change:
            raise ValueError("no such kernel")
        return delta_rule(inputs, v, state)

    with pytest.raises(ValueError, match=re.escape(words)):
        tree_recurrence(kernel, inputs, v, **options)
