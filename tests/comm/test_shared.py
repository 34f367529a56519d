"""Collectives through memory that the ranks of one host share: the bits of messages, and ranks that can't or fail."""

import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig, comm, tree_decode
from megatron_tree.bench.step_runner import SmallRunner
from megatron_tree.comm import shared, wire
from megatron_tree.comm.group import GroupState
from megatron_tree.energy import merge_by_energy
from support.failing_ranks import IN_TIME, LIMIT, die, run_to_the_end, start_clock
from support.ranks import run_distributed
from support.rounding import error, rounding

CPU = torch.device("cpu")
LARGE = shared.CAPACITY // 4 + 4001  # fp32 elements of more than a slot


def _both(run, x, allowed=0.0):
    """run(x, group, transport=...) through shared memory and in messages: the same bits, and what each records."""
    with comm.record() as in_memory:
        out = run(x, dist.group.WORLD, transport="shm", timeout_s=20.0)
    with comm.record() as messages:
        expected = run(x, dist.group.WORLD, transport="direct", timeout_s=20.0)
    assert out.dtype == expected.dtype and out.shape == expected.shape
    assert torch.equal(out, expected) if not allowed else error(out, expected) <= allowed
    assert all(sent.op.startswith("shared ") for sent in in_memory) and in_memory
    assert not any(sent.op.startswith("shared ") for sent in messages)
    return in_memory


def _reduced(schedule, state, group, **options):
    shares = (2, *[1] * (len(state) - 2), 0)
    reducer = comm.prepare_reduction(state.shape, state.dtype, CPU, group, schedule, shares=shares, **options)
    return reducer.start().finish(state)


