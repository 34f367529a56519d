"""Triton's tiles aligned to positions: a row's bits do not depend on the other rows, heads and batch rows that are
there, nor on where they lie."""

import itertools

import pytest
import torch

from megatron_tree.core import kernels
from megatron_tree.core.kernels import attn_delta, leaves
from megatron_tree.core.kernels.leaves import LEAF, Leaves
from megatron_tree.core.kernels.triton import aligned, configs
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec, Dropout
from megatron_tree.tools.bench import race
from support.rounding import assert_near
from support.triton_inputs import DEVICE, inputs

WHOLE = Segment(0, 0, 60, 0), Segment(60, 0, 13, 1)
QUERIES = ((0, 9, 30), (1, 4, 10), (0, 50, 60))  # of a rank: (document, first, end)
KEYS = ((1, 0, 13), (0, 33, 60), (0, 0, 33))  # in the order in which they have arrived
KERNELS = "fwd", "dq", "dkdv"
MASKS = {
    "causal": {},
    "window": dict(window_size=(20, 0)),
    "softcap": dict(causal=False, softcap=3.0),
    "ALiBi and dropout": dict(alibi_slopes=((0.5, 0.2, 0.1, 0.0),), dropout=Dropout(0.3, 7)),
}


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    """Of one tile of fp32 on a GPU, and two of the interpreter's."""
    monkeypatch.setattr(leaves, "LEAF", 32)
    Leaves.of.cache_clear()
    yield
    Leaves.of.cache_clear()


def place(x, runs):
    """(rows of x [b, s, ...] by runs, with a row of NaN before each, its segments)."""
    parts, segments, row = [], [], 0
    for document, first, end in runs:
        begin = WHOLE[document].row
        parts += [torch.full_like(x[:, :1], torch.nan), x[:, begin + first : begin + end]]
        segments.append(Segment(row + 1, first, end - first, document))
        row += 1 + end - first
    return torch.cat(parts, 1), tuple(segments)


def rows_of(runs, segments):
    """For rows of segments: (their numbers there, in the whole)."""
    here = [torch.arange(s.row, s.row + s.length) for s in segments]
    whole = [torch.arange(first, end) + WHOLE[document].row for document, first, end in runs]
    return torch.cat(here).to(DEVICE), torch.cat(whole).to(DEVICE)


@pytest.mark.parametrize(
    "mask", ["causal", "ALiBi and dropout", *(pytest.param(x, marks=pytest.mark.slow) for x in ("window", "softcap"))]
)
def test_rows_have_the_same_bits_anywhere(mask):
    spec = AttnSpec(softmax_scale=0.3, deterministic="ranks", **MASKS[mask])
    q, k, v, dout = inputs(73, 73, (4, 2), batch=2)
    segments = dict(q_segments=WHOLE, k_segments=WHOLE, spec=spec)
    out, lse = aligned.attn_fwd(q, k, v, **segments)
    delta = attn_delta(dout, out)
    grads = aligned.attn_bwd(dout, q, k, v, lse, delta, **segments)
    truth = kernels.attn_fwd(q.double(), k.double(), v.double(), **segments, backend="reference")
    assert_near(out, truth[0], 60 * 16)
    for x, right in zip(grads, kernels.attn_bwd(*(x.double() for x in (dout, q, k, v, lse, delta)), **segments)):
        assert_near(x, right, 60 * 16)

    # a rank that has the second KV head, and the first row of the batch
    heads = slice(2, 4)
    if spec.alibi_slopes or spec.dropout:
        spec = spec.heads_from(2, 2)
    mine = [x[:1, :, of] for x, of in ((q, heads), (k, slice(1, 2)), (v, slice(1, 2)), (dout, heads))]
    (own_q, q_segments), (own_k, k_segments), (own_v, _) = (
        place(x, runs) for x, runs in zip(mine, (QUERIES, KEYS, KEYS))
    )
    part = dict(q_segments=q_segments, k_segments=k_segments, spec=spec)
    some = aligned.attn_fwd(own_q, own_k, own_v, **part)
    here, there = rows_of(QUERIES, q_segments)
    assert torch.equal(some[0][:, here], out[:1, there, heads])
    assert torch.equal(some[1][:, :, here], lse[:1, heads, there])
    assert not some[0][:, 0].any() and some[1][:, :, 0].isneginf().all(), "rows of no segment"

    # in its backward it has all queries, and its own ones lie together
    everything = ((0, 30, 60), (1, 0, 13), (0, 0, 30))
    (of_dout, q_segments), (of_q, _) = (place(x, everything) for x in (mine[3], mine[0]))
    statistics = [place(x[:1, heads].transpose(1, 2), everything)[0].transpose(1, 2) for x in (lse, delta)]
    own = slice(q_segments[1].row, q_segments[2].row + 10), slice(k_segments[1].row + 5, k_segments[2].row)
    part |= dict(q_segments=q_segments)
    found = aligned.attn_bwd(of_dout, of_q, own_k, own_v, *statistics, **part, own=own)
    for x, whole, runs, of, mine, of_heads in zip(
        found,
        grads,
        (everything, KEYS, KEYS),
        (q_segments, k_segments, k_segments),
        (own[0], own[1], own[1]),
        (heads, slice(1, 2), slice(1, 2)),
    ):
        here, there = rows_of(runs, of)
        asked = (here >= mine.start) & (here < mine.stop)
        assert asked.any() and torch.equal(x[:, here[asked]], whole[:1, there[asked], of_heads])


def test_tiles_divide_a_leaf():
    """Those of the table, and those that `make gpu` may find faster."""
    every = [x for kernel in KERNELS for x in race.CANDIDATES[kernel]]
    for arch, kernel, width in itertools.product(configs.ARCHES, KERNELS, (16, 64, 128, 192, 256)):
        every += [configs.tiles(kernel, width, arch, itemsize, p) for itemsize in (2, 4) for p in (False, True)]
    assert not [x for x in every if LEAF % x.m or LEAF % x.n]
