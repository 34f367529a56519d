"""Collectives through memory that the ranks of one host share: the bits of messages, and ranks that can't or fail."""

import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.comm import shared, wire
from megatron_tree.core.comm.group import GroupState
from megatron_tree.core.energy import merge_by_energy
from megatron_tree.tools.bench.device_checks import SmallRunner
from support.bound import bound
from support.failing_ranks import IN_TIME, LIMIT, die, run_to_the_end, start_clock
from support.ranks import run_distributed
from support.rounding import error, rounding

CPU = torch.device("cpu")
LARGE = shared.CAPACITY // 4 + 4001  # fp32 elements of more than a slot


def _both(run, x, allowed=0.0):
    """run(ranks, x) through shared memory and in messages: the same bits, and what each records."""
    with comm.record() as in_memory:
        out = run(bound(transport="shm"), x)
    with comm.record() as messages:
        expected = run(bound(transport="direct"), x)
    assert out.dtype == expected.dtype and out.shape == expected.shape
    assert torch.equal(out, expected) if not allowed else error(out, expected) <= allowed
    assert all(sent.op.startswith("shared ") for sent in in_memory) and in_memory
    assert not any(sent.op.startswith("shared ") for sent in messages)
    return in_memory


def _reduced(schedule, ranks, state):
    shares = (2, *[1] * (len(state) - 2), 0)
    options = dict(schedule=schedule, shape=tuple(state.shape), dtype=state.dtype, shares=shares)
    return comm.Reduction(ranks=ranks, in_memory=True, **options).start()(state)


def _same_bits(rank, world):
    ranks = bound()
    assert ranks.memory is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        for size in (1, 7, 5000, LARGE):
            x = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
            before = x.clone()
            _both(comm.Ranks.sum, x)
            assert torch.equal(x, before)
    for shape in ((1,), (3, 5), (5, 0), (2, LARGE)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
        log = _both(comm.Ranks.gather, x)
        assert [sent.bytes for sent in log] == [x.nbytes]
        counts = (1, *range(world - 1))
        own = x[:1].expand(counts[rank], *x.shape[1:]).contiguous()
        log = _both(lambda ranks, x, counts=counts: ranks.gather_rows(x, counts), own)
        assert [sent.bytes for sent in log] == [counts[rank] * x[:1].nbytes]
    for rows in (1, 4, 4000):
        state = torch.randn(world, rows, 33, generator=torch.Generator().manual_seed(rank))
        for schedule in ("allgather", "scatter", "local_share"):  # states are merged by other code, equal on all ranks
            _both(functools.partial(_reduced, schedule), state, allowed=rounding(world))
            _both(functools.partial(_reduced, schedule), state.double())
            merged = _reduced(schedule, bound(transport="shm"), state)
            if schedule != "local_share":
                everyone = ranks.gather(merged[None])
                assert all(torch.equal(merged, other) for other in everyone)
    x = torch.full((LARGE,), float(rank))
    ranks.broadcast(x, world - 1)
    assert (x == world - 1).all()
    nan = torch.tensor([float("nan"), float("inf")]).bfloat16()
    assert ranks.sum(nan).isnan().tolist() == [True, False]
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
    both = [bound(group) for group in groups]
    late = torch.Generator().manual_seed(rank)
    for i in range(300):
        if torch.rand((), generator=late) < 0.02:
            time.sleep(0.005)
        ranks, x = both[i % 2], torch.tensor([float(i + rank)])
        if i % 3 == 0:
            ranks.broadcast(x, i % world)
            assert x.item() == i + i % world
        else:
            whole = ranks.gather(x)
            assert whole.tolist() == [float(i + r) for r in range(world)]
    assert both[0].memory is not both[1].memory
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
        assert bound().memory is None and bound().transport == "direct"
        assert bound().sum(torch.ones(3)).tolist() == [world] * 3
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
    ranks = bound(timeout_s=limit)
    bound(timeout_s=30.0).sum(torch.ones(8))  # what a process does once has more time
    for i in range(3):
        ranks.sum(torch.ones(8))
        if i == 1:
            start_clock()
            if rank == 2:
                die(how)
            if where == "broadcast":
                ranks.broadcast(torch.ones(8), 2)


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
    ranks = bound()
    ranks.sum(torch.ones(8))
    act = ranks.sum if rank else ranks.gather
    with pytest.raises(ValueError, match="rank 0 runs shared gather of 32 bytes.*; rank 1 runs shared sum"):
        act(torch.ones(8))
    with pytest.raises(ValueError, match="can't be used any more"):
        ranks.sum(torch.ones(8))
    return True


def test_ranks_that_differ_raise():
    assert all(run_distributed(_different, 2, fresh=True))


def _interrupted(rank, world):
    ranks = bound()
    ranks.sum(torch.ones(8))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        return ranks.broadcast(torch.ones(1), 1).item()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks.broadcast(torch.ones(1), 1)
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
            patch.setattr(comm.ranks, "default_config", lambda: config)  # for callers that name none
            ranks = comm.Ranks.of(group) if transport is None else bound(transport=transport)
            with comm.record() as log:
                assert ranks.broadcast(torch.full((5,), float(rank)), 1).tolist() == [1.0] * 5
                assert wire.share(rank, ranks, source=1) == 1
                assert wire.share_check(lambda: "checked", ranks) == "checked"
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
    ranks = bound(group)
    ranks.sum(torch.ones(8))
    files = _files()
    assert files and all(name.startswith("/memfd:") and name.endswith("(deleted)") for name in files)
    if (child := os.fork()) == 0:
        try:
            ranks.sum(torch.ones(8))
        except CommError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ranks.sum(torch.ones(1)).item() == world
    GroupState.of(group).shared = ranks.__dict__["memory"] = None
    return _files()


def _files():
    """Open files of this package."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [name for name in (os.readlink(path) for path in paths if os.path.lexists(path)) if "megatron_tree" in name]


def test_it_leaves_nothing_behind():
    assert run_distributed(_traces, 2, fresh=True) == [[], []]