def _same_bits(rank, world):
    group, options = dist.group.WORLD, {"timeout_s": 20.0}
    assert comm.resolve_shared(group, CPU, "auto", **options) == "shm"
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        for size in (1, 7, 5000, LARGE):
            x = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
            before = x.clone()
            _both(comm.sum_over_ranks, x)
            assert torch.equal(x, before)
    for shape in ((1,), (3, 5), (5, 0), (2, LARGE)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
        log = _both(comm.gather_sequence, x)
        assert [sent.bytes for sent in log] == [x.nbytes]
        counts = (1, *range(world - 1))
        own = x[:1].expand(counts[rank], *x.shape[1:]).contiguous()
        log = _both(lambda x, group, counts=counts, **options: comm.gather_rows(x, counts, group, **options), own)
        assert [sent.bytes for sent in log] == [counts[rank] * x[:1].nbytes]
    for rows in (1, 4, 4000):
        state = torch.randn(world, rows, 33, generator=torch.Generator().manual_seed(rank))
        for schedule in ("allgather", "scatter", "local_share"):  # states are merged by other code, equal on all ranks
            _both(functools.partial(_reduced, schedule), state, allowed=rounding(world))
            _both(functools.partial(_reduced, schedule), state.double())
            merged = _reduced(schedule, state, group, transport="shm", **options)
            if schedule != "local_share":
                everyone = comm.gather_sequence(merged[None], group, **options)
                assert all(torch.equal(merged, other) for other in everyone)
    x = torch.full((LARGE,), float(rank))
    comm.broadcast(x, group, world - 1, **options)
    assert (x == world - 1).all()
    nan = torch.tensor([float("nan"), float("inf")]).bfloat16()
    assert comm.sum_over_ranks(nan, group, **options).isnan().tolist() == [True, False]
    return True


def test_states_are_merged_as_the_energy_says():
    states = torch.randn(3, 2, 5, 4, 9, generator=torch.Generator().manual_seed(1))  # [n, b, s, h, d + 1]
    states[..., -1] *= 40  # weights from 0 to 1
    states[1, 0, ..., -1], states[1, 0, ..., :-1] = float("-inf"), 0.0
    states[:, 1, 0, :, -1], states[:, 1, 0, :, :-1] = float("-inf"), 0.0
    merged = shared.SharedMemory.make(1).merge(states).double()
    out, lse = merge_by_energy(states[..., :-1].double(), states[..., -1].transpose(-1, -2).double())
    assert error(merged[..., :-1], out) <= rounding(3)
    assert error(merged[..., -1].transpose(-1, -2), lse) <= rounding(3)
    assert merged[1, 0, :, -1].isneginf().all() and not merged.isnan().any()


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_bits_as_messages(world):
    assert all(run_distributed(_same_bits, world))


def _many_in_disorder(rank, world):
    """Rounds in two groups whose ranks come at very different times; a wrong slot would show."""
    groups = [dist.group.WORLD, dist.new_group(range(world))]
    late = torch.Generator().manual_seed(rank)
    for i in range(300):
        if torch.rand((), generator=late) < 0.02:
            time.sleep(0.005)
        group, x = groups[i % 2], torch.tensor([float(i + rank)])
        if i % 3 == 0:
            comm.broadcast(x, group, i % world, timeout_s=20.0)
            assert x.item() == i + i % world
        else:
            whole = comm.gather_sequence(x, group, timeout_s=20.0)
            assert whole.tolist() == [float(i + r) for r in range(world)]
    assert shared.shared(groups[0]) is not shared.shared(groups[1])
    return True


def test_many_rounds_in_two_groups():
    assert all(run_distributed(_many_in_disorder, 4))


def _refused(rank, world, what):
    """Rank 1 can't take part: no rank does, and says why; everything goes on in messages."""
    group, real = dist.group.WORLD, (shared._library, shared.SharedMemory.join, shared.SharedMemory.make)
    if what == "compiler" and rank == 1:
        shared._library = lambda: "memory.c needs a C compiler"
    elif what == "containers" and rank == 1:
        shared.SharedMemory.join = lambda address, *args: real[1](f"{os.getpid()} 0 {address.split()[2]}", *args)
    elif what == "memory" and rank == 0:
        shared.os.posix_fallocate, allocate = _no_room, os.posix_fallocate
    elif what == "hosts":
        GroupState.of(group).hosts = ("a", "b", "b")
    try:
        assert comm.resolve_shared(group, CPU, "auto", timeout_s=20.0) == "direct"
        assert comm.sum_over_ranks(torch.ones(3), group, timeout_s=20.0).tolist() == [world] * 3
        q, k = torch.ones(1, 1, 2, 8), torch.ones(1, 3, 2, 8)
        tree_decode(q, k, k, cp_group=group)
        with pytest.raises(ValueError, match="transport='shm' can't be had") as caught:
            tree_decode(q, k, k, cp_group=group, config=TreeConfig(transport="shm"))
        return str(caught.value)
    finally:
        shared._library, shared.SharedMemory.join, shared.SharedMemory.make = real
        if what == "memory" and rank == 0:
            shared.os.posix_fallocate = allocate


def _no_room(fd, offset, size):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("compiler", "rank 1: memory.c needs a C compiler"),
        ("containers", "rank 1:"),
        ("memory", "rank 0: [Errno 28] No space left"),
        ("hosts", "several hosts"),
    ],
)
def test_all_ranks_do_without_it_if_one_can_not(what, words):
    said = run_distributed(_refused, 3, what)
    reasons = {
        text[text.index("transport='shm' can't be had") :] for text in said
    }  # who hears of it first tells others
    assert len(reasons) == 1 and words in reasons.pop()


def _lost(rank, world, how, where, limit):
    """The victim does not come to the third sum, or to the broadcast of which it is the source."""
    group = dist.group.WORLD
    comm.sum_over_ranks(torch.ones(8), group, timeout_s=30.0)  # what a process does once has more time
    for i in range(3):
        comm.sum_over_ranks(torch.ones(8), group, timeout_s=limit)
        if i == 1:
            start_clock()
            if rank == 2:
                die(how)
            if where == "broadcast":
                comm.broadcast(torch.ones(8), group, 2, timeout_s=limit)


