"""JSON schemas that are too much end a process that knows nothing else; masks that are late keep nobody waiting."""

import concurrent.futures
import json
import time

import psutil
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("llguidance")

from megatron_tree.core import comm
from megatron_tree.core.errors import TreeError
from megatron_tree.inference.generation import room
from megatron_tree.inference.generation.grammars import Grammar, Grammars
from support import hostile_schemas
from support.http_server import byte_model, byte_tokenizer, until
from support.ranks import run_distributed
from support.scheduling import assert_alike, make_scheduler, request, serve, text_of, tokens_of

TOKENIZER = byte_tokenizer()
WORDS = json.dumps({"type": "string", "pattern": "^([a-z]{3},){20}$"})


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(TOKENIZER, vocab_size=257, end_tokens=[256])
    yield made
    made.close()


@pytest.fixture(scope="module")
def model():
    return byte_model()


@pytest.mark.parametrize("name", hostile_schemas.REFUSED)
def test_a_schema_that_is_too_much_is_a_sentence(grammars, name):
    schema, words = hostile_schemas.REFUSED[name]
    with pytest.raises(ValueError, match=words) as refused:
        grammars.check(json.dumps(schema))
    assert str(refused.value).startswith("json_schema: ") and len(str(refused.value)) < 400
    grammars.check(WORDS)


def test_large_and_recursive_schemas_that_are_not_too_much(grammars):
    for name, schema in hostile_schemas.TAKEN.items():
        grammars.check(json.dumps(schema)), name


def _copies(grammars):
    return psutil.Process(grammars._process.pid).children()


def test_the_end_of_one_copy_is_not_that_of_another(grammars):
    until(lambda: not _copies(grammars))  # those of the tests before end by themselves
    good, bad = grammars.grammar(WORDS), grammars.grammar(json.dumps(hostile_schemas.PATTERNS))
    try:
        quote = torch.zeros(257, dtype=torch.bool)
        quote[TOKENIZER('"').input_ids] = True
        matchers = [good.matcher(i) for i in range(2)]
        assert len(_copies(grammars)) == 0, "before the first question"
        for matcher in matchers:
            matcher.compute()
            assert matcher.mask.result().equal(quote)
        failing = bad.ask(0, [])
        matchers[0].take(int(quote.nonzero()))
        matchers[0].compute()
        letters = torch.zeros(257, dtype=torch.bool)
        letters[TOKENIZER("abcdefghijklmnopqrstuvwxyz").input_ids] = True
        assert matchers[0].mask.result().equal(letters)
        with pytest.raises(TreeError, match="schema simpler"):
            failing.result()
        with pytest.raises(TreeError, match="schema simpler"):
            bad.ask(1, []).result()
        matchers[1].compute()
        assert matchers[1].mask.result().equal(quote), "answers to a request go their own ways"
    finally:
        good.close()
        bad.close()
    until(lambda: not _copies(grammars))


def test_nobody_computes_for_who_has_gone(grammars):
    grammar = grammars.grammar(json.dumps(hostile_schemas.PATTERNS))
    grammar.ask(0, [])
    until(lambda: _copies(grammars))
    grammar.close()
    until(lambda: not _copies(grammars))


def test_the_process_is_started_again(grammars):
    grammars.check(WORDS)
    grammars._process.kill()
    grammars._process.wait()
    grammars.check(WORDS.replace("20", "21"))


def test_what_a_process_can_not_read_is_told():
    slow = Grammars(object(), vocab_size=257)
    with pytest.raises(ValueError, match="json_schema: needs a fast tokenizer"):
        slow.check(WORDS)
    wrong = Grammars(TOKENIZER, vocab_size=3)
    try:
        with pytest.raises(ValueError, match="json_schema: llguidance can't read the tokenizer"):
            wrong.check(WORDS)
    finally:
        wrong.close()


class Late:
    """Masks come when they are let go; `computed` counts those that were asked for."""

    def __init__(self, monkeypatch):
        self._ask, self.waiting, self.computed = Grammar.ask, [], 0
        monkeypatch.setattr(room, "SOON", 2)  # hardly any foresight: answers find no room later
        monkeypatch.setattr(Grammar, "ask", lambda *args: self._late(*args))

    def _late(self, grammar, answer, tokens):
        self.computed += 1
        mask = concurrent.futures.Future()
        mask.add_done_callback(lambda _: grammar._grammars.on_mask())
        self.waiting.append((mask, self._ask(grammar, answer, tokens)))
        return mask

    def let_go(self):
        going, self.waiting = self.waiting, []
        for mask, real in going:
            mask.set_result(real.result())


