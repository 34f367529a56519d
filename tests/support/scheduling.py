"""Requests, schedulers over a plain runner, and serving them, for tests."""

import pytest

from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from support.hf_models import prompt
from support.plain_runner import PlainRunner


def request(length, new, n=1, **options):
    return Request(prompt=prompt(1, length)[0], sampling=SamplingParams(max_tokens=new, **options), n=n)


def make_scheduler(
    model,
    tokenizer=None,
    *,
    max_rows=4,
    max_waiting=16,
    token_group=None,
    heartbeat_s=0.01,
    speculation=None,
    **options,
):
    runner = PlainRunner(model, token_group=token_group, **options)
    limits = {"max_rows": max_rows, "max_waiting": max_waiting, "heartbeat_s": heartbeat_s}
    return Scheduler(runner, tokenizer, speculation=speculation, **limits), runner


def serve(scheduler, requests, *, late=None):
    """Serve requests: the events of each. late: number of a request -> the turn in which it is submitted."""
    events, todo, turn = [[] for _ in requests], list(range(len(requests))), 0
    while True:
        for number in [i for i in todo if (late or {}).get(i, 0) <= turn]:
            scheduler.submit(requests[number], events[number].append)
            todo.remove(number)
        if not todo:
            scheduler.stop(grace_s=60.0)
        if not scheduler.run_once():
            return events
        turn += 1


def tokens_of(events, answer=0):
    return [e.token for e in events if e.token is not None and e.answer == answer]


def text_of(events, answer=0):
    return "".join(e.text for e in events if e.answer == answer)


def assert_alike(found, wanted):
    """Events of requests: the same tokens, texts and ends of every answer, and log-probabilities but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        answers = {e.answer for e in other}
        assert {e.answer for e in one} == answers
        for answer in answers:
            mine, theirs = ([e for e in events if e.answer == answer] for events in (one, other))
            ends = [[(e.token, e.finish_reason, e.stop_reason) for e in events] for events in (mine, theirs)]
            assert ends[0] == ends[1] and text_of(one, answer) == text_of(other, answer)
            logprobs = [[e.logprob for e in events if e.logprob is not None] for events in (mine, theirs)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
