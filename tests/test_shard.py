"""Layouts: who holds which tokens. Zigzag is Megatron's, checked against Megatron."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree.shard import (
    Segment,
    gathered_segments,
    join,
    packed_segments,
    positions_of,
    shard_lengths,
    shard_positions,
    shard_segments,
)


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_zigzag_is_megatrons_order(world, monkeypatch):
    utils = pytest.importorskip("megatron.core.utils", reason="megatron-core is not installed")
    from megatron.core import parallel_state

    split = utils.get_batch_on_this_cp_rank
    newer = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(split).parameters else {}
    tokens = torch.arange(2 * world * 3)[None]
    for rank in range(world):
        monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: world)
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda r=rank: r)
        theirs = split({"tokens": tokens}, **newer)["tokens"][0]
        assert torch.equal(shard_positions(tokens.shape[1], rank, world), theirs)


layouts = st.integers(1, 9).flatmap(
    lambda world: st.tuples(
        st.just(world),
        st.one_of(
            st.tuples(st.just("zigzag"), st.integers(0, 6).map(lambda c: 2 * world * c)),
            st.tuples(st.just("contiguous"), st.integers(0, 60)),
            st.lists(st.integers(0, 7), min_size=world, max_size=world).map(lambda ns: (tuple(ns), sum(ns))),
        ),
    )
)


@settings(max_examples=300, deadline=None)
@given(layouts)
def test_every_position_is_held_once(case):
    world, (layout, seq_len) = case
    held = [shard_positions(seq_len, r, world, layout) for r in range(world)]
    assert [len(x) for x in held] == list(shard_lengths(seq_len, world, layout))
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seq_len))
    stride = max(len(x) for x in held) + 2
    rows = positions_of(gathered_segments(range(world), seq_len, world, layout, stride), world * stride)
    for r in range(world):
        assert torch.equal(rows[r * stride : r * stride + len(held[r])], held[r])
        assert (rows[r * stride + len(held[r]) : (r + 1) * stride] == -1).all()


def test_contiguous_is_balanced():
    assert shard_lengths(11, 4, "contiguous") == (3, 3, 3, 2)
    assert shard_lengths(2, 4, "contiguous") == (1, 1, 0, 0)


def test_packed_documents():
    assert packed_segments([0, 3, 3, 7]) == (Segment(0, 0, 3, 0), Segment(3, 0, 4, 2))
    for bad in ([], [1, 2], [0, 4, 3]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            packed_segments(bad)


def test_segments_are_few():
    assert shard_segments(16, 3, 4) == (Segment(0, 6, 4),)  # zigzag's last rank: its two chunks touch
    assert len(gathered_segments(range(8), 64, 8, "contiguous", 8)) == 1
    assert join([Segment(0, 0, 2), Segment(2, 5, 0), Segment(2, 2, 3)]) == (Segment(0, 0, 5),)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard_positions(10, 0, 4), r"10 tokens.*multiple of.*8.*Pad it by 6"),
        (lambda: shard_positions(8, 4, 4), "rank=4"),
        (lambda: shard_positions(8, 0, 2, "stripes"), "layout='stripes'"),
        (lambda: shard_positions(8, 0, 2, (3, 4)), "7 tokens.*8"),
        (lambda: shard_positions(8, 0, 2, (8,)), "2 lengths"),
    ],
)
def test_bad_layouts(call, message):
    with pytest.raises(ValueError, match=message):
        call()
