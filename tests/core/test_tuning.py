"""Repeated calls that measure their plans: exact in every turn, one choice on all ranks, and the fast one."""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_tree import TreeConfig, comm, shard_sequence, tree_attn_func, tree_decode
from megatron_tree.attention import decode_call, passes, tuning
from megatron_tree.comm.group import GroupState
from support.failing_ranks import HOWS, IN_TIME, LIMIT, die, run_to_the_end, start_clock
from support.ranks import run_distributed

SEQ, HEADS, DIM = 64, 4, 16
NAMED, TUNED = TreeConfig(schedule="grid", ulysses_size=1), TreeConfig(topology="ethernet")


def _tried(*others):
    """In this context the planner's plan is tried, and those with these options."""

    def alternatives(plan_on, topology):
        return tuple(plan_on(topology=topology, **options) for options in ({}, *others))

    return mock.patch.object(tuning, "alternatives", alternatives)


def _grid_and_heads(world):
    return _tried({"ulysses_size": 1, "grid": (1, world)}, {"ulysses_size": world})


def _inputs(seq=SEQ):
    torch.manual_seed(1)
    qkv = (torch.randn(1, seq, HEADS, DIM) for _ in "qkv")
    return [shard_sequence(x, dist.group.WORLD, 1).requires_grad_() for x in qkv]


def _attend(q, k, v, config=TUNED):
    return tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config)


def _step(config=TUNED, run=_attend):
    """(out, gradients) of this rank's shard after one call."""
    qkv = _inputs()
    out = run(*qkv, config)
    out.backward(out.detach())
    return out.detach(), *(x.grad for x in qkv)


def _error(got, want):
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, want))


def _tuning():
    (found,) = [x for x in GroupState.of(dist.group.WORLD).tunings.values() if x.tried]
    return found


def _until_settled(step):
    """The largest of the steps' errors, and how many it took until the plan was chosen."""
    errors = []
    while not (errors and _settled()):
        assert len(errors) < 300
        errors.append(step())
    return max(errors), len(errors)


def _settled():
    return all(x.settled for x in GroupState.of(dist.group.WORLD).tunings.values() if x._calls)


