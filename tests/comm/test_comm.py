"""Teams, gathers, reduce-scatters and decode's reductions in real processes: both transports, one and two levels."""

import gc
import os

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig
from megatron_tree.core import comm
from megatron_tree.core.comm import work
from megatron_tree.core.comm.group import GroupState
from megatron_tree.core.kernels import merge_packed
from support.bound import bound
from support.ranks import largest, run_distributed
from support.rounding import error, rounding

SHAPES = [(1, 4), (4, 1), (2, 3)]  # nodes x ranks on each
TRANSPORTS = ("direct", "builtin")
SCHEDULES = ("allreduce", "allgather", "butterfly", "scatter", "two_level")
CPU = torch.device("cpu")


class _Sum:
    merge = staticmethod(lambda parts: parts.sum(0))
    narrow = staticmethod(lambda total: total)


def _work_of_a_team(rank, world, outer, inner, transport, seed):
    """Gathers and a reduce-scatter, three of them under way at a time; ranks of the team in any order."""
    order = torch.randperm(world, generator=torch.Generator().manual_seed(seed)).tolist()
    ranks = tuple(tuple(order[o * inner + i] for o in range(outer)) for i in range(inner))
    team = comm.Team(bound(transport=transport), ranks, ("test", seed))
    x = torch.full((3, 2), float(rank))
    shares = torch.tensor([100.0 * r + rank for r in team.order]).repeat_interleave(3)[:, None].expand(-1, 2)
    with comm.record() as log:
        first = comm.start_gather(x, team)
        sums = comm.start_reduce_scatter(shares, team, _Sum)
        second = comm.start_gather(x + 100, team)
        second.advance()
        total = sums.wait()
        whole = first.wait()
    assert whole.view(world, 3, 2)[:, 2, 1].tolist() == [float(r) for r in team.order]
    assert torch.equal(second.wait(), whole + 100)
    assert (total == 100 * rank * world + sum(range(world))).all() and total.shape == (3, 2)
    assert [(sent.op, sent.bytes) for sent in log] == [
        (op, (world - 1) * x.nbytes) for op in ("all_gather", "all_to_all", "all_gather")
    ]
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("outer", "inner"), SHAPES)
def test_gather_and_reduce_scatter(outer, inner, transport):
    for seed in range(2):
        run_distributed(_work_of_a_team, outer * inner, outer, inner, transport, seed)


def _every_reduction(rank, world, transport):
    """All schedules, all blocks: the right result, and the same bits on all ranks; states may be empty."""
    worst = 0.0
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        parts = torch.randn(world, 2, 3, 5, generator=g)
        parts[seed::2, 0, 1] = 0.0
        parts[seed::2, 0, 1, -1] = float("-inf")  # every second rank has seen nothing
        truth = merge_packed(parts.double())
        cases = [(schedule, 1, "direct") for schedule in SCHEDULES[:-1]]
        blocks = [n for n in range(1, world + 1) if world % n == 0]
        cases += [("two_level", block, across) for block in blocks for across in ("direct", "butterfly")]
        for schedule, block, across in cases:
            order = tuple(torch.randperm(world, generator=g).tolist())
            options = dict(schedule=schedule, order=order, block=block, across=across)
            merge = comm.Reduction(
                ranks=bound(transport=transport), shape=(2, 3, 5), dtype=torch.float32, **options
            ).start()
            out = merge(parts[rank])
            worst = largest((worst, error(out, truth)))
            everyone = [torch.empty_like(out) for _ in range(world)]
            dist.all_gather(everyone, out.contiguous())
            assert all(torch.equal(out, other) for other in everyone), (schedule, block)
    return worst


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 6])
def test_reductions(world, transport):
    assert largest(run_distributed(_every_reduction, world, transport)) < rounding(world)


def _over_the_host(rank, world):
    """As of a GPU's tensors: nothing but copies are given to gloo, and what arrives is copied into the tensor."""
    given, on_host, start = [], work._on_host, dist.batch_isend_irecv
    mine, theirs = torch.full((3,), float(rank)), torch.zeros(3)
    work._on_host = lambda x: False
    dist.batch_isend_irecv = lambda ops: given.extend(op.tensor for op in ops) or start(ops)
    try:
        found = comm.start_shift(mine, theirs, (0, 1), bound()).wait()
    finally:
        work._on_host, dist.batch_isend_irecv = on_host, start
    assert found is theirs and not any(x is theirs for x in given)
    return theirs


def test_messages_between_gpus_over_gloo():
    for rank, theirs in enumerate(run_distributed(_over_the_host, 2)):
        assert theirs.tolist() == [1.0 - rank] * 3


def _dropped(rank, world):
    """A reduction whose local attention failed on every rank leaves receives behind: later ones are not confused."""
    options = dict(ranks=bound(transport="direct"), shape=(4, 5), dtype=torch.float32)
    for _ in range(20):
        for schedule in ("butterfly", "scatter", "allgather"):
            comm.Reduction(schedule=schedule, **options).start()
        merge = comm.Reduction(schedule="butterfly", **options).start()
        out = merge(torch.full((4, 5), float(rank)))
    return out


def test_abandoned_receives_do_no_harm():
    results = run_distributed(_dropped, 4)
    expected = merge_packed(torch.arange(4.0)[:, None, None].expand(4, 4, 5))
    for out in results:
        torch.testing.assert_close(out, expected)


