"""Partial results that ranks read in one another's memory: a stand-in for GPUs holds the order of puts, barriers and
reads, and what becomes of ranks that can't take part or are lost."""

import random
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.comm import symmetric, work
from megatron_tree.core.comm.agreement import Refused
from megatron_tree.core.comm.symmetric import SymmetricMemory
from megatron_tree.core.kernels import merge_packed, states
from megatron_tree.core.kernels.triton import peers
from support.bound import bound
from support.decoding import decode_inputs, decode_oracle, same_everywhere
from support.failing_ranks import IN_TIME, LIMIT, die, run_to_the_end, start_clock
from support.graphed import Pair, rows_come_and_go
from support.ranks import largest, run_distributed
from support.rounding import error, rounding
from support.symmetric_memory import HALF, Handle, stand_in
from support.tape import Tape

IN_GLOO = {"transport": "builtin", "timeout_s": 20.0}


def _triton_on_cpu():
    """Merges are Triton's, in its interpreter."""
    return mock.patch.object(states, "ACCELERATORS", ("cpu",))


def _memory(path, rank, world):
    with _triton_on_cpu():
        return SymmetricMemory(*stand_in(path, rank, world))


def _bound(memory, **config):
    """`Ranks` of all, as with NCCL: states of decoding go through this memory, and messages are the backend's."""
    ranks = bound(**{**IN_GLOO, **config})
    ranks.__dict__.update(symmetric=memory)
    return ranks


# the order of signals


def _no_barrier(put, barrier, merge):
    return put, lambda **options: None, merge


def _barrier_first(put, barrier, merge):
    return lambda *args: (barrier(timeout_ms=20_000), put(*args)), lambda **options: None, merge


def _one_half(put, barrier, merge):
    return put, barrier, lambda numbers, turns, *args: (merge(numbers, turns, *args), turns.zero_())[0]


def _late(function, delays):
    def call(*args, **options):
        if delays.random() < 0.4:
            time.sleep(delays.random() * 0.03)
        return function(*args, **options)

    return call


def _in_disorder(rank, world, path, mutate, rounds):
    """Merges of many shapes by ranks that are late at random; returns how many were wrong."""
    memory, delays, ranks, wrong = _memory(path, rank, world), random.Random(rank), bound(), 0
    steps = memory._triton.put_state, memory._handle.barrier, memory._triton.merge_peers
    put, barrier, merge = (_late(x, delays) for x in (mutate(*steps) if mutate else steps))
    memory._triton, memory._handle = SimpleNamespace(put_state=put, merge_peers=merge), SimpleNamespace(barrier=barrier)
    dist.barrier()
    for turn in range(rounds):
        rows = 1 + turn % 4
        parts = torch.randn(world, rows, 1 + turn % 2, 3 + turn % 5, generator=torch.Generator().manual_seed(turn))
        first, count = ((0, rows), (min(rank, rows), int(rank < rows)), (rows - 1, 1))[turn % 3]
        merged = memory.merge_rows(parts[rank].contiguous(), first, count, ranks)
        with _triton_on_cpu():
            expected = merge_packed(parts)[first : first + count]
        assert merged.shape == expected.shape
        wrong += not torch.equal(merged, expected)
    return wrong


def test_late_ranks_read_what_was_written(tmp_path):
    assert run_distributed(_in_disorder, 3, str(tmp_path / "memory"), None, 40) == [0, 0, 0]


@pytest.mark.parametrize("mutate", [_no_barrier, _barrier_first, _one_half])
def test_another_order_is_seen(tmp_path, mutate):
    assert sum(run_distributed(_in_disorder, 3, str(tmp_path / "memory"), mutate, 40)) > 0


def test_the_stand_in_has_the_signals_of_torch():
    for name in ("barrier", "put_signal", "wait_signal"):
        says = getattr(torch._C._distributed_c10d._SymmetricMemory, name).__doc__
        assert "channel" in says and "timeout_ms" in says, says


# decode steps


