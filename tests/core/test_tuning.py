"""Kinds of calls that measure their plans once: one choice on all ranks, the fast one, and none after it."""

import functools
import itertools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megatron_tree import TreeConfig, dispatch_documents, shard_sequence, tree_attn_func, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.attention import passes, tuning
from megatron_tree.core.comm.group import GroupState
from megatron_tree.core.log import logger
from megatron_tree.core.plan import DecodePlan, TrainingPlan
from support.failing_ranks import HOWS, IN_TIME, LIMIT, die, run_to_the_end, start_clock
from support.ranks import on_ranks, run_distributed
from support.tried_plans import grid_and_heads, tried

SEQ, HEADS, DIM = 64, 4, 16
NAMED, TUNED = TreeConfig(schedule="grid", ulysses_size=1), TreeConfig(topology="ethernet")


def _inputs(seq=SEQ):
    torch.manual_seed(1)
    qkv = (torch.randn(1, seq, HEADS, DIM) for _ in "qkv")
    return [shard_sequence(x, dist.group.WORLD, 1).requires_grad_() for x in qkv]


def _attend(q, k, v, config=TUNED, **options):
    return tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config, **options)


def _step(config=TUNED):
    """(out, gradients) of this rank's shard after one call."""
    qkv = _inputs()
    out = _attend(*qkv, config)
    out.backward(out.detach())
    return out.detach(), *(x.grad for x in qkv)


def _error(got, want):
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, want))


def _plans():
    return list(GroupState.of(dist.group.WORLD).tuned.values())


@on_ranks(2)
def test_log_lines_are_short(rank, world):
    """Those of the first training call, with tuning, and of a decode step: each a fact, the plan's all together."""
    lines = []
    with mock.patch.object(logger, "log", lambda level, line: lines.append(line)):
        _step()
        q, k, v = _inputs()
        tree_decode(q[:, :1].detach(), k.detach(), v.detach(), cp_group=dist.group.WORLD)
    assert not lines or max(map(len, lines)) <= 120
    assert (rank == 0) == any(line.startswith("attention over 2 ranks (4 heads") for line in lines)
    at = next((i for i, line in enumerate(lines) if line.startswith("attention over")), None)
    assert at is None or [line.split()[0] for line in lines[at + 1 : at + 5 : 2]] == ["forward", "backward"]


@on_ranks(2)
def test_lines_of_measured_plans_say_what_was_measured(rank, world):
    """A line for each pass of each candidate, and two for what is taken."""
    lines = []
    with mock.patch.object(logger, "log", lambda level, line: lines.append(line)), grid_and_heads(world):
        _step()
    found = [re.fullmatch(r"a layer's (forward|backward), measured: [\d.]+ [mu]?s by (.+)", line) for line in lines]
    found = [x.groups() for x in found if x]
    (plan,) = _plans()
    taken = [f"from now on forward by {plan.forward}", f"from now on backward by {plan.backward}"]
    assert [line for line in lines if line.startswith("from now on")] == (taken if rank == 0 else [])
    assert [name for name, _ in found] == ["forward", "backward"] * (3 if rank == 0 else 0)
    assert not found or {str(plan.forward), str(plan.backward)} <= {by for _, by in found}


