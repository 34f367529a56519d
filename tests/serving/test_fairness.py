"""Who goes first: priorities, turns of clients, shares of the queue."""

import pytest

pytest.importorskip("transformers")

from dataclasses import replace

from megatron_tree.generation.scheduler import QueueFull
from support.hf_models import tiny_model
from support.scheduling import make_scheduler, request


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def _order(scheduler, requests):
    """Numbers of the requests in the order in which they end."""
    ended = []
    for number, one in enumerate(requests):
        scheduler.submit(one, lambda event, number=number: event.last and ended.append(number))
    scheduler.run_until_idle()
    return ended


def _from(client, count=1, **options):
    return [replace(request(3, 2), client=client, **options) for _ in range(count)]


def test_clients_take_turns_and_lower_priorities_go_first(model):
    scheduler, _ = make_scheduler(model, max_rows=1)
    requests = [*_from("many", 6), *_from("two", 2), *_from("one"), *_from("many", 1, priority=-1)]
    requests += _from("other", 2, priority=3)
    assert _order(scheduler, requests) == [9, 0, 6, 8, 1, 7, 2, 3, 4, 5, 10, 11]
    assert _order(scheduler, _from("same", 4)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="priority='high' must be an integer; lower ones go first"):
        scheduler.submit(replace(request(3, 2), priority="high"), print)


def test_a_flood_leaves_the_others_their_share_of_the_queue(model):
    scheduler, _ = make_scheduler(model, max_rows=1, max_waiting=4)

    def send(client, count):
        for one in _from(client, count):
            scheduler.submit(one, lambda event: None)

    send("many", 4)
    with pytest.raises(QueueFull, match="max_waiting=4 requests wait already"):
        send("many", 1)
    send("few", 2)
    send("third", 1)
    for client in ("many", "few", "third"):
        with pytest.raises(QueueFull):
            send(client, 1)
    assert scheduler.load.waiting == 7
    send("fourth", 1)
    with pytest.raises(QueueFull):  # many clients make no endless queue
        send("fifth", 1)
    scheduler.run_until_idle()
    assert scheduler.load == (0, 0)