def _decode(rank, world, path):
    """Every schedule, of all heads and of a rank's own: the oracle's results, the same bits on all ranks."""
    config = _bound(_memory(path, rank, world)).config
    shards = torch.randn(world, generator=torch.Generator().manual_seed(world)).softmax(0).mul(40).long() + 1
    total, start = int(shards.sum()), int(shards[:rank].sum())
    q, k, v = decode_inputs(3, 1, total, dtype=torch.float32)
    mine, seen = slice(start, start + int(shards[rank])), {}
    call = dict(cp_group=dist.group.WORLD, config=config)
    for schedule in ("auto", "allgather", "scatter", "butterfly", "two_level", "allreduce"):
        with comm.record() as sent:
            out = tree_decode(q, k[:, mine], v[:, mine], schedule=schedule, **call)
        assert error(out, decode_oracle(q, k, v, None)[0]) < rounding(total) and same_everywhere(out), schedule
        seen[schedule] = {x.op for x in sent}
    shares = [4 - (world - 1), *[1] * (world - 1)]
    first = sum(shares[:rank])
    heads = q[:, :, first : first + shares[rank]].contiguous()
    with comm.record() as sent:
        out = tree_decode(heads, k[:, mine], v[:, mine], head_shares=shares, schedule="scatter", **call)
    truth = decode_oracle(q, k, v, None)[0][:, :, first : first + shares[rank]]
    assert error(out, truth) < rounding(total)
    seen["own heads"] = {x.op for x in sent}
    return {name: "symmetric merge" in ops for name, ops in seen.items()}


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_decode_steps(tmp_path, world):
    for through_memory in run_distributed(_decode, world, str(tmp_path / "memory")):
        expected = dict.fromkeys(("scatter", "butterfly", "two_level", "allreduce"), False)
        assert through_memory == {**expected, "auto": True, "allgather": True, "own heads": True}


def _large(rank, world, path):
    """States that the memory does not hold, or in float64, are messages; an empty one is nothing at all."""
    ranks, ops = _bound(memory := _memory(path, rank, world)), []
    memory.capacity = 4 * HALF
    single, double, most = torch.float32, torch.float64, HALF // 4
    for rows, dtype in ((most, single), (most + 1, single), (4, double), (0, single)):
        state = torch.full((rows, 4), float(rank), dtype=dtype)
        options = dict(ranks=ranks, schedule="allgather", shape=(rows, 4), dtype=dtype, in_memory=True)
        with comm.record() as sent:
            merged = comm.Reduction(**options).start()(state)
        expected = merge_packed(torch.arange(float(world), dtype=dtype)[:, None, None].expand(-1, rows, 4))
        torch.testing.assert_close(merged, expected)
        ops.append([x.op for x in sent])
    return ops


def test_large_states_are_messages(tmp_path):
    for ops in run_distributed(_large, 2, str(tmp_path / "memory")):
        assert ops == [["symmetric merge"], ["all_gather"], ["all_gather"], ["symmetric merge"]]


def _replay(rank, world, path):
    """Replayed steps, of an odd number of merges, between ordinary ones; the ranks capture again in different steps."""
    config = TreeConfig(check="never", **IN_GLOO)
    _bound(_memory(path, rank, world), check="never")
    options = dict(cp_group=dist.group.WORLD, config=config, windows=(None,) * 3, schedule="allgather")
    pair, kernels = Pair.of(**options), ((peers, "put_state_kernel"), (peers, "merge_peers_kernel"))
    Tape.begin()
    with mock.patch.object(Tape, "only_replayed", ((Handle, "barrier"), *kernels)), comm.record() as sent:
        worst = rows_come_and_go(pair, 3)
    merges = [x for x in sent if x.op == "symmetric merge"]
    assert Tape.replays > len(Tape.made_after) > 0 and merges
    return worst


@pytest.mark.slow
def test_graphs_take_their_turns(tmp_path):
    assert largest(run_distributed(_replay, 2, str(tmp_path / "memory"))) <= 1e-5


# who can take part


def _joined(rank, world, path, step):
    """Rank 1 can't take a step, or none of them fails; what all of them get."""
    ranks, refused = bound(timeout_s=4.0 if step == "made too late" else 20.0), Refused("not this one")

    def gpu_of(ranks):
        if step == "GPUs" and rank == 1:
            raise refused
        return f"GPU {ranks.rank}"

    def check_links(ranks, gpus):
        assert gpus == [f"GPU {r}" for r in range(world)]
        if step == "links" and rank == 1:
            raise refused

    def allocated(ranks):
        if step == "made" and rank == 1:
            raise RuntimeError("CUDA driver error: no file descriptors")
        if step == "made too late":
            time.sleep(0.0 if rank == 1 else 8.0)  # as torch waits for a rank whose import has failed
        here, handle = stand_in(path, rank, world)
        if step == "checked" and rank == 1:  # it reads its own memory in the place of the last rank's
            handle.get_buffer = lambda r, *args: Handle.get_buffer(handle, 1 if r == world - 1 else r, *args)
        return here, handle

    patches = dict(_gpu_of=gpu_of, _check_links=check_links, _allocated=allocated)
    with mock.patch.multiple(symmetric, **patches), _triton_on_cpu():
        found = symmetric.join(ranks)
    for transport in ("symm_mem", "auto"):
        other = bound(transport=transport)
        other.__dict__.update(backend="nccl", _messages="builtin")
        other.state.symmetric = found
        if isinstance(found, SymmetricMemory):
            assert other.symmetric is found
        elif transport == "auto":
            assert other.symmetric is None
        else:
            with pytest.raises(ValueError, match="transport='symm_mem' can't be had: .*; use transport='auto'"):
                _ = other.symmetric
    return found if isinstance(found, str) else found.merge_rows(torch.tensor([[rank, 0.0]]), 0, 1, ranks).tolist()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("GPUs", "rank 1: not this one"),
        ("links", "rank 1: not this one"),
        ("made", "rank 1: CUDA driver error"),
        ("made too late", "rank 0: symmetric memory was not made within 2 s"),
        ("checked", "rank 1: it read"),
    ],
)
def test_one_rank_that_can_not_keeps_all_out(tmp_path, step, says):
    found = run_distributed(_joined, 3, str(tmp_path / "memory"), step)
    assert len(set(found)) == 1 and found[0].startswith(says), found


