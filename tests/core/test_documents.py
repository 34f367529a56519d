"""Packed documents that need no padding: dispatched over ranks, or anywhere in a sequence that is cut as a whole."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree import (
    TreeConfig,
    dispatch_documents,
    document_positions,
    packed_layout,
    shard_sequence,
    tree_attn_varlen_func,
    unshard_sequence,
)
from megatron_tree.core import comm
from megatron_tree.core.layout import Dispatched, documents_over, shard_positions, spread_documents
from megatron_tree.core.layout.segments import by_document, visible_rows
from megatron_tree.core.spec import MaskBounds
from support.attention import make_inputs, make_sinks, oracle
from support.ranks import largest, on_ranks, run_distributed


def _work(layout, rank, world):
    """Visible (query, key) pairs of a rank's queries under a causal mask."""
    return sum(sum(range(s.pos + 1, s.pos + s.length + 1)) for s in layout.segments(rank, world))


def _two_hundred():
    draw = random.Random(0)
    return tuple(draw.randint(1, 4096) for _ in range(200))


@pytest.mark.parametrize("world", [2, 3, 64])
def test_two_hundred_documents_are_balanced(world):
    layout = spread_documents(_two_hundred(), world)
    work = [_work(layout, r, world) for r in range(world)]
    assert max(work) <= 1.1 * sum(work) / world
    assert layout.num_rows == -(-sum(layout.lengths) // world), "no rank has more tokens than its share"
    runs = [len(share) for share in layout.shares]
    assert sum(runs) <= len(layout.lengths) + 20 * world, "few documents are cut"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 6), st.sampled_from([1, 2, 8]))
def test_every_token_lies_on_one_rank(lengths, world, multiple_of):
    layout = spread_documents(tuple(lengths), world, multiple_of=multiple_of)
    total = sum(lengths)
    assert layout.num_rows % multiple_of == 0 and 0 <= world * layout.num_rows - total < world * multiple_of
    rows = [shard_positions(world * layout.num_rows, r, world, layout) for r in range(world)]
    assert sorted(n for x in rows for n in x.tolist() if n >= 0) == list(range(total))
    inside = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64)
    for r, x in enumerate(rows):
        assert torch.equal(document_positions(layout, r, world)[x >= 0], inside[x[x >= 0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dispatched((4, 4), (4, 4), (((0, 3),), ((4, 4),)), 4), "row 3 is in no share"),
        (lambda: Dispatched((4, 4), (4, 4), (((0, 5),), ((4, 4),)), 5), "row 4 is in two"),
        (lambda: Dispatched((4, 4), (4, 4), (((0, 5),), ((5, 3),)), 4), "at most 5 on a rank.*num_rows=4"),
        (lambda: Dispatched((4, 4), (4, 4), (((0, 4),), ()), 4), "hold 4 of 8 rows"),
        (lambda: Dispatched((5,), (4,), (((0, 4),),), 4), "none longer than its padded length"),
        (lambda: spread_documents((8,), 2).check(3), "dispatched over 2 ranks, but cp_group has 3"),
        (lambda: dispatch_documents([0, 8, 4], None), "do not decrease"),
        (lambda: dispatch_documents([0, 8], None, multiple_of=0), "multiple_of=0 must be a positive integer"),
        (lambda: shard_positions(16, 0, 2, packed_layout([0, 7, 16])), "dispatch_documents, or layout='zigzag'"),
        (lambda: shard_sequence(torch.zeros(7), None, 0, spread_documents((8,), 1)), "has 7 tokens.*documents have 8"),
    ],
)
def test_bad_shares(make, message):
    with pytest.raises(ValueError, match=message):
        make()


LENGTHS = (5, 1, 0, 23, 8, 2, 9)  # 48 tokens
MASKS = [
    dict(window_size=(-1, -1)),
    dict(window_size=(3, 0)),
    dict(window_size=(-1, -1), causal=False, sinks=True),
]
OPTIONS = [
    {},
    dict(ulysses_size=1, schedule="cast"),
    dict(schedule="ring"),
    dict(schedule="grid", head_chunks=1),
    dict(comm_dtype="fp32", transport="builtin"),
]


@pytest.mark.parametrize("world", [1, 4])
@on_ranks()
def test_documents_match_the_oracle(rank, world):
    inputs = make_inputs(sum(LENGTHS), (4, 2), batch=1)
    cu_seqlens, found = [0, *itertools.accumulate(LENGTHS)], {}
    dispatched = dispatch_documents(cu_seqlens, dist.group.WORLD, multiple_of=5)
    unit = 2 * world
    cases = [("dispatched", dispatched, {}), ("given twice", dispatched, dict(cu_seqlens=cu_seqlens))]
    if sum(LENGTHS) % unit == 0:
        cases.append(("zigzag", documents_over(LENGTHS, LENGTHS, world), dict(cu_seqlens=cu_seqlens, layout="zigzag")))
    if sum(LENGTHS) % world == 0:
        whole = documents_over(LENGTHS, LENGTHS, world, "contiguous")
        cases.append(("contiguous", whole, dict(cu_seqlens=cu_seqlens, layout="contiguous")))
    sequences = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for mask in MASKS:
        seen = mask | ({"sinks": make_sinks(4)} if "sinks" in mask else {})
        truth = oracle(*inputs, sequences=sequences, **seen)
        for (name, layout, also), option in itertools.product(cases, [*OPTIONS, dict(ulysses_size=world)]):
            rows = shard_positions(layout.num_rows * world, rank, world, layout)
            leaves = [shard_sequence(x[0], dist.group.WORLD, 0, layout, padding=float("nan")) for x in inputs[:3]]
            whole = unshard_sequence(leaves[0], dist.group.WORLD, 0, layout)
            assert torch.equal(whole, inputs[0][0])
            leaves = [x.detach().requires_grad_() for x in leaves]
            dout = shard_sequence(inputs[3][0], dist.group.WORLD, 0, layout)
            sinks = make_sinks(4).requires_grad_() if mask.get("sinks") else None
            call = dict(dict(layout=layout) | also, window_size=mask["window_size"], causal=mask.get("causal"))
            config = TreeConfig(**option)
            out, lse = tree_attn_varlen_func(
                *leaves, **call, sinks=sinks, cp_group=dist.group.WORLD, config=config, return_lse=True
            )
            grads = torch.autograd.grad(out, leaves, dout)
            here, worst = rows >= 0, 0.0
            for x, t in zip((out, *grads), (truth[0], *truth[2:5])):
                worst = largest((worst, float((x[here] - t[0, rows[here]]).abs().max()) if here.any() else 0.0))
                assert not x[~here].any(), "rows of padding are 0"
            error = (lse[:, here] - truth[1][0][:, rows[here]]).abs()
            found[str((mask, name, option))] = largest((worst, float(error.max()) if error.numel() else 0.0))
    assert len(found) >= 30 and largest(found.values()) < 1e-12, found


