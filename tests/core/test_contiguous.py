"""layout="contiguous" with any length, as `shard_sequence` cuts it: no rank knows the others' lengths from its own."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import (
    Decay,
    TreeConfig,
    shard_sequence,
    tree_attn_func,
    tree_attn_varlen_func,
    tree_convolution,
    tree_halo,
    tree_recurrence,
    tree_select_func,
    unshard_sequence,
)
from megatron_tree.core import comm
from megatron_tree.core.attention.selection import Blocks
from support.attention import make_inputs, oracle
from support.ranks import largest, on_ranks, run_distributed
from support.recurrences import decaying

CONTIGUOUS = "contiguous"


def _error(own, whole, group):
    """Of this rank's shard [b, s_local, ...] of a result."""
    mine = shard_sequence(whole, group, 1, CONTIGUOUS)
    assert own.shape == mine.shape
    return float((own - mine).abs().max()) if mine.numel() else 0.0


def _attention(n, group, config):
    inputs = make_inputs(n, (4, 2), batch=2, seed=n)
    q, k, v, dout = (shard_sequence(x, group, 1, CONTIGUOUS) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for window in ((-1, -1), (3, 0)):
        options = dict(cp_group=group, layout=CONTIGUOUS, window_size=window, return_lse=True, config=config)
        out, lse = tree_attn_func(*leaves, **options)
        found = [out, lse.transpose(1, 2), *torch.autograd.grad(out, leaves, dout)]
        truth = oracle(*inputs, causal=True, window_size=window)
        wanted = [truth[0], truth[1].transpose(1, 2), *truth[2:5]]
        yield from (_error(a.detach(), b, group) for a, b in zip(found, wanted, strict=True))


def _cross(n, group, config):
    """Queries and keys of two sequences, each cut by itself."""
    (q, _, _, _), (_, k, v, _) = make_inputs(n, (4, 2), batch=1), make_inputs(n + 4, (4, 2), batch=1, seed=1)
    options = dict(cp_group=group, causal=False, layout=CONTIGUOUS, config=config)
    out = tree_attn_func(*(shard_sequence(x, group, 1, CONTIGUOUS) for x in (q, k, v)), **options)
    yield _error(out, oracle(q, k, v, q, causal=False)[0], group)


def _documents(n, group, config):
    """Cut as `shard_sequence` does, and into lengths that the ranks know."""
    inputs, bounds = make_inputs(n, (4, 2), batch=1, seed=n), [0, n // 3, n // 3, n - 2]  # and two rows of padding
    inputs[0][:, n - 2 :] = float("nan")
    of = torch.tensor([0] * bounds[1] + [2] * (bounds[3] - bounds[2]) + [-1, -1])
    truth = oracle(*(x.nan_to_num() for x in inputs), sequences=of, causal=True)
    wanted = [truth[0], truth[1].transpose(1, 2), *truth[2:5]]
    for layout in (CONTIGUOUS, {2: [n - 3, 3], 3: (n - 3, 0, 3)}[dist.get_world_size()]):
        q, k, v, dout = (shard_sequence(x, group, 1, layout)[0] for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options = dict(cu_seqlens=bounds, cp_group=group, layout=layout, return_lse=True, config=config)
        out, lse = tree_attn_varlen_func(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, dout)
        found = [out[None], lse.T[None], *(x[None] for x in grads)]
        real = shard_sequence((of >= 0)[None], group, 1, layout)[0]
        for a, b in zip(found, wanted, strict=True):
            difference = (a.detach() - shard_sequence(b, group, 1, layout))[:, real]
            yield float(difference.abs().max()) if real.any() else 0.0


def _recurrent(n, group, config):
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, n, 2, 4, generator=g, dtype=torch.float64) for _ in range(3))
    decay = -torch.rand(2, n, 2, generator=g, dtype=torch.float64)
    before = torch.randn(2, 3, 2, 4, generator=g, dtype=torch.float64)
    whole, state = decaying((q, k, decay), v, None)
    own = [shard_sequence(x, group, 1, CONTIGUOUS) for x in (q, k, decay, v)]
    options = dict(cp_group=group, layout=CONTIGUOUS, config=config)
    call = dict(head_dim=4, return_final_state=True, decay=Decay(own[2], own[0]), **options)
    out, final = tree_recurrence(decaying, own[:3], own[3], **call)
    yield from (_error(out, whole, group), float((final - state).abs().max()))
    behind = torch.cat((before, v), 1)
    sums = behind.unfold(1, 4, 1).sum(-1)
    halos, last = tree_halo(own[3], 3, before=before, return_final=True, **options)
    yield from (float((last - behind[:, -3:]).abs().max()), float(halos.shape[2] - 3))
    summed, _ = tree_convolution(
        lambda x: torch.cat((x[:, :3], x.unfold(1, 4, 1).sum(-1)), 1), own[3], 3, before=before, **options
    )
    yield _error(summed, sums, group)


def _selected(n, group, config):
    g = torch.Generator().manual_seed(n)
    q, w, k = (torch.randn(1, n, *shape, generator=g) for shape in ((2, 8), (2,), (8,)))
    for blocks in (None, Blocks(2, lambda keys, positions: keys.mean(2))):
        alone = tree_select_func(q, w, k, topk=3, cp_group=None, blocks=blocks)
        own = (shard_sequence(x, group, 1, CONTIGUOUS) for x in (q, w, k))
        found = tree_select_func(*own, topk=3, cp_group=group, layout=CONTIGUOUS, blocks=blocks, config=config)
        yield float((found.sort(-1)[0] != shard_sequence(alone.sort(-1)[0], group, 1, CONTIGUOUS)).sum())


def _joined(n, group, config):
    x = torch.randn(2, n, 3)
    yield float((unshard_sequence(shard_sequence(x, group, 1, CONTIGUOUS), group, 1, CONTIGUOUS) != x).sum())


CALLS = (_attention, _cross, _documents, _recurrent, _selected, _joined)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_any_length(world):
    """The same own length in sequences of other lengths, one after another: 8 tokens beside 8, and beside 9."""
    lengths = (17, 16, 17)
    group, errors = dist.group.WORLD, []
    for transport, some in (("auto", lengths), ("builtin", lengths[:1])):
        config = TreeConfig(timeout_s=60.0, tune=False, transport=transport)
        errors += [error for n in some for call in CALLS for error in call(n, group, config)]
    worst = largest(errors)
    assert worst < 1e-12, worst


@on_ranks(4)
def test_ranks_without_tokens():
    """Fewer tokens than ranks."""
    group, q = dist.group.WORLD, make_inputs(2, (2, 2), batch=1)[0]
    own = shard_sequence(q, group, 1, CONTIGUOUS)
    worst = _error(tree_attn_func(own, own, own, cp_group=group, layout=CONTIGUOUS), oracle(q, q, q, q)[0], group)
    assert worst < 1e-12, worst


def _refused(rank, world):
    group = dist.group.WORLD
    said = []
    for lengths in ((8, 9), (12, 4)):
        x = torch.randn(1, lengths[rank], 2, 8)
        with pytest.raises(ValueError, match="gives them") as caught:
            tree_attn_func(x, x, x, cp_group=group, layout=CONTIGUOUS)
        said.append(str(caught.value))
        assert tree_attn_func(x, x, x, cp_group=group, layout=lengths).isfinite().all()
    x = torch.randn(1, 8, 2, 8)
    with comm.record() as log:  # lengths that are known are not asked for
        tree_attn_func(x, x, x, cp_group=group, layout=(8, 8))
    assert all(sent.bytes > 16 for sent in log)
    sent = []
    for layout in (CONTIGUOUS, (8, 8)):
        with comm.record() as log:
            tree_attn_varlen_func(x[0], x[0], x[0], cu_seqlens=[0, 5, 16], cp_group=group, layout=layout)
        sent.append(len(log))
    assert sent[0] == sent[1] + 1
    for lengths, message in (((9, 7), "q has 8 rows on rank .* but layout=.9, 7. gives it"), ((8,), "must give 2")):
        with pytest.raises(ValueError, match=message):
            tree_attn_varlen_func(x[0], x[0], x[0], cu_seqlens=[0, 5, 16], cp_group=group, layout=lengths)
    with pytest.raises(ValueError, match=r"rank 0 has function=tree_attn_func\(layout='contiguous'\); rank 1 has"):
        tree_attn_func(x, x, x, cp_group=group, layout=["contiguous", "zigzag"][rank])
    return said


def test_other_lengths_are_refused_and_those_to_pass_are_named():
    said, other = run_distributed(_refused, 2)
    assert said == other
    assert said[0] == "q has (8, 9) tokens on the ranks, but layout='contiguous' gives them (9, 8): pass layout=(8, 9)"