def test_ranks_that_can_all_do(tmp_path):
    for merged in run_distributed(_joined, 3, str(tmp_path / "memory"), ""):
        assert merged[0] == pytest.approx([1.0, 1.0986123], abs=1e-6)


def _links(names, visible, matrix):
    """What `_check_links` says on rank 0 of ranks with GPUs of these names, which sees those that are visible."""
    ranks = SimpleNamespace(rank=0, state=SimpleNamespace(ranks=(4, 5, 6)))
    detected = lambda kind, link: SimpleNamespace(matrix=matrix)  # noqa: E731
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=len(visible)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=visible[i])),
        mock.patch.object(torch._C._distributed_c10d, "_detect_dma_connectivity", detected),
    ):
        try:
            symmetric._check_links(ranks, names)
        except Refused as refused:
            return str(refused)
    return ""


def test_links():
    names, visible, joined = ["b", "c", "a"], ["a", "b", "c"], [[0, 2, 2], [2, 0, 2], [2, 2, 0]]
    assert _links(names, visible, joined) == ""
    assert _links(names, visible, [[0, 2, 2], [0, 0, 2], [2, 2, 0]]) == "no NVLink joins its GPU to that of rank 6"
    assert _links(names, visible[:2], joined).startswith("it does not see the GPU of rank 5: give all ranks the same")
    assert _links(["b", "a", "b"], visible, joined) == "it has the GPU of rank 6"


def test_torch_knows_the_functions():
    """Of a build without CUDA, which refuses the device, and not the arguments."""
    ranks = SimpleNamespace(device=torch.device("cpu"), group=None, device_type="cuda")
    with pytest.raises(RuntimeError, match="does not support device type cpu"):
        symmetric._allocated(ranks)
    with pytest.raises(Refused if torch.version.cuda is None else Exception):
        symmetric._gpu_of(ranks)


def _on_cpu_ranks(rank, world):
    with pytest.raises(ValueError, match="transport='symm_mem' needs NCCL and tensors on GPUs; this group has gloo"):
        tree_decode(*decode_inputs(1, 1, 4), cp_group=dist.group.WORLD, config=TreeConfig(transport="symm_mem"))
    assert bound().symmetric is None


def test_cpu_ranks_refuse_it_by_name():
    run_distributed(_on_cpu_ranks, 2)


# ranks that are lost


def _lost(rank, world, path, graphed):
    """Rank 2 does not come to a merge: the others' kernels end by a trap, of which their hosts hear."""
    ranks = _bound(_memory(path, rank, world), timeout_s=LIMIT)
    state = torch.ones(2, 5)
    ranks.symmetric.merge_rows(state, 0, 2, _bound(ranks.symmetric, timeout_s=30.0))
    dist.barrier()
    start_clock()
    if rank == 2:
        die("SIGKILL")
    merge = lambda: ranks.symmetric.merge_rows(state, 0, 2, ranks)  # noqa: E731
    if graphed:
        work.wait_until(merge, "a decode step", ranks)
    with comm.monitored("step 5"):
        merge()


@pytest.mark.alone
@pytest.mark.parametrize("graphed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_survivors_name_the_rank_in_time(tmp_path, graphed):
    outcomes = run_to_the_end(_lost, 3, str(tmp_path / "memory"), graphed, victims=(2,))
    for outcome in outcomes[:2]:
        assert outcome.error == CommError.__name__ and "rank 2 did not respond" in outcome.text, outcome
        assert "launch failure" in outcome.text and outcome.seconds < LIMIT + IN_TIME, outcome