class _Clock:
    """In this context it is the clock of tuning, which goes on when the test says so."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def __enter__(self):
        self._patches = [mock.patch.object(module, "time", self) for module in (tuning, decode_call)]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


def _tuned(rank, world, ulysses):
    """On the last rank passes take longer where heads are exchanged, or where they are not."""
    want, clock = _step(NAMED), _Clock()

    def timed(run):
        def slow(*args):
            call = next(x for x in args if hasattr(x, "plan"))
            clock.now += 2 if rank == world - 1 and (call.plan.forward.ulysses_size > 1) == ulysses else 1
            return run(*args)

        return slow

    slow = mock.patch.multiple(passes, _forward=timed(passes._forward), _backward=timed(passes._backward))
    with clock, slow, _grid_and_heads(world):
        error, calls = _until_settled(lambda: _error(_step(), want))
    with comm.record() as log:
        _step()
    return error, str(_tuning().plan.forward), str(_tuning().plan.backward), calls, [x.op for x in log]


@pytest.mark.parametrize("ulysses", [True, False])
def test_all_ranks_take_the_fast_plan(ulysses):
    error, *found = zip(*run_distributed(_tuned, 4, ulysses))
    assert max(error) < 2e-6
    assert all(len(set(map(str, of_ranks))) == 1 for of_ranks in found), found
    assert ("heads over" in found[0][0]) != ulysses, found
    assert found[2][0] < 60, "calls"
    assert "all_reduce" not in found[3][0], "nothing is measured any more"


def _layers(again, accumulated, q, k, v, config):
    """The sum of some batches of two layers, each of which autograd may have to run again."""
    total = 0.0
    for scale in range(1, accumulated + 1):
        x = q * scale
        for _ in range(2):
            attend = functools.partial(_attend, config=config)
            x = attend(x, k, v) if again is None else checkpoint(attend, x, k, v, use_reentrant=again)
        total = total + x
    return total


def _model(rank, world, again):
    """Several calls wait for their backward at a time. Every third step is an evaluation, on rank 0 without a graph."""
    runs = [functools.partial(_layers, again, n) for n in (1, 2)]
    wants = [_step(NAMED, run) for run in runs]
    numbers = itertools.count()

    def step():
        n = next(numbers)
        if n % 3 == 2:
            with torch.set_grad_enabled(rank > 0):
                return _error([runs[0](*_inputs(), TUNED)], wants[0])
        return _error(_step(TUNED, runs[n % 3]), wants[n % 3])

    with _grid_and_heads(world):
        error, _ = _until_settled(step)
    return error, str(_tuning().plan.forward)


@pytest.mark.parametrize("again", [None, False, True], ids=["kept", "recomputed", "recomputed by a new graph"])
def test_calls_that_wait_for_their_backward(again):
    """A forward that is run again takes the plan that it had: else checkpointing finds other tensors."""
    error, *found = zip(*run_distributed(_model, 2, again))
    assert max(error) < 1e-5
    assert len(set(found[0])) == 1


def _decoded(rank, world, slow):
    """The largest error of decode steps, and the schedule that they end with, where one of them is slow on one rank."""
    prepare, clock = comm.prepare_reduction, _Clock()

    def timed(*args, **kwargs):
        clock.now += 2 if rank == world - 1 and slow in args else 1
        return prepare(*args, **kwargs)

    torch.manual_seed(1)
    q, k, v = torch.randn(64, 1, HEADS, DIM), *torch.randn(2, 64, 8, HEADS, DIM)
    config = TreeConfig(topology="ethernet", transport="direct")
    decode = functools.partial(tree_decode, q, k, v, cp_group=dist.group.WORLD, config=config)
    want = decode(schedule="allgather")
    others = _tried({"schedule": "scatter"}, {"schedule": "butterfly"})
    with clock, others, mock.patch.object(comm, "prepare_reduction", timed):
        error, calls = _until_settled(lambda: _error([decode()], [want]))
    return error, str(_tuning().plan), calls


@pytest.mark.parametrize("slow", ["scatter", "butterfly"])
def test_decode_takes_the_fast_schedule(slow):
    error, *found = zip(*run_distributed(_decoded, 4, slow))
    assert max(error) < 1e-5
    assert len(set(found[0])) == len(set(found[1])) == 1 and found[0][0] != slow, found


def _rejected(rank, world):
    """Every few calls one rank rejects its input, and the others catch the error."""
    want, numbers, raised = _step(NAMED), itertools.count(), []

    def step():
        n = next(numbers)
        if n % 7 == 3:
            try:
                _attend(*(x[:, : SEQ // world - (rank == n % world)] for x in _inputs()), TUNED)
            except ValueError as error:
                raised.append(str(error))
        return _error(_step(TreeConfig(topology="ethernet", check="always")), want)

    with _grid_and_heads(world):
        error, calls = _until_settled(step)
    return error, calls, str(_tuning().plan.forward), len(raised)


def test_after_an_error_turns_go_on():
    error, *found = zip(*run_distributed(_rejected, 2))
    assert max(error) < 2e-6
    assert all(len(set(x)) == 1 for x in found), found
    assert found[2][0] >= 3


def _changing(rank, world):
    with mock.patch.multiple(tuning, alternatives=mock.Mock(), KINDS_KNOWN=8):
        for seq in range(16, 16 + 20 * world, 2 * world):
            _attend(*_inputs(seq)).sum().backward()
        return tuning.alternatives.call_count, len(GroupState.of(dist.group.WORLD).tunings)


def test_what_is_not_repeated_is_not_tried():
    assert run_distributed(_changing, 2) == [(0, 8)] * 2


def _without_gradients(rank, world):
    votes = mock.patch.object(tuning.Tuning, "_vote", autospec=True, side_effect=tuning.Tuning._vote)
    with torch.no_grad(), votes, _grid_and_heads(world):
        for _ in range(100):
            _attend(*_inputs())
        return tuning.Tuning._vote.call_count


def test_calls_without_gradients_hardly_vote():
    assert run_distributed(_without_gradients, 2) == [4] * 2  # calls 12, 24, 48, 96


def _lost(rank, world, how):
    """A rank that is lost where the others vote."""
    config = TreeConfig(topology="ethernet", timeout_s=LIMIT)
    vote = tuning.Tuning._vote

    def dies(*args):
        start_clock()
        if rank == 1:
            die(how)
        vote(*args)

    tuning.Tuning._vote = dies
    with _grid_and_heads(world):
        while True:
            _step(config)


@pytest.mark.alone
@pytest.mark.parametrize("how", ["exception", *(pytest.param(x, marks=pytest.mark.slow) for x in HOWS[:2])])
def test_a_rank_that_is_lost_in_a_vote_is_named(how):
    outcomes = run_to_the_end(_lost, 4, how, victims=(1,) if how.startswith("SIG") else ())
    for rank in (0, 2, 3):
        assert outcomes[rank].error == "CommError" and "rank 1" in outcomes[rank].text, outcomes[rank]
        assert outcomes[rank].seconds < LIMIT + IN_TIME
