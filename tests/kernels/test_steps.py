"""Gradients of keys as integers: as near as sums in fp32, whatever is large; no overflow; what is not finite shows."""

import pytest
import torch

from megatron_tree.core import kernels
from megatron_tree.core.kernels import Steps, attn_delta, largest_of
from megatron_tree.core.layout import Segment
from megatron_tree.core.merge import IntegerReducer
from megatron_tree.core.spec import AttnSpec
from support.attention import make_inputs
from support.rounding import assert_near

S = 300
ALL = dict(q_segments=(Segment(0, 0, S),), k_segments=(Segment(0, 0, S),))


def _grads(q, k, v, dout, spec, segments=ALL):
    """(dq, dk, dv) in leaves, and in float64."""
    found = []
    for x in ([q, k, v, dout], [x.double() for x in (q, k, v, dout)]):
        here = AttnSpec(softmax_scale=spec.softmax_scale, deterministic="ranks" if not found else False)
        backend = "auto" if not found else "reference"
        out, lse = kernels.attn_fwd(*x[:3], **segments, spec=here, backend=backend)
        delta = attn_delta(x[3], out)
        found.append(kernels.attn_bwd(x[3], *x[:3], lse, delta, **segments, spec=here, backend=backend))
    return found


def _one_key(q, k, v, dout):
    """Of all weight: its dv is as large as its bound."""
    return q.abs(), torch.cat((k[:, :1].abs() * 50, k[:, 1:]), 1), v, dout.abs()


def _one_query(q, k, v, dout):
    """Of all of the gradient."""
    return q, k, v, torch.cat((dout[:, :-1] * 1e-4, dout[:, -1:] * 1e4), 1)


CASES = {
    "one key": _one_key,
    "one query": _one_query,
    "small": lambda q, k, v, dout: (q, k, v * 1e-3, dout * 1e-25),
    "large": lambda q, k, v, dout: (q * 1e2, k * 1e-2, v * 1e3, dout * 1e29),
    "nothing": lambda q, k, v, dout: (q, k, v, dout * 0),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_near_the_truth(case):
    inputs = CASES[case](*make_inputs(S, (4, 1), d=16, d_v=24, dtype=torch.float32))
    found, truth = _grads(*inputs, AttnSpec(softmax_scale=0.25))
    for x, right in list(zip(found, truth))[2 if case == "one key" else 1 :]:  # its dk is a difference of equal numbers
        assert_near(x, right, 4 * S * 24)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_what_is_not_finite_makes_dk_and_dv_of_its_document_and_head_nan(which):
    """Also in a query: integers can't tell whose sums it is in."""
    inputs = dict(zip(("q", "k", "v", "dout"), make_inputs(S, (4, 2), batch=2, d=16, d_v=16, dtype=torch.float32)))
    spec = AttnSpec(softmax_scale=0.25, deterministic="ranks")
    segments = dict.fromkeys(("q_segments", "k_segments"), (Segment(0, 0, 100, 0), Segment(100, 0, S - 100, 1)))
    whole = _grads(*inputs.values(), spec, segments)[0]
    inputs[which][1, 150, -1, 0] = torch.nan
    for x, right in zip(_grads(*inputs.values(), spec, segments)[0][1:], whole[1:]):
        assert x[1, 100:, 1].isnan().all()
        assert torch.equal(x[0], right[0])
        assert torch.equal(x[1, :100], right[1, :100]) and torch.equal(x[1, :, 0], right[1, :, 0])


def test_sums_of_parts_are_the_sum():
    """Of queries in any order, with int64 that stays within its range even where all of them add the most."""
    s, segments = 4096, (Segment(0, 0, 4096),)
    call = dict(q_segments=segments, k_segments=segments, spec=AttnSpec(softmax_scale=1.0, causal=False))
    dout = torch.full((1, s, 2, 8), 3.0)
    largest = largest_of(dout, dout, torch.zeros(1, 2, s), 1, all_segments=segments, **call)
    largest[..., 1] /= 1024  # as of a query with more keys
    steps = Steps(largest, dout[:, :, :1], **call, group=2)
    total = torch.zeros(1, s, 1, 8, dtype=torch.int64)
    for _ in range(2 * s):  # each has the weight 1
        steps.add(total[:, :1], torch.full((1, 1, 1, 8), 3.0), steps.per_unit[0][0][0][1])
    assert 2**58 < int(total.max()) <= 2**60
    assert steps.values(total, total)[1][0, 0, 0, 0] == 2 * s * 3.0


@pytest.mark.parametrize(("bits", "num_bytes"), [(30, 4), (33, 5), (38, 5), (41, 6), (46, 6), (51, 8), (63, 8)])
def test_sums_travel_in_as_many_bytes_as_they_need(bits, num_bytes):
    """Of four ranks, two of which add up first; also where the sum of some is larger than that of all."""
    largest = 2**bits - 1
    parts = torch.randint(-largest // 4, largest // 4, (4, 3, 7))
    parts[:, 0, 0] = torch.tensor([largest, -largest, largest, -largest]) // 4
    reducer, want = IntegerReducer(largest, 7), parts.sum(0)
    packed = torch.stack([reducer.narrow(*x.clone().split((4, 3), -1)) for x in parts])
    assert packed.shape[-1] == -(-7 * num_bytes // 4)
    of_two = torch.stack([reducer.narrow(reducer.merge(x)) for x in packed.split(2)])
    assert torch.equal(reducer.merge(packed), want) and torch.equal(reducer.merge(of_two), want)
