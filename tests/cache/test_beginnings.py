"""Rows that begin with the same pages: a decoding step reads those once, and gets what it gets without them."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.core import energy
from megatron_tree.core.cache import ShardedCache, quantize, sharded
from megatron_tree.core.cache.prefixes import common_beginnings
from megatron_tree.core.kernels import KVCache, SharedPages, attn_decode, backends
from megatron_tree.core.spec import AttnSpec
from support.ranks import largest, run_distributed
from support.rounding import error, rounding

PAGE, HEADS, D = 16, (4, 2), 16


def test_the_groups_that_save_most():
    pages = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 7], [5, 6], [1], []]
    assert common_beginnings(pages, 1) == [([0, 3, 1], 2), ([2, 4], 1)]
    assert common_beginnings(pages, 4) == [([0, 3, 1], 2)] and common_beginnings(pages, 5) == []
    assert common_beginnings([[1]], 1) == common_beginnings([], 1) == common_beginnings([[1], [2]], 1) == []
    long = list(range(50))
    assert common_beginnings([[*long, 90], [0, 91], [*long, 92]], 3) == [([0, 2], 50)], "one row more would spoil it"


def _pages(s_q, dtype, stored=None):
    """q, pages with scales, the same as float64, and five rows: a group of three, two others."""
    g = torch.Generator().manual_seed(s_q)
    h, h_kv = HEADS
    q = torch.randn(5, s_q, h, D, generator=g).to(dtype)
    k, v = torch.randn(2, 40, PAGE, h_kv, D, generator=g).to(dtype)
    scales = ()
    exact = [k.double(), v.double()]
    if stored is not None:
        (k, k_scale), (v, v_scale) = quantize(k, stored), quantize(v, stored)
        scales, exact = (k_scale, v_scale), [k.double() * k_scale[..., None], v.double() * v_scale[..., None]]
    beginning = [7, 3, 30]
    rows = [[*beginning, 1, 2], [8, 9], [*beginning, 4], [*beginning, 5], [12]]
    lengths = [5 * PAGE - 3, PAGE + 1, 4 * PAGE, 3 * PAGE + (s_q if s_q > 1 else 0), 9]
    return q, k, v, scales, exact, rows, lengths


def _oracle(q, exact, rows, lengths, s_q):
    found = []
    for i, (pages, n) in enumerate(zip(rows, lengths, strict=True)):
        k, v = (x[pages].flatten(0, 1)[None, :n] for x in exact)
        keep = (torch.arange(n) <= n - s_q + torch.arange(s_q)[:, None])[None]
        found.append(energy.attention(q[i : i + 1].double(), k, v, spec=AttnSpec(softmax_scale=D**-0.5), keep=keep))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _split(rows, lengths):
    """(tables and lengths of what follows, the shared pages)."""
    skip = [3, 0, 3, 3, 0]
    rest = [pages[n:] for pages, n in zip(rows, skip)]
    table = torch.tensor([[*pages, 0, 0][:2] for pages in rest], dtype=torch.int32)
    shared = [SharedPages(torch.tensor([0, 2, 3]), torch.tensor([rows[0][:3]], dtype=torch.int32))]
    return table, torch.tensor([n - PAGE * s for n, s in zip(lengths, skip)]), shared


CASES = [
    ("native", torch.float32, None), ("native", torch.bfloat16, None), ("native", torch.float32, torch.int8),
    ("aten", torch.float32, None), ("reference", torch.float64, None),
    ("reference", torch.float32, torch.float8_e4m3fn),
]  # fmt: skip


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize(("backend", "dtype", "stored"), CASES, ids=str)
def test_states_are_exact(backend, dtype, stored, s_q):
    q, k, v, scales, exact, rows, lengths = _pages(s_q, dtype, stored)
    check(q, k, v, scales, exact, rows, lengths, lambda *args: attn_decode(*args, backend))


def check(q, k, v, scales, exact, rows, lengths, decode):
    """Against the oracle, and against the same kernel with whole rows."""
    s_q = q.shape[1]
    out, lse = _oracle(q, exact, rows, lengths, s_q)
    table, own, shared = _split(rows, lengths)
    whole = torch.tensor([[*pages, 0, 0, 0, 0][:5] for pages in rows], dtype=torch.int32)
    spec, errors = AttnSpec(softmax_scale=D**-0.5), []
    for block_table, counts, more in ((whole, torch.tensor(lengths), ()), (table, own, shared)):
        positions = ()
        if s_q > 1:
            slots = torch.arange(block_table.shape[1] * PAGE).expand(5, -1)
            positions = (counts[:, None] - s_q + torch.arange(s_q), slots)
        seen = (None, counts, *(positions or (None, None)), block_table, more)
        state = decode(q, KVCache(k, v, *(scales or (None, None)), *seen), spec)
        errors.append(largest((error(state[..., :-1], out), error(state[..., -1], lse.transpose(1, 2)))))
    limit = rounding(max(lengths), torch.promote_types(q.dtype, torch.float32))
    assert errors[1] <= 2 * errors[0] + limit and errors[1] < 0.05


def _forks(rank, world, tokens):
    """Slots that the kernel was told to read with and without sharing, the worst error, and bits that differ."""
    g = torch.Generator().manual_seed(5)
    h, h_kv = HEADS
    cache = ShardedCache([None], rank=rank, world=world, page_size=4)
    sharded.SAVED_TOKENS = tokens
    text = torch.randn(2, 1, 60, h_kv, D, generator=g)
    rows = [cache.book.add()]
    cache.write(0, cache.append(rows, 60), *text)
    rows += [cache.book.fork(rows[0]) for _ in range(4)]
    cache.crop(rows[3], 30)
    rows.append(cache.book.add())
    own = torch.randn(2, 6, 9, h_kv, D, generator=g)
    for i in range(9):  # forks grow by themselves
        append = cache.append(rows, 1)
        cache.write(0, append, *own[:, :, i : i + 1])
    q = torch.randn(6, 1, h, D, generator=g)
    view, pages, read = cache.view(0, rows, "cpu"), cache.layers[0], []
    decode = backends.Backend.attn_decode

    def watched(self, q, cache, spec):
        read.append(int(cache.lengths.sum()) + sum(4 * table.shape[1] for _, table in cache.shared))
        return decode(self, q, cache, spec)

    backends.Backend.attn_decode = watched
    outs = []
    for seen, shared in ((view, ()), (view.rest or view, view.shared)):
        call = dict(block_table=seen.block_table, cache_seqlens=seen.lengths, shared=shared, cp_group=dist.group.WORLD)
        outs.append(tree_decode(q, pages.k, pages.v, **call))
    backends.Backend.attn_decode = decode
    begun = [60, 60, 60, 30, 60, 0]
    worst = 0.0
    for i, n in enumerate(begun):
        k, v = (torch.cat((text[x, :, :n], own[x, i : i + 1]), 1).double() for x in (0, 1))
        want, _ = energy.attention(q[i : i + 1].double(), k, v, spec=AttnSpec(softmax_scale=D**-0.5))
        worst = largest((worst, *(error(out[i : i + 1], want) for out in outs)))
    return read, worst, len(view.shared), outs[1]


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_reads_what_rows_share_once(world):
    found = run_distributed(_forks, world, 8)
    assert all(torch.equal(out, found[0][3]) for *_, out in found)
    assert largest(worst for _, worst, *_ in found) < rounding(69)
    without, once = (sum(read[i] for read, *_ in found) for i in (0, 1))
    assert without == 4 * 69 + 39 + 9
    assert once <= 60 + 4 * 9 + 39 + 9 + 8 * world, "four rows of 60 tokens are read once, but for a page begun"
    assert all(groups == 1 for *_, groups, _ in found)
    assert all(groups == 0 for *_, groups, _ in run_distributed(_forks, world, 1024)), "too little to save"


def test_what_shared_pages_do_not_go_with():
    q, k, v, _, _, rows, lengths = _pages(1, torch.float32)
    table, own, shared = _split(rows, lengths)
    call = dict(cp_group=None, block_table=table, cache_seqlens=own)
    positions = dict(
        q_positions=torch.zeros(5, 1, dtype=torch.int64), cache_positions=torch.zeros(2 * PAGE, dtype=torch.int64)
    )
    wrong = [SharedPages(torch.tensor([0, 9]), shared[0].block_table)]
    for options, message in (
        (call | {"shared": shared, "schedule": "ring"}, "another schedule than 'ring'"),
        (call | {"shared": shared, "window_size": (4, 0)} | positions, "no window"),
        (call | {"shared": shared, "config": TreeConfig(deterministic=True)}, "not deterministic"),
        (call | {"shared": wrong}, r"rows \[0, 9\] must be below 5"),
        (call | {"shared": [(torch.tensor([0.5]), shared[0].block_table)]}, "must be pairs of rows int64"),
        ({"cp_group": None, "shared": shared}, "needs a block_table"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_decode(q, *((k, v) if "block_table" in options else (k[:5], v[:5])), **options)
