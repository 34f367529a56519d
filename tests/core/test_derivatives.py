"""Tangents and second derivatives: the ways to ask for them, what they send, and what there is none of.

test_fuzz_derivatives.py has masks, layouts and schedules.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from megatron_tree import TreeConfig, shard_positions, tree_attn_func, tree_decode, tree_prefill
from megatron_tree.core import comm, energy
from megatron_tree.core.layout import Segment
from megatron_tree.core.plan import Shape, grids
from megatron_tree.core.spec import AttnSpec
from support.attention import configs, make_inputs, make_sinks
from support.plans import training
from support.ranks import on_ranks, run_distributed

WITHOUT_THIRD = "attention has no third derivatives"


def inputs_and_tangents(n, heads, **options):
    """q, k, v, sinks and their tangents."""
    h = heads[0]
    tensors = [*make_inputs(n, heads, **options)[:3], make_sinks(h)]
    return tuple(tensors), tuple(torch.randn_like(x) for x in tensors)


def dense(q, k, v, sinks):
    """(out, lse) by torch's own operations, which it differentiates any number of times."""
    n, spec = q.shape[1], AttnSpec(softmax_scale=q.shape[-1] ** -0.5, softcap=2.0)
    s = energy.scores(q, k, spec, torch.ones(n, n, dtype=torch.bool).tril())
    s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:3], 1)), -1)
    top = s.detach().amax(-1, keepdim=True)
    lse = top[..., 0] + torch.exp(s - top).sum(-1).log()
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1)[..., :-1], v), lse


def ours(q, k, v, sinks, **config):
    options = dict(cp_group=None, softcap=2.0, return_lse=True, config=TreeConfig(backend="reference", **config))
    return tree_attn_func(q, k, v, sinks=sinks, **options)


def loss(attend, *tensors):
    """Of higher degree than two in out and lse, so that what flows in depends on the inputs as well."""
    out, lse = attend(*tensors)
    return (out**3).sum() + (lse**2).sum()


def _func(kind):
    """A derivative by torch.func or torch.autograd.functional, as a function of (attend, inputs, tangents)."""
    every = (0, 1, 2, 3)
    jvp, grad = torch.func.jvp, torch.func.grad

    def along(attend, tangents, *x):
        return sum((y**3).sum() for y in jvp(attend, x, tangents)[1])

    of_loss = lambda attend: functools.partial(loss, attend)  # noqa: E731
    return {
        "jvp": lambda attend, x, t: jvp(attend, x, t)[1],
        "grad": lambda attend, x, t: grad(of_loss(attend), every)(*x),
        "jvp of grad": lambda attend, x, t: jvp(grad(of_loss(attend), every), x, t)[1],
        "grad of jvp": lambda attend, x, t: grad(functools.partial(along, attend, t), every)(*x),
        "grad of grad": lambda attend, x, t: grad(
            lambda *y: sum((g**3).sum() for g in grad(of_loss(attend), every)(*y)), every
        )(*x),
        "hvp": lambda attend, x, t: torch.autograd.functional.hvp(of_loss(attend), x, t)[1],
        "vhp": lambda attend, x, t: torch.autograd.functional.vhp(of_loss(attend), x, t)[1],
    }[kind]


def assert_equal(found, truth):
    for x, want in zip(found, truth, strict=True):
        assert (x - want).abs().max() <= 1e-12 * want.abs().max()


@pytest.mark.parametrize("kind", ["jvp", "grad", "jvp of grad", "grad of jvp", "grad of grad", "hvp", "vhp"])
def test_function_transforms(kind):
    inputs, tangents = inputs_and_tangents(10, (4, 2), d=6, d_v=5)
    assert_equal(*(_func(kind)(attend, inputs, tangents) for attend in (ours, dense)))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_dual_tensors(needs_grad):
    """forward_ad: the tangents of the results and, where gradients are asked for, of gradients."""
    inputs, tangents = inputs_and_tangents(10, (4, 2), d=6, d_v=5)

    def derive(attend):
        with forward_ad.dual_level():
            x = [forward_ad.make_dual(x.clone().requires_grad_(needs_grad), t) for x, t in zip(inputs, tangents)]
            results = attend(*x)
            found = [*results]
            if needs_grad:
                found += torch.autograd.grad(loss(lambda *_: results), x)
            return [forward_ad.unpack_dual(y).tangent.detach() for y in found]

    assert_equal(derive(ours), derive(dense))


