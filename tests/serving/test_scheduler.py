"""Continuous batching: all get what they would get alone, rows are given back, ranks stay in step."""

import sys

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core.errors import TreeError
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Load, QueueFull, Scheduler
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from support.hf_models import plain, prompt, tiny_model, tree_model
from support.plain_runner import PlainRunner, character_tokenizer
from support.ranks import run_distributed
from support.scheduling import make_scheduler, request, serve, tokens_of

LENGTHS = (3, 21, 8, 1, 30, 9)
NEW = (7, 12, 1, 9, 5, 8)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def _staggered(rank, world):
    model = tiny_model("llama")
    scheduler, runner = make_scheduler(model, max_rows=3, token_group=dist.group.WORLD)
    requests = [request(*lengths) for lengths in zip(LENGTHS, NEW)]
    if rank > 0:
        scheduler.run()
        assert not scheduler.run_once()
        return runner.calls, runner.rows, None
    events = serve(scheduler, requests, late={1: 1, 3: 4, 5: 9})
    return runner.calls, runner.rows, [tokens_of(e) for e in events]


def test_greedy_requests_that_come_and_go_get_what_generate_gives_and_ranks_make_the_same_calls(model):
    (calls, rows, tokens), (others, left, _) = run_distributed(_staggered, 2)
    for length, new, got in zip(LENGTHS, NEW, tokens, strict=True):
        assert got == plain(model, prompt(1, length), new)[0][0].tolist()
    assert not rows and not left, "rows were left in the cache"
    assert calls == others and max(len(call[1]) for call in calls if call[0] == "step") == 3


def _sampled(**seeds):
    hot = {"temperature": 1.5, "top_p": 0.95}
    options = (
        (19, 10, {**hot, "top_k": 40}),
        (3, 12, hot),
        (12, 9, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}),
        (25, 8, {"temperature": 0.7, "min_p": 0.05}),
    )
    return [request(length, new, **more, **seeds) for length, new, more in options]


