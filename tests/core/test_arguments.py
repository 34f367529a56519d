"""Arguments in the forms in which callers have them: numpy's integers, lists and tuples, padding, heads on one rank."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_tree import (
    TreeConfig,
    packed_layout,
    shard_positions,
    shard_sequence,
    tree_attn_func,
    tree_attn_varlen_func,
    tree_decode,
    tree_prefill,
    unshard_sequence,
)
from megatron_tree.core import energy
from megatron_tree.core.attention.validate import check_runs, check_segments
from megatron_tree.core.layout import Packed, Segment
from megatron_tree.core.spec import AttnSpec
from support.attention import make_inputs, make_slopes, oracle
from support.decoding import cached_oracle, decode_inputs, decode_oracle
from support.ranks import largest, on_ranks, run_distributed

INT = np.int64


@on_ranks(2)
def test_numpy_integers_are_integers(rank, world):
    """Rank 1 passes numpy's integers where rank 0 passes Python's: one call."""
    kind = INT if rank else int
    group, n = dist.group.WORLD, 8
    q, k, v, dout = make_inputs(n, (4, 2), batch=1)
    given, lengths = [kind(5), kind(3)], [5, 3]
    rows = shard_positions(n, rank, world, given)
    options = dict(window_size=(kind(3), kind(0)), dropout_p=0.0, alibi_slopes=make_slopes(4), layout=given)
    config = TreeConfig(head_chunks=kind(2), memory_budget=kind(1 << 30), grid=(kind(2), kind(1)))
    out = tree_attn_func(*(x[:, rows] for x in (q, k, v)), cp_group=group, config=config, **options)
    truth = oracle(q, k, v, dout, window_size=(3, 0), alibi_slopes=make_slopes(4))[0]
    assert (out - truth[:, rows]).abs().max() < 1e-12
    kinds = dict(dropout_p=0.2, dropout_seed=kind(7), ranges=None)
    assert tree_attn_func(*(x[:, rows] for x in (q, k, v)), cp_group=group, layout=lengths, **kinds).isfinite().all()
    whole = [((kind(0), kind(n)), (kind(0), kind(n)), "causal")]
    out = tree_attn_func(*(x[:, rows] for x in (q, k, v)), cp_group=group, layout=tuple(lengths), ranges=whole)
    assert (out - oracle(q, k, v, dout)[0][:, rows]).abs().max() < 1e-12
    bounds = [kind(x) for x in (0, 4, n)]
    mine = shard_positions(n, rank, world, packed_layout(bounds))
    out = tree_attn_varlen_func(*(x[0, mine] for x in (q, k, v)), cp_group=group, cu_seqlens=bounds)
    documents = [oracle(*(x[:, part] for x in (q, k, v, dout)))[0] for part in (slice(4), slice(4, n))]
    assert (out - torch.cat(documents, 1)[0, mine]).abs().max() < 1e-12
    own = slice(4 * rank, 4 * rank + 4)
    out = tree_prefill(
        q[:, own], k[:, own], v[:, own], cp_group=group, attention_chunk_size=kind(n), grid=(kind(1), kind(2)),
        shares=[[(kind(4 * r), kind(4))] for r in range(2)],
        key_segments=[[(kind(0), kind(4 * r), kind(4))] for r in range(2)],
    )  # fmt: skip
    assert (out - oracle(q, k, v, dout)[0][:, own]).abs().max() < 1e-12
    heads = slice(2 * rank, 2 * rank + 2)
    shares = dict(head_shares=[kind(2), kind(2)])
    out = tree_decode(q[:, -1:, heads], k[:, own], v[:, own], cp_group=group, **shares)
    assert (out - oracle(q, k, v, dout)[0][:, -1:, heads]).abs().max() < 1e-12


@pytest.mark.parametrize("bad", [True, 4.0, np.float64(4), "4", None])
def test_what_is_no_integer(bad):
    with pytest.raises(ValueError, match="cu_seqlens=.*must be integers"):
        packed_layout([0, bad])
    with pytest.raises(ValueError, match="layout=.*must give 1 lengths"):
        shard_positions(4, 0, 1, [bad])
    if bad is not None:
        with pytest.raises(ValueError, match="head_chunks=.*must be a positive integer"):
            TreeConfig(head_chunks=bad)


@on_ranks(2)
def test_shards_are_joined_again(rank, world):
    x = torch.arange(12.0)[:, None]
    for seq_len, layout in ((8, [5, 3]), (8, (INT(5), INT(3))), (12, "zigzag"), (11, "contiguous"), (1, "contiguous")):
        mine = shard_sequence(x[:seq_len], dist.group.WORLD, 0, layout)
        assert torch.equal(mine, x[shard_positions(seq_len, rank, world, layout)])
        assert torch.equal(unshard_sequence(mine, dist.group.WORLD, 0, layout, seq_len), x[:seq_len])
    assert torch.equal(unshard_sequence(x[: 5 - 2 * rank], dist.group.WORLD, 0, [(5, 3), [5, 3]][rank])[:5], x[:5])


def test_segments_and_runs_of_several_ranks():
    own, other = (Segment(0, 0, 4), Segment(4, 8, 4)), (Segment(0, 4, 4, 1),)
    assert check_segments(((own), ())) == [list(own), []]
    assert check_segments([[tuple(s) for s in own], list(other)]) == [list(own), list(other)]
    assert check_segments(()) == [] and check_segments([[], ()]) == [[], []]
    assert check_runs((((0, 4), [8, 4]), ())) == [[(0, 4), (8, 4)], []]
    for bad in (None, 3, [(0, 1)], [(0.0, 0, 4)], [[(0, -1, 4)]], "segments", [own, 3]):
        with pytest.raises(ValueError, match=r"key_segments=.* must be segments \(row, position, length\)"):
            check_segments(bad)
    for bad in (None, 3, [(0, 4)], [[(0, 4.0)]], [[(0, 4, 4)]], "runs"):
        with pytest.raises(ValueError, match=r"shares=.* must be lists of runs \(first position, count\)"):
            check_runs(bad)


def _expand(latents):
    """Keys and values [b, n, 2, 8] of latents [b, n, 1, 6]."""
    g = torch.Generator().manual_seed(3)
    up = torch.randn(6, 32, generator=g, dtype=torch.float64).to(latents.dtype)
    return (latents[:, :, 0] @ up).unflatten(-1, (2, 16)).split(8, -1)


@on_ranks(2)
def test_latents_are_checked_for_nan(rank):
    """Latents with check="finite", clean and with a NaN on rank 1."""
    q = make_inputs(8, (4, 2), batch=1)[0]
    latents = torch.randn(1, 8, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    own = slice(4 * rank, 4 * rank + 4)
    options = dict(v_cache=None, head_dim_v=INT(8), expand=_expand, shares=[[(0, 4)], [(4, 4)]])
    options |= dict(key_segments=[Segment(0, 4 * rank, 4)], cp_group=dist.group.WORLD)
    config = TreeConfig(check="finite", timeout_s=30)
    out = tree_prefill(q[:, own], latents[:, own], config=config, **options)
    assert (out - cached_oracle(q, *_expand(latents), 0)[0][:, own]).abs().max() < 1e-12
    if rank == 1:
        latents[0, 5, 0, 2] = float("nan")
    with pytest.raises(ValueError, match=r"k_cache on rank 1 .*first at k_cache\[0, 1, 0, 2\] = nan"):
        tree_prefill(q[:, own], latents[:, own], config=config, **options)


def _padded_cross(rank, world):
    """Packed cross attention: rows of padding after the documents of q alone, of k alone, and of both."""
    errors = []
    for q_rows, k_rows in ((16, 8), (8, 16), (16, 12)):
        q, _, _, dout = make_inputs(q_rows, (4, 2), batch=1)
        _, k, v, _ = make_inputs(k_rows, (4, 2), batch=1, seed=1)
        bounds, bounds_kv = [0, 4, 8], [0, 8, 8] if k_rows == 8 else [0, 4, 8]
        layouts = [packed_layout(x, num_rows=n) for x, n in ((bounds, q_rows), (bounds_kv, k_rows))]
        rows = [shard_positions(n, rank, world, layout) for n, layout in zip((q_rows, k_rows), layouts)]
        q[:, 8:], dout[:, 8:], k[:, 8:], v[:, 8:] = (float("nan") for _ in range(4))
        leaves = [x[0, own].requires_grad_() for x, own in zip((q, k, v), (rows[0], rows[1], rows[1]))]
        call = dict(cu_seqlens=bounds, cu_seqlens_kv=bounds_kv, causal=False, cp_group=dist.group.WORLD)
        out = tree_attn_varlen_func(*leaves, **call)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout[0, rows[0]])]
        documents = [torch.arange(8)[:, None] >= x[1] for x in (bounds, bounds_kv)]
        spec = AttnSpec(softmax_scale=8**-0.5, causal=False)
        options = dict(spec=spec, keep=documents[0] == documents[1].T)
        used = [x[:, :8] for x in (q, k, v)]
        truth = [energy.attention(*used, **options)[0], *energy.attention_grads(*used, dout[:, :8], **options)]
        for x, want, own in zip(found, truth, (rows[0], rows[0], rows[1], rows[1])):
            whole = torch.zeros(max(q_rows, k_rows), *want.shape[2:], dtype=want.dtype)
            whole[:8] = want[0]  # rows of padding: 0
            errors.append(float((x - whole[own]).abs().max()))
    with pytest.raises(ValueError, match="cu_seqlens has 2 documents and cu_seqlens_kv 1"):
        tree_attn_varlen_func(*leaves, **{**call, "cu_seqlens_kv": [0, 4]})
    return largest(errors)


def test_padding_after_the_documents_is_no_document():
    assert largest(run_distributed(_padded_cross, 2)) < 1e-12
    assert packed_layout([0, 4], num_rows=6) == Packed((4, 0), (4, 2))


@on_ranks(3)
def test_all_heads_everywhere_where_one_rank_has_them_by_its_share(rank, world):
    """Rank 0 has all heads by its share: the others may pass none, or all."""
    worst = 0.0
    q, k, v = decode_inputs(2, 1, 4 * world, (2, 1))
    own, shares = slice(4 * rank, 4 * rank + 4), [2] + [0] * (world - 1)
    call = dict(cp_group=dist.group.WORLD, head_shares=shares)
    truth = decode_oracle(q, k, v, None)[0]
    for queries in (q, q[:, :, : shares[rank]]):
        for schedule in ("scatter", "allgather", "ring"):
            out = tree_decode(queries, k[:, own], v[:, own], schedule=schedule, **call)
            assert out.shape == (2, 1, shares[rank], 8)
            worst = largest((worst, *(out - truth[:, :, : shares[rank]]).abs().flatten()))
        for grid in ((world, 1), (1, world)):
            segments = [[Segment(0, 4 * r, 4)] for r in range(world)]
            chunk = dict(shares=[[(4 * world - 1, 1)]], key_segments=segments, grid=grid)
            out = tree_prefill(queries, k[:, own], v[:, own], **chunk, **call)
            assert out.shape == (2, 1, shares[rank], 8)
            worst = largest((worst, *(out - truth[:, :, : shares[rank]]).abs().flatten()))
    assert worst < 1e-12, worst
