"""Attention dropout: one mask for every backend, block and head slice; forward and backward against the oracle.

Triton kernels run on a GPU where there is one, elsewhere in the interpreter.
"""

import math

import pytest
import torch

from megatron_tree.core import dropout, energy, kernels
from megatron_tree.core.kernels import KVCache
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec, Dropout
from support.blocks import CELLS, Cell, check_block, masks_of
from support.states import merged
from support.triton_inputs import DEVICE, inputs

ALL_ONES = 0xFFFFFFFF
LIMIT = {"reference": 1e-12, "triton": 4e-6}  # float64 and fp32


@pytest.fixture(params=LIMIT)
def backend(request):
    return request.param


def test_philox_gives_its_published_words():
    """The known answers that come with the paper's library (Random123), first word of philox4x32 with 7 rounds."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]  # four counters, two keys
    for words, answer in (([0] * 6, 0x5F6FB709), ([ALL_ONES] * 6, 0x5207DDC2), (pi, 0x4DFCCABA)):
        assert dropout.philox(tuple(words[4:]), *map(torch.tensor, words[:4])).item() == answer


def mask(options, batch, heads, s_q, s_k):
    """bool [batch, heads, s_q, s_k] of whole sequences."""
    positions = dict(q_positions=torch.arange(s_q), k_positions=torch.arange(s_k))
    weights = dropout.keep_weights(options, batch=batch, num_heads=heads, **positions)
    assert set(weights.unique().tolist()) <= {0.0, 1 / (1 - options.p)}
    return weights > 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_is_random(p):
    """Counts of kept pairs, of one mask and of two that must be independent, within 5 standard deviations."""

    def near(count, of, probability):
        assert abs(count - of * probability) < 5 * math.sqrt(of * probability * (1 - probability))

    keep = mask(Dropout(p, 1234), 3, 4, 120, 110)
    near(keep.sum().item(), keep.numel(), 1 - p)
    for per_axis in (keep.sum((0, 1, 2)), keep.sum((0, 1, 3)), keep.sum((0, 2, 3)), keep.sum((1, 2, 3))):
        for count in per_axis.tolist():
            near(count, keep.numel() // len(per_axis), 1 - p)
    neighbours = [(keep.narrow(a, 1, n - 1), keep.narrow(a, 0, n - 1)) for a, n in enumerate(keep.shape)]
    seeds = [(keep, mask(Dropout(p, other), 3, 4, 120, 110)) for other in (1235, 1234 + (1 << 32), 1234 + (1 << 62))]
    swapped = [(keep[..., :110, :], keep[..., :110, :].mT)]  # query and key positions are not interchangeable
    for a, b in (*neighbours, *seeds, *swapped):
        near((a & b).sum().item(), a.numel(), (1 - p) ** 2)


def test_extreme_probabilities():
    assert mask(Dropout(1e-12, 0), 1, 2, 64, 64).all()  # 2**-32 is the finest step
    assert not mask(Dropout(1 - 1e-12, 0), 1, 2, 64, 64).any()
    assert dropout.threshold(1 - 1e-12) == ALL_ONES and dropout.threshold(0.5) == 1 << 31


def test_every_kernel_drops_the_same_pairs(backend):
    """Forward, dq and dkdv show their masks bit for bit: logits all 0, values, keys and dout one-hot."""
    s_q, s_k, h = 20, 24, 2
    far = (1 << 31) - 40  # the last positions that int32 holds
    plain, distant = ((0, 0, s_q),), ((0, far, s_q),)
    cases = [
        (plain, ((0, 0, s_k),), Dropout(0.3, 0)),
        (plain, ((0, 5, s_k),), Dropout(0.75, 0x80000000, 1)),
        (plain, ((0, 0, s_k),), Dropout(0.5, 1 << 32, 16)),
        (distant, ((0, far + 3, s_k),), Dropout(0.3, (1 << 63) - 1, 1000)),
        (((0, 0, 8, 3), (8, 9, 12, 1)), ((0, 50, 14, 1), (14, 4, 10, 3)), Dropout(0.3, 5)),
    ]
    dtype = torch.float64 if backend == "reference" else torch.float32
    for *segments, options in cases:
        segments = [tuple(Segment(*x) for x in s) for s in segments]
        spec = AttnSpec(softmax_scale=1.0, causal=False, dropout=options)
        masks = masks_of(Cell(*segments, s_q, s_k), spec, 2, h)
        seen, expected = masks["keep"], (masks["keep_weights"] > 0) & masks["keep"]
        blocks = dict(q_segments=segments[0], k_segments=segments[1], spec=spec, backend=backend)
        one_hot_q, one_hot_k = (
            torch.eye(s, dtype=dtype, device=DEVICE)[None, :, None].expand(2, -1, h, -1) for s in (s_q, s_k)
        )
        q = torch.zeros(2, s_q, h, s_k, dtype=dtype, device=DEVICE)
        out, lse = kernels.attn_fwd(q, one_hot_k, one_hot_k, **blocks)
        assert torch.equal(out.transpose(1, 2) > 0, expected)  # column of the value = key
        torch.testing.assert_close(lse.exp(), seen.sum(1).to(lse.dtype).expand_as(lse), rtol=1e-5, atol=0)
        v = torch.ones(2, s_k, h, s_q, dtype=dtype, device=DEVICE)  # dout.v = 1 for every pair
        dq, _, dv = kernels.attn_bwd(one_hot_q, q, one_hot_k, v, lse, torch.zeros_like(lse), **blocks)
        assert torch.equal(dq.transpose(1, 2) > 0, expected)
        assert torch.equal(dv.transpose(1, 2) > 0, expected.mT)


SPECS = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(window_size=(9, 0)),
    "two-sided": dict(causal=False, window_size=(12, 3)),
    "softcap": dict(softcap=3.0),
}


def check(backend, cell, options, heads=(4, 2), d=16, d_v=16, batch=1):
    dtype = torch.float64 if backend == "reference" else torch.float32
    options = options | dict(dropout=Dropout(0.3, 9, 1))
    check_block(backend, cell, options, heads, d, d_v, dtype=dtype, batch=batch, limit=LIMIT[backend])


@pytest.mark.parametrize("cell", ["cell of a grid", "packed"])
@pytest.mark.parametrize("options", SPECS)
def test_against_the_oracle(options, cell, backend):
    check(backend, CELLS[cell], SPECS[options])


@pytest.mark.parametrize(("heads", "d", "d_v"), [((2, 2), 16, 16), ((3, 1), 24, 40), ((4, 2), 48, 24)])
def test_heads_and_head_dims(heads, d, d_v, backend):
    check(backend, CELLS["offsets"], {}, heads, d, d_v, batch=2)


def test_long_strips_of_reference():
    """More query rows than reference takes at a time."""
    check("reference", Cell((Segment(0, 0, 150),), (Segment(0, 0, 150),), 150, 150), {})


def test_slices_of_heads_and_blocks(backend):
    """Heads 2..3 of 4, keys and queries in unequal pieces: they give what the whole gives."""
    s, spec = 40, AttnSpec(softmax_scale=0.25, dropout=Dropout(0.4, 3))
    q, k, v, dout = inputs(s, s, batch=1, dtype=torch.float64 if backend == "reference" else torch.float32)
    whole = dict(q_segments=(Segment(0, 0, s),), k_segments=(Segment(0, 0, s),), backend=backend)
    out, lse = kernels.attn_fwd(q, k, v, **whole, spec=spec)
    delta = kernels.attn_delta(dout, out)
    grads = kernels.attn_bwd(dout, q, k, v, lse, delta, **whole, spec=spec)
    close = dict(rtol=0, atol=4 * LIMIT[backend])

    upper = [x[:, :, x.shape[2] // 2 :] for x in (dout, q, k, v)]
    o, l = kernels.attn_fwd(*upper[1:], **whole, spec=spec.heads_from(2, 2))
    torch.testing.assert_close(o, out[:, :, 2:], **close)
    for part, total in zip(kernels.attn_bwd(*upper, l, delta[:, 2:], **whole, spec=spec.heads_from(2, 2)), grads):
        torch.testing.assert_close(part, total[:, :, total.shape[2] // 2 :], **close)
    wrong, _ = kernels.attn_fwd(*upper[1:], **whole, spec=spec)  # what forgetting heads_from would give
    assert (wrong - out[:, :, 2:]).abs().max() > 0.1

    cuts = [slice(0, 17), slice(17, 40)]
    added = [torch.zeros_like(g) for g in grads]
    for rows in cuts:
        parts = []
        for cols in cuts:
            cell = dict(
                q_segments=(Segment(0, rows.start, rows.stop - rows.start),),
                k_segments=(Segment(0, cols.start, cols.stop - cols.start),),
                spec=spec,
                backend=backend,
            )
            share = q[:, rows], k[:, cols], v[:, cols]
            parts.append(kernels.attn_fwd(*share, **cell))
            cell_grads = kernels.attn_bwd(dout[:, rows], *share, lse[..., rows], delta[..., rows], **cell)
            for total, at, grad in zip(added, (rows, cols, cols), cell_grads):
                total[:, at] += grad
        o, l = merged(parts)
        torch.testing.assert_close(o, out[:, rows], **close)
        torch.testing.assert_close(l, lse[..., rows], **close)
    for part, total in zip(added, grads):
        torch.testing.assert_close(part, total, **close)


def test_dispatch_says_why():
    q, k, v, _ = inputs(4, 4)
    spec = AttnSpec(softmax_scale=1.0, dropout=Dropout(0.1, 0))
    choice = kernels.choose(q, k, v, spec)
    if DEVICE == "cpu":
        assert choice.name == "reference" and "aten can't take dropout" in choice.reason
    else:
        assert choice.name == "triton"
    with pytest.raises(ValueError, match=r"backend='aten' can't take dropout: use backend='auto' or 'reference'"):
        kernels.choose(q, k, v, spec, "aten")
    with pytest.raises(AssertionError, match="dropout is for training"):
        kernels.attn_decode(q[:, :1], KVCache(k, v), spec)
    with pytest.raises(AssertionError, match="keep_weights"):
        energy.attention(q, k, v, spec=spec)