def _silent_peer(rank, world, transport):
    if rank == 1:
        return None
    team = comm.Team(bound(transport=transport, timeout_s=1.0), ((0, 1),))
    with pytest.raises(CommError) as caught:
        comm.start_gather(torch.ones(2), team).wait()
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_silent_peer_ends_in_an_error(transport):
    message = run_distributed(_silent_peer, 2, transport)[0]
    assert "rank 1 did not respond within 1 s: all_gather among ranks [0, 1] failed on rank 0" in message


def _broadcast(rank, world):
    found = []
    for src in range(world):
        for transport in ("auto", "direct", "builtin"):
            x = torch.arange(5.0) + 10 * rank
            with comm.record() as log:
                bound(transport=transport).broadcast(x, src)
            found.append((x.tolist(), src, transport, sum(sent.bytes for sent in log)))
    return found


@pytest.mark.parametrize("world", [2, 5])
def test_broadcasts(world):
    for results in zip(*run_distributed(_broadcast, world)):
        for x, src, transport, _ in results:
            assert x == [10.0 * src + i for i in range(5)], (src, transport)
        if results[0][2] == "direct":
            assert sum(num_bytes for *_, num_bytes in results) == (world - 1) * 20


def _where(rank, world):
    found = bound().hosts
    GroupState.of(dist.group.WORLD).hosts = None
    real, comm.ranks._this_host = comm.ranks._this_host, lambda: f"node{rank // 2}"
    try:
        return found, bound(dist.new_group(range(world))).hosts
    finally:
        comm.ranks._this_host = real


def test_hosts_are_told_apart():
    for found, told in run_distributed(_where, 4):
        assert len(set(found)) == 1 and told == ("node0", "node0", "node1", "node1")


def _transports(rank, world):
    cuda = torch.device("cuda")
    assert comm.Ranks.of(None, CPU).transport == bound().transport == "direct"
    assert bound(transport="builtin").transport == "builtin"
    assert comm.Ranks.of(dist.group.WORLD, cuda).transport == "builtin"
    with pytest.raises(ValueError, match="transport='direct' needs gloo and tensors on the CPU.*'builtin'"):
        _ = comm.Ranks.of(dist.group.WORLD, cuda, TreeConfig(transport="direct")).transport
    return True


def test_direct_transport_is_for_gloo_on_the_cpu():
    assert all(run_distributed(_transports, 2))


def _local_shares(rank, world, transport, hosts):
    """The first half of "scatter", small and large, on one host (through the first rank) and on several."""
    GroupState.of(dist.group.WORLD).hosts = hosts
    for rows in (3, 5000):
        for shares in ((1,) * world, (3, *[2] * (world - 2), 0)):
            parts = torch.randn(world, sum(shares), rows, 5, generator=torch.Generator().manual_seed(rows))
            ranks, options = bound(transport=transport), {"schedule": "local_share", "shares": shares}
            options |= {"shape": tuple(parts.shape[1:]), "dtype": torch.float32}
            own = comm.Reduction(ranks=ranks, **options).start()(parts[rank])
            assert torch.equal(own, merge_packed(parts).split(shares)[rank])
            whole = ranks.gather_rows(own.contiguous(), shares)
            assert torch.equal(whole, merge_packed(parts))
            if len(set(shares)) == 1:
                assert torch.equal(ranks.gather(own), merge_packed(parts))
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world", "several"), [(2, False), (3, True), (4, False)])
def test_local_shares_and_gathers(world, several, transport):
    hosts = tuple(str(rank if several else 0) for rank in range(world))
    run_distributed(_local_shares, world, transport, hosts)


def _sums(rank, world, hosts):
    GroupState.of(dist.group.WORLD).hosts = hosts
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in (1, 7, 50_001):
            parts = torch.randn(world, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
            parts = parts.to(dtype)
            in_order = parts[0].to(torch.promote_types(dtype, torch.float32))
            for part in parts[1:]:
                in_order = in_order + part
            before = parts[rank].clone()
            total = bound().sum(parts[rank][:, None])
            assert total.dtype == dtype and torch.equal(total[:, 0], in_order.to(dtype)), (dtype, size)
            assert torch.equal(parts[rank], before)
    return True


@pytest.mark.parametrize(("world", "several"), [(1, False), (2, False), (3, True), (4, False)])
def test_sums_are_added_up_in_rank_order(world, several):
    run_distributed(_sums, world, tuple(str(rank if several else 0) for rank in range(world)))


def _threads_of_former_groups(rank, world):
    """Threads of this process after each of a few groups, whose sub-groups have the same ranks every time."""
    counts = []
    for _ in range(3):
        group = dist.new_group(range(world))
        for inner, outer in ((1, 2), (2, 1)):
            ranks = tuple(tuple(2 * (rank // 2) + i + o for o in range(outer)) for i in range(inner))
            team = comm.Team(bound(group, transport="builtin"), ranks, ("row", inner, outer))
            x = torch.full((2,), float(rank))
            assert comm.start_gather(x, team).wait().tolist() == [r for r in team.order for _ in range(2)]
        inside = len(os.listdir("/proc/self/task"))
        dist.barrier()
        dist.destroy_process_group(group)
        del group, team
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
        assert inside > counts[-1]
    return counts


def test_sub_groups_are_freed_with_their_group():
    for counts in run_distributed(_threads_of_former_groups, 4):
        assert len(set(counts)) == 1, counts
