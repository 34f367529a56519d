"""Triton's split-KV decode kernel and the merge of its states, against the float64 oracle."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_tree.core import energy, merge
from megatron_tree.core.kernels import KVCache, best_keys
from megatron_tree.core.kernels.triton import decode, host, index_entries, index_unsupported, merge_packed
from megatron_tree.core.spec import AttnSpec
from support.attention import distances
from support.paging import paged
from support.rounding import assert_near
from support.triton_inputs import DEVICE, NEG_INF, inputs


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize(
    ("case", "s_q", "heads", "d", "d_v"),
    [
        ("plain", 1, (8, 2), 16, 16),
        ("plain", 1, (4, 4), 24, 40),
        ("lengths", 1, (8, 1), 16, 16),
        ("positions", 3, (4, 2), 16, 16),
        ("window", 2, (4, 2), 32, 16),
        ("positions, alibi", 3, (4, 2), 16, 16),
        ("softcap", 1, (20, 1), 16, 16),
        ("plain", 2, (68, 2), 16, 16),  # tiles of 2 of the 34 heads of a KV head
        ("paged, int8", 1, (40, 2), 16, 16),
        ("paged", 1, (4, 2), 16, 16),
        ("paged, int8", 1, (4, 2), 16, 16),
        ("paged, lengths", 2, (4, 2), 16, 16),
    ],
)
def test_decode(case, s_q, heads, d, d_v, num_splits):
    s = 192
    q, k, v, _ = inputs(s_q, s, heads, d, d_v)
    g = torch.Generator().manual_seed(1)
    seen = {}
    spec = AttnSpec(
        softmax_scale=d**-0.5,
        window_size=(30 if case == "window" else -1, -1),
        softcap=2.0 if case == "softcap" else 0.0,
        alibi_slopes=((0.1, 0.05, 0.0, -0.01), (0.5, 0.0, 0.2, 0.02)) if "alibi" in case else None,
    )
    keep, distance = torch.ones(2, s_q, s, dtype=torch.bool, device=DEVICE), None
    if "lengths" in case:
        seen["lengths"] = torch.tensor([0, 130], device=DEVICE)
        keep &= (torch.arange(s, device=DEVICE) < seen["lengths"][:, None])[:, None]
    if "positions" in case or case == "window":
        k_positions = torch.stack([torch.randperm(s, generator=g) for _ in range(2)]).to(DEVICE)
        k_positions[0, :5] = -1
        seen["q_positions"] = torch.arange(100, 100 + s_q, device=DEVICE).expand(2, -1)
        seen["k_positions"] = k_positions
        keep &= energy.visible(seen["q_positions"], k_positions, spec) & (k_positions >= 0)[:, None]
        distance = distances(seen["q_positions"], k_positions)
    exact, scales = [x.double() for x in (q, k, v)], ()
    if "int8" in case:
        scales = [x.abs().amax(-1) / 127 for x in (k, v)]
        k, v = ((x / scale[..., None]).round().to(torch.int8) for x, scale in zip((k, v), scales))
        exact[1:] = [x.double() * scale.double()[..., None] for x, scale in zip((k, v), scales)]
    if "paged" in case:
        (k, table), (v, _) = paged(k, 32), paged(v, 32)
        seen["block_table"], scales = table, [paged(x, 32)[0] for x in scales]
    state = decode.attn_decode(q, KVCache(k, v, *scales, **seen), spec, num_splits)
    out, lse = energy.attention(*exact, spec=spec, keep=keep, distance=distance)
    lse = lse.transpose(1, 2)
    assert_near(state[..., :-1], out, s)
    assert_near(state[..., -1], lse, s)


@pytest.mark.parametrize("kept", ["dense", "paged"])
def test_rows_of_any_length_in_a_table_of_any_width(kept):
    """The same launches and bits, and no key is read beyond a row's length: there is NaN, and a page that is not there.
    Every row is cut into as many splits as its tiles allow."""
    lengths, page, spec = torch.tensor([0, 5, 64, 65, 300], device=DEVICE), 16, AttnSpec(softmax_scale=0.25)
    q, k, v, _ = inputs(1, 320, (4, 2), batch=5)
    slots = torch.arange(320, device=DEVICE)
    keep = (slots < lengths[:, None])[:, None]
    k, v = (x.masked_fill(~keep[:, 0, :, None, None], float("nan")) for x in (k, v))
    grids, found = [], []
    for width in (320, 1024, 16384):
        seen = dict(lengths=lengths)
        if kept == "paged":
            (keys, table), (values, _) = paged(k, page), paged(v, page)
            beyond = slots[::page] >= lengths[:, None]
            wide = torch.full((5, width // page), 1 << 30, dtype=torch.int32, device=DEVICE)
            wide[:, : table.shape[1]] = table.masked_fill(beyond, 1 << 30)
            seen["block_table"] = wide
        else:
            keys, values = (F.pad(x, (0, 0, 0, 0, 0, width - 320), value=float("nan")) for x in (k, v))
        kernel = _Grids(decode.attn_decode_kernel)
        with mock.patch.object(decode, "attn_decode_kernel", kernel):
            found.append(decode.attn_decode(q, KVCache(keys, values, **seen), spec, num_splits=4))
        grids += kernel.grids
    out, lse = energy.attention(q.double(), *(x.double().nan_to_num() for x in (k, v)), spec=spec, keep=keep)
    assert_near(found[0][..., :-1], out, 300)
    assert_near(found[0][..., -1], lse.transpose(1, 2), 300)
    assert all(torch.equal(x, found[0]) for x in found) and grids == [(4, 2, 5)] * 3


class _Grids:
    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


def test_the_number_of_splits_where_the_device_knows_the_length():
    """It fills a GPU with one long row, and does not follow the table's width."""
    chosen = {n: decode._splits(n, 8, None, False, 264, by_length=True) for n in (64, 640, 1 << 14, 1 << 20)}
    assert chosen == {64: (1, 0), 640: (10, 0), 1 << 14: (33, 0), 1 << 20: (33, 0)}
    assert decode._splits(1 << 20, 8, None, True, 264, by_length=True) == (1 << 10, decode.SPLIT_KEYS)