@pytest.mark.parametrize("uses_tangents", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_through_tangents(inside, uses_tangents):
    """MeanFlow's loss, whose target has the tangents as a constant, and one with their gradient; the backward runs
    within the level of forward mode, or after it."""
    inputs, tangents = inputs_and_tangents(10, (4, 2), d=6, d_v=5)

    def total(values, changes):
        kept = changes if uses_tangents else [x.detach() for x in changes]
        return sum((x * t).sum() + (t**2).sum() for x, t in zip(values, kept))

    def by_dual_tensors():
        leaves = [x.clone().requires_grad_() for x in inputs]
        with forward_ad.dual_level():
            results = ours(*map(forward_ad.make_dual, leaves, tangents))
            loss = total(*zip(*map(forward_ad.unpack_dual, results)))
            if inside:
                return [forward_ad.unpack_dual(x).primal for x in torch.autograd.grad(loss, leaves)]
        return torch.autograd.grad(loss, leaves)

    def by_function_transform(attend):
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        return torch.autograd.grad(total(*torch.func.jvp(attend, leaves, tangents)), leaves)

    truth = by_function_transform(dense)
    assert_equal(by_dual_tensors(), truth)
    assert_equal(by_function_transform(ours), truth)


def test_the_gradient_of_what_flows_in():
    """By dout and dlse, through a double backward."""
    inputs, tangents = inputs_and_tangents(10, (4, 2), d=6, d_v=5)

    def derive(attend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = attend(*leaves)
        upstream = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).requires_grad_() for x in results]
        grads = torch.autograd.grad(results, leaves, upstream, create_graph=True)
        return torch.autograd.grad(grads, upstream, tangents)

    assert_equal(derive(ours), derive(dense))


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_the_largest_logits_beside_tangents(backend):
    (q, k, v, _), tangents = inputs_and_tangents(10, (4, 2), dtype=torch.float32)
    options = dict(cp_group=None, config=TreeConfig(backend=backend), return_max_logit=True)
    attend = lambda q: tree_attn_func(q, k, v, **options)  # noqa: E731
    (out, largest), (outt, _) = torch.func.jvp(attend, (q,), tangents[:1])
    for x, want in zip((out, largest), attend(q), strict=True):
        torch.testing.assert_close(x, want)
    assert outt.abs().max() > 0


def test_there_are_no_third_derivatives():
    inputs, tangents = inputs_and_tangents(6, (2, 1))
    leaf = inputs[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(ours, leaf, *inputs[1:]), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf, create_graph=True)
    with pytest.raises(ValueError, match=WITHOUT_THIRD):
        torch.autograd.grad(second.sum(), leaf)
    with pytest.raises(ValueError, match="no tangents of tangents"):
        torch.func.jvp(lambda *x: torch.func.jvp(ours, x, tangents)[1], inputs, tangents)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, tangents[0])
        (first,) = torch.autograd.grad(loss(ours, dual, *inputs[1:]), dual, create_graph=True)
        with pytest.raises(ValueError, match="no tangents of tangents"):
            torch.autograd.grad(first.sum(), dual)
        # a tangent's backward within the level: torch asks for third derivatives, whoever wants them or not
        change = forward_ad.unpack_dual(ours(dual, *inputs[1:])[0]).tangent
        (second,) = torch.autograd.grad(change.sum(), leaf)
        assert (
            forward_ad.unpack_dual(second).tangent.isnan().all()
            and forward_ad.unpack_dual(second).primal.isfinite().all()
        )


@pytest.mark.parametrize("name", ["cudnn", "fa3"])
def test_libraries_have_first_derivatives_only(name):
    from megatron_tree.core.kernels.backends import NAMED, Backend
    from megatron_tree.core.kernels.libraries import LIBRARIES

    with pytest.raises(ValueError, match=f"backend='{name}' has first derivatives only"):
        Backend(name, NAMED, LIBRARIES[name]).for_duals(torch.bfloat16, 64)


def _counted(call):
    """(result, bytes that this rank sends)"""
    with comm.record() as sent:
        result = call()
    return result, sum(x.bytes for x in sent)


SIZES = Shape(4, 2, 16, 16)


