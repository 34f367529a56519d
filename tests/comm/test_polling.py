"""The thread that asks the job's store whether another rank failed: how often, and its end."""

import datetime
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core import comm
from megatron_tree.core.comm import store
from megatron_tree.core.comm.watchdog import Watchdog
from support.failing_ranks import LIMIT, die, run_to_the_end, start_clock
from support.ranks import run_distributed


def _polls(rank, world, polls_per_s):
    """(polls in a monitored region, how many there may be, how many of ten a second)."""
    polls, poll = [], Watchdog.poll
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "POLLS_PER_S", polls_per_s)
        patch.setattr(Watchdog, "poll", lambda self, store: polls.append(self) or poll(self, store))
        with comm.monitored("the region"):
            polls.clear()
            began = time.monotonic()
            time.sleep(1.2)
            count, took = len(polls), time.monotonic() - began
        dist.barrier()
    return count, 1 + took * polls_per_s / world, 1 + took / store.POLL_S


def test_a_large_job_asks_the_store_less_often():
    """Two ranks whose store takes two questions a second, as it takes 1,000 of 4,096 ranks; and with room for all."""
    for polls, allowed, _ in run_distributed(_polls, 2, 2, fresh=True):
        assert polls <= allowed
    for polls, _, allowed in run_distributed(_polls, 2, store.POLLS_PER_S, fresh=True):
        assert 1 <= polls <= allowed


def _late_reports(rank, world):
    """Rank 0 waits for rank 1, which waits for rank 2, which is frozen; only rank 0 has a short time limit."""
    store.POLLS_PER_S = 1
    limits = ((0, 1), LIMIT), ((1, 2), 60.0)
    first, second = (dist.new_group(ranks, timeout=datetime.timedelta(seconds=limit)) for ranks, limit in limits)
    start_clock()
    with comm.monitored("the region"):
        if rank == 2:
            die("SIGSTOP")
        dist.all_reduce(torch.ones(3), group=second if rank else first)


@pytest.mark.slow
def test_who_asks_less_often_has_longer_to_report():
    """Rank 1 hears of the failure seconds later, and is not taken for the one that failed."""
    for outcome in run_to_the_end(_late_reports, 3, victims=(2,))[:2]:
        assert outcome.error == "CommError" and "rank 2 did not respond" in outcome.text, outcome


AT_THE_END = """
import time
import torch.distributed as dist
from megatron_tree.core.comm.store import StoreClient

def busy(store):
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        store.check(["nothing"])
    yield

dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, is_master=True), rank=0, world_size=1)
StoreClient.here().submit(busy)
time.sleep(0.2)
"""


def test_the_interpreter_ends_while_the_store_is_asked():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