class _Clock:
    """In this context it is the clock of tuning, which goes on when the test says so."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def __enter__(self):
        self._patch = mock.patch.object(tuning, "time", self)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


def _tuned(rank, world, ulysses):
    """On the last rank passes take longer where heads are exchanged, or where they are not."""
    want, clock = _step(NAMED), _Clock()

    def timed(run):
        def slow(*args):
            call = next(x for x in args if hasattr(x, "plan"))
            clock.now += 2 if rank == world - 1 and (call.plan.forward.ulysses_size > 1) == ulysses else 1
            return run(*args)

        return slow

    slow = mock.patch.multiple(passes, forward=timed(passes.forward), backward=timed(passes.backward))
    with clock, slow, grid_and_heads(world):
        error = _error(_step(), want)
    with comm.record() as log:
        error = max(error, _error(_step(), want))
    (plan,) = _plans()
    return error, str(plan.forward), str(plan.backward), [x.op for x in log]


@pytest.mark.parametrize("ulysses", [True, False])
def test_all_ranks_take_the_fast_plan(ulysses):
    error, *found = zip(*run_distributed(_tuned, 4, ulysses))
    assert max(error) < 2e-6
    assert all(len(set(map(str, of_ranks))) == 1 for of_ranks in found), found
    assert ("heads over" in found[0][0]) != ulysses, found
    assert "all_reduce" not in found[2][0], "nothing is measured any more"


def _training_plan(name, heads=1):
    forward = mock.Mock(**{"__str__": lambda _: f"{name} forward", "arrangement.heads": heads}, name=name)
    return TrainingPlan(forward=forward, backward=f"{name} backward", reason=name, candidates=((), ()))


@pytest.mark.parametrize(
    ("seconds", "forward", "backward"),
    [
        ([(1, 2), (1, 1), (3, 3)], "b", "b"),
        ([(1, 1), (0.99, 0.99), (3, 3)], "a", "a"),  # no faster than measurements vary
        ([(1, 2), (2, 1.5), (3, 3)], "a", "b"),  # each pass by itself, where heads are exchanged alike
        ([(1, 2), (2, 1.5), (1.5, 0.5)], "c", "c"),
        ([(1, 2), (2, 1.5), (1.5, 0.5), (0.5, 9)], "c", "c"),  # a's fast forward has not exchanged c's heads
    ],
)
def test_the_choice(seconds, forward, backward):
    a, b, c, d = (_training_plan(name, heads) for name, heads in zip("abcd", (1, 1, 2, 1)))
    plan = tuning._choice((a, b, c, d)[: len(seconds)], seconds)
    assert plan.forward._mock_name == forward and plan.backward == f"{backward} backward"


def test_the_choice_of_calls_without_a_backward():
    plans = [_training_plan(name) for name in "ab"]
    assert tuning._choice(plans, [[2.0], [1.0]]).forward is plans[1].forward
    assert tuning._choice(plans, [[1.0], [0.99]]).forward is plans[0].forward


def _decoded(rank, world, slow):
    """The largest error of decode steps, and the schedule that they end with, where one of them is slow on one rank."""
    start, clock = comm.Reduction.start, _Clock()

    def timed(reduction):
        clock.now += 2 if rank == world - 1 and slow == reduction.schedule else 1
        return start(reduction)

    torch.manual_seed(1)
    q, k, v = torch.randn(64, 1, HEADS, DIM), *torch.randn(2, 64, 8, HEADS, DIM)
    config = TreeConfig(topology="ethernet", transport="direct")
    decode = functools.partial(tree_decode, q, k, v, cp_group=dist.group.WORLD, config=config)
    want = decode(schedule="allgather")
    others = tried({"schedule": "scatter"}, {"schedule": "butterfly"})
    with clock, others, mock.patch.object(comm.Reduction, "start", timed):
        errors = [_error([decode()], [want])]
        while not _plans():
            errors.append(_error([decode()], [want]))
        errors.append(_error([decode()], [want]))
    (plan,) = _plans()
    assert isinstance(plan, DecodePlan)
    return max(errors), str(plan), len(errors)


@pytest.mark.parametrize("slow", ["scatter", "butterfly"])
def test_decode_takes_the_fast_schedule(slow):
    error, *found = zip(*run_distributed(_decoded, 4, slow))
    assert max(error) < 1e-5
    assert set(found[1]) == {tuning.REPEATED + 4 + 2}, "steps"
    assert len(set(found[0])) == 1 and found[0][0] != slow, found


def _rejected(rank, world):
    """Now and then one rank rejects its input, and the others catch the error; all measure with the calls between."""
    want, raised, errors = _step(NAMED), [], []
    with grid_and_heads(world), torch.set_grad_enabled(False):
        for n in range(3 * tuning.REPEATED):
            if n % 7 == 3:
                try:
                    _attend(*(x[:, : SEQ // world - (rank == n % world)] for x in _inputs()))
                except ValueError as error:
                    raised.append(str(error))
            errors.append(_error([_attend(*_inputs(), TreeConfig(topology="ethernet", check="always"))], want))
    (plan,) = _plans()
    return max(errors), str(plan.forward), len(raised)


def test_calls_that_are_rejected_do_not_count():
    error, *found = zip(*run_distributed(_rejected, 2))
    assert max(error) < 2e-6
    assert all(len(set(x)) == 1 for x in found), found
    assert found[1][0] == 3


@on_ranks(2)
def test_what_is_measured(world):
    """Trials of calls that are made once, that are repeated without gradients, and that are new with every batch."""
    calls = mock.patch.object(tuning, "_fastest", side_effect=lambda candidates, *_: candidates[0])
    few_counted = mock.patch.object(GroupState.of(dist.group.WORLD).counted, "most", 4)
    with grid_and_heads(world), calls as fastest, few_counted, mock.patch.object(tuning, "KINDS_MEASURED", 3):
        counts = []
        with torch.no_grad():
            for seq in range(16, 16 + 20 * world, 2 * world):
                _attend(*_inputs(seq))
            counts.append((fastest.call_count, len(GroupState.of(dist.group.WORLD).counted)))
            for _ in range(tuning.REPEATED + world + 5):
                _attend(*_inputs())
            counts.append(fastest.call_count)
        documents = dispatch_documents([0, 40, 64], dist.group.WORLD)
        rows = shard_sequence(torch.randn(1, 64, HEADS, DIM), dist.group.WORLD, 1, layout=documents).requires_grad_()
        _attend(rows, rows, rows, layout=documents).sum().backward()
        counts.append(fastest.call_count)
        for seq in (16, 32, 48, 64):  # the fourth kind is planned only
            _attend(*_inputs(seq)).sum().backward()
        counts.append(fastest.call_count)
    assert counts == [(0, 4), 1, 1, 3], counts


@on_ranks(2)
def test_ranks_that_differ_in_going_backward(rank):
    """Ranks of which one only goes backward."""
    differ = pytest.raises(ValueError, match="goes_backward=False.*goes_backward=True")
    with torch.set_grad_enabled(rank > 0), differ:
        _attend(*_inputs())
    worst = _error(_step(), _step(NAMED))
    assert worst < 2e-6, worst


@on_ranks(2)
def test_modes_see_nothing_of_what_is_run_aside(world):
    """FLOPs that a mode of the user's sees in a call that measures."""
    with grid_and_heads(world), FlopCounterMode(display=False) as mode:
        _step()
    assert mode.get_total_flops() == 0 and len(_plans()) == 1


def _lost(rank, world, how):
    """A rank that is lost in the middle of what is run aside."""
    config = TreeConfig(topology="ethernet", timeout_s=LIMIT)
    numbers, rehearse = itertools.count(), passes.rehearse

    def dies(*args):
        if next(numbers) == 3:
            start_clock()
            if rank == 1:
                die(how)
        rehearse(*args)

    with grid_and_heads(world), mock.patch.object(passes, "rehearse", dies):
        _step(config)


@pytest.mark.alone
@pytest.mark.parametrize("how", ["exception", *(pytest.param(x, marks=pytest.mark.slow) for x in HOWS[:2])])
def test_a_rank_that_is_lost_while_plans_are_measured_is_named(how):
    outcomes = run_to_the_end(_lost, 4, how, victims=(1,) if how.startswith("SIG") else ())
    for rank in (0, 2, 3):
        assert outcomes[rank].error == "CommError" and "rank 1" in outcomes[rank].text, outcomes[rank]
        assert outcomes[rank].seconds < LIMIT + IN_TIME
