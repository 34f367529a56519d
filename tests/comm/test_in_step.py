"""What ranks run in step: an error that leaves it on one rank is told, and calls of different steps don't meet."""

import contextlib
import functools
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig, tree_attn_func, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.comm.work import Mail
from support.bound import bound
from support.failing_ranks import IN_TIME
from support.ranks import run_distributed

TRANSPORTS = ("auto", "direct", "builtin")
BATCHES, LAYERS = 4, 2


def attempt(job):
    """(what it returns, or its error in words; seconds)"""
    started = time.monotonic()
    try:
        said = job()
    except (ValueError, CommError, MemoryError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - started


def _batch(number, rank, group, config, failing_layer=None):
    """Some layers of attention over a batch of this number; before one of them this rank may have no memory left."""
    g = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(1, 4, 2, 8, generator=g, dtype=torch.float64, requires_grad=True)
    out = x
    for layer in range(LAYERS):
        if layer == failing_layer:
            raise MemoryError("no room")
        out = tree_attn_func(out, out, out, cp_group=group, config=config)
    return out, x


def _train(number, rank, group, config, failing_layer=None):
    with comm.in_step(group):
        out, x = _batch(number, rank, group, config, failing_layer)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), grad


def _evaluate(number, rank, group, config, failing_layer=None):
    with torch.no_grad(), comm.in_step(group):
        return (_batch(number, rank, group, config, failing_layer)[0],)


RUNS = {"training": _train, "evaluation": _evaluate}


def _skips_a_batch(rank, world, what, transport, layer):
    """Rank 0 leaves a batch out, for want of memory between two calls; all go on with the batch that comes."""
    config, run = TreeConfig(transport=transport, timeout_s=60.0), RUNS[what]
    truth = [run(number, rank, dist.new_group(range(world)), config) for number in range(BATCHES)]
    said = []
    for number in range(BATCHES):
        failing = layer if (rank, number) == (0, 1) else None
        found, seconds = attempt(functools.partial(run, number, rank, dist.group.WORLD, config, failing))
        if isinstance(found, str):
            said.append((found, seconds))
        else:
            for x, y in zip(found, truth[number], strict=True):
                torch.testing.assert_close(x, y)
    return said


@pytest.mark.parametrize("transport", TRANSPORTS[1:])  # shared memory has no training
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("what", RUNS)
def test_a_batch_that_one_rank_leaves_out(what, layer, transport):
    for rank, said in enumerate(run_distributed(_skips_a_batch, 2, what, transport, layer)):
        assert len(said) == BATCHES - 1  # all but the first
        assert all("no room" in text and (rank == 0 or "rank 0 failed after " in text) for text, _ in said), said
        assert all(seconds < IN_TIME for _, seconds in said), said


def _all_leave_out(rank, world):
    config, group = TreeConfig(timeout_s=60.0), dist.group.WORLD
    truth = _train(2, rank, dist.new_group(range(world)), config)
    for number in range(2):
        with contextlib.suppress(MemoryError):
            _train(number, rank, group, config, failing_layer=1)
        if rank == 1:
            time.sleep(0.3)
    return all(map(torch.equal, truth, _train(2, rank, group, config)))


def test_a_batch_that_all_leave_out_does_no_harm():
    assert all(run_distributed(_all_leave_out, 3))


def _all_fail_behind_a_message(rank, world):
    """Rank 0 has its message, and fails, while rank 1 waits for its own; then they fail, too."""
    group, x = dist.group.WORLD, torch.ones(1)
    with contextlib.suppress(MemoryError), comm.in_step(group):
        mail = Mail("a message", bound(timeout_s=60.0))
        if rank < 2:
            mail.wait(mail.receive(x, 2))
        else:
            mail.send(x, 0)
            mail.sent()
            time.sleep(1.0)
            mail.send(x, 1)
            mail.sent()
        raise MemoryError("no room")
    return _train(0, rank, group, TreeConfig(timeout_s=60.0))[0].isfinite().all().item()


def test_nobody_is_told_who_does_not_wait_in_vain():
    assert run_distributed(_all_fail_behind_a_message, 3) == [True] * 3


def _waits_outside_of_calls(rank, world, transport):
    """Rank 1 fails where the others go on to a sum that is no call."""
    group, config = dist.group.WORLD, TreeConfig(transport=transport, timeout_s=60.0)
    ranks = comm.Ranks.of(group, config=config)
    _train(0, rank, group, config)
    ranks.sum(torch.ones(2))

    def step():
        with comm.in_step(group):
            ranks.sum(torch.ones(2))
            if rank == 1:
                raise MemoryError("no room")
            ranks.sum(torch.ones(2))

    return attempt(step), attempt(lambda: _train(1, rank, group, config))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_waits_outside_of_calls_is_told(transport):
    for rank, said in enumerate(run_distributed(_waits_outside_of_calls, 3, transport)):
        assert said[0][0] == "MemoryError: no room" or rank != 1
        told = [text for text, _ in said[rank == 1 :]]
        assert all("rank 1 failed after the backward of tree attention" in text for text in told), said
        assert all(seconds < IN_TIME for _, seconds in said), said


def _decode(rank, group, config, number=0):
    q, k, v = (torch.full((1, 2, 2, 8), float(10 * number + rank)) for _ in "qkv")
    return tree_decode(q[:, :1] * 0, k, v, cp_group=group, config=config)


def _other_positions(rank, world, transport):
    """Nobody has failed, as far as anyone can tell: ranks run the same call, but at another position."""
    group, config = dist.group.WORLD, TreeConfig(transport=transport, timeout_s=60.0)
    for number in range(3):
        with comm.in_step(group, positions=[number]):
            _decode(rank, group, config)

    def step():
        with comm.in_step(group, positions=[3 + rank]):
            _decode(rank, group, config)

    return attempt(step)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_of_different_steps_are_an_error(transport):
    for text, seconds in run_distributed(_other_positions, 2, transport):
        assert text.startswith("ValueError") and seconds < IN_TIME, text
        shown = "rank 0 has step.positions=[3]; rank 1 has step.positions=[4]" in text
        assert shown or (transport == "auto" and "make different calls" in text), text


def _leaves_a_region(rank, world):
    """Rank 1 leaves a step, which is one of the whole job, by an error; the group is one of two."""
    group, config = dist.new_group([0, 1]), TreeConfig(timeout_s=60.0)
    truth = _decode(rank, group, config, number=1)
    dist.barrier()

    def step(number):
        with comm.monitored(f"step {number}"):
            if (rank, number) == (1, 0):
                raise MemoryError("no room")
            return torch.equal(_decode(rank, group, config, number), truth) or number == 0

    return [attempt(lambda number=number: step(number)) for number in range(2)]


def test_no_group_is_used_after_a_region_that_failed():
    for rank, said in enumerate(run_distributed(_leaves_a_region, 2)):
        for (text, seconds), number in zip(said, range(2)):
            assert isinstance(text, str) and "no room" in text and seconds < IN_TIME, said
            assert text.startswith("MemoryError" if (rank, number) == (1, 0) else "CommError: rank 1 failed"), said
