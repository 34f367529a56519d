"""Memory that runs out: the latest answers pause, are run again later, and get the same tokens."""

import random

import pytest
import torch
import torch.distributed as dist

import transformers
from megatron_tree.inference.generation import batcher, room
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from support.byte_tokens import byte_tokenizer
from support.hf_models import SHAPE, plain, prompt, tiny_model
from support.ranks import run_distributed
from support.scheduling import assert_alike, make_scheduler, request, serve, text_of, tokens_of
from support.speculation import Told, speculation, whole


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(autouse=True)
def _hardly_any_foresight(monkeypatch):
    monkeypatch.setattr(room, "SOON", 2)
    monkeypatch.setattr(batcher, "PATIENCE_S", 60.0)  # which rows take part in a step does not depend on the machine


def test_answers_that_pause_get_the_same_tokens():
    pytest.importorskip("llguidance")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPE | {"vocab_size": 257})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    hot = {"temperature": 1.0, "seed": 5}
    requests = [
        request(9, 30, n=3, logprobs=2, **hot),
        request(20, 25),
        request(5, 40, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1, **hot),
        request(4, 30, json_schema='{"type": "string", "pattern": "^([a-z]{3},){20}$"}', **hot),
        request(12, 30, stop="no such text"),
        request(30, 20, prompt_logprobs=1),
    ]
    tokenizer = byte_tokenizer()
    free = serve(make_scheduler(model, tokenizer, max_rows=8)[0], requests)
    assert "," in text_of(free[3])
    scheduler, runner = make_scheduler(model, tokenizer, max_rows=8, capacity=120, page_size=4)
    tight = serve(scheduler, requests)
    assert scheduler.preemptions > 2 and 0 <= runner.least_free < 10 and not runner.rows
    assert_alike(tight, free)
    for one, other in zip(free, tight, strict=True):
        assert sum(e.prompt_logprobs is not None for e in one) == sum(e.prompt_logprobs is not None for e in other)
    firsts = [call[1] for call in runner.calls if call[0] == "step"]
    assert max(map(len, firsts)) > 3, "what fits goes on together"
    drafts = speculation(Told(whole(requests, free), wrong=3))
    options = {"max_rows": 8, "speculation": drafts}
    scheduler, runner = make_scheduler(model, tokenizer, **options, capacity=120, page_size=4)
    assert_alike(serve(scheduler, requests), free)
    assert scheduler.preemptions and 0 < drafts.numbers.accepted < drafts.numbers.drafted and not runner.rows


def test_the_latest_pauses_first_and_can_be_cancelled(model):
    scheduler, runner = make_scheduler(model, max_rows=2, capacity=40)
    told = [], []
    numbers = [scheduler.submit(request(8, 25), events.append) for events in told]
    while not scheduler.preemptions:
        scheduler.run_once()
    done = len(told[1])
    assert scheduler.cancel(numbers[1])
    scheduler.run_until_idle()
    assert told[1][-1].finish_reason == "cancelled" and told[1][-1].usage.completion_tokens == done
    assert tokens_of(told[0]) == plain(model, prompt(1, 8), 25)[0][0].tolist() and not runner.rows


@pytest.mark.parametrize("seed", range(1, 3))
def test_whatever_comes_ends(model, seed):
    chance = random.Random(seed)
    requests, late = [], {}
    for number in range(8):
        length, new, n = chance.randint(1, 30), chance.randint(1, 25), chance.choice((1, 1, 2))
        requests.append(request(length, new, n=n, temperature=chance.choice((0.0, 1.0)), seed=number))
        late[number] = chance.randint(0, 25)
    page = chance.choice((1, 3, 8))
    most = max(r.n * -(-(len(r.prompt) + r.sampling.max_tokens) // page) * page for r in requests)
    scheduler, runner = make_scheduler(model, max_rows=chance.randint(3, 6), capacity=most, page_size=page)
    got = serve(scheduler, requests, late=late)
    assert scheduler.preemptions and not runner.rows and runner.least_free >= 0
    assert_alike(got, serve(make_scheduler(model, max_rows=40, max_waiting=40)[0], requests))


def _on_ranks(rank, world, answers):
    room.SOON = 2
    model = tiny_model("llama")
    model.set_attn_implementation("tree")
    cache = TreeCache(model.config, cp_group=dist.group.WORLD, page_size=4)
    runner = Runner(model, cache, chunk_size=16, capacity_tokens=120)
    drafts = speculation(Told(answers, wrong=3)) if rank == 0 else None
    options = {"max_rows": 8, "max_waiting": 16, "keep_bytes": 1 << 20, "heartbeat_s": 0.1}
    scheduler = Scheduler(runner, speculation=drafts, **options)
    if rank > 0:
        return scheduler.run(), {row: held.runs for row, held in runner.store.book.rows.items()}
    events = serve(scheduler, _questions())
    owners = {row: held.runs for row, held in runner.store.book.rows.items()}
    return [tokens_of(e) for e in events], owners, scheduler.preemptions, runner.free_tokens


def _questions():
    text = prompt(1, 30)[0].tolist()
    return [Request(prompt=[*text, 3 + i, 7], sampling=SamplingParams(max_tokens=20 + i)) for i in range(6)]


def test_rows_are_copied_and_kept_and_given_up_on_all_ranks_alike(model):
    texts = [(q.prompt, q.sampling.max_tokens) for q in _questions()]
    want = [plain(model, torch.tensor([text]), count)[0][0].tolist() for text, count in texts]
    answers = [[*text, *tokens] for (text, _), tokens in zip(texts, want, strict=True)]
    (tokens, owners, preemptions, free), (_, others) = run_distributed(_on_ranks, 2, answers)
    assert owners == others and preemptions > 1 and free >= 0
    assert tokens == want
