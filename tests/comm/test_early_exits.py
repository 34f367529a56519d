"""Ranks that end their program, without an error, while others wait for them; and those that may."""

import atexit
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core.comm.store import Farewell, _leave_without_calls
from megatron_tree.core.comm.work import Mail
from support.bound import bound
from support.failing_ranks import IN_TIME, PATIENT, call, run_to_the_end, start_clock
from support.processes import free_port
from support.ranks import WORKER_ENV

LOCAL_S = 2.2  # of work without the others: they ask twice meanwhile who has left


def end():
    """As a process ends after its last line; what was registered before the fork does not run by itself."""
    _leave_without_calls()
    atexit._run_exitfuncs()
    os._exit(0)


def _wait(rank, world, before, then, leaver, destroys):
    if before:
        call(before, world, rank, config=PATIENT)
    if rank == leaver:
        if destroys:
            group = dist.group.WORLD  # which it still has in a variable
            dist.destroy_process_group()
            time.sleep(1.0)  # it goes on alone
            del group
        end()
    start_clock()
    for _ in range(2):  # a rank that needs nothing of the one that has left needs it in the next call
        call(then, world, rank, config=PATIENT)


@pytest.mark.parametrize(
    ("before", "then", "leaver", "destroys"),
    [
        ("", "forward", 1, False),
        ("backward", "backward", 2, False),
        ("", "decode", 2, False),
        pytest.param("decode", "decode", 1, False, marks=pytest.mark.slow),
        pytest.param("forward", "decode", 1, True, marks=pytest.mark.slow),
    ],
)
def test_who_has_ended_is_named_at_once(before, then, leaver, destroys):
    """Also in what the ranks have not compared before, where no connection closes."""
    how = "destroy_process_group" if destroys else "exit"
    for rank, outcome in enumerate(run_to_the_end(_wait, 3, before, then, leaver, destroys, victims=(leaver,))):
        if rank != leaver:
            assert outcome.error == "CommError" and outcome.seconds < IN_TIME, outcome
            assert f"rank {leaver} ended its program ({how})" in outcome.text, outcome
            assert ".cc:" not in outcome.text and "typically" not in outcome.text, (
                "what gloo adds says nothing to users"
            )


def _first_rank_alone(rank, world):
    if rank > 0:
        end()
    time.sleep(1.0)
    call("forward", world, rank, config=PATIENT)


def test_all_who_have_ended_are_named():
    first, *_ = run_to_the_end(_first_rank_alone, 3, victims=(1, 2))
    wanted = "ranks [1, 2] ended their programs (exit) while rank 0 waited in tree_attn_func, call 1 of its group"
    assert (first.error, first.text) == ("CommError", wanted)


PROGRAM = """\
import sys, torch, torch.distributed as dist
from megatron_tree import tree_attn_func
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    {}["a sample"]
q, k, v = (torch.ones(1, 4, 2, 8) for _ in "qkv")
tree_attn_func(q, k, v, cp_group=dist.group.WORLD)
"""


def test_a_program_that_fails_between_calls_is_named(tmp_path):
    """Processes of their own, as a launcher starts them."""
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join(filter(None, sys.path))
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py"], env={**os.environ, **WORKER_ENV, **job, "RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "KeyError: 'a sample'" in said[1] and [rank.returncode for rank in ranks] == [1, 1]
    assert "CommError: rank 1 ended its program (KeyError) while rank 0 waited in tree_attn_func, call 1" in said[0]


def _ends_early(rank, world):
    """The last rank has done its part of the second call and ends; the middle one still waits for the first one."""
    ranks, x = bound(timeout_s=30.0), torch.ones(1)
    for late in (False, True):
        if late and rank == 0:
            time.sleep(LOCAL_S)
        with ranks.call("a call") as call:
            call.agree()
            mail, began = Mail("a message", ranks), time.monotonic()
            if rank == 0:
                mail.send(x, 1)
            if rank == 1:
                mail.wait(mail.receive(x, 0))
            mail.sent()
    if rank == 2:
        end()
    return time.monotonic() - began


def test_a_rank_that_has_done_its_part_may_end():
    """While others still wait in the same call, or go on alone: no error."""
    first, middle, _ = run_to_the_end(_ends_early, 3, victims=(2,))
    assert (first.code, middle.code) == (0, 0), (first, middle)
    assert middle.value > LOCAL_S / 2


def _again(rank, world):
    """Rank 1 comes late. With the same store it had another default group before, and left that."""
    store = dist.distributed_c10d._get_default_store()
    Farewell("destroy_process_group", False, {"megatron_tree/0/7": 3}).leave(store, 1)
    if rank == 1:
        time.sleep(LOCAL_S)
    call("forward", world, rank, config=PATIENT)


def test_what_was_left_in_an_earlier_group_does_no_harm():
    outcomes = run_to_the_end(_again, 2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
