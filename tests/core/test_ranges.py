"""Any mask as slices of queries and keys: exact in every schedule, and only visible keys are sent."""

import functools
import itertools
import random

import pytest
import torch
import torch.distributed as dist

from megatron_tree import AttnSlice, TreeConfig, tree_attn_func
from megatron_tree.core import comm, energy, kernels
from megatron_tree.core.attention.validate import make_slices
from megatron_tree.core.kernels import ranges as grouped
from megatron_tree.core.layout import (
    Dispatched,
    Segment,
    Sharding,
    by_document,
    shard_positions,
    shard_segments,
    visible_rows,
)
from megatron_tree.core.spec import SLICES, AttnSpec
from support.attention import make_inputs, make_sinks, run_call, seen_in, worst_error
from support.ranks import largest, on_ranks, run_distributed

MASKS = {
    "causal": [((0, 48), (0, 48), "causal")],
    "documents": [((a, b), (a, b), "causal") for a, b in ((0, 7), (7, 30), (30, 48))],
    "prefix": [((0, 20), (0, 20), "full"), ((20, 48), (0, 48), "causal")],
    "chunks": [((i, i + 12), (i, i + 12), "causal") for i in range(0, 48, 12)],
    "shared question": [((0, 16), (0, 16), "causal")]
    + [((i, i + 16), (0, 16), "full") for i in (16, 32)]
    + [((i, i + 16), (i, i + 16), "causal") for i in (16, 32)],
    "video": [((i, i + 12), (0, i + 12), "full") for i in range(0, 48, 12)],
    "inverse": [((0, 48), (0, 48), "inverse")],
    "band": [((4, 20), (10, 40), "bidirectional"), ((20, 48), (1, 9), "inverse"), ((0, 4), (44, 48), "causal")],
    "nothing": [],
    "empty slices": [((3, 3), (0, 48), "full"), ((0, 20), (0, 4), "bidirectional"), ((5, 6), (7, 8), "full")],
}


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize(
    ("q_range", "k_range"), [((2, 9), (1, 13)), ((1, 13), (2, 9)), ((0, 5), (0, 5)), ((3, 3), (0, 4))]
)
def test_a_slice_is_its_sides(kind, q_range, k_range):
    piece = AttnSlice(q_range, k_range, kind)
    keep = seen_in([piece], 16, 16)
    assert piece.pairs == int(keep.sum())
    i, j = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    inside = (i >= q_range[0]) & (i < q_range[1]) & (j >= k_range[0]) & (j < k_range[1])
    if piece.left is not None:
        inside &= j >= i - piece.left
    if piece.right is not None:
        inside &= j <= i + piece.right
    assert torch.equal(keep, inside)


def _drawn(seed, seq_len, seq_len_kv, count=6):
    """Random slices that don't overlap."""
    draw, found = random.Random(seed), []
    seen = torch.zeros(seq_len, seq_len_kv, dtype=torch.bool)
    for _ in range(4 * count):
        spans = [sorted(draw.choices(range(n + 1), k=2)) for n in (seq_len, seq_len_kv)]
        piece = AttnSlice(*map(tuple, spans), draw.choice(SLICES))
        mine = seen_in([piece], seq_len, seq_len_kv)
        if not (mine & seen).any() and len(found) < count:
            found.append(piece)
            seen |= mine
    return found


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_are_found_exactly(seed):
    n, m, draw = 14, 17, random.Random(seed)
    whole = Sharding(seq_len=n, world=1, layout="zigzag"), Sharding(seq_len=m, world=1, layout="zigzag")
    slices = _drawn(seed, n, m)
    assert make_slices(slices, *whole) == tuple(slices)
    spans = [sorted(draw.choices(range(x + 1), k=2)) for x in (n, m)]
    another = AttnSlice(*map(tuple, spans), draw.choice(SLICES))
    if (seen_in([another], n, m) & seen_in(slices, n, m)).any():
        with pytest.raises(ValueError, match="the same key, which would count twice"):
            make_slices([*slices, another], *whole)
    else:
        make_slices([*slices, another], *whole)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_visible_rows_are_those_that_some_query_sees(name, layout):
    spec = AttnSpec(softmax_scale=1.0, causal=False, ranges=tuple(AttnSlice(*piece) for piece in MASKS[name]))
    keep, world = seen_in(MASKS[name], 48, 48), 4
    for a, b in itertools.product(range(world), repeat=2):
        queries, keys = (shard_segments(48, r, world, layout) for r in (a, b))
        rows = [shard_positions(48, r, world, layout) for r in (a, b)]
        expected = keep[rows[0]][:, rows[1]].any(0).nonzero().flatten().tolist()
        found = visible_rows(by_document(queries), by_document(keys), spec.mask_bounds)
        assert [s.row + i for s in found for i in range(s.length)] == expected


