"""What a call sends, and what it refuses: counts and bytes of collectives, bad input, ranks that disagree."""

import contextlib
import gc
import io
import logging
import re
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig, tree_attn_func, tree_attn_varlen_func, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.comm.store import StoreClient
from megatron_tree.core.log import logger
from megatron_tree.core.plan import Shape, grids
from support.plans import backward_words, forward_words
from support.ranks import run_distributed

H, H_KV, D, D_V, B, ROWS = 4, 2, 8, 6, 2, 10  # rows: one rank's share


def totals(log):
    found = {}
    for sent in log:
        count, size = found.get(sent.op, (0, 0))
        found[sent.op] = (count + 1, size + sent.bytes)
    return found


def _training_traffic(rank, world, dtype):
    g = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(B, ROWS, *n, generator=g).to(dtype).requires_grad_() for n in ((H, D), (H_KV, D), (H_KV, D_V))
    )
    found = {}
    for grid, back in [*zip(grids(world), grids(world)[::-1]), ("ring", "ring")]:
        named = {"schedule": "ring"} if grid == "ring" else {"grid": grid, "grid_backward": back, "head_chunks": 1}
        config = TreeConfig(**named)
        with comm.record() as forward:
            out = tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config)
        with comm.record() as backward:
            out.backward(torch.ones_like(out))
        found[grid, back] = totals(forward), totals(backward)
    return found


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (4, torch.bfloat16), (6, torch.float32)])
def test_training_sends_what_the_design_says(world, dtype):
    """docs/design.md, section 2: (a-1)(|Q| + |O|) + (b-1)(|K| + |V|) words forward, in at most three collectives."""
    size, tokens, lse = dtype.itemsize, B * ROWS, 4  # bytes of a word and of one statistic
    q, o, kv = tokens * H * D * size, tokens * H * D_V * size, tokens * H_KV * (D + D_V) * size
    stat = tokens * H * lse
    for found in run_distributed(_training_traffic, world, dtype):
        for (grid, back), (forward, backward) in found.items():
            if grid == "ring":
                assert forward == {"send": (world - 1, (world - 1) * kv)}
                assert backward == {"send": (2 * world - 1, (2 * world - 1) * kv)}  # the gradient comes home
                continue
            a, b = grid
            gathers = (a > 1) + (b > 1)
            sent = [forward.get(op, (0, 0)) for op in ("all_gather", "all_to_all")]
            assert sent[0] == (gathers, (a - 1) * q + (b - 1) * kv)
            assert sent[1] == (int(a > 1), (a - 1) * (o + stat))
            a, b = back
            sent = [backward.get(op, (0, 0)) for op in ("all_gather", "all_to_all")]
            assert sent[0] == (gathers, (a - 1) * (q + o + 2 * stat) + (b - 1) * kv)
            assert sent[1] == (gathers, (a - 1) * q + (b - 1) * kv)
            assert set(forward) | set(backward) <= {"all_gather", "all_to_all"}
            if dtype == torch.float32:  # the planner counts the same words
                shape = Shape(H, H_KV, D, D_V)
                assert sum(s for _, s in forward.values()) == 4 * tokens * forward_words(grid, shape)
                assert sum(s for _, s in backward.values()) == 4 * tokens * backward_words(back, shape)


def _reduced_bytes(rank, world, comm_dtype):
    q, k, v = (torch.randn(B, ROWS, *n).bfloat16().requires_grad_() for n in ((H, D), (H_KV, D), (H_KV, D_V)))
    with comm.record() as log:
        config = TreeConfig(grid=(world, 1), grid_backward=(1, world), comm_dtype=comm_dtype)
        out = tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config)
        out.backward(torch.ones_like(out))
    return [sent.bytes for sent in log if sent.op == "all_to_all"]


def test_partial_results_travel_in_fp32_if_asked_for():
    out, lse, dkv = B * ROWS * H * D_V, B * ROWS * H, B * ROWS * H_KV * (D + D_V)
    assert run_distributed(_reduced_bytes, 2, "auto")[0] == [2 * out + 4 * lse, 2 * dkv]
    assert run_distributed(_reduced_bytes, 2, "fp32")[0] == [4 * out + 4 * lse, 4 * dkv]


def _decode_traffic(rank, world):
    q, k, v = torch.randn(B, 1, H, D), torch.randn(B, ROWS, H_KV, D), torch.randn(B, ROWS, H_KV, D_V)
    found = {}
    for schedule in ("allreduce", "allgather", "butterfly", "scatter", "ring"):
        for transport in ("direct", "builtin"):
            with comm.record() as log:
                tree_decode(
                    q, k, v, cp_group=dist.group.WORLD, schedule=schedule, config=TreeConfig(transport=transport)
                )
            assert found.setdefault(schedule, totals(log)) == totals(log), (schedule, transport)
    return found