def test_a_seed_gives_the_same_tokens_alone_and_among_others(model):
    requests = _sampled(seed=11)
    alone = [tokens_of(serve(make_scheduler(model)[0], [one])[0]) for one in requests]
    together = serve(make_scheduler(model)[0], requests, late={1: 2, 3: 5})
    assert [tokens_of(e) for e in together] == alone
    unseeded = [tokens_of(serve(make_scheduler(model)[0], _sampled()[:1])[0]) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_several_answers_to_one_prompt_share_its_prefill(model):
    options = {"temperature": 1.0, "seed": 4, "logprobs": 2}
    scheduler, runner = make_scheduler(model, capacity=3 * 28, page_size=4)
    (events,) = serve(scheduler, [request(17, 9, n=3, **options)])
    assert [call[2] for call in runner.calls if call[0] == "prefill"] == [
        prompt(1, 17)[0, i : i + 8].tolist() for i in (0, 8, 16)
    ]
    answers = [tokens_of(events, answer) for answer in range(3)]
    assert len(set(map(tuple, answers))) == 3 and all(len(a) == 9 for a in answers)
    assert answers[0] == tokens_of(serve(make_scheduler(model)[0], [request(17, 9, **options)])[0])
    ends = [e for e in events if e.finish_reason is not None]
    assert [e.last for e in ends] == [False, False, True] and not runner.rows
    assert all(e.usage.prompt_tokens == 17 and e.usage.completion_tokens == 9 for e in ends)
    assert all(len(e.top_logprobs) == 2 and e.logprob < 0 for e in events)
    # an answer of one token needs no row of its own
    scheduler, runner = make_scheduler(model)
    (events,) = serve(scheduler, [request(5, 1, n=4, temperature=1.0)])
    assert len(events) == 4 and [call[0] for call in runner.calls] == ["add", "prefill", "remove"]


def test_running_streams_wait_for_one_chunk_at_most(model):
    """Whatever comes meanwhile: long prompts, many short ones, prompts whose log-probabilities are asked for."""
    scheduler, runner = make_scheduler(model, max_rows=16)
    coming = [request(60, 2), *(request(5 + i, 3) for i in range(6)), request(40, 2, prompt_logprobs=1), request(90, 2)]
    serve(scheduler, [request(3, 60), *coming], late={1 + i: 3 + i // 3 for i in range(len(coming))})
    stream, waited, most = 1, 0, 0
    for name, *arguments in runner.calls:
        if name == "prefill":
            waited += len(arguments[1])
        elif name == "step" and stream in arguments[0]:
            waited, most = 0, max(most, waited)
        elif name == "step":
            waited += len(arguments[1][0])
    assert 0 < most <= runner.chunk_size


def test_cancelled_requests_give_their_rows_back_at_once(model):
    tokenizer = character_tokenizer()
    scheduler, runner = make_scheduler(model, tokenizer, max_rows=2)
    events = [[] for _ in range(4)]
    numbers = [
        scheduler.submit(request(4, 50, stop="\0" * 9), events[0].append),
        scheduler.submit(request(30, 50), events[1].append),
        scheduler.submit(request(4, 3), events[2].append),
        scheduler.submit(request(5, 3), events[3].append),
    ]
    for _ in range(3):
        scheduler.run_once()
    assert len(runner.rows) == 2 and scheduler.load == Load(waiting=2, served=2)
    assert scheduler.cancel(numbers[0]) and scheduler.cancel(numbers[1]) and scheduler.cancel(numbers[3])
    scheduler.run_once()  # one decodes, one is being prefilled, one waits
    assert [e[-1].finish_reason for e in events[:2] + events[3:]] == ["cancelled"] * 3
    assert events[0][-1].token is None and events[0][-1].last and events[3][-1].usage.completion_tokens == 0
    assert len(runner.rows) == 1, "their rows were not freed by the next turn"
    scheduler.stop(grace_s=60.0)
    scheduler.run()
    assert events[2][-1].finish_reason == "length" and not runner.rows
    assert not scheduler.cancel(numbers[0]) and not scheduler.cancel(99)


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_request_waits_until_rows_and_cache_suffice(model, page_size):
    scheduler, runner = make_scheduler(model, max_rows=8, capacity=64, page_size=page_size)
    lengths = [(20, 9), (11, 12), (40, 20), (2, 4), (30, 30), (1, 3)]
    events = serve(scheduler, [request(*length) for length in lengths])
    assert [tokens_of(e) for e in events] == [plain(model, prompt(1, a), b)[0][0].tolist() for a, b in lengths]
    assert max(len(call[1]) for call in runner.calls if call[0] == "step") >= 2
    assert 0 <= runner.least_free < 20
    leftover = PlainRunner(model, capacity=64)
    scheduler = Scheduler(leftover, max_rows=8, max_waiting=2)
    with torch.no_grad():
        PlainRunner.prefill(leftover, leftover.add(), torch.arange(1, 40))
    told = []
    scheduler.submit(request(30, 30), told.append)
    with pytest.raises(TreeError, match="rows that the scheduler did not make are in it"):
        scheduler.run_once()
    assert told[-1].finish_reason == "error" and "rows" in told[-1].error and told[-1].last


def test_the_prompt_of_several_answers_takes_room_once(model):
    scheduler, runner = make_scheduler(model, capacity=40 + 4 * 6)
    (events,) = serve(scheduler, [request(40, 6, n=4, temperature=1.0, seed=1)])
    assert [len(call[1]) for call in runner.calls if call[0] == "step"] == [4] * 5
    assert [len(tokens_of(events, answer)) for answer in range(4)] == [6] * 4
    assert scheduler.preemptions == 0 and runner.least_free == 4


def test_what_can_never_be_served_is_refused(model):
    scheduler, _ = make_scheduler(model, max_rows=2, max_waiting=2, capacity=100, page_size=8)
    for bad, message in (
        (request(200, 100), "200 prompt tokens and max_tokens=100 exceed the model's 256 positions.* at most 56"),
        (request(90, 15), "exceed the cache of 96 tokens"),
        (request(40, 40, n=2), "for each of 2 answers exceed the cache"),
        (request(4, 4, n=3), "n=3 must be from 1 to max_rows=2"),
        (request(4, 4, stop="a"), "stop=.* needs a tokenizer"),
        (request(4, 4, stop_token_ids=(131,)), "stop_token_ids=.131.: the model has"),
        (Request(prompt=[[1]]), "prompt must be"),
        (Request(prompt=["a"]), "prompt must be"),
        (Request(prompt=[5, 131]), "holds the token 131, the model has 0 to 130"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.submit(bad, print)
    for _ in range(2):
        scheduler.submit(request(3, 3), lambda event: None)
    with pytest.raises(QueueFull, match="max_waiting=2 requests wait already"):
        scheduler.submit(request(3, 3), print)
    scheduler.stop()
    with pytest.raises(TreeError, match="takes no more requests: it is stopping"):
        scheduler.submit(request(3, 3), print)
    scheduler.run()
    for options in ({"max_rows": 0}, {"max_waiting": 1.5}, {"heartbeat_s": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make_scheduler(model, **options)
    runner = PlainRunner(model)
    Scheduler(runner, max_rows=1, max_waiting=1, timeout_s=3.0)  # the heartbeat that nobody asked for fits
    with pytest.raises(ValueError, match=r"heartbeat_s=10 must be more than 0 and less than timeout_s=3.0"):
        Scheduler(runner, max_rows=1, max_waiting=1, timeout_s=3.0, heartbeat_s=10)


def test_one_answer_with_broken_logits_ends_and_the_others_go_on(model):
    scheduler, runner = make_scheduler(model)
    step, calls = runner.step, []

    def broken(rows, tokens):
        calls.append(rows)
        logits = step(rows, tokens)
        if len(calls) == 3:
            logits[0] = float("nan")
        return logits

    runner.step = broken
    bad, good = serve(scheduler, [request(3, 9), request(4, 9)])
    assert bad[-1].finish_reason == "error" and "largest logit is nan" in bad[-1].error
    assert tokens_of(good) == plain(model, prompt(1, 4), 9)[0][0].tolist() and not runner.rows


def test_a_kept_row_is_continued_until_it_is_forgotten(model):
    scheduler, runner = make_scheduler(model)
    row, first, second = scheduler.keep(), [], []
    start = prompt(1, 20)[0].tolist()
    options = {"sampling": SamplingParams(max_tokens=3), "row": row}
    scheduler.submit(Request(prompt=start, **options), first.append)
    scheduler.run_until_idle()
    answer = tokens_of(first)
    assert row.tokens == start + answer[:2] and len(runner.rows) == 1, "the last token has not been run"
    runner.calls.clear()
    scheduler.submit(Request(prompt=start + answer + [7, 8], **options), second.append)
    scheduler.run_until_idle()
    assert [call[2] for call in runner.calls if call[0] == "prefill"] == [[answer[2], 7, 8]]
    alone, _ = make_scheduler(model)
    (expected,) = serve(alone, [Request(prompt=start + answer + [7, 8], sampling=SamplingParams(max_tokens=3))])
    assert tokens_of(second) == tokens_of(expected)
    scheduler.forget(row)
    assert not runner.rows
    with pytest.raises(ValueError, match="n=2: a request with a row of its own has one answer"):
        scheduler.submit(Request(prompt=start, row=row, n=2), second.append)


def test_first_come_first_served(model):
    scheduler, ended = make_scheduler(model, max_rows=1)[0], []
    for number in range(4):
        scheduler.submit(request(3, 2), lambda event, number=number: event.last and ended.append(number))
    scheduler.run_until_idle()
    assert ended == [0, 1, 2, 3]


def test_a_short_prompt_goes_before_the_next_chunk_of_a_long_one(model):
    scheduler, runner = make_scheduler(model, chunk_size=8)
    long, short = request(100, 3), request(5, 3)
    told = [], []
    scheduler.submit(long, told[0].append)
    for _ in range(2):
        scheduler.run_once()
    scheduler.submit(short, told[1].append)
    scheduler.run_once()
    assert len(told[1]) == 1 and not told[0]
    scheduler.run_until_idle()
    for asked, events in zip((long, short), told, strict=True):
        assert tokens_of(events) == plain(model, asked.prompt[None], 3)[0][0].tolist()
    chunks = [call[2] for call in runner.calls if call[0] == "prefill" and len(call[2]) != 5]
    assert chunks == [long.prompt[i : i + 8].tolist() for i in range(0, 100, 8)], "chunks don't depend on others"


@pytest.mark.parametrize("at_once", [1, 2])
def test_short_prompts_do_not_keep_a_long_one_waiting(model, at_once):
    scheduler, _ = make_scheduler(model, chunk_size=8)
    long, short = [], []
    scheduler.submit(request(100, 1), long.append)
    turns = 0
    while not long:
        for _ in range(at_once):
            scheduler.submit(request(5, 1), short.append)
        scheduler.run_once()
        turns += 1
        assert turns <= 2 * 13
    assert len(short) >= at_once * (turns // 2)
    scheduler.run_until_idle()


def test_python_calls_of_a_token():
    """Functions of Python and C that are called for 16 + 32 tokens: for each token of 24 rows, and of 16 rows more."""
    model, calls = tree_model("llama"), []
    scheduler = Scheduler(Runner(model, TreeCache(model.config)), max_rows=24, max_waiting=24, end_tokens=())

    def count(frame, event, arg):
        calls[-1] += event in ("call", "c_call")

    for rows in (24, 8, 24):  # the first time something is compiled or read
        answers = [[] for _ in range(rows)]
        calls.append(0)
        sys.setprofile(count)
        try:
            for events in answers:
                scheduler.submit(request(16, 32), events.append)
            scheduler.run_until_idle()
        finally:
            sys.setprofile(None)
        assert [len(tokens_of(events)) for events in answers] == [32] * rows
    _, few, many = calls
    assert many / (24 * 32) <= 96
    assert (many - few) / (16 * 32) <= 17
