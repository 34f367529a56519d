"""Decoding over lists of selected slots: every backend against the float64 oracle; nothing else is read."""

import pytest
import torch

from megatron_tree.core import energy, kernels
from megatron_tree.core.cache import quantize
from megatron_tree.core.kernels import KVCache
from megatron_tree.core.spec import AttnSpec
from support.decoding import decode_inputs
from support.paging import paged
from support.rounding import assert_near

BATCH, SLOTS = 2, 300
NAN = float("nan")
SHAPES = {  # heads, d, d_v, queries, selected
    "8/2 x 64": ((8, 2), 64, 64, 1, 200),
    "4/4 x 20, 12, 3 queries": ((4, 4), 20, 12, 3, 40),
    "2/1 x 24, few": ((2, 1), 24, 24, 2, 3),
    "4/2 x 16, all": ((4, 2), 16, 16, 1, SLOTS),
    "4/2 x 16, none": ((4, 2), 16, 16, 2, 0),
}


def lists(queries, count, seed=0):
    """(int32 [BATCH, queries, count], bool [BATCH, queries, SLOTS]): a fifth are -1, and all of one query's."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(SLOTS, generator=g)[:count] for _ in range(BATCH * queries)])
    rows = rows.view(BATCH, queries, count).masked_fill(torch.rand(BATCH, queries, count, generator=g) < 0.2, -1)
    rows[-1, -1] = -1
    keep = torch.zeros(BATCH, queries, SLOTS + 1, dtype=torch.bool)
    return rows.to(torch.int32), keep.scatter_(2, rows % (SLOTS + 1), True)[..., :SLOTS]


def hide(x, keep):
    """NaN in the slots that no query of their row has selected."""
    return x.masked_fill(~keep.any(1)[..., None, None], NAN)


def check(state, q, k, v, keep, dtype=torch.float32):
    spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5)
    out, lse = energy.attention(*(x.double() for x in (q, k, v)), spec=spec, keep=keep)
    lse, seen = lse.transpose(1, 2), keep.any(-1)[:, :, None].expand(*q.shape[:3])
    assert torch.equal(state[..., -1] > float("-inf"), seen)
    assert_near(state[..., :-1], out, SLOTS, dtype=dtype)
    assert_near(state[..., -1][seen], lse[seen], SLOTS, dtype=dtype)


@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_selected_slots(shape, backend):
    heads, d, d_v, queries, count = SHAPES[shape]
    rows, keep = lists(queries, count)
    spec = AttnSpec(softmax_scale=d**-0.5)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = decode_inputs(BATCH, queries, SLOTS, heads, d, d_v, dtype=dtype)
        (pk, table), (pv, _) = paged(hide(k, keep), 16), paged(hide(v, keep), 16)
        lengths = torch.full((BATCH,), SLOTS)
        for cache in (
            KVCache(hide(k, keep), hide(v, keep), selected=rows),
            KVCache(pk, pv, lengths=lengths, block_table=table, selected=rows),
        ):
            state = kernels.attn_decode(q, cache, spec, backend)
            check(state, q, k, v, keep, dtype if backend == "aten" else torch.float32)


@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
def test_selected_latents(backend):
    """Keys of 72 that hold their values of 64, of one head."""
    rows, keep = lists(2, 100)
    q, k, _ = decode_inputs(BATCH, 2, SLOTS, (12, 1), 72, 64, dtype=torch.float32)
    pages, table = paged(hide(k, keep), 32)
    seen = dict(lengths=torch.full((BATCH,), SLOTS), block_table=table, selected=rows)
    state = kernels.attn_decode(
        q, KVCache(pages, None, head_dim_v=64, **seen), AttnSpec(softmax_scale=72**-0.5), backend
    )
    check(state, q, k, k[..., :64], keep)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
def test_selected_slots_of_eight_bits(backend, stored):
    rows, keep = lists(2, 100)
    q, k, v = decode_inputs(BATCH, 2, SLOTS, (4, 2), 32, 16, dtype=torch.float32)
    (k, k_scale), (v, v_scale) = quantize(k, stored), quantize(v, stored)
    exact = [x.double() * scale.double()[..., None] for x, scale in ((k, k_scale), (v, v_scale))]
    (pk, table), *others = (paged(x, 16) for x in (k, v, k_scale, v_scale))
    pv, *scales = (pages for pages, _ in others)
    cache = KVCache(pk, pv, *scales, lengths=torch.full((BATCH,), SLOTS), block_table=table, selected=rows)
    check(kernels.attn_decode(q, cache, AttnSpec(softmax_scale=32**-0.5), backend), q, *exact, keep)


@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
def test_the_same_bits_alone_and_in_a_batch(backend):
    rows, _ = lists(3, 270)
    q, k, v = decode_inputs(BATCH, 3, SLOTS, (4, 2), 16, 16, dtype=torch.float32)
    spec = AttnSpec(softmax_scale=0.25, deterministic=True)
    state = kernels.attn_decode(q, KVCache(k, v, selected=rows), spec, backend)
    for i, j in ((0, 0), (1, 1), (1, 2)):
        alone = KVCache(k[i : i + 1], v[i : i + 1], selected=rows[i : i + 1, j : j + 1])
        assert torch.equal(kernels.attn_decode(q[i : i + 1, j : j + 1], alone, spec, backend)[0, 0], state[i, j])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_of_the_index(dtype):
    """Any number of heads, queries and columns; keys that lie apart, in one block and several."""
    for n, h, d, s in ((1, 1, 128, 3000), (1, 64, 128, 70), (3, 500, 20, 333), (2, 2, 7, 1), (1, 1, 4, 0)):
        q, k = torch.randn(n, h, d).to(dtype), torch.randn(s, 2, d).to(dtype)[:, 0]
        weights = torch.randn(n, h)
        products = (q.double().flatten(0, 1) @ k.double().T).view(n, h, s) * 0.3
        want = (weights.double()[..., None] * products.clamp(min=0)).sum(1)
        scores = kernels.index_scores(q, weights, k, 0.3)
        assert_near(scores, want, h * d)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(kernels.index_scores(q, weights, k, 0.3), scores)


def test_index_scores_keep_nan_to_its_key():
    """What lies in hidden slots is hidden afterwards: it must not reach the scores of others."""
    q, k, weights = torch.randn(1, 4, 16), torch.randn(100, 16), torch.randn(1, 4)
    want = kernels.index_scores(q, weights, k, 1.0)
    k[37] = float("nan")
    found = kernels.index_scores(q, weights, k, 1.0)
    assert (
        found[0, 37].isnan() and torch.equal(found[0, :37], want[0, :37]) and torch.equal(found[0, 38:], want[0, 38:])
    )