HOT = {"temperature": 1.0, "seed": 5}
REQUESTS = [request(4, 12, n=2, json_schema=WORDS, logprobs=1, **HOT), request(9, 40, ignore_eos=True)]


@pytest.mark.parametrize("options", [{}, {"capacity": 64, "page_size": 4}, {"prefill_first": True}])
def test_an_answer_whose_mask_is_late_keeps_nobody(model, monkeypatch, options):
    first = options.pop("prefill_first", False)
    want = serve(make_scheduler(model, TOKENIZER)[0], REQUESTS)
    late = Late(monkeypatch)
    scheduler, runner = make_scheduler(model, TOKENIZER, **options)
    scheduler._batcher._prefill_first = first
    told = [], []
    for asked, events in zip(REQUESTS, told, strict=True):
        scheduler.submit(asked, events.append)
    while not (told[1] and told[1][-1].last):
        assert scheduler.run_once() and not told[0]
    scheduler.run_once()  # its row goes
    assert late.computed == 2
    plans, share = [], scheduler._share
    scheduler._share = lambda plan: plans.append(plan) or share(plan)
    scheduler._heartbeat_s = 0.3
    scheduler.run_once()
    assert len(plans) == 1, "it waits for masks"
    while not told[0] or not told[0][-1].last:
        late.let_go()
        scheduler.run_once()
    assert_alike(told, want)
    assert late.computed == 24 and "," in text_of(told[0]) and (options or not runner.rows)


def test_who_waits_for_a_mask_can_pause_and_be_cancelled(model, monkeypatch):
    late = Late(monkeypatch)
    scheduler, runner = make_scheduler(model, TOKENIZER, max_rows=3, capacity=48)
    told = [], []
    scheduler.submit(request(4, 40, ignore_eos=True), told[0].append)
    number = scheduler.submit(request(4, 30, json_schema=WORDS), told[1].append)
    while len(tokens_of(told[1])) < 8:
        late.let_go()
        scheduler.run_once()
    while not scheduler.preemptions:
        scheduler.run_once()
    assert len(tokens_of(told[1])) == 8 and told[0][-1].finish_reason is None
    scheduler.cancel(number)
    scheduler.run_until_idle()
    assert told[1][-1].finish_reason == "cancelled" and told[0][-1].finish_reason == "length" and not runner.rows


def test_a_mask_that_fails_ends_its_answer_alone(model):
    """The first mask is in time; a later one is too much, which `check` can't know."""
    scheduler, runner = make_scheduler(model, TOKENIZER)
    requests = [request(4, 40, json_schema=json.dumps(hostile_schemas.LATER), **HOT), *REQUESTS]
    scheduler.check(requests[0])
    told = serve(scheduler, requests)
    assert told[0][-1].finish_reason == "error" and told[0][-1].error.startswith("json_schema: ")
    assert_alike(told[1:], serve(make_scheduler(model, TOKENIZER)[0], REQUESTS))
    assert not runner.rows


def _behind_a_limit(rank, world):
    """Rank 0 waits for a mask for longer than rank 1 may wait for it."""
    with comm.monitored("serving", wait_limit_s=3.0):
        scheduler, runner = make_scheduler(byte_model(), TOKENIZER, token_group=dist.group.WORLD, heartbeat_s=None)
        if rank > 0:
            scheduler.run()
            return len(runner.rows), None
        ask = Grammar._ask
        Grammar._ask = lambda *args: time.sleep(5.0 if args[2] == 0 else 0.0) or ask(*args)
        events = []
        scheduler.submit(request(4, 2, json_schema=WORDS), events.append)
        scheduler.run_until_idle()
        scheduler.stop()
        scheduler.run()
        return len(runner.rows), text_of(events)


def test_a_rank_that_waits_for_a_mask_or_for_requests_is_not_dead():
    (left, text), (others, _) = run_distributed(_behind_a_limit, 2, fresh=True)
    assert left == others == 0 and len(text) == 2 and text[0] == '"'
