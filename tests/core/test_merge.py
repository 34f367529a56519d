"""The merge of partial states: an associative, commutative operation with an identity, in any tree, without NaN."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree.core import comm, energy, merge
from support.states import merged

NEG_INF = float("-inf")
many = settings(max_examples=200, deadline=None)


@st.composite
def states(draw, n=None, max_n=8):
    """outs [n, s, h, d] and lses [n, h, s], fp32; some empty, lses from tiny to huge."""
    n = n or draw(st.integers(1, max_n))
    s, h, d = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]))
    shift = draw(st.sampled_from([0.0, -1e4, 1e4]))
    outs = torch.randn(n, s, h, d, generator=g)
    lses = torch.randn(n, h, s, generator=g) * spread + shift
    empty = torch.rand(n, h, s, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return torch.where(empty.transpose(1, 2)[..., None], 0.0, outs), torch.where(empty, NEG_INF, lses)


def truth(outs, lses):
    """The merge derived from the energy, in float64."""
    return energy.merge_by_energy(outs.double(), lses.double())


def close(a, b, tolerance=5e-6):
    (out_a, lse_a), (out_b, lse_b) = a, b
    assert not out_a.isnan().any() and not lse_a.isnan().any()
    assert torch.equal(lse_a == NEG_INF, lse_b == NEG_INF)
    scale = lse_b.abs().clamp(min=1).nan_to_num(posinf=1.0)
    gap = torch.where(lse_b == NEG_INF, 0.0, (lse_a.double() - lse_b.double()).abs() / scale)
    assert gap.max() <= 1e-6, gap.max()
    # an lse of 1e4 carries 1e-3 of fp32 rounding, and so do the weights
    assert (out_a.double() - out_b.double()).abs().max() <= tolerance * scale.max()


@many
@given(states())
def test_merging_many_matches_the_derivation(s):
    close(merged(zip(*s)), truth(*s))


@many
@given(states(n=3))
def test_associative(s):
    a, b, c = zip(*s)
    close(merged([merged([a, b]), c]), merged([a, merged([b, c])]), 2e-5)


@many
@given(states(n=2))
def test_commutative_to_the_last_bit(s):
    a, b = zip(*s)
    for x, y in zip(merged([a, b]), merged([b, a])):
        assert torch.equal(x, y)


@many
@given(states(n=1))
def test_identity(s):
    state = s[0][0], s[1][0]
    nothing = merge.empty_state(state[0].shape)
    for out, lse in (merged([state, nothing]), merged([nothing, state])):
        assert torch.equal(out, state[0]) and torch.equal(lse, state[1])
    acc = merge.empty_state(state[0].shape)
    merge.merge_into(acc, state)
    assert torch.equal(acc[0], state[0]) and torch.equal(acc[1], state[1])


@many
@given(st.data())
def test_any_tree_over_many_partials(data):
    n = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 255, 512])))
    outs, lses = data.draw(states(n=n))
    pick = random.Random(data.draw(st.integers(0, 2**32)))
    forest = [(out.clone(), lse.clone()) for out, lse in zip(outs, lses)]
    while len(forest) > 1:  # a random tree: merge two random subtrees
        a = forest.pop(pick.randrange(len(forest)))
        b = forest.pop(pick.randrange(len(forest)))
        if pick.random() < 0.5:
            forest.append(merged([a, b]))
        else:
            merge.merge_into(a, b)
            forest.append(a)
    close(forest[0], truth(outs, lses), 1e-4)


@many
@given(states(n=2), st.integers(0, 2**16))
def test_sink_is_a_leaf_with_value_zero(s, seed):
    out, lse = s[0][0], s[1][0]
    sinks = torch.randn(lse.shape[0], generator=torch.Generator().manual_seed(seed)) * 3
    leaf = torch.stack((out, torch.zeros_like(out))), torch.stack((lse, sinks[:, None].expand_as(lse)))
    close(merge.merge_sinks(out, lse, sinks), truth(*leaf), 1e-5)


@many
@given(states(n=1), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_lse_travels_bit_for_bit(s, wire):
    out, lse = s[0][0], s[1][0]
    o, l = merge.unpack_state(merge.pack_state(out, lse, wire), torch.float32)
    assert torch.equal(l, lse) and torch.equal(o, out.to(wire))


def test_lists_are_in_the_order_of_scores_and_positions():
    inf = float("inf")
    scores = torch.tensor([3.0, -0.0, 0.0, inf, -2.5, 0.0, 1e-40, -inf, -1e-40, 3.0])
    positions = torch.tensor([7, 9, 2, 4, 1, (1 << 32) - 2, 5, 0, 6, 3])
    entries = merge.ranked(scores, positions)
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), int(positions[i])))
    assert entries.argsort(descending=True).tolist() == order
    assert len(set(entries.tolist())) == len(entries) and int(entries.min()) > merge.NO_ENTRY


def test_merging_lists_in_any_tree():
    """Short ones and empty ones among them; the k-th entry by counting is that of the merged list."""
    g, k = torch.Generator().manual_seed(0), 12
    lists = torch.full((5, 3, k), merge.NO_ENTRY)
    for i, count in enumerate((12, 3, 0, 12, 7)):
        scores = torch.randint(-2, 3, (3, count), generator=g) * torch.rand(1, generator=g)
        positions = torch.randperm(1000, generator=g)[:count] * 5 + i
        lists[i, :, :count] = merge.ranked(scores.float(), positions).sort(descending=True).values
    whole = merge.ListReducer.merge(lists)
    assert torch.equal(whole, lists.transpose(0, 1).flatten(1).sort(descending=True).values[:, :k])
    two = [merge.ListReducer.merge(x) for x in (lists[:2], lists[2:])]
    assert torch.equal(merge.ListReducer.merge(torch.stack(two)), whole)
    assert torch.equal(merge.ListReducer.merge(lists[2:3]), lists[2])
    every, alone = lists.transpose(0, 1).flatten(1), comm.Ranks.of(None)
    for bits in (1, 6, 8, 11):
        for some in (1, k, 34, 35):
            threshold = comm.kth_largest(every, some, bits, alone)
            assert ((every >= threshold[:, None]) & (every != merge.NO_ENTRY)).sum(1).tolist() == [min(some, 34)] * 3
