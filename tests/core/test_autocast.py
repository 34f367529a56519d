"""Under torch.autocast attention casts as torch's scaled_dot_product_attention does, and computes as without it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_tree import TreeConfig, shard_sequence, tree_attn_func, tree_attn_varlen_func, tree_decode, tree_prefill
from megatron_tree.core.layout import Segment
from support.ranks import run_distributed

BF16 = torch.bfloat16


def _inputs(dtypes, s=16):
    torch.manual_seed(0)
    shapes = [(2, s, 4, 8), (2, s, 2, 8), (2, s, 2, 8)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in zip(shapes, dtypes, strict=True)]


def _sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _close(x, y):
    """Within a few roundings of bf16, of the largest element."""
    return x.dtype == y.dtype and (x.float() - y.float()).abs().max() <= 2**-6 * y.float().abs().max()


def _trains(rank, world, dtypes):
    group, whole = dist.group.WORLD, _inputs(dtypes)
    with torch.autocast("cpu", BF16):
        expected = _sdpa(*whole)
    wanted = torch.autograd.grad(expected.float().square().sum(), whole)
    own = [shard_sequence(x.detach(), group, 1).requires_grad_() for x in whole]
    with torch.autocast("cpu", BF16):
        out, lse = tree_attn_func(*own, cp_group=group, return_lse=True)
        packed = tree_attn_varlen_func(*(x[0] for x in own), cu_seqlens=[0, 16], cp_group=group)
    assert packed.dtype == out.dtype == BF16 and lse.dtype == torch.float32 and torch.equal(packed, out[0])
    grads = torch.autograd.grad(out.float().square().sum(), own)
    assert _close(out, shard_sequence(expected, group, 1))
    return [_close(x, shard_sequence(y, group, 1)) for x, y in zip(grads, wanted, strict=True)]


def test_all_dtypes_but_float64_become_that_of_autocast():
    for dtypes in ((torch.float32,) * 3, (torch.float32, BF16, torch.float16)):
        assert run_distributed(_trains, 2, dtypes) == [[True] * 3] * 2


def _decodes(rank, world):
    """A bf16 cache and queries in fp32, and a cache in fp32; then pages in 8 bits, which stay."""
    group = dist.group.WORLD
    q, k, v = (x.detach() for x in _inputs((torch.float32, BF16, BF16)))
    own = [x[:, 8 * rank : 8 * rank + 8] for x in (k, v)]
    options = dict(cp_group=group, shares=[[(15, 1)], [(16, 0)]], key_segments=[Segment(0, 8 * rank, 8)])
    expected = tree_decode(q[:, -1:].to(BF16), *own, cp_group=group)
    of_prefill = tree_prefill(q[:, 15 : 16 - rank].to(BF16), *own, **options)
    with torch.autocast("cpu", BF16):
        for cache in (own, [x.float() for x in own]):
            out, lse = tree_decode(q[:, -1:], *cache, cp_group=group, return_lse=True)
            assert out.dtype == BF16 and lse.dtype == torch.float32 and torch.equal(out, expected)
            assert torch.equal(tree_prefill(q[:, 15 : 16 - rank], *cache, **options), of_prefill)
        pages = [x.to(torch.float8_e4m3fn)[:1] for x in own]
        scales = torch.ones(1, 8, 2)
        tables = dict(block_table=torch.zeros(2, 1, dtype=torch.int32), cache_seqlens=torch.tensor([8, 3]))
        return tree_decode(q[:, -1:], *pages, cp_group=group, k_scale=scales, v_scale=scales, **tables).dtype


def _expands(rank, world):
    """Latents in fp32, and an expansion whose weights autocast has to cast."""
    torch.manual_seed(0)
    q, latents, weights = torch.randn(1, 1, 2, 8), torch.randn(1, 8, 1, 6), torch.randn(6, 32)
    segments = [[Segment(0, 0, 8)], [Segment(0, 8, 8)]]
    options = dict(cp_group=dist.group.WORLD, shares=[[(14, 1)], [(15, 1)]], key_segments=segments, head_dim_v=8)

    def expand(x):
        return (x @ weights).view(1, -1, 4, 8).split(2, 2)

    with torch.autocast("cpu", BF16):
        out = tree_prefill(q, latents, None, expand=expand, grid=(1, 2), **options)
        keys, values = expand(latents)
        expected = tree_prefill(q, keys, values, **{**options, "head_dim_v": None})
    return out.dtype == BF16 and _close(out, expected)


def test_what_expands_latents_runs_under_autocast():
    assert run_distributed(_expands, 2) == [True, True]


def test_decoding_casts_queries_and_caches_but_not_pages_in_8_bits():
    assert run_distributed(_decodes, 2) == [BF16, BF16]


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_products_inside_are_not_cast(backend):
    """Not those of float64, which autocast leaves alone, and not those of a backward under autocast."""
    options = dict(cp_group=None, config=TreeConfig(backend=backend), return_lse=True)
    q, k, v = _inputs((torch.float64,) * 3)
    out, lse = tree_attn_func(q, k, v, **options)
    with torch.autocast("cpu", BF16):
        assert all(map(torch.equal, tree_attn_func(q, k, v, **options), (out, lse)))
        bf16, lse = tree_attn_func(q.float(), k.float(), v.float(), **options)
    assert all(map(torch.equal, tree_attn_func(q.to(BF16), k.to(BF16), v.to(BF16), **options), (bf16, lse)))
    inputs = _inputs((torch.float32,) * 3)
    expected, loss = (tree_attn_func(*inputs, **options)[0].square().sum() for _ in range(2))
    with torch.autocast("cpu", BF16):
        grads = torch.autograd.grad(loss, inputs)
    assert all(map(torch.equal, grads, torch.autograd.grad(expected, inputs)))
