"""Second and forward-mode derivatives: right on one rank with the reference backend, an error everywhere else."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from megatron_tree import TreeConfig, shard_positions, tree_attn_func, tree_attn_varlen_func, tree_decode, tree_prefill
from megatron_tree.layout import Segment
from support.attention import configs, make_inputs, make_sinks
from support.ranks import run_distributed

NO_SECOND = "no second derivatives on {} rank"


def plain(q, k, v, sinks, keep):
    """(out, lse) by torch's own operations, which can be differentiated any number of times."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~keep, float("-inf"))
    logits = torch.cat((logits, sinks[:, None, None].expand(*logits.shape[:3], 1)), -1)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1)[..., :-1], v), logits.logsumexp(-1)


def second_derivatives(attend, tensors, dout):
    """Of a function of all gradients of a loss with out and lse in it."""
    tensors = [x.clone().requires_grad_() for x in tensors]
    out, lse = attend(*tensors)
    grads = torch.autograd.grad((out * dout + out**2).sum() + (lse**2).sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum((x**3).sum() for x in grads), tensors)


@pytest.mark.parametrize("form", ["causal", "documents", "ranges"])
def test_second_derivatives_on_one_rank(form):
    n, options = 12, dict(cp_group=None, config=TreeConfig(backend="reference"), return_lse=True)
    q, k, v, dout = make_inputs(n, (4, 2), batch=1)
    keep = torch.ones(n, n, dtype=torch.bool).tril()

    def attend(q, k, v, sinks):
        if form == "documents":
            out, lse = tree_attn_varlen_func(q[0], k[0], v[0], sinks=sinks, cu_seqlens=[0, 5, n], **options)
            return out[None], lse[None]
        mask = dict(ranges=[((0, n), (0, 3), "full"), ((4, n), (3, 7), "causal")]) if form == "ranges" else {}
        return tree_attn_func(q, k, v, sinks=sinks, **mask, **options)

    if form == "documents":
        keep[5:, :5] = False
    if form == "ranges":
        keep = torch.zeros_like(keep)
        keep[:, :3] = True
        keep[4:, 3:7] = torch.ones(n - 4, 4, dtype=torch.bool).tril(4 - (n - 4))
    tensors = (q, k, v, make_sinks(4))
    truth = second_derivatives(lambda *tensors: plain(*tensors, keep), tensors, dout)
    for x, want in zip(second_derivatives(attend, tensors, dout), truth, strict=True):
        assert (x - want).abs().max() < 1e-12 * want.abs().max()


def check_first_only(attend, q, k, v, backend, world):
    """First derivatives with create_graph=True are those without it; differentiating any of them is an error, also
    where the upstream gradient is a constant."""
    tensors = [x.clone().requires_grad_() for x in (q, k, v, make_sinks(q.shape[2]).to(q.dtype))]
    plain = torch.autograd.grad(attend(*tensors).sum(), tensors)
    found = torch.autograd.grad(attend(*tensors).sum(), tensors, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
    for of, x in zip((0, 1, 2, 0), found, strict=True):
        with pytest.raises(ValueError, match=NO_SECOND.format(world) + f".*backend='{backend}'.*cp_group=None"):
            torch.autograd.grad(x.sum(), tensors[of], retain_graph=True)
    direction = torch.ones_like(q).requires_grad_()
    (through_dout,) = torch.autograd.grad(attend(*tensors), tensors[0], direction, create_graph=True)
    with pytest.raises(ValueError, match="no second derivatives"):
        torch.autograd.grad(through_dout.sum(), direction)


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_kernels_have_first_derivatives_only(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    config = TreeConfig(backend=backend)
    q, k, v, _ = make_inputs(8, (2, 2), batch=1, d=16, d_v=16, dtype=torch.float32)
    attend = lambda q, k, v, sinks: tree_attn_func(q, k, v, cp_group=None, sinks=sinks, config=config)  # noqa: E731
    check_first_only(attend, q, k, v, backend, 1)


def _several_ranks(rank, world, layout):
    q, k, v, _ = (x[:, shard_positions(4 * world, rank, world, layout)] for x in make_inputs(4 * world, (4, 2)))
    for _, config in configs(world):
        options = dict(cp_group=dist.group.WORLD, layout=layout, config=replace(config, backend="reference"))
        attend = functools.partial(tree_attn_func, **options)
        check_first_only(lambda *x, attend=attend: attend(*x[:3], sinks=x[3]), q, k, v, "reference", world)
    return True


def test_ranks_have_first_derivatives_only():
    assert all(run_distributed(_several_ranks, 2, "zigzag"))


def _tangents(rank, world):
    group = dist.group.WORLD if world > 1 else None
    q, k, v, _ = make_inputs(8, (4, 2), dtype=torch.float32)
    shares = [[(4 * r, 4)] for r in range(2)] if world > 1 else [[(0, 8)]]
    own = slice(4 * rank, 4 * rank + 4) if world > 1 else slice(8)
    q, k, v = (x[:, own] for x in (q, k, v))
    options = dict(shares=shares, key_segments=[Segment(0, own.start or 0, q.shape[1])], cp_group=group)
    with forward_ad.dual_level():
        for i, name in enumerate(("q", "k", "v")):
            tensors = [forward_ad.make_dual(x, torch.ones_like(x)) if i == j else x for j, x in enumerate((q, k, v))]
            with pytest.raises(ValueError, match=f"{name} has a tangent.*{name}.detach()"):
                tree_attn_func(*tensors, cp_group=group)
            with pytest.raises(ValueError, match=f"{name}(_cache)? has a tangent"):
                tree_decode(tensors[0][:, :1], *tensors[1:], cp_group=group)
            with pytest.raises(ValueError, match=f"{name}(_cache)? has a tangent"):
                tree_prefill(*tensors, **options)
    with forward_ad.dual_level():  # the group stays usable, and one rank decodes with torch's operations
        config, direction = TreeConfig(backend="reference"), torch.randn_like(q[:, :1])
        call = lambda q, group: tree_decode(q, k, v, cp_group=group, config=config)  # noqa: E731
        call(q[:, :1].contiguous(), group)
        found = forward_ad.unpack_dual(call(forward_ad.make_dual(q[:, :1], direction), None)).tangent
    assert torch.isfinite(found).all() and found.abs().max() > 0
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_tangents_are_refused(world):
    assert all(run_distributed(_tangents, world))
