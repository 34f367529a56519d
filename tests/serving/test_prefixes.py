"""Prompts that begin alike: their blocks are found again, kept while there is room, and change no token."""

import dataclasses

import pytest
import torch

from megatron_tree.core.cache import RowBook
from megatron_tree.core.cache.prefixes import page_keys
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.integrations.transformers.attention import TreeCache
from support.hf_models import plain, prompt, tiny_model
from support.hf_served import CountingRunner
from support.scheduling import serve, tokens_of

BLOCK = 4
TEXT = prompt(1, 90)[0].tolist()


def _scheduler(model, *, keep_bytes=1 << 30, max_rows=16, capacity=None, **options):
    cache = TreeCache(model.config, cp_group=None, page_size=BLOCK, **options)
    runner = CountingRunner(model, cache, chunk_size=32, capacity_tokens=capacity)
    return Scheduler(runner, max_rows=max_rows, max_waiting=64, keep_bytes=keep_bytes, heartbeat_s=0.1), runner


def _model(family="llama"):
    model = tiny_model(family)
    model.set_attn_implementation("tree")
    return model


def _questions(count, text=TEXT, new=5, **options):
    params = SamplingParams(max_tokens=new, **options)
    return [Request(prompt=[*text, 7 + i, 3, 5 + 2 * i], sampling=params) for i in range(count)]


def _ask(scheduler, request):
    events = []
    scheduler.submit(request, events.append)
    scheduler.run_until_idle()
    return tokens_of(events)


def test_prompts_of_which_lengths_run_together():
    model = tiny_model("llama", positions=1024)
    model.set_attn_implementation("tree")
    runner = CountingRunner(model, TreeCache(model.config, page_size=BLOCK), chunk_size=512)
    scheduler = Scheduler(runner, max_rows=8, max_waiting=8, heartbeat_s=0.1)
    for n in (20, 200, 300, 250, 30):
        scheduler.submit(Request(prompt=[3] * n, sampling=SamplingParams(max_tokens=300)), lambda event: None)
    for _ in range(2):
        scheduler.run_once()
    assert runner.together == [[20, 200, 250, 30]] and runner.num_run == 800


def _want(request, family="llama"):
    return plain(tiny_model(family), torch.tensor([request.prompt]), request.sampling.max_tokens)[0][0].tolist()


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
def test_later_questions_run_little_more_than_themselves(family):
    scheduler, runner = _scheduler(_model(family))
    for i, question in enumerate(_questions(6)):
        before = runner.num_run
        assert _ask(scheduler, question) == _want(question, family)
        run = runner.num_run - before
        assert run == 93 if i == 0 else run <= 3 + BLOCK, run


def test_prompts_are_shared_by_those_with_the_same_salt():
    scheduler, _ = _scheduler(_model("deepseek_v3"))
    question, cached = _questions(1)[0], []
    for salt in ("", "a", "b", "a", "", "ab"):
        events = []
        asked = dataclasses.replace(question, salt=salt)
        scheduler.submit(asked, events.append)
        scheduler.run_until_idle()
        assert tokens_of(events) == _want(question, "deepseek_v3")
        cached.append(events[-1].usage.cached_tokens)
    assert cached[:3] == [0, 0, 0] and cached[5] == 0 and min(cached[3:5]) >= 92 - BLOCK
    answers = serve(scheduler, [dataclasses.replace(question, salt=salt) for salt in ("c", "d", "d")])
    assert [events[-1].usage.cached_tokens for events in answers] == [0, 0, cached[3]], "rows under way, too"


def test_questions_that_come_together_wait_for_the_first():
    scheduler, runner = _scheduler(_model())
    questions = _questions(16)
    events = serve(scheduler, questions)
    assert [tokens_of(e) for e in events] == [_want(question) for question in questions]
    assert runner.num_run <= 93 + 15 * (3 + BLOCK)


