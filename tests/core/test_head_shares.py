"""tree_decode and tree_prefill with query heads split over the ranks of the cache, against the float64 oracle."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode, tree_prefill
from megatron_tree.core import comm
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.core.layout import Segment
from megatron_tree.core.plan import grids
from support.attention import make_slopes
from support.decoding import cache_of, cached_oracle, decode_inputs, decode_oracle
from support.ragged_rows import LONGEST, QUERIES, ragged_rows
from support.ranks import largest, on_ranks
from support.rounding import error, rounding

FORMS = {  # heads, head_dim, head_dim_v, options of the call
    "gqa": ((12, 3), 8, 8, {}),
    "mqa, wide values": ((9, 1), 8, 12, {}),
    "softcap": ((9, 3), 8, 8, {"softcap": 2.0}),
    "sinks": ((12, 4), 8, 8, {"sinks": torch.linspace(-1, 1, 12)}),
    "window": ((9, 3), 8, 4, {"window_size": (5, 0)}),
    "alibi": ((9, 1), 8, 8, {"alibi_slopes": make_slopes(9)}),
    "fewer heads than ranks": ((2, 1), 8, 8, {"sinks": torch.linspace(-1, 1, 2)}),
}


def shares_of(heads, world):
    return [heads // world + (r < heads % world) for r in range(world)]


def own(x, shares, rank, dim):
    return x.split(shares, dim)[rank]


def _own_options(options, shares, rank):
    sinks = options.get("sinks")
    return options if sinks is None else options | {"sinks": own(sinks, shares, rank, 0)}


@pytest.mark.parametrize(("world", "page_size"), [(3, 1), (4, 16)])
@on_ranks()
def test_decode_from_pages(rank, world, page_size):
    """Rows of different lengths in pages: the worst error by form, dtype and schedule."""
    worst = {}
    for name, form in FORMS.items():
        (heads, _), _, d_v, options = form
        shares = shares_of(heads, world)
        for dtype in ("auto", "int8", "fp8") if name == "gqa" else ("auto",):
            call, truth = ragged_rows(rank, world, form, page_size, dtype)
            out, lse = (own(x, shares, rank, dim) for x, dim in zip(truth, (2, 1)))
            call |= _own_options(options, shares, rank)
            if dtype != "int8":  # all heads, or those of this rank
                call["q"] = own(call["q"], shares, rank, 2)
            for schedule in DECODE_SCHEDULES:
                o, l = tree_decode(**call, head_shares=shares, schedule=schedule, return_lse=True)
                assert o.shape == (4, QUERIES, shares[rank], d_v) and l.shape == (4, shares[rank], QUERIES)
                if shares[rank]:
                    errors = error(o, out), error(l, lse)
                    worst[name, dtype, schedule] = largest((worst.get((name, dtype, schedule), 0.0), *errors))
    assert worst and largest(worst.values()) < rounding(LONGEST), worst


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_same_bits_as_with_all_heads_everywhere(rank, world):
    """Own heads of "scatter" against the same heads of a call in which every rank has all of them."""
    q, k, v = decode_inputs(2, 1, 8 * world, (6, 2), dtype=torch.float32)
    shares, mine = shares_of(6, world), slice(8 * rank, 8 * rank + 8)
    call = dict(cp_group=dist.group.WORLD, schedule="scatter")
    for transport in ("auto", "direct", "builtin"):
        config = TreeConfig(transport=transport)
        whole = tree_decode(q, k[:, mine], v[:, mine], config=config, **call)
        with comm.record() as log:
            out = tree_decode(
                own(q, shares, rank, 2), k[:, mine], v[:, mine], head_shares=shares, config=config, **call
            )
        assert torch.equal(out, own(whole, shares, rank, 2)), transport
        if transport == "builtin":  # queries, without padding, and states of the longest share
            sizes = (2 * shares[rank] * 8 * 4, 2 * max(shares) * 9 * 4)
            assert [tuple(sent) for sent in log] == [("all_to_all", world, (world - 1) * n) for n in sizes]
        of_all = tree_decode(q, k[:, mine], v[:, mine], head_shares=shares, config=config, **call)
        assert torch.equal(of_all, out), transport
    out = tree_decode(own(q, shares, rank, 2), k[:, mine], v[:, mine], head_shares=shares, cp_group=dist.group.WORLD)
    worst = error(out, own(decode_oracle(q, k, v, None)[0], shares, rank, 2))
    assert worst < rounding(8 * world), worst


@pytest.mark.parametrize(("world", "page_size"), [(3, 1), (4, 16), pytest.param(8, 4, marks=pytest.mark.slow)])
@on_ranks()
def test_prefill_in_chunks(rank, world, page_size):
    """A prompt in chunks whose queries are all on every rank, of its own heads."""
    worst = 0.0
    for (heads, heads_kv), d, d_v, options in FORMS.values():
        shares = shares_of(heads, world)
        mine = _own_options(options, shares, rank)
        q, k, v = decode_inputs(1, 59, 59, (heads, heads_kv), d, d_v, torch.float32)
        cache, row = cache_of(rank, world, options, page_size)
        for begin, end in ((0, 7), (7, 37), (37, 38), (38, 59)):
            append = cache.append([row], end - begin)
            cache.write(0, append, k[:, begin:end], v[:, begin:end])
            view, pages = cache.view(0, [row], "cpu"), cache.layers[0]
            held = int(view.lengths[0])
            queries, middle = q[:, begin:end], grids(world)[len(grids(world)) // 2]
            grid = {0: middle, 7: (1, world), 37: middle, 38: (world, 1)}[begin] if heads_kv == 1 else (world, 1)
            out = tree_prefill(
                queries if begin in (7, 37) else own(queries, shares, rank, 2),  # all heads, or those of this rank
                *pages.row(view.block_table, 0, held, q.dtype),
                cp_group=dist.group.WORLD,
                shares=[[(begin, end - begin)]],
                key_segments=cache.key_segments(
                    append, 0, of_all_ranks=grid[1] > 1, by_position="alibi_slopes" in mine
                ),
                head_shares=shares,
                grid=grid,
                **mine,
            )
            truth = own(cached_oracle(queries, k[:, :end], v[:, :end], begin, **options)[0], shares, rank, 2)
            assert out.shape == truth.shape
            worst = largest((worst, error(out, truth)))
    assert worst < rounding(59), worst


@on_ranks(2)
def test_what_is_refused_on_every_rank(rank):
    q, k, v = decode_inputs(1, 1, 8, (4, 2), dtype=torch.float32)
    step = dict(q=q[:, :, :2], k_cache=k, v_cache=v, cp_group=dist.group.WORLD, head_shares=[2, 2])
    chunk = step | dict(shares=[[(0, 1)]], key_segments=[[Segment(0, 0, 8)]] * 2)
    latents = dict(k_cache=k[:, :, :1], v_cache=None, head_dim_v=8, expand=lambda x: (x, x), grid=(2, 1))
    cases = {
        "head_shares=[4] must hold the number of query heads of each of the 2 ranks": step | dict(head_shares=[4]),
        "head_shares=[3, 1] gives rank": step | dict(head_shares=[3, 1]),
        "q has 5 heads and k_cache 2": step | dict(q=q[:, :, : 2 + rank], head_shares=[2, 3]),
        "head_shares=[0, 0] must hold": step | dict(q=q[:, :, :0], head_shares=[0, 0]),
        "head_shares=[2.0, 2.0] must hold": step | dict(head_shares=[2.0, 2.0]),
        "one logit per query head, [2]": step | dict(sinks=torch.zeros(4)),
        "gathers_heads": step | dict(q=q[:, :, : 4 - 2 * rank]),
        "with head_shares one entry for all": chunk | dict(shares=[[(0, 1)]] * 2, key_segments=[]),
        "if there is one KV head, not 2: choose b = 1": chunk | dict(grid=(1, 2)),
        "expand makes keys of one rank's heads, with head_shares: choose a = 1": chunk | latents,
    }
    for message, arguments in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            (tree_prefill if "shares" in arguments else tree_decode)(**arguments)