def _schedules(world):
    """Options of `TreeConfig` and of the planner."""
    yield dict(schedule="ring")
    yield from (dict(grid=grid, head_chunks=1) for grid in grids(world))
    yield from (dict(ulysses_size=u, grid=grid) for u in (2, 4) if world % u == 0 for grid in grids(world // u))


def _sent(rank, world, dtype):
    """By schedule: bytes that this rank sends in a forward, in one with tangents, a backward and a second-order one."""
    whole, directions = inputs_and_tangents(8 * world, SIZES[:2], batch=1, d=16, d_v=16, dtype=dtype)
    rows = shard_positions(8 * world, rank, world, "zigzag")
    inputs, tangents = (tuple(x[:, rows] for x in tensors[:3]) for tensors in (whole, directions))
    return [_sent_with(options, inputs, tangents) for options in _schedules(world)]


def _sent_with(options, inputs, tangents):
    config = TreeConfig(backend="reference", transport="direct", **options)
    attend = functools.partial(tree_attn_func, cp_group=dist.group.WORLD, config=config)
    _, forward = _counted(lambda: attend(*inputs))
    _, tangent = _counted(lambda: torch.func.jvp(attend, inputs, tangents))
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    grads, backward = _counted(lambda: torch.autograd.grad(out.sum(), leaves, create_graph=True))
    _, both = _counted(lambda: torch.autograd.grad(grads, leaves, tangents))
    return forward, backward, tangent, both - tangent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_equal_the_formula(world, dtype):
    """With tangents every number that travels has one beside it, and a state mu as well: docs/design.md, section 1.
    The planner counts the same bytes."""
    (h, h_kv, d, _), rows, word = SIZES, 8, dtype.itemsize
    q, kv = rows * h * d * word, 2 * rows * h_kv * d * word  # q is as large as an output
    one, mu = rows * h * max(word, 4), rows * h * word  # a statistic of every query travels bit for bit
    for by_schedule in run_distributed(_sent, world, dtype):
        for options, sent in zip(_schedules(world), by_schedule, strict=True):
            size = dict(batch=1, seq_len=rows * world, bytes_per_word=word)
            plans = [training(world, SIZES, **size, **options, with_lse=dual, dual=dual) for dual in (False, True)]
            forward, backward, tangent, second = sent
            u = options.get("ulysses_size", 1)
            second -= (u - 1) / u * (q + kv * max(1, u / h_kv))  # a backward of a backward first sends q, k and v back
            planned = [of_pass.cost.bytes for plan in plans for of_pass in (plan.forward, plan.backward)]
            assert [forward, backward, tangent, second] == planned
            assert tangent <= 2.1 * forward
            if options.keys() == {"grid", "head_chunks"}:
                a, b = options["grid"]
                assert forward == (a - 1) * (2 * q + one) + (b - 1) * kv
                assert tangent == (a - 1) * (4 * q + one + mu) + (b - 1) * 2 * kv
                assert backward == (a - 1) * (3 * q + 2 * one) + (b - 1) * 2 * kv
                assert second == 2 * backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 4])
@on_ranks()
def test_low_precision_within_the_rule(rank, world, dtype):
    """By schedule: errors of outt and of second derivatives as fractions of those of torch's operations in `dtype`."""
    whole, directions = inputs_and_tangents(32 * world, (4, 2), batch=1, d=32, d_v=32, dtype=dtype)
    q, k, v, _ = whole
    directions = [x.to(dtype) for x in directions[:3]]
    rows = shard_positions(32 * world, rank, world, "zigzag")
    upstream = make_inputs(32 * world, (4, 2), batch=1, d=32, d_v=32, dtype=dtype, seed=4)[3]

    def plain(q, k, v):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    def derive(attend, tensors, tangents, dout):
        outt = torch.func.jvp(attend, tuple(tensors), tuple(tangents))[1]
        leaves = [x.clone().requires_grad_() for x in tensors]
        grads = torch.autograd.grad(attend(*leaves), leaves, dout, create_graph=True)
        return [outt.detach(), *torch.autograd.grad(grads, leaves, tangents)]

    truth = derive(plain, *([x.double() for x in y] for y in ((q, k, v), directions)), upstream.double())
    allowed = [(x.double() - t).abs().max() for x, t in zip(derive(plain, (q, k, v), directions, upstream), truth)]
    found = {}
    for label, config in configs(world):
        attend = functools.partial(tree_attn_func, cp_group=dist.group.WORLD, config=config)
        mine = ([x[:, rows] for x in y] for y in ((q, k, v), directions))
        results = derive(attend, *mine, upstream[:, rows])
        found[label] = [float((x - t[:, rows]).abs().max() / a) for x, t, a in zip(results, truth, allowed)]
    for label, (outt, *second) in found.items():
        assert outt <= 2 and max(second) <= 3, (label, outt, second)


@on_ranks(2)
def test_ranks_must_agree_on_tangents(rank, world):
    q, k, v = (x[:, 4 * rank : 4 * rank + 4] for x in make_inputs(4 * world, (4, 2))[:3])
    attend = functools.partial(tree_attn_func, k=k, v=v, cp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="tangents"), forward_ad.dual_level():
        attend(forward_ad.make_dual(q, torch.ones_like(q)) if rank else q)
    assert torch.isfinite(attend(q)).all()


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_decoding_has_no_tangents(rank, world):
    group = dist.group.WORLD if world > 1 else None
    q, k, v, _ = make_inputs(8, (4, 2), dtype=torch.float32)
    shares = [[(4 * r, 4)] for r in range(2)] if world > 1 else [[(0, 8)]]
    rows = slice(4 * rank, 4 * rank + 4) if world > 1 else slice(8)
    q, k, v = (x[:, rows] for x in (q, k, v))
    options = dict(shares=shares, key_segments=[Segment(0, rows.start or 0, q.shape[1])], cp_group=group)
    with forward_ad.dual_level():
        for i, name in enumerate(("q", "k", "v")):
            tensors = [forward_ad.make_dual(x, torch.ones_like(x)) if i == j else x for j, x in enumerate((q, k, v))]
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