@pytest.mark.parametrize("backend", ["reference", "aten", "triton"])
@pytest.mark.parametrize("name", MASKS)
def test_backends_match_the_oracle(backend, name):
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, k, v, dout = make_inputs(48, (4, 2), batch=1, dtype=dtype)
    spec = AttnSpec(softmax_scale=0.4, causal=False, ranges=tuple(AttnSlice(*piece) for piece in MASKS[name]))
    exact, plain = [x.double() for x in (q, k, v, dout)], AttnSpec(softmax_scale=0.4)
    keep = seen_in(MASKS[name], 48, 48)
    expected = energy.attention(*exact[:3], spec=plain, keep=keep)
    segments = dict(q_segments=(Segment(0, 0, 48),), k_segments=(Segment(0, 0, 48),))
    out, lse = kernels.attn_fwd(q, k, v, **segments, spec=spec, backend=backend)
    delta = (out.double() * exact[3]).sum(-1).transpose(1, 2).to(lse.dtype)
    found = [out, lse, *kernels.attn_bwd(dout, q, k, v, lse, delta, **segments, spec=spec, backend=backend)]
    grads = energy.attention_grads(*exact, spec=plain, keep=keep)
    limit = 1e-4 if backend == "triton" else 1e-12
    for x, t in zip(found, (*expected, *grads)):
        assert torch.equal(x.isinf(), t.isinf())
        assert largest([(torch.where(t.isinf(), 0.0, x.double() - t)).abs().max().item()]) < limit


def test_few_layers():
    """Slices that share nothing are one call of the kernels."""

    def count(slices):
        spec = AttnSpec(softmax_scale=1.0, causal=False, ranges=tuple(AttnSlice(*piece) for piece in slices))
        return len(grouped.slice_groups(spec))

    layers = {"documents": 1, "chunks": 1, "prefix": 2, "nothing": 0, "shared question": 3}
    assert {name: count(MASKS[name]) for name in layers} == layers
    assert count([((i, i + 1), (i, i + 1), "causal") for i in range(500)]) == 1