@pytest.mark.parametrize("world", [2, 3, 6])
def test_decode_sends_what_the_design_says(world):
    """The table of docs/design.md, section 3: steps, and one packed buffer per step."""
    rows = B * H
    state = rows * (D_V + 1) * 4
    share = -(-rows // world) * (D_V + 1) * 4  # rows split over ranks
    kv = B * ROWS * H_KV * (D + D_V) * 4
    core = 1 << (world.bit_length() - 1)
    for rank, found in enumerate(run_distributed(_decode_traffic, world)):
        lse_bytes, packed = 2 * (world - 1) * rows * 4 // world, 2 * (world - 1) * state // world
        assert found["allreduce"] == {"all_reduce": (2, lse_bytes + packed)}
        assert found["allgather"] == {"all_gather": (1, (world - 1) * state)}
        assert found["scatter"] == {"all_to_all": (1, (world - 1) * share), "all_gather": (1, (world - 1) * share)}
        sends = 1 if rank >= core else core.bit_length() - 1 + (rank + core < world)
        assert found["butterfly"] == {"send": (sends, sends * state)}
        # keys, values, and what the shard to come looks like: two numbers
        assert found["ring"] == {"send": (3 * (world - 1), (world - 1) * (kv + 16))}


def good():
    return dict(q=torch.randn(2, 4, 4, 8), k=torch.randn(2, 4, 2, 8), v=torch.randn(2, 4, 2, 8))


CROSS = dict(k=torch.randn(2, 6, 2, 8), v=torch.randn(2, 6, 2, 8))
BAD = {
    "head ratio": (dict(k=torch.randn(2, 4, 3, 8), v=torch.randn(2, 4, 3, 8)), {}, r"q has 4 heads and k 3"),
    "kv heads": (dict(v=torch.randn(2, 4, 1, 8)), {}, "k has 2 heads but v has 1"),
    "dtype mix": (
        dict(k=torch.randn(2, 4, 2, 8).bfloat16()),
        {},
        r"k has dtype torch.bfloat16 but q has torch.float32",
    ),
    "integer": (dict(q=torch.ones(2, 4, 4, 8, dtype=torch.int64)), {}, "q has dtype torch.int64"),
    "device mix": (
        dict(v=torch.empty(2, 4, 2, 8, device="meta")),
        {},
        "v is on the meta device, where tensors have no",
    ),
    "rank": (dict(q=torch.randn(4, 4, 8)), {}, r"q must be a 4-D tensor.*4, 4, 8"),
    "batch": (dict(k=torch.randn(1, 4, 2, 8)), {}, "k has batch size 1 but q has 2"),
    "head_dim": (dict(k=torch.randn(2, 4, 2, 6)), {}, "k has head_dim 6 but q has 8"),
    "lengths": (dict(k=torch.randn(2, 5, 2, 8)), {}, "q has 4, k 5, v 4"),
    "odd zigzag": ({n: x[:, :3] for n, x in good().items()}, {}, r"multiple of.*4.*layout='contiguous'"),
    "layout": ({}, dict(layout="stripes"), "layout='stripes'"),
    "layout lengths": ({}, dict(layout=(3, 5)), r"has 4 tokens on rank \d but layout=\(3, 5\)"),
    "scale": ({}, dict(softmax_scale=float("nan")), "softmax_scale=nan"),
    "window": ({}, dict(window_size=(3, -2)), r"window_size=\(3, -2\)"),
    "softcap": ({}, dict(softcap=-1.0), "softcap=-1.0"),
    "sinks": ({}, dict(sinks=torch.zeros(2)), r"sinks must be.*\[4\]"),
    "slopes": ({}, dict(alibi_slopes=torch.zeros(2)), r"alibi_slopes must be.*\[4\].*\[2, 4\].*got.*\(2,\)"),
    "slopes in bf16": ({}, dict(alibi_slopes=torch.zeros(4).bfloat16()), "alibi_slopes must be an fp32"),
    "slopes of NaN": ({}, dict(alibi_slopes=torch.full((4,), float("nan"))), "alibi_slopes=.*finite"),
    "learned slopes": ({}, dict(alibi_slopes=torch.zeros(4, requires_grad=True)), "alibi_slopes get no gradient"),
    "slopes, ranges": ({}, dict(alibi_slopes=torch.zeros(4), ranges=[]), "alibi_slopes can't be combined with ranges"),
    "cross, slopes": (
        CROSS,
        dict(alibi_slopes=torch.zeros(4), causal=False),
        "alibi_slopes, may k and v have another length",
    ),
    "slopes, aten": (
        {},
        dict(alibi_slopes=torch.zeros(4), config=TreeConfig(backend="aten")),
        "backend='aten' can't take alibi_slopes",
    ),
    "grid": ({}, dict(config=TreeConfig(grid=(3, 2))), r"grid=\(3, 2\) has 6 cells but cp_group has 2 ranks"),
    "topology": ({}, dict(config=TreeConfig(topology="moon")), "topology 'moon' is unknown: name one of .*dgx_h100"),
    "ulysses_size": ({}, dict(config=TreeConfig(ulysses_size=3)), "ulysses_size=3 must divide the 2"),
    "heads of Ulysses": (
        {n: x[:, :, :1] for n, x in good().items()},
        dict(config=TreeConfig(ulysses_size=2)),
        "ulysses_size=2 ranks can't share 1 query heads",
    ),
    "dropout_p": ({}, dict(dropout_p=1.0, dropout_seed=1), "dropout_p=1.0"),
    "no seed": ({}, dict(dropout_p=0.1), "dropout_seed=None"),
    "seed": ({}, dict(dropout_p=0.1, dropout_seed=-3), "dropout_seed=-3"),
    "cross, causal": (CROSS, {}, "causal=False"),
    "cross, window": (CROSS, dict(causal=False, window_size=(2, 2)), "no window_size"),
}


BAD_DECODE = {
    "schedule": (dict(schedule="star"), "schedule='star' is unknown.*'butterfly'"),
    "positions missing": (dict(q=torch.randn(2, 3, 4, 8)), "q_positions and cache_positions"),
    "one of two": (dict(q_positions=torch.zeros(1, dtype=torch.int64)), "only q_positions is given"),
    "window": (dict(window_size=(4, 0)), r"window_size=\(4, 0\).*q_positions"),
    "slopes": (dict(alibi_slopes=torch.zeros(4)), "alibi_slopes: pass q_positions and cache_positions"),
    "seqlens shape": (dict(cache_seqlens=torch.tensor([1])), r"cache_seqlens must be.*\[2\]"),
    "seqlens range": (dict(cache_seqlens=torch.tensor([1, 9])), r"cache_seqlens=\[1, 9\].*6 slots"),
    "cache lengths": (dict(v_cache=torch.randn(2, 5, 2, 8)), "k_cache holds 6 slots and v_cache 5"),
    "head ratio": (dict(k_cache=torch.randn(2, 6, 3, 8), v_cache=torch.randn(2, 6, 3, 8)), "k_cache 3"),
    "float positions": (
        dict(q_positions=torch.zeros(1), cache_positions=torch.zeros(6, dtype=torch.int64)),
        "q_positions must be an integer",
    ),
}


BAD_PACKED = {
    "4-D": (good(), "3-D tensor"),
    "max_seqlen": (dict(max_seqlen=4), "max_seqlen=4"),
    "padding": (dict(cu_seqlens=torch.tensor([0, 6, 16])), "6 padded tokens"),
}


def _bad_input(rank, world):
    group = dist.group.WORLD
    step = dict(q=torch.randn(2, 1, 4, 8), k_cache=torch.randn(2, 6, 2, 8), v_cache=torch.randn(2, 6, 2, 8))
    cases = [(tree_attn_func, {**good(), **tensors, **options}, message) for tensors, options, message in BAD.values()]
    cases += [(tree_decode, {**step, **options}, message) for options, message in BAD_DECODE.values()]
    packed = {n: x.flatten(0, 1) for n, x in good().items()} | {"cu_seqlens": [0, 16]}
    cases += [(tree_attn_varlen_func, packed | options, message) for options, message in BAD_PACKED.values()]
    for call, arguments, message in cases:
        with comm.record() as log, pytest.raises(ValueError, match=message):
            call(**arguments, cp_group=group)
        assert not log, f"{message}: something was sent"
    return tree_attn_func(**good(), cp_group=group).isfinite().all().item()  # the group still works


def test_bad_input_is_refused_before_anything_is_sent():
    assert run_distributed(_bad_input, 2) == [True, True]


@pytest.mark.parametrize(
    "options",
    [
        dict(schedule="star"),
        dict(backend="cuda"),
        dict(comm_dtype="fp8"),
        dict(check="sometimes"),
        dict(grid=(2,)),
        dict(grid=(0, 4)),
        dict(grid=(2, 2), schedule="ring"),
        dict(head_chunks=0),
        dict(head_chunks=2, schedule="ring"),
        dict(grid_backward=(2, 2), schedule="ring"),
        dict(topology=3),
        dict(transport="pigeon"),
        dict(memory_budget=0),
        dict(timeout_s=0),
        dict(timeout_s=float("inf")),
    ],
)
def test_bad_configs(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TreeConfig(**options)


def _disagree(rank, world):
    """Different arguments on one rank: the same error on all, at once, and the group goes on working."""
    errors = []
    cases = [
        dict(causal=rank != 1),
        dict(softmax_scale=0.5 if rank else 0.25),
        dict(alibi_slopes=torch.full((4,), float(rank > 0))),
        dict(config=TreeConfig(grid=(1, world) if rank else (world, 1))),
        dict(window_size=(rank, 0)),
        dict(dropout_p=0.1, dropout_seed=int(rank > 0)),
        dict(ranges=[((0, 12), (0, 12), "causal" if rank else "full")]),
    ]
    started = time.monotonic()
    for options in cases:
        with pytest.raises(ValueError) as caught:
            tree_attn_func(**good(), cp_group=dist.group.WORLD, **options)
        errors.append(str(caught.value))
    tensors = {n: x[:, : 2 if rank == 0 else 4] for n, x in good().items()}
    with pytest.raises(ValueError) as caught:  # another number of tokens
        tree_attn_func(**tensors, cp_group=dist.group.WORLD)
    errors.append(str(caught.value))
    with pytest.raises(ValueError) as caught:  # one rank's input is bad, the others' is good
        tree_attn_func(**good(), cp_group=dist.group.WORLD, softmax_scale=float("nan") if rank == 1 else 0.125)
    if rank != 1:
        assert "rank 1" in str(caught.value) and "softmax_scale=nan" in str(caught.value)
    out = tree_attn_func(**good(), cp_group=dist.group.WORLD)
    return errors, time.monotonic() - started, out.isfinite().all().item()


def test_ranks_that_disagree_all_get_the_same_error():
    results = run_distributed(_disagree, 3)
    for errors, seconds, fine in results:
        assert fine and seconds < 60 and errors == results[0][0]
    words = ["causal=True", "softmax_scale=0.25", "alibi_slopes=((0.0", "grid=(3, 1)", "window_size=("]
    words += ["dropout_seed=0", "ranges=", "seq_len=6"]
    for error, word in zip(results[0][0], words, strict=True):
        assert "different arguments" in error and word in error, error


def _absent(rank, world):
    if rank == 1:
        return None
    with pytest.raises(CommError) as caught:
        tree_attn_func(**good(), cp_group=dist.group.WORLD, config=TreeConfig(timeout_s=3.0))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    found = run_distributed(_absent, 3)
    assert "rank 1 did not respond within 3 s: " in found[0]
    assert "ranks [1] did not call tree_attn_func within 3 s" in found[2]


def _stuck_in_the_middle(rank, world):
    """A rank that agrees and then stops: the others' collective ends with an error at its limit."""
    config = TreeConfig(timeout_s=4.0, grid=(world, 1))
    for first in (TreeConfig(), config):  # what a process does once has more time
        tree_attn_func(**good(), cp_group=dist.group.WORLD, config=first)
    if rank == 1:
        return None
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        tree_attn_func(**good(), cp_group=dist.group.WORLD, config=config)
    return str(caught.value), time.monotonic() - started


def test_a_stuck_rank_becomes_an_error_within_the_limit():
    found = run_distributed(_stuck_in_the_middle, 2)
    message, seconds = found[0]
    assert "all_gather among ranks [0, 1] failed on rank 0" in message and seconds < 30


def _destroyed_after_errors(rank, world):
    return [_is_held(rank, world, agrees_first) for agrees_first in (False, True)]


def _is_held(rank, world, agrees_first):
    """Whether anything holds a group after a call that ended in an error, and its end."""
    group = dist.new_group(list(range(world)))
    held = weakref.ref(group)
    if agrees_first:
        tree_attn_func(**good(), cp_group=group)
    with contextlib.suppress(ValueError):
        tree_attn_func(**good(), cp_group=group, causal=rank != 1)
        raise AssertionError("no error")
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    for _ in range(600):  # the store client's thread is done with the call a little later
        if held() is None:
            return False
        time.sleep(0.05)
    return True


def test_a_group_whose_calls_failed_can_be_freed():
    assert run_distributed(_destroyed_after_errors, 2) == [[False, False]] * 2


def _alone(rank, world):
    q, stream = torch.randn(1, 8, H, D), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        for _ in range(2):
            tree_attn_func(q, q, q, cp_group=None)
    finally:
        logger.removeHandler(handler)
    return stream.getvalue()


def test_no_group_in_a_job_of_several_ranks_is_said_once():
    said, nothing = run_distributed(_alone, 2, fresh=True)
    assert re.fullmatch("tree_attn_func: cp_group=None computes on this rank alone, in a job of 2 ranks: .*\n", said)
    assert not nothing


def test_a_group_that_was_destroyed_is_named():
    assert dist.group.WORLD is None
    with pytest.raises(CommError, match="no default process group any more: call before dist.destroy_process_group"):
        StoreClient.here()
