"""Other forms of attention over real ranks, against the float64 oracle: packed documents, cross attention, dropout."""

import functools
import itertools

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
)
from megatron_tree.config import Dropout
from support.attention import configs, make_inputs, make_sinks, make_slopes, oracle, run_call, worst_error
from support.ranks import run_distributed

SEED = 12345678901234


def check(fn, world):
    for errors in run_distributed(fn, world, timeout=300):
        bad = {name: e for name, e in errors.items() if not e <= 1e-12}
        assert errors and not bad, bad


DOCUMENTS = {  # lengths and padded lengths in units of 2p tokens, the last rows may be tail padding
    "equal": ([2, 2], [2, 2], 0),
    "one long": ([3], [3], 0),
    "padding, empty, short": ([1.75, 0, 0.25, 2], [2, 0, 1, 2], 0),
    "empty but padded": ([1, 0, 2], [1, 1, 2], 1),
    "all empty": ([0, 0], [1, 0], 0),
}
PACKED_MASKS = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(window_size=(3, 0)),
    "dropout": dict(dropout_p=0.4),
    "dropout, window, sinks": dict(dropout_p=0.3, window_size=(5, 0), sinks=True),
    "sinks": dict(sinks=True),
    "alibi, dropout": dict(alibi_slopes=make_slopes(4), causal=False, dropout_p=0.4),
}


def packed_case(world, name):
    """(cu_seqlens, cu_seqlens_padded, rows in all, every row's document) of DOCUMENTS."""
    unit = 2 * world
    lengths, padded, tail = DOCUMENTS[name]
    lengths, padded = [int(n * unit) for n in lengths], [n * unit for n in padded]
    sequences = [s for i, (n, m) in enumerate(zip(lengths, padded)) for s in [i] * n + [-1] * (m - n)]
    bounds = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths, padded)]
    return *bounds, sum(padded) + tail * unit, torch.tensor(sequences + [-1] * tail * unit)


def _packed(rank, world):
    return {name: error for documents in DOCUMENTS for name, error in _packed_errors(rank, world, documents).items()}


def _packed_errors(rank, world, documents):
    cu_seqlens, cu_seqlens_padded, num_rows, sequences = packed_case(world, documents)
    inputs = make_inputs(num_rows, (4, 2), batch=1)
    garbage = [x.clone() for x in inputs[:3]]
    for x in garbage:
        x[:, sequences < 0] = float("nan")  # nothing may come of what lies in padding
    layout = packed_layout(cu_seqlens, cu_seqlens_padded, num_rows=num_rows)
    rows = shard_positions(num_rows, rank, world, layout)
    assert torch.equal(shard_sequence(inputs[0], dist.group.WORLD, 1, layout), inputs[0][:, rows])
    errors = {}
    several = [("heads", TreeConfig(ulysses_size=world)), ("2 head chunks", TreeConfig(grid=(world, 1), head_chunks=2))]
    several += [("heads and ring", TreeConfig(ulysses_size=2, schedule="ring"))]
    truths = {}
    for (name, mask), (label, config) in itertools.product(PACKED_MASKS.items(), [*configs(world), *several]):
        if name not in ("causal", "dropout") and (label.startswith("grid") or documents != "padding, empty, short"):
            continue
        mask = dict(mask)
        sinks = make_sinks(4) if mask.pop("sinks", False) else None
        if name not in truths:
            seen = {key: value for key, value in mask.items() if key != "dropout_p"}
            dropout = Dropout(mask["dropout_p"], SEED) if "dropout_p" in mask else None
            truths[name] = oracle(*inputs, sequences=sequences, dropout=dropout, sinks=sinks, **seen)

        def call(q, k, v, sinks, mask=mask, config=config):
            out, lse = tree_attn_varlen_func(
                *(x[0] for x in (q, k, v)),
                cu_seqlens=cu_seqlens,
                cu_seqlens_padded=cu_seqlens_padded,
                cp_group=dist.group.WORLD,
                sinks=sinks,
                dropout_seed=SEED,
                config=config,
                return_lse=True,
                **mask,
            )
            return out[None], lse[None]

        mine = run_call([*garbage, inputs[3]], rows, rows, call, sinks)
        assert not mine[0][:, sequences[rows] < 0].any()
        assert not any(g[:, sequences[rows] < 0].any() for g in mine[2:5])
        errors[f"{documents}, {name}, {label}"] = worst_error(rows, mine, truths[name])
    return errors


def test_packed_documents():
    check(_packed, 4)


def _cross(rank, world):
    errors = {}
    group = dist.group.WORLD
    for s_q, s_k, layout in ((4, 10, "zigzag"), (6, 2, "zigzag"), (3, 5, "contiguous"), (2, 0, "contiguous")):
        s_q, s_k = s_q * world, s_k * world
        q, _, _, dout = make_inputs(s_q, (4, 2))
        _, k, v, _ = make_inputs(s_k, (4, 2), seed=1)
        rows = [shard_positions(n, rank, world, layout) for n in (s_q, s_k)]
        for dropout_p in (0.0, 0.3):
            truth = oracle(q, k, v, dout, causal=False, dropout=Dropout(dropout_p, SEED) if dropout_p else None)
            for label, config in (*configs(world), *[("heads", TreeConfig(ulysses_size=2))] * (world > 1)):
                options = dict(causal=False, dropout_p=dropout_p, dropout_seed=SEED, cp_group=group, layout=layout)
                call = functools.partial(tree_attn_func, config=config, return_lse=True, **options)
                mine = run_call((q, k, v, dout), *rows, call)
                errors[f"{s_q} queries, {s_k} keys, {label}, {dropout_p}"] = worst_error(rows[0], mine, truth, rows[1])
    return errors


@pytest.mark.parametrize("world", [1, 4])
def test_cross_attention(world):
    check(_cross, world)
