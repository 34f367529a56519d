"""Ranks with a GPU each, over NCCL. Where there are not two, ranks on the CPU rehearse the same over gloo."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_tree import TreeConfig, shard_positions, tree_attn_func, tree_decode, tree_prefill, tree_select
from megatron_tree.core import comm, energy
from megatron_tree.core.cache.graph import check_runner
from megatron_tree.core.config import DECODE_SCHEDULES, SELECT_SCHEDULES
from megatron_tree.core.layout import Segment
from megatron_tree.core.plan import grids
from support.attention import make_inputs, oracle, run_call
from support.decoding import cached_oracle, decode_inputs, decode_oracle
from support.failing_ranks import IN_TIME, LIMIT, lose, own_device, run_to_the_end
from support.graphed import Pair, rows_come_and_go
from support.ranks import as_launched, largest, run_distributed
from support.rounding import assert_near

GPUS = torch.cuda.device_count()
NEEDS_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA or ROCm devices, torch sees {GPUS}"),
    pytest.mark.timeout(900),
]
STARTS = {  # of the default group, by the type of the ranks' devices
    "cpu": {
        "as commands start": lambda rank, world: own_device(rank, "gloo"),
        "no backend": lambda rank, world: dist.init_process_group(),
        "a mesh": lambda rank, world: init_device_mesh("cpu", (world,)),
    },
    "cuda": {
        "as commands start": lambda rank, world: own_device(rank, "nccl"),  # bound to devices
        "no backend": lambda rank, world: dist.init_process_group(),
        "not bound": lambda rank, world: dist.init_process_group("nccl"),
        "one for each device": lambda rank, world: dist.init_process_group("cpu:gloo,cuda:nccl"),
        "one for each, bound": lambda rank, world: dist.init_process_group(
            "cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank)
        ),
        "a mesh": lambda rank, world: init_device_mesh("cuda", (world,)),
        "gloo with tensors of GPUs": lambda rank, world: dist.init_process_group("cuda:gloo"),
    },
}
SLOW = [pytest.mark.slow]  # without GPUs: tests/comm/test_backends.py has them, too
CASES = [
    pytest.param(
        kind,
        start,
        marks=NEEDS_GPUS if kind == "cuda" else SLOW * (start != "no backend"),
        id=f"{kind}, {start}",
    )
    for kind, starts in STARTS.items()
    for start in starts
]
PLACES = ["cpu", pytest.param("cuda", marks=NEEDS_GPUS)]
D, TOKENS = 16, 24  # of a head; of every rank


def _on_ranks(fn, kind, start, *args, world=4):
    """Run fn(rank, world, device, *args) on ranks that have started so."""
    world = min(world, GPUS) if kind == "cuda" else world
    return run_distributed(_started, world, fn, kind, start, args, fresh=True, timeout=600 if kind == "cuda" else 120)


def _started(rank, world, fn, kind, start, args):
    with as_launched():
        if kind == "cuda":
            torch.cuda.set_device(rank)
        STARTS[kind][start](rank, world)
        return fn(rank, world, torch.device(kind, rank if kind == "cuda" else None), *args)


def _transports(device, group):
    """Those that this device's tensors can take; others must be refused."""
    if device.type == "cpu":
        return "auto", "builtin", "direct", "shm"
    for transport in ("direct", "shm"):
        with pytest.raises(ValueError, match=f"transport='{transport}' needs gloo and tensors on the CPU"):
            tree_decode(*_decoding(device, 1)[0], cp_group=group, config=TreeConfig(transport=transport))
    return "auto", "builtin", *["symm_mem"] * (comm.Ranks.of(group, device).symmetric is not None)


def _training_configs(n):
    """Every schedule of n ranks."""
    yield {}
    yield {"schedule": "ring"}
    yield from ({"grid": grid, "head_chunks": chunks} for grid in grids(n) for chunks in (1, 2))
    yield {"grid": (1, n), "grid_backward": (n, 1), "comm_dtype": "fp32"}
    yield {"ulysses_size": n}
    if n == 4:
        yield {"ulysses_size": 2, "grid": (2, 1)}
        yield {"ulysses_size": 2, "schedule": "ring"}


