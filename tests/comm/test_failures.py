"""Dead and stuck peers: every survivor raises in time and says which rank it was, and the group can be rebuilt."""

import dataclasses
import datetime
import itertools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import megatron_tree
from megatron_tree import CommError, TreeConfig, tree_attn_func
from megatron_tree.core import comm
from support.bound import bound
from support.failing_ranks import (
    HOWS,
    IN_TIME,
    LIMIT,
    PATIENT,
    WHERES,
    call,
    die,
    lose,
    run_to_the_end,
    start_clock,
)
from support.ranks import DistributedTestError, run_distributed
from support.training_runs import train_all, write_text

SAVE_LIMIT = 5.0  # seconds: Megatron's own collectives at the start of a run need some

IN_CI = {
    ("SIGKILL", "prefill", 0),
    ("SIGSTOP", "decode", 0),
    ("SIGSTOP", "forward", 3),
    ("exception", "backward", 1),
    ("out of memory", "decode", 3),
}
ALL = [(how, where, victim) for how in HOWS for where in WHERES for victim in (0, 1, 3)]


def _check(outcomes, how, victim):
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.code == 1 and outcome.error == "CommError", outcome
        assert outcome.seconds < LIMIT + IN_TIME, outcome
        assert f"rank {victim}" in outcome.text, outcome.text
    if not how.startswith("SIG"):
        cause = "the disk is on fire" if how == "exception" else "memory"
        assert all(cause in outcome.text for outcome in outcomes), outcomes
        assert outcomes[victim].code == 1


