"""tree_prefill and tree_decode over pages, in real processes, against the float64 oracle."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode, tree_prefill
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.core.layout import Segment
from megatron_tree.core.plan import grids
from support.attention import dense, make_slopes
from support.decoding import cache_of, cached_oracle, decode_inputs, prefill_chunk, same_everywhere
from support.ragged_rows import LONGEST, ragged_rows
from support.ranks import largest, on_ranks, run_distributed
from support.rounding import error, rounding

FORMS = {  # heads, head_dim, head_dim_v, options of the call
    "plain": ((4, 4), 8, 8, {}),
    "gqa": ((8, 2), 8, 8, {}),
    "mqa, wide values": ((4, 1), 8, 12, {}),
    "softcap": ((4, 2), 8, 8, {"softcap": 2.0}),
    "sinks": ((4, 2), 8, 8, {"sinks": torch.linspace(-1, 1, 4)}),
    "window": ((4, 2), 8, 4, {"window_size": (5, 0)}),
    "alibi": ((4, 2), 8, 8, {"alibi_slopes": make_slopes(4)}),
    "window, sinks": ((4, 2), 8, 8, {"window_size": (0, 0), "sinks": torch.linspace(-1, 1, 4)}),
}
OF_PREFILL = FORMS | {"chunks": ((4, 2), 8, 8, {"attention_chunk_size": 11})}
BF16 = ({}, {"alibi_slopes": make_slopes(8)})
# how a prompt comes in: chunks that end inside pages, shorter than the ranks, one token
CHUNKS = ((7, 30, 1, 2, 19), (64,), (1, 1, 13))


def want(*args, **options):
    return cached_oracle(*args, **options)[0]


@pytest.mark.parametrize(
    ("world", "page_size"),
    [(1, 4), (2, 4), (3, 1), (4, 16), pytest.param(8, 3, marks=pytest.mark.slow)],
)
@on_ranks()
def test_prefill_in_chunks(rank, world, page_size):
    # 4 ranks and pages of 16: some have no queries in a chunk, and no keys either at the beginning
    worst = {}
    for form, (heads, d, d_v, options) in OF_PREFILL.items():
        for chunks in CHUNKS:
            for grid in grids(world) if chunks is CHUNKS[0] else (None,):
                q, k, v = decode_inputs(1, sum(chunks), sum(chunks), heads, d, d_v, torch.float32)
                cache, row = cache_of(rank, world, options, page_size)
                at = 0
                for n in chunks:
                    new = slice(at, at + n)
                    out, mine = prefill_chunk(cache, row, q[:, new], k[:, new], v[:, new], options, grid)
                    assert out.dtype == torch.float32 and out.isfinite().all()
                    assert out.shape == (1, len(mine), heads[0], d_v)
                    truth = want(q[:, new], k[:, : at + n], v[:, : at + n], at, **options)
                    worst[form] = largest((worst.get(form, 0.0), error(out, truth[:, torch.tensor(mine).long()])))
                    at += n
    assert largest(worst.values()) < rounding(max(map(sum, CHUNKS))), worst


@on_ranks(2)
def test_prefill_with_triton_kernels(rank, world):
    q, k, v = decode_inputs(1, 40, 40, dtype=torch.float32)
    options, worst = dict(config=TreeConfig(backend="triton", timeout_s=60)), []
    for grid in grids(world):
        cache, row = cache_of(rank, world, {}, 4)
        for new in (slice(0, 23), slice(23, 40)):
            out, mine = prefill_chunk(cache, row, q[:, new], k[:, new], v[:, new], options, grid)
            truth = want(q[:, new], k[:, : new.stop], v[:, : new.stop], new.start)
            worst.append(error(out, truth[:, torch.tensor(mine).long()]))
    found = largest(worst)
    assert found < rounding(40), found


@pytest.mark.parametrize("world", [1, 4])
@on_ranks()
def test_prefill_in_bf16_within_the_rule(rank, world):
    q, k, v = decode_inputs(1, 96, 96, (8, 2), 32, 32, torch.bfloat16)
    errors = []
    for options in BF16:
        truth = want(q, k, v, 0, **options)
        allowed = (dense(q, k, v, torch.zeros_like(q), **options)[0].double() - truth).abs().max()
        for grid in grids(world):
            cache, row = cache_of(rank, world, {}, 4)
            for new in (slice(0, 40), slice(40, 96)):
                out, mine = prefill_chunk(cache, row, q[:, new], k[:, new], v[:, new], options, grid)
                errors.append(float((out.double() - truth[:, new][:, mine]).abs().max() / allowed))
    worst = largest(errors)
    assert worst <= 2, worst


@pytest.mark.parametrize(("world", "page_size"), [(1, 4), (2, 1), (4, 16)])
@on_ranks()
def test_decode_from_pages(rank, world, page_size):
    """Rows of different lengths in one cache; every schedule and eight bits, too."""
    worst = {}
    for name, form in FORMS.items():
        for dtype in ("auto", "int8", "fp8") if name in ("gqa", "window") else ("auto",):
            call, (truth, _) = ragged_rows(rank, world, form, page_size, dtype)
            for schedule in DECODE_SCHEDULES:
                out = tree_decode(**call, schedule=schedule)
                assert same_everywhere(out), (name, dtype, schedule)
                worst[name, dtype] = largest((worst.get((name, dtype), 0.0), error(out, truth)))
    assert largest(worst.values()) < rounding(LONGEST), worst


@pytest.mark.parametrize("world", [1, 4])
@on_ranks()
def test_decode_in_bf16_within_the_rule(rank, world):
    errors, options = [], dict(cp_group=dist.group.WORLD, q_positions=torch.tensor([127]))
    for mask in BF16:
        q, k, v = decode_inputs(2, 128, 128, (8, 2), 32, 32, torch.bfloat16)
        last = dense(q, k, v, torch.zeros_like(q), **mask)[0][:, -1:]
        q = q[:, -1:]
        truth = want(q, k, v, 127, **mask)
        cache, row = cache_of(rank, world, {}, 16)
        rows = [row, cache.book.add()]
        for new in (slice(0, 100), slice(100, 128)):
            cache.write(0, cache.append(rows, new.stop - new.start), k[:, new], v[:, new])
        view, pages = cache.view(0, rows, "cpu"), cache.layers[0]
        seen = dict(block_table=view.block_table, cache_seqlens=view.lengths, cache_positions=view.positions)
        outs = [tree_decode(q, pages.k, pages.v, schedule=x, **options, **seen, **mask) for x in DECODE_SCHEDULES]
        errors += [float((out.double() - truth).abs().max() / (last.double() - truth).abs().max()) for out in outs]
    worst = largest(errors)
    assert worst <= 2, worst


@on_ranks(2)
def test_no_queries_at_all(rank, world):
    q, k, v = decode_inputs(1, 0, 3, dtype=torch.float32)
    options = dict(cp_group=dist.group.WORLD, shares=[[] for _ in range(world)])
    alone = tree_prefill(q, k, v, key_segments=[Segment(0, 0, 3)], **options)
    segments = [[Segment(0, 0, 3)], *([] for _ in range(world - 1))]
    some = slice(0, 0 if rank else 3)
    beside = tree_prefill(q, k[:, some], v[:, some], key_segments=segments, **options)
    assert alone.shape == beside.shape == (1, 0, 4, 8)


def _refused(rank, world):
    """[(who refuses it, what is said here)] where rank 1 does something wrong, or all do."""
    config = TreeConfig(timeout_s=20)
    q, k, v = (x[:, 3 * rank : 3 * rank + 3] for x in decode_inputs(1, 6, 6, dtype=torch.float32))
    chunk = dict(q=q, k_cache=k, v_cache=v, shares=[[(0, 3)], [(3, 3)]], key_segments=[Segment(0, 3 * rank, 3)])
    gathered = chunk | dict(key_segments=[[Segment(0, 0, 3)], [Segment(0, 3, 3)]])
    table = torch.zeros(1, 1, dtype=torch.int32)
    pages = dict(q=q[:, :1], k_cache=k, v_cache=v, block_table=table, cache_seqlens=torch.tensor([3]))
    on_triton = TreeConfig(timeout_s=20, backend="triton")
    other, no_list = "call this with different arguments", r"key_segments must hold a list for each of the 2 ranks"
    cells = r"grid=\(2, 2\) has 4 cells but cp_group has 2 ranks: choose 1x2, 2x1"
    cases = [  # the message, who refuses it, a call, and what rank 1 passes instead
        (f"{other}.*shares=", "all", chunk, dict(shares=[[(0, 2), (2, 1)], [(3, 3)]])),
        (f"{other}.*softcap=", "all", chunk, dict(softcap=1.0)),
        (r"q has 2 queries, but shares=\[3, 3\]", "rank 1", chunk, dict(q=q[:, 1:])),
        ("k_cache has 2 keys", "rank 1", chunk, dict(k_cache=k[:, 1:], v_cache=v[:, 1:])),
        (r"shares=\[3\] for 2 ranks", "all", chunk | dict(shares=[[(0, 3)]]), {}),
        (f"{other}.*grid=", "all", gathered | dict(grid=(2, 1)), dict(grid=(1, 2))),
        (cells, "rank 1", gathered | dict(grid=(2, 1)), dict(grid=(2, 2))),
        (no_list, "rank 1", gathered | dict(grid=(1, 2)), dict(key_segments=chunk["key_segments"])),
        ("block_table must be int32", "rank 1", pages, dict(block_table=table.long())),
        (r"block_table=\[\[-1\]\] names pages beyond the 1", "rank 1", pages, dict(block_table=table - 1)),
        ("pages in int8 or fp8 need", "rank 1", pages, dict(k_cache=k.to(torch.int8))),
        ("page_size=3: .*16, 32, 64, 128, 256", "rank 1", pages, dict(config=on_triton)),
    ]
    said = []
    for message, by, call, wrong in cases:
        call = dict(cp_group=dist.group.WORLD, config=config) | call | (wrong if rank == 1 else {})
        with pytest.raises(ValueError, match=message) as caught:
            (tree_decode if "block_table" in call else tree_prefill)(**call)
        said.append((by, str(caught.value)))
    return said


def test_every_rank_is_told():
    """What rank 1 alone refuses, rank 0 refuses too, and says that it was rank 1."""
    for (by, other), (_, own) in zip(*run_distributed(_refused, 2, timeout=120)):
        assert by == "all" or (other.startswith("rank 1 rejected") and other.endswith(own)), (other, own)


def test_values_of_tables_and_lengths_are_checked():
    """Of the entries in use, in every call."""
    q, pages = torch.randn(2, 1, 2, 8), torch.randn(6, 16, 2, 8)
    table, lengths = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([32, 20])
    call = dict(cp_group=None, block_table=table, cache_seqlens=lengths)
    for _ in range(2):
        tree_decode(q, pages, pages, **call)
    table[1, 1] = 6
    for _ in range(2):
        with pytest.raises(ValueError, match="names pages beyond the 6"):
            tree_decode(q, pages, pages, **call)
    lengths[1] = 16  # not used any more
    tree_decode(q, pages, pages, **call)
    lengths[0] = 33
    with pytest.raises(ValueError, match="within 0 and the cache's 32 slots"):
        tree_decode(q, pages, pages, **call)
    lengths[0] = 32
    with pytest.raises(ValueError, match="names pages beyond the 1 of"):
        tree_decode(q, pages[:1], pages[:1], **call)
    with torch.inference_mode():  # tensors without a version
        other = table.clone()
        tree_decode(q, pages, pages, **{**call, "block_table": other})
        other[0, 0] = -1
        with pytest.raises(ValueError, match="names pages beyond the 6"):
            tree_decode(q, pages, pages, **{**call, "block_table": other})