@pytest.mark.alone
@pytest.mark.parametrize(("how", "where"), [("SIGKILL", "sum"), ("SIGSTOP", "broadcast"), ("SIGSTOP", "sum")])
def test_survivors_name_the_rank_in_time(how, where):
    limit = 2 * IN_TIME if how == "SIGKILL" else LIMIT  # a process that has ended is noticed at once
    outcomes = run_to_the_end(_lost, 4, how, where, limit, victims=(2,))
    for outcome in outcomes[:2] + outcomes[3:]:
        assert outcome.error == "CommError" and "rank 2" in outcome.text, outcome
        assert "did not respond" in outcome.text and f"shared {where}" in outcome.text, outcome
        assert outcome.seconds < LIMIT + IN_TIME, outcome
        if how == "SIGSTOP":
            assert f"within {LIMIT:g} s" in outcome.text


def _different(rank, world):
    group = dist.group.WORLD
    comm.sum_over_ranks(torch.ones(8), group, timeout_s=20.0)
    act = comm.sum_over_ranks if rank else comm.gather_sequence
    with pytest.raises(ValueError, match="rank 0 runs shared gather of 32 bytes.*; rank 1 runs shared sum"):
        act(torch.ones(8), group, timeout_s=20.0)
    with pytest.raises(ValueError, match="can't be used any more"):
        comm.sum_over_ranks(torch.ones(8), group, timeout_s=20.0)
    return True


def test_ranks_that_differ_raise():
    assert all(run_distributed(_different, 2, fresh=True))


def _interrupted(rank, world):
    group = dist.group.WORLD
    comm.sum_over_ranks(torch.ones(8), group, timeout_s=20.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        return comm.broadcast(torch.ones(1), group, 1, timeout_s=20.0).item()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            comm.broadcast(torch.ones(1), group, 1, timeout_s=20.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    store.set("interrupted", "")


def test_a_signal_ends_the_wait():
    assert run_distributed(_interrupted, 2, fresh=True) == [None, 1.0]


def _ruled_out(rank, world):
    """Nothing that transport="direct" runs takes the memory; "auto" does."""
    group, config = dist.group.WORLD, TreeConfig(transport="direct")
    for name, transport, joined in (("file", None, False), ("direct", "direct", False), ("auto", "auto", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "default_config", lambda: config)  # for callers that name none
            with comm.record() as log:
                if transport is not None:
                    x = torch.full((5,), float(rank))
                    assert comm.broadcast(x, group, 1, transport=transport).tolist() == [1.0] * 5
                assert wire.share(rank, group, source=1, transport=transport) == 1
                assert wire.share_check(lambda: "checked", group, transport=transport) == "checked"
        assert {sent.op.startswith("shared ") for sent in log} == {joined}, name
    runner = SmallRunner(cp_group=group, page_size=4, chunk_size=64, config=config)
    with comm.record() as log:
        logits = runner.prefill(runner.add(), torch.arange(32))  # sharded
    assert logits.isfinite().all() and not any(sent.op.startswith("shared ") for sent in log)
    assert "broadcast" in {sent.op for sent in log}
    return True


def test_direct_rules_it_out():
    assert all(run_distributed(_ruled_out, 2))


def _traces(rank, world):
    """What the memory leaves: no name, and nothing at all once the group is gone. A fork must not touch it."""
    group = dist.new_group(range(world))
    comm.sum_over_ranks(torch.ones(8), group, timeout_s=20.0)
    files = _files()
    assert files and all(name.startswith("/memfd:") and name.endswith("(deleted)") for name in files)
    if (child := os.fork()) == 0:
        try:
            comm.sum_over_ranks(torch.ones(8), group, timeout_s=1.0)
        except CommError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert comm.sum_over_ranks(torch.ones(1), group, timeout_s=20.0).item() == world
    GroupState.of(group).shared = None
    return _files()


def _files():
    """Open files of this package."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [name for name in (os.readlink(path) for path in paths if os.path.lexists(path)) if "megatron_tree" in name]


def test_it_leaves_nothing_behind():
    assert run_distributed(_traces, 2, fresh=True) == [[], []]
