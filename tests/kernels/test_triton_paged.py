"""Triton's decode kernel over pages in 8 bits, and for many queries, against the float64 oracle."""

from types import SimpleNamespace

import pytest
import torch

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.core import energy, kernels
from megatron_tree.core.cache import ShardedCache, quantize
from megatron_tree.core.kernels import KVCache, SharedPages
from megatron_tree.core.kernels.kv_cache import decode_shared
from megatron_tree.core.kernels.triton import decode
from megatron_tree.core.spec import AttnSpec
from support.paging import paged
from support.rounding import assert_near, error, rounding
from support.triton_inputs import DEVICE, inputs, skip_without

EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def check(
    heads,
    s_q,
    stored,
    *,
    limit=None,
    dtype=torch.float32,
    d=16,
    d_v=16,
    page=16,
    window=None,
    softcap=0.0,
    num_splits=None,
):
    s, lengths = 96, torch.tensor([0, 70, 96], device=DEVICE)
    limit = limit or rounding(s)
    q, k, v, _ = inputs(s_q, s, heads, d, d_v, batch=3, dtype=dtype)
    left = -1 if window is None else window - 1
    spec = AttnSpec(softmax_scale=d**-0.5, window_size=(left, 0), softcap=softcap)
    positions = torch.arange(s, device=DEVICE).expand(3, -1)
    q_positions = (lengths - s_q).clamp(min=0)[:, None] + torch.arange(s_q, device=DEVICE)
    keep = energy.visible(q_positions, positions, spec) & (positions < lengths[:, None])[:, None]
    exact, scales = [q.double(), k.double(), v.double()], ()
    if stored is not None:
        (k, k_scale), (v, v_scale) = quantize(k, stored), quantize(v, stored)
        exact[1:] = [x.double() * scale.double()[..., None] for x, scale in ((k, k_scale), (v, v_scale))]
        scales = [paged(scale, page)[0] for scale in (k_scale, v_scale)]
    (k, table), (v, _) = paged(k, page), paged(v, page)
    seen = dict(lengths=lengths, q_positions=q_positions, k_positions=positions, block_table=table)
    cache = KVCache(k, v, *scales, **seen)
    state = decode.attn_decode(q, cache, spec, num_splits)
    out, lse = energy.attention(*exact, spec=spec, keep=keep)
    lse = lse.transpose(1, 2)
    assert error(state[..., :-1], out) < limit and error(state[..., -1], lse) < limit
    gathered = kernels.attn_decode(q, cache, spec, backend="reference")
    assert error(state[..., :-1], gathered[..., :-1]) < limit


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize(
    ("heads", "s_q", "options"),
    [
        ((4, 2), 1, {}),
        ((4, 4), 2, {"d": 24, "d_v": 40, "num_splits": 3}),
        ((8, 1), 3, {"window": 9}),
        ((4, 2), 1, {"softcap": 2.0, "page": 32}),
        ((4, 2), 1, {"dtype": torch.float16, "limit": 2e-3}),
    ],
)
def test_pages_in_eight_bits(name, heads, s_q, options):
    skip_without(EIGHT_BITS[name])
    check(heads, s_q, EIGHT_BITS[name], **options)


@pytest.mark.parametrize(("heads", "s_q"), [((4, 2), 33), ((8, 1), 9), ((72, 1), 2)])
def test_more_queries_than_one_tile_takes(heads, s_q):
    assert s_q * heads[0] // heads[1] > decode.ROWS[4]
    check(heads, s_q, None, window=20)


def test_pages_of_other_sizes_are_refused():
    cache = ShardedCache([None], page_size=12)
    rows = [cache.book.add()]
    q, k, v, _ = inputs(1, 20, batch=1)
    cache.write(0, cache.append(rows, 20), k, v)
    view, pages = cache.view(0, rows, DEVICE), cache.layers[0]
    options = dict(cp_group=None, block_table=view.block_table, cache_seqlens=view.lengths)
    with pytest.raises(ValueError, match=r"page_size=12: .*16, 32, 64, 128, 256 tokens; choose .*page_size"):
        tree_decode(q, pages.k, pages.v, config=TreeConfig(backend="triton"), **options)
    out = tree_decode(q, pages.k, pages.v, config=TreeConfig(backend="reference"), **options)
    truth, _ = energy.attention(*(x.double() for x in (q, k, v)), spec=AttnSpec(softmax_scale=0.25))
    assert_near(out, truth, 20)


def test_fp8_on_a_gpu_that_has_none_is_refused(monkeypatch):
    pages = SimpleNamespace(shape=(1, 16, 1, 8), dtype=torch.float8_e4m3fn, device=torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"fp8 on a GPU of compute capability 8\.0: .*dtype='int8'"):
        decode.check_pages(pages)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    decode.check_pages(pages)


def test_pages_that_rows_begin_with_are_read_once():
    """Queries of several rows over the pages they share, merged with what follows: as whole rows."""
    q, k, v, _ = inputs(1, 96, (4, 2), 16, 16, batch=3, dtype=torch.float32)
    (k, table), (v, _) = paged(k, 16), paged(v, 16)
    table[2, :4] = table[0, :4]
    lengths, spec = torch.tensor([96, 70, 80], device=DEVICE), AttnSpec(softmax_scale=0.25)
    whole = decode.attn_decode(q, KVCache(k, v, lengths=lengths, block_table=table), spec)
    shared = [SharedPages(torch.tensor([0, 2], device=DEVICE), table[:1, :4])]
    rest = KVCache(k, v, lengths=lengths.clone(), block_table=table.clone(), shared=shared)
    rest.block_table[[0, 2], :2] = table[[0, 2], 4:6]
    rest.lengths[[0, 2]] -= 64
    state = decode_shared(decode.attn_decode, q, rest, spec, decode.attn_decode(q, rest, spec))
    assert_near(state, whole, 96)
