"""The scheduler's loop on two ranks: clients in other threads, an idle leader, failures that nobody waits for."""

import threading

import pytest
import torch.distributed as dist

from megatron_tree.core.errors import TreeError
from support.hf_models import plain, prompt, tiny_model
from support.ranks import run_distributed
from support.scheduling import make_scheduler, request, tokens_of


def _threads(rank, world):
    """Requests of other threads, an idle leader in between, and a stop while a request is open."""
    model = tiny_model("llama")
    scheduler, runner = make_scheduler(model, token_group=dist.group.WORLD, heartbeat_s=0.1)
    if rank > 0:
        scheduler.run()
        return len(runner.rows), None
    events, ended = [[] for _ in range(7)], threading.Semaphore(0)

    def sink(number):
        def take(event):
            events[number].append(event)
            if event.last:
                ended.release()

        return take

    def client(number):
        scheduler.submit(request(4 + number, 5), sink(number))

    def clients():
        for wave in ((0, 1, 2), (3, 4, 5)):
            threads = [threading.Thread(target=client, args=(n,)) for n in wave]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
                ended.acquire()
            threading.Event().wait(0.5)  # longer than several heartbeats
        scheduler.submit(request(4, 200), sink(6))
        scheduler.stop()

    main = threading.Thread(target=clients)
    main.start()
    scheduler.run()
    main.join()
    return len(runner.rows), [(tokens_of(e), e[-1].finish_reason) for e in events]


def test_other_threads_submit_while_the_leader_idles():
    model = tiny_model("llama")
    (left, told), (others, _) = run_distributed(_threads, 2)
    assert left == others == 0
    for number in range(6):
        assert told[number] == (plain(model, prompt(1, 4 + number), 5)[0][0].tolist(), "length")
    assert told[6][1] == "cancelled"


def _failing(rank, world, where):
    scheduler, _ = make_scheduler(tiny_model("llama"), token_group=dist.group.WORLD)
    if rank > 0:
        with pytest.raises(ValueError, match="only rank 0"):
            scheduler.submit(request(3, 3), print)
        scheduler.run()
    other = []
    scheduler.submit(request(5, 30), other.append)

    def sink(event):
        if where == "sink":
            raise KeyError("broken pipe")

    scheduler.submit(request(3, 3), sink)
    if where == "plan":
        scheduler._batcher.passes = lambda: 1 // 0
    try:
        scheduler.run()
    finally:
        assert other[-1].finish_reason == "error" and other[-1].last
        with pytest.raises(TreeError, match="takes no more requests"):
            scheduler.submit(request(3, 3), print)


@pytest.mark.parametrize(("where", "name"), [("sink", "KeyError"), ("plan", "ZeroDivisionError")])
def test_a_failure_of_the_leader_ends_all_ranks_at_once(where, name):
    with pytest.raises(Exception) as caught:
        run_distributed(_failing, 2, where, timeout=60.0)
    failures = caught.value.failures
    assert set(failures) == {0, 1}, caught.value
    assert name in failures[0] and f"TreeError: rank 0 of the scheduler failed: {name}" in failures[1]
