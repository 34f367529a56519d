"""The public functions in code that torch.compile compiles: one graph break for each call, results as without."""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters

from megatron_tree import (
    dispatch_documents,
    shard_sequence,
    tree_attn_func,
    tree_attn_varlen_func,
    tree_decode,
    tree_prefill,
    unshard_sequence,
)
from megatron_tree.core.layout import Segment
from support.ranks import run_distributed


def compiled(fn, backend="eager"):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(fn, backend=backend)


def compiles(fn):
    """Of a test's function: with torch.compile, which the ranks of the tests otherwise turn off."""
    with torch._dynamo.config.patch(disable=False):
        return fn()


def _layer(x, w, **options):
    """Rows [b, s, 16] through projections around attention with 4 heads and 2 KV heads, and a sum of squares."""
    q, k, v = (x @ w).unflatten(-1, (8, 4)).split((4, 2, 2), -2)
    out, lse = tree_attn_func(q.sin(), k, v, cp_group=dist.group.WORLD, return_lse=True, **options)
    return (out * 2).square().sum() + lse.sum()


def _loss_and_grads(fn, seed, s):
    torch.manual_seed(seed)
    x, w = torch.randn(2, s, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    fn(x, w).backward()
    return x.grad, w.grad


def _assert_same(fn, other, seed, s):
    for a, b in zip(_loss_and_grads(fn, seed, s), _loss_and_grads(other, seed, s), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def _trains(rank, world, backend):
    def run():
        layer = compiled(_layer, backend)
        for s in (8, 12):
            _assert_same(layer, _layer, rank, s)
        breaks = sum(counters["graph_break"].values())
        step = compiled(lambda x, w: _layer(x, w).backward(), backend)
        x, w = torch.randn(2, 8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
        step(x, w)
        expected = torch.autograd.grad(_layer(x, w), (x, w))
        for a, b in zip((x.grad, w.grad), expected, strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()
        return breaks

    breaks = compiles(run)
    return breaks, unshard_sequence(torch.full((2,), float(rank)), dist.group.WORLD, 0, "contiguous").tolist()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training_is_the_same_and_the_group_lives_on(backend):
    """Also of a step that is compiled with its backward, which runs inside of it."""
    breaks = 2  # the layer is compiled for one length, and then for any
    assert run_distributed(_trains, 2, backend) == [(breaks, [0.0, 0.0, 1.0, 1.0])] * 2


def _whole(x, bounds):
    """Packed documents through cutting, attention and joining; then decoding and prefill over what rank 0 holds."""
    group, rank = dist.group.WORLD, dist.get_rank()
    layout = dispatch_documents(bounds, group)
    own = shard_sequence(x * 2, group, 0, layout)
    out = unshard_sequence(tree_attn_varlen_func(own, own, own, layout=layout, cp_group=group) + 1, group, 0, layout)
    held = (x[: 16 * (1 - rank)] * 3)[None]
    decoded = tree_decode(x[None, -1:] * 3, held, held, cp_group=group)
    segments = [Segment(0, 0, held.shape[1])] if held.shape[1] else []
    shares = [[(16, 0)], [(16, 0)]]
    chunk = tree_prefill(held[:, :0], held, held, cp_group=group, shares=shares, key_segments=segments)
    return out.cos(), decoded.cos(), chunk


def _all_functions(rank, world):
    x, bounds = torch.randn(16, 2, 8), [0, 5, 16]
    got, expected = compiles(lambda: compiled(_whole)(x, bounds)), _whole(x, bounds)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    breaks = sum(counters["graph_break"].values())
    x, w = torch.randn(2, 8, 16), torch.randn(16, 32)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        compiles(lambda: torch.compile(_layer, backend="eager", fullgraph=True)(x, w))
    _layer(x, w)  # nothing was sent
    return breaks


def test_one_graph_break_for_each_call():
    assert run_distributed(_all_functions, 2) == [6, 6]