@pytest.mark.parametrize(("s_q", "heads"), [(1, 128), (3, 20)])
def test_latents(s_q, heads):
    """Keys of 576 that hold their values of 512, of one head, in pages; heads that need several tiles."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, n, h, 576, generator=generator) for n, h in ((s_q, heads), (96, 1)))
    q, k, lengths = q.half().to(DEVICE), k.half().to(DEVICE), torch.tensor([7, 90], device=DEVICE)
    pages, table = paged(k, 32)
    spec, slots = AttnSpec(softmax_scale=0.04), torch.arange(96, device=DEVICE)
    q_positions = (lengths - s_q)[:, None] + torch.arange(s_q, device=DEVICE)
    seen = dict(lengths=lengths, q_positions=q_positions, k_positions=slots.expand(2, -1), block_table=table)
    assert host.unsupported(q, k, k[..., :512], spec, flowing_lse=False, masked=True, decodes=True) is None
    state = decode.attn_decode(q, KVCache(pages, None, head_dim_v=512, **seen), spec)
    keep = slots <= q_positions[..., None]
    out, lse = energy.attention(q.double(), k.double(), k[..., :512].double(), spec=spec, keep=keep)
    dense, _ = energy.attention(q, k, k[..., :512], spec=spec, keep=keep)
    assert (state[..., :-1] - out).abs().max() <= 2 * (dense - out).abs().max() + 1e-3
    assert (state[..., -1] - lse.transpose(1, 2)).abs().max() < 1e-4
    for other in (k.expand(-1, -1, 2, -1), k.float()):
        said = host.unsupported(q.to(other.dtype), other, other, spec, flowing_lse=False, masked=True, decodes=True)
        assert "head_dim 576 above 256 (decoding bf16 or fp16 with one KV head: 576)" in said


@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize("case", ["dense", "paged", "paged, int8", "latents"])
def test_selected_slots(case, num_splits):
    """Lists of slots for each of 2 queries of 2 rows, with -1 in them; what none has selected is NaN."""
    queries, slots, count = 2, 192, 70
    heads, d, d_v = ((20, 1), 48, 32) if case == "latents" else ((4, 2), 16, 16)
    q, k, v, _ = inputs(queries, slots, heads, d, d_v)
    g = torch.Generator().manual_seed(3)
    rows = torch.stack([torch.randperm(slots, generator=g)[:count] for _ in range(2 * queries)]).view(2, queries, -1)
    rows[torch.rand(rows.shape, generator=g) < 0.3] = -1
    rows[1, 1] = -1
    keep = torch.zeros(2, queries, slots + 1, dtype=torch.bool).scatter_(2, rows % (slots + 1), True)[..., :-1]
    keep, seen, spec = keep.to(DEVICE), dict(selected=rows.to(DEVICE, torch.int32)), AttnSpec(softmax_scale=d**-0.5)
    v, scales, head_dim_v = (k[..., :d_v] if case == "latents" else v), (), None
    exact = [x.double() for x in (q, k, v)]
    if "int8" in case:
        scales = [x.abs().amax(-1) / 127 for x in (k, v)]
        k, v = ((x / scale[..., None]).round().to(torch.int8) for x, scale in zip((k, v), scales))
        exact[1:] = [x.double() * scale.double()[..., None] for x, scale in zip((k, v), scales)]
    else:
        k, v = (x.masked_fill(~keep.any(1)[..., None, None], float("nan")) for x in (k, v))
    if case == "latents":
        v, head_dim_v = None, d_v
    if case != "dense":
        (k, table), v = paged(k, 32), v if v is None else paged(v, 32)[0]
        seen |= dict(block_table=table, lengths=torch.full((2,), slots, device=DEVICE))
        scales = [paged(x, 32)[0] for x in scales]
    cache = KVCache(k, v, *(scales or (None, None)), head_dim_v=head_dim_v, **seen)
    state = decode.attn_decode(q, cache, spec, num_splits)
    out, lse = energy.attention(*exact, spec=spec, keep=keep)
    assert_near(state[..., :-1], out, slots)
    assert_near(state[..., -1], lse.transpose(1, 2), slots)


@pytest.mark.parametrize("heads", [3, 80])
@pytest.mark.parametrize("case", ["dense", "paged"])
def test_index(case, heads):
    """The entries are those of scores in whole numbers, which are exact; of hidden slots there are none, nor are they
    read."""
    g, (b, n, s, d), topk = torch.Generator().manual_seed(4), (2, 3, 150, 20), 40
    q, k = (torch.randint(-2, 3, shape, generator=g).half() for shape in ((b, n, heads, d), (b, s, 1, d)))
    weights = torch.randint(-2, 3, (b, n, heads), generator=g).float()
    positions = torch.stack([torch.randperm(s, generator=g) for _ in range(b)])
    positions[:, ::9] = -1
    q_positions, lengths = torch.tensor([[148, 149, 150], [3, 40, 41]]), torch.tensor([150, 120])
    hidden = (positions < 0) | (positions > q_positions[:, -1:]) | (torch.arange(s) >= lengths[:, None])
    k, seen = k.masked_fill(hidden[..., None, None], float("nan")).to(DEVICE), {}
    if case == "paged":
        k, table = paged(k, 16)
        seen["block_table"] = table
        positions = torch.nn.functional.pad(positions, (0, table.shape[1] * 16 - s), value=-1)
    seen |= {"lengths": lengths, "q_positions": q_positions, "k_positions": positions}
    cache = KVCache(k, None, head_dim_v=d, **{name: x.to(DEVICE) for name, x in seen.items()})
    want, slots = best_keys(*(x.cpu() for x in (q, weights)), cache_to(cache, "cpu"), topk, 0.5)
    assert not index_unsupported(q, cache)
    entries, found = index_entries(q.to(DEVICE), weights.to(DEVICE), cache, 0.5).topk(topk)
    assert torch.equal(entries.cpu(), want)
    assert torch.equal(found.cpu().where(want != merge.NO_ENTRY, 0), slots.where(want != merge.NO_ENTRY, 0))


def cache_to(cache, device):
    return KVCache(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in cache))


def test_splits_fill_the_gpu():
    """Enough programs for every place, no more waves than needed, and one split where the batch fills the GPU."""
    places = 396  # 132 multiprocessors x 3
    for num_keys, programs in ((131072, 8), (1 << 20, 8), (65536, 1), (4096, 64)):
        splits = decode.choose_splits(num_keys, programs, places)
        assert programs * splits <= 4 * places
        assert programs * splits > 0.9 * min(places, programs * num_keys // (8 * decode.KEYS))
    assert decode.choose_splits(4096, 4000, places) == 1
    assert decode.choose_splits(1, 1, places) == 1


def test_merge_of_packed_states():
    g = torch.Generator().manual_seed(0)
    for n, rows, d in ((1, 3, 16), (4, 7, 24), (45, 9, 128), (17, 2, 512), (3, 2, 5)):
        states = torch.randn(n, 2, rows, d + 1, generator=g).to(DEVICE)
        states[..., -1] *= 20
        empty = torch.rand(n, 2, rows, generator=g).to(DEVICE) < 0.4
        states[..., -1][empty] = NEG_INF
        states[..., :-1][empty] = 0.0
        states[:, :, 0, -1] = NEG_INF  # one row that is empty everywhere
        states[:, :, 0, :-1] = 0.0
        out, lse = merge.unpack_state(merge.merge_packed(states), states.dtype)
        lse = lse.transpose(-1, -2)
        for merged in (merge_packed(states), merge_packed(states.transpose(0, 1).contiguous(), 1)):
            assert not merged.isnan().any()
            assert_near(merged[..., :-1], out, n)
            assert_near(merged[..., -1], lse, n)
        nothing = torch.zeros_like(states[:1]).index_fill_(-1, torch.tensor([d], device=DEVICE), NEG_INF)
        for more in (1, 30):  # bits of a row don't depend on the splits that longer rows need
            assert torch.equal(merge_packed(torch.cat([states, *[nothing] * more])), merge_packed(states))


def test_strided_lengths_tables_and_scales():
    q, k, v, _ = inputs(1, 192, batch=2)
    spec = AttnSpec(softmax_scale=0.25)
    lengths = torch.tensor([70, 9999], device=DEVICE)[:1].expand(2)
    scales = [x.abs().amax(-1) / 127 for x in (k, v)]
    k, v = ((x / s[..., None]).round().to(torch.int8) for x, s in zip((k, v), scales))
    (k, table), (v, _), *scales = paged(k, 32), paged(v, 32), *(paged(s, 32)[0] for s in scales)
    dense = KVCache(k, v, *scales, lengths=lengths.clone(), block_table=table)
    scales = [s.transpose(0, 2).contiguous().transpose(0, 2) for s in scales]
    strided = KVCache(k, v, *scales, lengths=lengths, block_table=table.t().contiguous().t())
    assert strided.block_table.stride(1) != 1 and strided.k_scale.stride(2) != 1
    assert torch.equal(decode.attn_decode(q, strided, spec), decode.attn_decode(q, dense, spec))


def test_a_growing_cache_makes_its_arguments_once():
    """What a launch is given beside tensors, strides and lengths is found again, however long the cache is."""
    q, k, v, _ = inputs(1, 192)
    made = []
    for n in (64, 65, 130, 192):
        decode.attn_decode(q, KVCache(k[:, :n], v[:, :n]), AttnSpec(softmax_scale=0.25))
        made.append(decode._fixed.cache_info().misses)
    assert made == made[:1] * 4


def test_nobody_decodes():
    q, k, v, _ = inputs(1, 192, batch=0)
    state = decode.attn_decode(q, KVCache(k, v), AttnSpec(softmax_scale=1.0), num_splits=3)
    assert state.shape == (0, 1, 4, 17)