def test_prompts_whose_log_probabilities_are_asked_for_are_run_whole():
    scored = _questions(2, prompt_logprobs=0)
    events = serve(_scheduler(_model())[0], [*_questions(1), *scored], late={2: 9})
    for question, answer in zip(scored, events[1:], strict=True):
        assert tokens_of(answer) == _want(question)
        ids = torch.tensor([question.prompt])
        want = tiny_model("llama")(ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert [choice.token for choice in answer[0].prompt_logprobs] == question.prompt[1:]
        assert [choice.logprob for choice in answer[0].prompt_logprobs] == pytest.approx(want.tolist(), abs=1e-4)


def test_answers_are_found_again_in_a_conversation():
    scheduler, runner = _scheduler(_model())
    (first,) = _questions(1, new=9)
    answer = _ask(scheduler, first)
    before = runner.num_run
    second = Request(prompt=[*first.prompt, *answer, 9, 9], sampling=SamplingParams(max_tokens=3))
    assert _ask(scheduler, second) == _want(second)
    assert runner.num_run - before <= 1 + 2 + BLOCK
    # the same again: all but its last token is held; several answers to it are sampled as without the cache
    before = runner.num_run
    sampled = Request(prompt=second.prompt, sampling=SamplingParams(max_tokens=4, temperature=1.0, seed=3), n=3)
    (events,) = serve(scheduler, [sampled])
    assert runner.num_run - before <= BLOCK
    (alone,) = serve(_scheduler(_model(), keep_bytes=0)[0], [sampled])
    assert [tokens_of(events, i) for i in range(3)] == [tokens_of(alone, i) for i in range(3)]


def test_a_small_budget_evicts_and_changes_nothing():
    model = _model()
    texts = [prompt(1, 40 + 7 * i)[0].tolist()[::-1] for i in range(3)]
    requests = [question for _ in range(2) for text in texts for question in _questions(2, text)]
    scheduler, runner = _scheduler(model)
    everything = [_ask(scheduler, request) for request in requests]
    most = runner.used_bytes
    assert everything == [_want(request) for request in requests]
    for share in (3, 100):
        limit = most // share
        scheduler, runner = _scheduler(model, keep_bytes=limit)
        assert [_ask(scheduler, request) for request in requests] == everything
        assert runner.used_bytes <= limit
    scheduler, runner = _scheduler(model, keep_bytes=0)
    assert [_ask(scheduler, request) for request in requests[:2]] == everything[:2]
    assert runner.used_bytes == 0 and not runner.store.book.rows


def test_kept_rows_give_way_to_requests():
    scheduler, runner = _scheduler(_model(), capacity=240, max_rows=4)
    texts = [prompt(1, 60 + 7 * i)[0].tolist()[::-1] for i in range(5)]
    requests = [question for text in texts for question in _questions(3, text)]
    events = serve(scheduler, requests)
    assert [tokens_of(e) for e in events] == [_want(request) for request in requests]
    # a request that fits only in place of the row that it continues takes that row
    scheduler, runner = _scheduler(_model(), capacity=100, max_rows=4)
    for i, question in enumerate(_questions(3)):
        before = runner.num_run
        assert _ask(scheduler, question) == _want(question)
        assert i == 0 or runner.num_run - before <= 3 + BLOCK


def test_cancelled_prompts_are_kept_as_far_as_they_have_come():
    scheduler, runner = _scheduler(_model())
    (question,) = _questions(1)
    told = []
    number = scheduler.submit(question, told.append)
    for _ in range(2):
        scheduler.run_once()
    scheduler.cancel(number)
    scheduler.run_until_idle()
    assert told[-1].finish_reason == "cancelled" and runner.num_run == 64
    assert _ask(scheduler, question) == _want(question)
    assert runner.num_run == 93


def test_the_index():
    book = RowBook(0, 1, 2)

    def hold(tokens):
        row, keys = book.add(), page_keys(tokens, 2)
        book.append([row], len(tokens))
        pages = book.pages_to_share(row, keys)
        book.share(row, pages, keys)
        return row, pages

    find = lambda tokens: book.prefixes.find(page_keys(tokens, 2))  # noqa: E731
    first, pages = hold([1, 2, 3, 4, 5])
    assert pages == [0, 1] and len(find([1, 2, 3, 4, 5, 6])) == 2 and len(find([1, 2, 9, 9])) == 1
    assert find([1]) == [] and find([2, 2, 3, 4]) == []
    assert find([9, 9, 3, 4]) == [], "a page is found behind its own beginning only"
    others = [hold(tokens) for tokens in ([1, 2, 7, 7], [8, 8], [1, 2, 3, 4], [1])]
    assert [pages for _, pages in others] == [[1], [0], [], []], "held elsewhere, or not full"
    assert not book.prefixes.unused
    for row, _ in others:
        book.remove(row)
    book.remove(first)
    assert len(book.prefixes.unused) == sum(book.loads) == book.numbers[0].used == 4
    again = book.add()
    book.begin(again, find([1, 2, 3, 4]))
    assert book.rows[again].length == 4 and len(book.prefixes.unused) == 2
    book.remove(again)
    for left in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2], []):  # used last, and the end before the beginning
        book.evict(1)
        assert len(find([1, 2, 3, 4])) == len(left) // 2
    assert not book.prefixes.unused and not sum(book.loads) and not book.numbers[0].used