def _train(device, group, transport):
    """Each schedule, causal, and the cast under a window: out, lse and gradients are the oracle's."""
    n, rank = comm.group_size(group), comm.group_rank(group)
    inputs = make_inputs(TOKENS * n, (8, 4), batch=1, d=D, d_v=D, dtype=torch.float32)
    here, rows = [x.to(device) for x in inputs], shard_positions(TOKENS * n, rank, n)
    masks = [({}, config) for config in _training_configs(n)] + [({"window_size": (20, 0)}, {"schedule": "cast"})]
    truths = {}
    for mask, config in masks:
        config = TreeConfig(transport=transport, timeout_s=60, **config)
        call = functools.partial(tree_attn_func, cp_group=group, config=config, return_lse=True, causal=True, **mask)
        found = run_call(here, rows.to(device), rows.to(device), call)
        truth = truths.setdefault(str(mask), oracle(*inputs, causal=True, **mask))
        for i, (x, want) in enumerate(zip(found, truth, strict=True)):
            assert_near(x.cpu(), want[..., rows] if i == 1 else want[:, rows], 8 * TOKENS * n, (config, mask, i))


def _decoding(device, n):
    """(q, k, v) of two rows of n ranks, on the device and as they are."""
    qkv = decode_inputs(2, 1, TOKENS * n, (8, 2), D, D, torch.float32)
    return [x.to(device) for x in qkv], qkv


def _decode(device, group, transport):
    """Each schedule gives the oracle's result and the same bits everywhere; a prompt's chunk; selected keys."""
    n, rank = comm.group_size(group), comm.group_rank(group)
    (q, k, v), given = _decoding(device, n)
    mine, config = slice(TOKENS * rank, TOKENS * (rank + 1)), TreeConfig(transport=transport, timeout_s=60)
    ranks, length = comm.Ranks.of(group, device, config), TOKENS * n
    out, lse = decode_oracle(*given, None)
    call = dict(cp_group=group, config=config)
    for schedule in DECODE_SCHEDULES:
        found = tree_decode(q, k[:, mine], v[:, mine], schedule=schedule, return_lse=True, **call)
        for x, want in zip(found, (out, lse), strict=True):
            assert_near(x.cpu(), want, length, schedule)
        everywhere = ranks.gather(found[0])
        assert all(torch.equal(x, found[0]) for x in everywhere.split(len(found[0]))), schedule
    prompt, *_ = decode_inputs(2, length, length, (8, 2), D, D, torch.float32, seed=1)
    truth, _ = cached_oracle(prompt, *given[1:], 0, causal=True)
    keys = dict(
        shares=[[(TOKENS * r, TOKENS)] for r in range(n)],
        key_segments=[[Segment(0, TOKENS * r, TOKENS)] for r in range(n)],
    )
    for grid in grids(n):
        x = tree_prefill(prompt[:, mine].to(device), k[:, mine], v[:, mine], grid=grid, **keys, **call)
        assert_near(x.cpu(), truth[:, mine], length, ("prefill", grid))
    _select(device, n, mine, length, call, ranks)


def _select(device, n, mine, length, call, ranks):
    """Scores are whole numbers, exact in fp32, and many of them are equal: of these, earlier keys are selected."""
    draw = functools.partial(torch.randint, -3, 4, generator=torch.Generator().manual_seed(2))
    index = [draw(shape).float() for shape in ((2, 1, 2, D), (2, 1, 2), (2, length, D))]
    keep = energy.selected(*(x.double() for x in index), 8, torch.ones(2, 1, length, dtype=torch.bool), 1.0)
    index_q, weights, keys = (x.to(device) for x in index)
    positions = torch.arange(length, device=device).expand(2, -1)
    seen = dict(q_positions=positions[:, -1:], cache_positions=positions[:, mine])
    for schedule in SELECT_SCHEDULES:
        slots = tree_select(index_q, weights, keys[:, mine], topk=8, schedule=schedule, **seen, **call)
        of_rank = torch.zeros(2, TOKENS + 1, dtype=torch.int32, device=device)
        of_rank.scatter_(1, slots[:, 0].long() % (TOKENS + 1), 1)
        chosen = ranks.gather(of_rank[:, :TOKENS].t().contiguous()).t().cpu()
        assert torch.equal(chosen.bool(), keep[:, 0]), schedule


