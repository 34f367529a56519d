"""Layouts: who holds which tokens. Zigzag is Megatron's, checked against Megatron."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree import shard_sequence, unshard_sequence
from megatron_tree.core.layout import (
    Packed,
    Segment,
    gathered_segments,
    join,
    packed_layout,
    positions_of,
    shard_lengths,
    shard_positions,
    shard_segments,
)


@pytest.mark.parametrize("world", [2, 3])
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


@settings(max_examples=100, deadline=None)
@given(layouts)
def test_every_position_is_held_once(case):
    world, (layout, seq_len) = case
    held = [shard_positions(seq_len, r, world, layout) for r in range(world)]
    assert [len(x) for x in held] == list(shard_lengths(seq_len, world, layout))
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seq_len))
    stride = max(len(x) for x in held) + 2
    rows = positions_of(gathered_segments(tuple(range(world)), seq_len, world, layout, stride), world * stride)
    for r in range(world):
        assert torch.equal(rows[r * stride : r * stride + len(held[r])], held[r])
        assert (rows[r * stride + len(held[r]) : (r + 1) * stride] == -1).all()


def test_contiguous_is_balanced():
    assert shard_lengths(11, 4, "contiguous") == (3, 3, 3, 2)
    assert shard_lengths(2, 4, "contiguous") == (1, 1, 0, 0)


def test_packed_documents():
    documents = packed_layout([0, 3, 3, 7])
    assert documents == Packed((3, 0, 4), (3, 0, 4))
    assert shard_segments(7, 0, 1, documents) == (Segment(0, 0, 3, 0), Segment(3, 0, 4, 2))
    padded = packed_layout(torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 4, 12]), num_rows=16)  # the rest: padding
    assert padded == Packed((3, 0, 5, 0), (4, 0, 8, 4))
    assert shard_segments(16, 0, 2, padded) == (Segment(0, 0, 1, 0), Segment(2, 0, 2, 2))
    assert shard_segments(16, 1, 2, padded) == (Segment(0, 1, 2, 0), Segment(2, 2, 3, 2))
    rows = [shard_positions(16, r, 2, padded).tolist() for r in range(2)]
    assert rows == [[0, 3, 4, 5, 10, 11, 12, 15], [1, 2, 6, 7, 8, 9, 13, 14]]


def test_packed_tensors_are_read_again_when_they_change():
    cu_seqlens = torch.tensor([0, 4, 8])
    assert packed_layout(cu_seqlens).lengths == (4, 4)
    cu_seqlens[1] = 6
    assert packed_layout(cu_seqlens).lengths == (6, 2)


def test_segments_are_few():
    assert shard_segments(16, 3, 4) == (Segment(0, 6, 4),)  # zigzag's last rank: its two chunks touch
    assert len(gathered_segments(tuple(range(8)), 64, 8, "contiguous", 8)) == 1
    assert join([Segment(0, 0, 2), Segment(2, 5, 0), Segment(2, 2, 3)]) == (Segment(0, 0, 5),)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packed_layout([]), "cu_seqlens=.*start at 0"),
        (lambda: packed_layout([1, 2]), "cu_seqlens=.*start at 0"),
        (lambda: packed_layout([0, 4, 3]), "do not decrease"),
        (lambda: packed_layout([0.0, 4.0]), "integers"),
        (lambda: packed_layout([0, 4], [0, 4, 8]), "equally many"),
        (lambda: packed_layout([0, 4, 9], [0, 8, 12]), "none longer"),
        (lambda: packed_layout([0, 4], num_rows=3), "end at row 4, but q has 3"),
        (lambda: shard_positions(12, 0, 2, packed_layout([0, 8, 12, 18])), "6 padded tokens.*multiple of 2 . 2 = 4"),
        (lambda: shard_positions(16, 0, 2, packed_layout([0, 8, 12])), "12 rows, the sequence 16"),
        (lambda: shard_positions(10, 0, 4), r"10 tokens.*multiple of.*8.*Pad it by 6"),
        (lambda: shard_positions(8, 4, 4), "rank=4"),
        (lambda: shard_positions(8, 0, 2, "stripes"), "layout='stripes'"),
        (lambda: shard_positions(8, 0, 2, (3, 4)), "7 tokens.*8"),
        (lambda: shard_positions(8, 0, 2, (8,)), "2 lengths"),
        (lambda: shard_sequence(torch.ones(2, 8), None, 2), r"dim=2.*\(2, 8\)"),
        (lambda: unshard_sequence(torch.ones(2, 8), None, -3), r"dim=-3.*\(2, 8\)"),
    ],
)
def test_bad_layouts(call, message):
    with pytest.raises(ValueError, match=message):
        call()