@on_ranks(4)
def test_masks_match_the_oracle(rank, world):
    found, group = {}, dist.group.WORLD
    configs = [
        {},
        dict(schedule="cast", ulysses_size=1),
        dict(schedule="ring"),
        dict(grid=(world, 1)),
        dict(ulysses_size=world),
    ]
    chunks = [[(i, 4) for i in range(r * 4, 48, 4 * world)] for r in range(world)]
    cases = [(name, mask, 48, 48) for name, mask in MASKS.items()]
    cases += [(f"cross {seed}", _drawn(seed, 48, 36), 48, 36) for seed in range(3)]
    cases += [(f"drawn {seed}", _drawn(seed, 48, 48), 48, 48) for seed in range(3)]
    for i, (name, mask, n, m) in enumerate(cases):
        q, k, v, dout = make_inputs(n, (4, 2), batch=2)
        k, v = k[:, :m], v[:, :m]
        sinks = make_sinks(4) if i % 2 else None
        spec, keep = AttnSpec(softmax_scale=q.shape[-1] ** -0.5), seen_in(mask, n, m)
        dlse = torch.linspace(-1, 1, n, dtype=torch.float64).expand(2, 4, n)
        truth = energy.attention(q, k, v, spec=spec, keep=keep, sinks=sinks)
        truth += energy.attention_grads(q, k, v, dout, spec=spec, keep=keep, sinks=sinks, dlse=dlse)
        placed = "contiguous" if n != m else Dispatched((48,), (48,), tuple(map(tuple, chunks)), 48 // world)
        for layout, option in itertools.product(("zigzag", placed), configs[i % 2 :: 2]):
            if layout == "zigzag" and m % (2 * world):
                continue
            rows, cols = (shard_positions(x, rank, world, layout) for x in (n, m))
            options = dict(cp_group=group, layout=layout, config=TreeConfig(**option), return_lse=True)
            call = functools.partial(tree_attn_func, ranges=mask, **options)
            mine = run_call((q, k, v, dout), rows, cols, call, sinks, dlse)
            found[str((name, layout, option))] = worst_error(rows, mine, truth, cols)
    assert len(found) >= 40 and largest(found.values()) < 1e-12, found


def _sent(rank, world, mask, rows):
    q, k, v = (torch.randn(1, rows, h, 4, requires_grad=True) for h in (4, 2, 2))
    sent, options = [], dict(cp_group=dist.group.WORLD, ranges=mask, layout=(rows,) * world)
    for config in (TreeConfig(schedule="cast", ulysses_size=1), TreeConfig()):
        with comm.record() as log:
            out = tree_attn_func(q, k, v, config=config, **options)
            out.backward(torch.ones_like(out))
        sent.append(sum(x.bytes for x in log))
    return sent


def test_only_visible_keys_are_sent():
    """Chunks that lie on one rank send nothing; a band sends what its neighbours see, twice, and its gradients once."""
    chunks = [((i, i + 8), (i, i + 8), "causal") for i in range(0, 32, 8)]
    assert run_distributed(_sent, 4, chunks, 8) == [[0, 0]] * 4
    band = [((3, 32), (0, 32), "bidirectional")]  # every query sees its own key and three before it
    found = run_distributed(_sent, 4, band, 8)
    assert sum(cast for cast, _ in found) == 3 * 3 * 3 * (2 * 2 * 4 * 4)
    assert all(auto <= cast for cast, auto in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ranges=[((0, 9), (0, 8))]), r"ranges\[0\]: q_range=\(0, 9\) is not within a sequence of 8"),
        (dict(ranges=[((0, 8), (4, 3))]), r"k_range=\(4, 3\) is not within"),
        (dict(ranges=[((0, 8), (0, 8), "other")]), "a kind of 'full', 'causal', 'inverse', 'bidirectional'"),
        (dict(ranges=[(0, 8, 0, 8)]), r"ranges\[0\]=\(0, 8, 0, 8\) must be"),
        (dict(ranges=[((0.0, 8), (0, 8))]), "with integers"),
        (dict(ranges="causal"), "ranges='causal' must be a list"),
        (dict(ranges=[((0, 8), (0, 8))] * 2), "would count twice"),
        (dict(ranges=[], causal=True), "leave causal=True and window_size=.-1, -1. out"),
        (dict(ranges=[], causal=False), "leave causal=False"),
        (dict(ranges=[], window_size=(2, 0)), r"window_size=\(2, 0\) out"),
        (dict(ranges=[], dropout_p=0.1, dropout_seed=1), "dropout_p=0.1 can't be combined with ranges"),
        (
            dict(ranges=[], layout=Dispatched((4, 4), (4, 4), (((0, 8),),), 8)),
            "positions in one sequence, but layout=2 documents",
        ),
    ],
)
def test_bad_ranges(options, message):
    q = k = v = torch.zeros(1, 8, 2, 4)
    with pytest.raises(ValueError, match=message):
        tree_attn_func(q, k, v, cp_group=None, **options)