def _whole(rank, world, device):
    group = dist.group.WORLD
    for transport in _transports(device, group):
        _train(device, group, transport)
        _decode(device, group, transport)


def _start_and_parts(rank, world, device):
    """One call of each kind in all ranks and in groups of every other rank, both at once and in turn."""
    halves = [list(range(world))[i::2] for i in range(2)]
    part = [dist.new_group(half) for half in halves][rank % 2]  # which all ranks make
    for group in (dist.group.WORLD, part, dist.group.WORLD):
        (q, k, v), given = _decoding(device, n := comm.group_size(group))
        mine = slice(TOKENS * comm.group_rank(group), TOKENS * (comm.group_rank(group) + 1))
        config = TreeConfig(timeout_s=60, transport="builtin", grid=(2, n // 2) if n > 2 else None)  # with sub-groups
        token = tree_decode(q, k[:, mine], v[:, mine], cp_group=group, schedule="two_level", config=config)
        assert_near(token.cpu(), decode_oracle(*given, None)[0], TOKENS * n)
        q, k, v = (x[:, mine].requires_grad_() for x in (k.repeat(1, 1, 4, 1), k, v))
        out = tree_attn_func(q, k, v, cp_group=group, config=config, layout="contiguous", causal=True)
        truth, _ = cached_oracle(given[1].repeat(1, 1, 4, 1), *given[1:], 0, causal=True)
        assert_near(out.cpu(), truth[:, mine], TOKENS * n)
        out.sum().backward()
        total = comm.Ranks.of(group, device, config).sum(v.grad.sum((1, 3)))
        # each query's weights add up to 1: so do the gradients of v, D times, over its keys
        assert_near(total.cpu(), torch.full((2, 2), 4.0 * D * TOKENS * n), D * TOKENS * n)


def _replay(rank, world, device):
    """Where one rank's pages move all ranks' do, and all capture again, in the same call."""
    config = TreeConfig(transport="builtin", check="never", timeout_s=60)
    page_size, steps = (4, 40) if device.type == "cpu" else (16, 150)
    pair = Pair.of(cp_group=dist.group.WORLD, device=device, config=config, page_size=page_size, schedule="allgather")
    if device.type == "cuda":
        check_runner(pair.graphed)
    graphs, captures = pair.graphed._graphs, []
    capture = graphs._capture
    graphs._capture = lambda run: (
        captures.append(comm.group.GroupState.of(dist.group.WORLD).calls.latest.number) or capture(run)
    )
    return rows_come_and_go(pair, steps), captures


@pytest.mark.parametrize(("kind", "start"), CASES)
def test_every_start_and_groups_of_some_ranks(kind, start):
    _on_ranks(_start_and_parts, kind, start)


@pytest.mark.parametrize("world", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
@pytest.mark.parametrize("kind", PLACES)
def test_every_schedule_and_transport(kind, world):
    _on_ranks(_whole, kind, "as commands start", world=world)


@pytest.mark.parametrize("kind", PLACES)
def test_all_ranks_capture_again_in_the_same_steps(kind):
    found = _on_ranks(_replay, kind, "as commands start", world=2)
    assert largest(worst for worst, _ in found) <= 1e-5
    assert len(found[0][1]) > 3 and found[0][1] == found[1][1]


@pytest.mark.alone
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("where", ["backward", "decode"])
def test_survivors_of_a_killed_rank_end(where, kind):
    """With NCCL by torch's watchdog, where no error comes first; within minutes, and none of them reports success."""
    backend, world = ("gloo", 2) if kind == "cpu" else ("nccl", min(4, GPUS))
    outcomes = run_to_the_end(lose, world, "SIGKILL", where, 1, {}, victims=(1,), backend=backend)
    assert outcomes[1].code == -9 and all(outcome.code not in (None, 0) for outcome in outcomes), outcomes
    named = [outcome for outcome in outcomes if outcome.error == "CommError"]
    assert named or kind == "cuda"
    assert all("rank 1" in x.text and x.seconds < LIMIT + IN_TIME for x in named), named