def _bytes(rank, world, lengths):
    """Bytes sent in forward and backward: zigzag of every document, and dispatched."""
    cu_seqlens, unit = [0, *itertools.accumulate(lengths)], 2 * world
    padded = [0, *itertools.accumulate(-(-n // unit) * unit for n in lengths)]
    dispatched, sent = dispatch_documents(cu_seqlens, dist.group.WORLD), []
    for rows, call in (
        (padded[-1] // world, dict(cu_seqlens=cu_seqlens, cu_seqlens_padded=padded)),
        (dispatched.num_rows, dict(layout=dispatched)),
    ):
        q, k, v = (torch.randn(rows, h, 4, requires_grad=True) for h in (4, 2, 2))
        with comm.record() as log:
            out = tree_attn_varlen_func(q, k, v, cp_group=dist.group.WORLD, **call)
            out.backward(torch.ones_like(out))
        sent.append(sum(x.bytes for x in log))
    return sent


def test_documents_on_one_rank_send_nothing():
    lengths = tuple(1 + n // 16 for n in _two_hundred())  # the same proportions, faster
    found = run_distributed(_bytes, 4, lengths)
    zigzag, dispatched = (sum(x) for x in zip(*found))
    assert dispatched <= zigzag / 100, "at most a third is asked for"


@on_ranks(4)
def test_only_visible_keys_are_sent(rank, world):
    """A document of most of the work lies on all four ranks, the others on one each: in a forward pass a rank sends
    those of its keys that queries on other ranks see."""
    lengths = (96, *(3,) * 20, 14, 30)
    layout = dispatch_documents([0, *itertools.accumulate(lengths)], dist.group.WORLD)
    q, k, v = (torch.randn(layout.num_rows, h, 4) for h in (4, 2, 2))
    with comm.record() as log:
        tree_attn_varlen_func(q, k, v, cp_group=dist.group.WORLD, layout=layout)
    documents = [by_document(layout.segments(r, world)) for r in range(world)]
    causal = MaskBounds(None, 0)
    seen = (visible_rows(documents[r], documents[rank], causal) for r in range(world) if r != rank)
    row = 2 * (4 + 4) * 4  # KV heads, head sizes of keys and values, bytes of a number
    sent, needed = sum(x.bytes for x in log), row * sum(s.length for segments in seen for s in segments)
    assert sent == needed > 0, (sent, needed)


def test_documents_of_very_different_lengths():
    """Over 16 ranks; over 4 groups of 4 with as many tokens each, the busiest rank has 1.6 times the mean."""
    draw, groups = random.Random(0), [[], [], [], []]
    lengths = tuple(min(32768, max(16, int(draw.lognormvariate(6.2, 1.6)))) for _ in range(256))
    for n in lengths:
        min(groups, key=sum).append(n)
    mean = sum(n * (n + 1) / 2 for n in lengths) / 16
    assert max(sum(n * (n + 1) / 2 for n in group) / 4 for group in groups) > 1.6 * mean
    layout = spread_documents(lengths, 16)
    assert max(_work(layout, rank, 16) for rank in range(16)) < 1.05 * mean


def test_what_is_missing_or_differs_is_said():
    q = k = v = torch.zeros(8, 2, 4)
    layout = dispatch_documents([0, 5, 8], None)
    with pytest.raises(ValueError, match="cu_seqlens is missing"):
        tree_attn_varlen_func(q, k, v, cp_group=None)
    with pytest.raises(ValueError, match="other documents than the layout"):
        tree_attn_varlen_func(q, k, v, cp_group=None, layout=layout, cu_seqlens=[0, 4, 8])
    with pytest.raises(ValueError, match="layout='spread' is unknown"):
        tree_attn_varlen_func(q, k, v, cp_group=None, layout="spread", cu_seqlens=[0, 4, 8])
    options = dict(cu_seqlens=[0, 5, 8], cu_seqlens_kv=[0, 5, 8], causal=False)
    with pytest.raises(ValueError, match="cu_seqlens_kv needs layout='documents'"):
        tree_attn_varlen_func(q, k, v, cp_group=None, layout="zigzag", **options)
    with pytest.raises(ValueError, match="8 rows, the sequence 6"):
        tree_attn_varlen_func(q[:6], k[:6], v[:6], cp_group=None, layout=layout)
