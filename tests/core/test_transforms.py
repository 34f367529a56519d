"""Collective functions within transforms of torch.func: they run, or are refused before anything is sent."""

import re

import pytest
import torch
import torch.distributed as dist

import megatron_tree
from megatron_tree import (
    tree_attn_func,
    tree_attn_varlen_func,
    tree_convolution,
    tree_decode,
    tree_halo,
    tree_prefill,
    tree_recurrence,
    tree_scan,
    tree_select,
    tree_select_func,
    unshard_sequence,
)
from megatron_tree.core import comm
from megatron_tree.core.attention.selection import tree_select_prefill
from megatron_tree.core.layout import Segment
from support.ranks import run_distributed

RUNS = dict(shares=[[(0, 1)], [(1, 1)]], key_segments=[[Segment(0, 0, 4)], [Segment(0, 4, 4)]])


def _kernel(inputs, v, state):
    final = torch.einsum("bthd,bthe->bhde", inputs[0], v)
    return v * 2, final if state is None else final + state


def _functions():
    """{name: function of x [4, 4]}."""
    group = dict(cp_group=dist.group.WORLD)
    at = dict(cache_positions=torch.arange(4)[None] + 4 * comm.group_rank(dist.group.WORLD))

    def of_heads(x):
        return x.view(1, 4, 1, 4)

    differentiable = {
        "tree_attn_func": lambda x: tree_attn_func(*[of_heads(x)] * 3, **group),
        "tree_attn_varlen_func": lambda x: tree_attn_varlen_func(*[of_heads(x)[0]] * 3, cu_seqlens=[0, 8], **group),
        "tree_recurrence": lambda x: tree_recurrence(_kernel, [of_heads(x)], of_heads(x), head_dim=4, **group)[0],
        "tree_scan": lambda x: tree_scan(x[:1, :1, None], x.view(1, 1, 1, 4, 4), layout="contiguous", **group)[0],
        "tree_halo": lambda x: tree_halo(x[None], 1, **group)[0],
        "tree_convolution": lambda x: tree_convolution(torch.tanh, x[None], 1, **group)[0],
    }
    others = {
        "tree_decode": lambda x: tree_decode(of_heads(x)[:, :1], of_heads(x), of_heads(x), **group),
        "tree_prefill": lambda x: tree_prefill(of_heads(x)[:, :1], of_heads(x), of_heads(x), **RUNS, **group),
        "tree_select": lambda x: tree_select(
            of_heads(x)[:, :1], x[None, :1, :1], x[None], topk=2, q_positions=torch.tensor([[7]]), **at, **group
        ),
        "tree_select_func": lambda x: tree_select_func(of_heads(x), x[None, :, :1], x[None], topk=2, **group),
        "tree_select_prefill": lambda x: tree_select_prefill(
            of_heads(x)[:, :1], x[None, :1, :1], x[None], topk=2, **RUNS, **group
        ),
        "unshard_sequence": lambda x: unshard_sequence(x, dist.group.WORLD, 0),
    }
    return differentiable, others


def _batched(function, x):
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    torch.autograd.grad(out, leaf, torch.stack((out, out)).detach(), is_grads_batched=True)


REFUSED = {
    "vmap": lambda function, x: torch.vmap(function)(torch.stack((x, x))),
    "vmap of what the function does not see": lambda f, x: torch.vmap(lambda y: f(x).sum() + y)(x[0]),
    "jacrev": lambda function, x: torch.func.jacrev(function)(x),
    "jacfwd": lambda function, x: torch.func.jacfwd(function)(x),
    "hessian": lambda function, x: torch.func.hessian(lambda x: function(x).square().sum())(x),
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
}
DIFFERENTIATES = {
    "grad": lambda function, x: torch.func.grad(lambda x: function(x).double().sum())(x),
    "grad of what the function does not see": lambda f, x: torch.func.grad(lambda y: (f(x).sum() + y).sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
}


def _run(rank, world, name):
    """How each transform ended, and that the group was usable after it."""
    differentiable, others = _functions()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    function, found = (differentiable | others)[name], {}
    want = function(x)
    transforms = REFUSED | DIFFERENTIATES | ({"is_grads_batched": _batched} if name in differentiable else {})
    for way, transform in transforms.items():
        try:
            transform(function, x)
            found[way] = None
        except ValueError as error:
            found[way] = str(error)
        assert torch.equal(function(x), want), way
    return found


@pytest.mark.parametrize("name", sorted(name for names in _functions() for name in names))
def test_refused_before_anything_is_sent(name):
    first, second = run_distributed(_run, 2, name)
    assert first == second
    differentiable, _ = _functions()
    for way, message in first.items():
        if way in DIFFERENTIATES and name in differentiable:
            assert message is None, way
        else:
            assert re.search("does not run within [a-z, ]* of torch.func|has a tangent", message), (way, message)


def test_every_public_collective_function_is_here():
    public = {name for name in megatron_tree.__all__ if name.startswith("tree_")}
    assert public <= {name for names in _functions() for name in names}