@pytest.mark.alone
@pytest.mark.parametrize(
    ("how", "where", "victim"),
    [case if case in IN_CI else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_survivors_name_the_rank_in_time(how, where, victim):
    lost = (victim,) if how.startswith("SIG") else ()
    _check(run_to_the_end(lose, 4, how, where, victim, {}, victims=lost), how, victim)


@pytest.mark.alone
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "builtin", "grid": (2, 2)},
        pytest.param({"schedule": "ring"}, marks=pytest.mark.slow),
        pytest.param({"ulysses_size": 2}, marks=pytest.mark.slow),
        pytest.param({"transport": "builtin", "grid": (4, 1)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["SIGSTOP", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_however_it_is_spread(how, options):
    _check(run_to_the_end(lose, 4, how, "forward", 2, options, victims=(2,)), how, 2)


def _steps(rank, world, how, victim):
    """Collectives of torch itself, in rows and columns of the ranks, as a training framework has them."""
    limit = datetime.timedelta(seconds=LIMIT)
    groups = [dist.new_group(ranks, timeout=limit) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    mine = [groups[rank // 2], groups[2 + rank % 2]]
    start_clock()
    for step in range(3):
        with comm.monitored(f"step {step}"):
            if (rank, step) == (victim, 2):
                die(how)
            for group in mine:
                dist.all_reduce(torch.ones(3), group=group)


@pytest.mark.alone
@pytest.mark.parametrize(("how", "victim"), [("SIGSTOP", 3), ("SIGKILL", 1), ("exception", 0)])
def test_a_step_of_training_is_named(how, victim):
    """Others' collectives are interrupted, too, and the error says where in the run it was."""
    outcomes = run_to_the_end(_steps, 4, how, victim, victims=(victim,) if how.startswith("SIG") else ())
    _check(outcomes, how, victim)
    assert all("in step 2" in outcomes[rank].text for rank in range(4) if rank != victim)


def _saves(rank, world, how, victim, folder):
    """A run of training whose second save one rank does not survive."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    number, prepare = itertools.count(1), FileSystemWriterAsync.prepare_write_data

    def prepare_write_data(*args, **kwargs):
        if next(number) == 2:
            start_clock()
            if rank == victim:
                die(how)
        return prepare(*args, **kwargs)

    FileSystemWriterAsync.prepare_write_data = prepare_write_data
    options = f"--context-parallel-size 2 --data-path {folder / 'text'} --save {folder / 'kept'} --save-interval 2"
    minutes = f"--distributed-timeout-minutes {SAVE_LIMIT / 60}"
    return train_all(rank, world, [(folder / "run", f"{options} {minutes}")])


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(("how", "victim"), [("SIGSTOP", 1), ("SIGKILL", 3), ("exception", 0), ("out of memory", 2)])
def test_a_save_of_training_is_named(how, victim, tmp_path):
    """Survivors of a save say who was lost in which save, in time, and the checkpoint before is in force."""
    pytest.importorskip("megatron.core", reason="saves are Megatron's")
    from megatron_tree.tools.training.checkpoint import TRACKER

    write_text(tmp_path / "text")
    lost = (victim,) if how.startswith("SIG") else ()
    outcomes = run_to_the_end(_saves, 4, how, victim, tmp_path, victims=lost, limit=SAVE_LIMIT)
    for rank in {0, 1, 2, 3} - {victim}:
        outcome = outcomes[rank]
        assert outcome.code == 1 and outcome.error == "CommError", outcome
        assert outcome.seconds < SAVE_LIMIT + IN_TIME, outcome
        assert f"rank {victim}" in outcome.text and "in the save after step 4" in outcome.text, outcome.text
    assert (tmp_path / "kept" / TRACKER).read_text() == "2\n"


def _slow(rank, world):
    config = TreeConfig(timeout_s=10)
    results = [call("forward", world, rank, config=config)]
    if rank == 1:
        time.sleep(1.0)  # ten looks at the news
    return results + [call("forward", world, rank, config=config)]


def test_a_slow_rank_is_waited_for():
    for outcome in run_to_the_end(_slow, 3):
        assert outcome.code == 0 and outcome.value[0] == outcome.value[1], outcome


def _stuck(rank, world, how, transport, seconds):
    config = TreeConfig(timeout_s=60, transport=transport)
    call("decode", world, rank, config=config)  # what comes first may take long, and is not limited
    start_clock()
    with comm.monitored("serving", wait_limit_s=LIMIT):
        if rank == 1 and how == "SIGSTOP":
            die("SIGSTOP")
        if rank == 1:
            time.sleep(seconds)
        call("decode", world, rank, config=config)
        return comm.waited_s()


@pytest.mark.alone
@pytest.mark.parametrize("transport", [pytest.param("direct", marks=pytest.mark.slow), "shm"])
def test_a_region_limits_each_wait(transport):
    """The calls' own time limit is a long one."""
    for rank, outcome in enumerate(run_to_the_end(_stuck, 3, "SIGSTOP", transport, 0, victims=(1,))):
        if rank != 1:
            assert outcome.error == "CommError" and outcome.seconds < LIMIT + IN_TIME, outcome
            assert f"rank 1 did not respond within {LIMIT:g} s" in outcome.text and "serving" in outcome.text


@pytest.mark.alone
def test_a_region_lets_shorter_waits_pass():
    for outcome in run_to_the_end(_stuck, 2, "slow", "direct", LIMIT / 4):
        assert outcome.code == 0 and outcome.value == 0, outcome


def _half_of_a_message(rank, world, sender):
    """Ranks 0 and 2 wait for rank 1; rank 1 dies while a message between it and rank 0 is under way."""
    from megatron_tree.core.comm.work import Mail

    store, x = dist.distributed_c10d._get_default_store(), torch.zeros(64 << 20)
    dist.barrier()
    mail = Mail("a large message", bound(timeout_s=60.0))
    if rank == 1:
        store.set("victim", str(os.getpid()))
    if rank == 2:
        return mail.wait(mail.receive(x, 1))
    receives = rank != sender
    message = mail.receive(x, 1 - rank) if receives else mail.send(x.fill_(1), 1 - rank)
    start_clock()

    def kill_halfway():
        while x[0] == 0:
            pass
        os.kill(int(store.get("victim")), signal.SIGKILL)

    if receives:
        threading.Thread(target=kill_halfway).start()
    mail.wait(message) if receives else mail.sent()
    time.sleep(60)


@pytest.mark.alone
@pytest.mark.parametrize("sender", [0, 1])
def test_half_of_a_message(sender):
    """gloo forgets such a message when its connection closes: its wait would last until the limit of 60 seconds."""
    outcomes = run_to_the_end(_half_of_a_message, 3, sender, victims=(1,))
    for outcome in outcomes[::2]:
        assert outcome.error == "CommError" and "rank 1" in outcome.text and outcome.seconds < IN_TIME, outcome


def _rebuilt(rank, world):
    """Three of four ranks go on in a group of their own, after the fourth has died in the midst of a call."""
    try:
        lose(rank, world, "SIGKILL", "forward", 3, {})
    except CommError as error:
        first = str(error)
    with pytest.raises(CommError, match="can't be used any more"):
        call("forward", world, rank)
    group = dist.new_group([0, 1, 2], use_local_synchronization=True)
    with pytest.raises(ValueError, match="causal"):  # the new one compares again
        tree_attn_func(*(torch.ones(1, 4, 2, 8) for _ in "qkv"), cp_group=group, causal=rank == 1)
    return first, [call(where, 3, rank, group) for where in WHERES]


def _undisturbed(rank, world):
    return "", [call(where, world, rank) for where in WHERES]


@pytest.mark.alone
def test_survivors_go_on_in_a_new_group():
    outcomes = run_to_the_end(_rebuilt, 4, victims=(3,))[:3]
    expected = run_to_the_end(_undisturbed, 3)
    assert [outcome.value[1] for outcome in outcomes] == [outcome.value[1] for outcome in expected]
    assert all("rank 3" in outcome.value[0] for outcome in outcomes)


def _differ_later(rank, world, options, transport):
    """One rank changes its mind in a later call, while the others do again what they have agreed on."""
    q, k, v = (torch.ones(1, 4, 2, 8) for _ in "qkv")
    same = {"cp_group": dist.group.WORLD, "config": dataclasses.replace(PATIENT, transport=transport)}
    for _ in range(3):
        tree_attn_func(q, k, v, **same)
    dist.barrier()
    started = time.monotonic()
    with pytest.raises(ValueError) as caught:
        tree_attn_func(q, k, v, **{**same, **(options if rank == 1 else {})})
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("options", "words", "transport"),
    [
        ({"causal": False}, ["rank 1 has causal=False", "has causal=True"], "auto"),
        ({"causal": False}, ["rank 1 has causal=False", "has causal=True"], "builtin"),
        ({"config": TreeConfig(timeout_s=30, grid=(3, 1))}, ["config.grid=(3, 1)", "config.grid=None"], "auto"),
        ({"softmax_scale": float("nan")}, ["rank 1 rejected its input", "softmax_scale=nan"], "auto"),
    ],
    ids=["causal", "causal, builtin", "grid", "bad input"],
)
def test_a_rank_that_differs_in_a_later_call(options, words, transport):
    """The others wait for it in a collective already: they are interrupted, and say the same."""
    said = run_distributed(_differ_later, 3, options, transport, fresh=True)
    for rank, (text, seconds) in enumerate(said):
        assert seconds < PATIENT.timeout_s / 2, said
        assert all(word in text for word in words[1 if rank == 1 and "rejected" in words[0] else 0 :]), text
    assert said[0][0] == said[2][0]


def _other_version(rank, world):
    if rank == 1:
        megatron_tree.__version__ = "0.0.1"
    with pytest.raises(ValueError) as caught:
        call("decode", world, rank)
    return str(caught.value)


def test_versions_are_compared():
    said = run_distributed(_other_version, 2, fresh=True)
    assert said[0] == said[1] and "rank 1 has megatron_tree='0.0.1'" in said[0]


def _refused_by_all(rank, world):
    """Everybody's input is bad: an error everywhere, and the group goes on, also where ranks wait outside a call."""
    for _ in range(2):
        with pytest.raises(ValueError, match="softmax_scale"):
            tree_attn_func(*(torch.ones(1, 4, 2, 8) for _ in "qkv"), cp_group=dist.group.WORLD, softmax_scale="big")
    if rank == 1:
        time.sleep(0.5)  # several looks at the news
    return bound().broadcast(torch.tensor([float(rank + 1)]), 1).item()


def test_what_all_refuse_does_no_harm():
    assert run_distributed(_refused_by_all, 3) == [2.0, 2.0, 2.0]


def _swapped(rank, world, check, stamped=True):
    """[20, 10] tokens on one rank, [10, 20] on the other: as many bytes."""
    if not stamped:
        comm.agreement.digest_of = lambda *_: 0
    b, s = ((2, 2), (1, 4))[rank]
    q, k, v = (torch.arange(64.0).reshape(b, s, 2, 8).sin() for _ in "qkv")
    config = TreeConfig(check=check, timeout_s=10, grid=(1, 2))
    return tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config, causal=False)


def test_without_the_check_shapes_that_fit_are_silently_wrong():
    """What the comparison is for, and the digest in tags: messages are equally long, and taken for something else."""
    wrong = run_distributed(_swapped, 2, "never", False, fresh=True)
    assert [tuple(out.shape) for out in wrong] == [(2, 2, 2, 8), (1, 4, 2, 8)]
    assert all(out.isfinite().all() for out in wrong)
    for check in ("first", "never"):
        with pytest.raises(DistributedTestError, match=r"batch=2, seq_len=4.*batch=1, seq_len=8") as caught:
            run_distributed(_swapped, 2, check)
        assert len(caught.value.failures) == 2
