"""Speculation: the tokens without it in fewer steps, whoever drafts them; switched off where nothing is right."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_tree.inference.generation import batcher
from megatron_tree.inference.generation.conversation import Conversation
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.generation.speculation import DraftCost, DraftState, PromptLookup, Speculation, last_match
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from support.byte_tokens import byte_tokenizer
from support.hf_models import VOCAB, prompt, tiny_model
from support.plain_runner import PlainRunner
from support.ranks import run_distributed
from support.scheduling import assert_alike, serve, tokens_of
from support.speculation import Told, speculation, whole

BLOCK = 4


def _tree_runner(model, group=None, **options):
    model.set_attn_implementation("tree")
    return Runner(model, TreeCache(model.config, cp_group=group, page_size=BLOCK), chunk_size=32, **options)


def _scheduler(runner, tokenizer=None, *, max_rows=8, speculation=None, **options):
    options = {"max_waiting": 32, "heartbeat_s": 0.1} | options
    return Scheduler(runner, tokenizer, max_rows=max_rows, speculation=speculation, **options)


def _everything():
    """Requests with all that looks at earlier tokens."""
    hot = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    options = [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {**hot, "logprobs": 2},
        {**hot, "presence_penalty": 0.7, "logit_bias": {40: 3.0, 41: 3.0}},
        {"json_schema": '{"type": "string", "pattern": "^(ab|ac)*d?$"}', **hot},
        {"json_schema": '{"type": "string", "pattern": "^[a-e,]{30}$"}'},
        {**hot, "stop": ["e", "k"]},
        {"stop_token_ids": list(range(60, 70))},
    ]
    text = prompt(1, 12)[0].tolist() * 3  # repeats itself: there is something to find
    return [
        Request(prompt=text[i:], sampling=SamplingParams(max_tokens=20 + i, **own), n=2 if i in (2, 4) else 1)
        for i, own in enumerate(options)
    ]


def _ranks(rank, world, family):
    group = dist.group.WORLD if world > 1 else None
    tokenizer, requests = byte_tokenizer(size=VOCAB), _everything()
    late = {1: 1, 3: 4, 5: 6}
    batcher.PATIENCE_S = 60.0  # which rows take part in a step does not depend on the machine
    plain, runner = None, _tree_runner(tiny_model(family), group)
    lengths, step = [], runner.step

    def counted(rows, tokens):
        lengths.append(tokens.shape[1])
        return step(rows, tokens)

    runner.step = counted
    found = []
    for drafter in (None, "right", "partly", "lookup"):
        made = None
        if rank == 0 and drafter == "lookup":
            made = speculation(PromptLookup())
        elif rank == 0 and drafter is not None:
            made = speculation(Told(whole(requests, plain), None if drafter == "right" else 3))
        scheduler = _scheduler(runner, tokenizer, max_rows=10, speculation=made, keep_bytes=1 << 20)
        lengths.clear()
        if rank > 0:
            scheduler.run()
        else:
            events = serve(scheduler, requests, late=late)
            plain = plain or events
            assert_alike(events, plain)
        found.append((list(lengths), *scheduler.speculated))
        for row in list(runner.store.book.rows):
            runner.remove(row)
    return found


@pytest.mark.parametrize(("family", "world"), [("llama", 2), ("gemma3", 2)])
def test_same_tokens_in_fewer_steps_on_all_ranks(family, world):
    results = run_distributed(_ranks, world, family)
    assert all([own[0] for own in rank] == [own[0] for own in results[0]] for rank in results), "ranks ran other steps"
    (plain, *_), (right, drafted, accepted, steps), (partly, *numbers), _ = results[0]
    assert set(plain) == {1} and max(right) == 5 and drafted > accepted > 2 * steps
    assert len(right) < 0.45 * len(plain)
    assert len(right) < len(partly) < 0.8 * len(plain) and 0 < numbers[1] < numbers[0]


class TestDrafts:
    def test_what_came_last_after_as_many_tokens_as_possible(self):
        for text, want in (
            ([1], 0),
            ([1, 2, 3, 1, 4, 1], 0),
            ([1, 2, 3, 1, 2], 2),
            ([1, 2, 3, 1, 2, 4, 1, 2], 5),
            ([9, 1, 2, 3, 1, 2, 4, 9, 1, 2], 3),
            ([5, 5, 5], 2),
        ):
            assert last_match(np.array(text, dtype=np.int64)) == want, text
        state = DraftState(torch.tensor([1, 2, 3, 1, 2]), [], 8)
        assert PromptLookup().ready([state]) == [True] and PromptLookup().draft([state], 5) == [[3, 1, 2, 3, 1]]

    def test_the_width_with_the_most_tokens_per_second(self):
        made = Speculation(4, Told([]))
        states = [DraftState(torch.arange(9), [], 50) for _ in range(2)]
        for state in states:
            state.learn(4, 4)
            state.learn(4, 4)
        for tokens in (2, 10):
            made.cost.add(tokens, 1.0)
        assert made._best(states, 2, 4) == 4, "a wide step takes no longer"
        for _ in range(100):
            made.cost.add(2, 1.0)
            made.cost.add(10, 5.0)
        assert made._best(states, 2, 4) == 0, "five times the cost for at most five times the tokens"
        assert made.cost.seconds(6) == pytest.approx(3.0, rel=0.05)
        for tokens, seconds in ((2, 1.0), (10, 1.4), (100, 5.9)) * 100:
            made.cost.add(tokens, seconds)
        assert made._best(states, 2, 4) == 4
        assert made._best(states, 20, 4) == 0, "18 of 20 rows would be padded"

    def test_answers_learn_from_those_before_and_a_cost_is_measured_again(self):
        made, widths = speculation(Told([list(range(500))])), []
        for _ in range(3):
            state = made.begin_answer(torch.arange(5), [], 250)
            for token in range(5, 205):
                ((drafted),) = made.draft([state], 17)
                widths.append(len(drafted))
                made.begin_step(1)
                made.end_step([(state, len(drafted), 0)], alone=True)
                state.add(token)
        assert widths[0] == 4 and widths[400] == 0 and 10 < sum(n > 0 for n in widths[400:]) < 40
        made._usual_rate, made.cost = 1.0, DraftCost()
        for tokens, seconds in ((1, 1.0), (5, 100.0)):  # the first wide step was slow
            made.cost.add(tokens, seconds)
        state, widths = made.begin_answer(torch.arange(5), [], 450), []
        for token in range(5, 305):
            ((drafted),) = made.draft([state], 17)
            widths.append(len(drafted))
            made.cost.add(1 + len(drafted), 1.0)
            made.end_step([(state, len(drafted), len(drafted))], alone=False)
            state.add(token)
        assert widths[0] == 0 and set(widths[-50:]) == {4}


def _steps(runner):
    return [len(call[2][0]) for call in runner.calls if call[0] == "step"]


def test_nothing_right_switches_it_off():
    model = tiny_model("llama")
    request = Request(prompt=prompt(1, 20)[0], sampling=SamplingParams(max_tokens=120, temperature=2.0, seed=1))

    class Wrong(Told):
        def _next(self, text, count):
            return [130] * count

    runner, made = PlainRunner(model), speculation(Wrong([]))
    (events,) = serve(_scheduler(runner, speculation=made), [request])
    (plain,) = serve(_scheduler(PlainRunner(model)), [request])
    assert tokens_of(events) == tokens_of(plain)
    wide = [i for i, n in enumerate(_steps(runner)) if n > 1]
    assert 6 <= len(wide) <= 40 and made.numbers.steps == 119
    assert made.numbers.accepted <= 4 and wide[-1] > 60, "it is tried again later"


def test_a_full_cache_and_the_last_positions_bound_the_width():
    model = tiny_model("llama")
    requests = [
        Request(prompt=prompt(1, 10)[0].tolist() * 2, sampling=SamplingParams(max_tokens=n)) for n in (12, 20, 5)
    ]
    requests.append(Request(prompt=prompt(1, 200)[0], sampling=SamplingParams(max_tokens=56)))
    plain = serve(_scheduler(PlainRunner(model)), requests)
    for capacity in (256, 300):
        runner = PlainRunner(model, capacity=capacity, page_size=8)  # asserts that it never overflows
        made = speculation(Told(whole(requests, plain)))
        events = serve(_scheduler(runner, speculation=made), requests)
        assert [tokens_of(e) for e in events] == [tokens_of(e) for e in plain]
        assert max(_steps(runner)) == 5 and not runner.rows


@pytest.mark.parametrize("family", ["phi3_longrope", "llama_dynamic"])
def test_rotary_embeddings_that_depend_on_length_get_one_token_at_a_time_where_they_change(family):
    request = Request(prompt=prompt(1, 9)[0].tolist() * 2, sampling=SamplingParams(max_tokens=20))
    runner = _tree_runner(tiny_model(family))
    (plain,) = serve(_scheduler(runner), [request])
    made = speculation(Told(whole([request], [plain])))
    (events,) = serve(_scheduler(runner, speculation=made), [request])
    assert tokens_of(events) == tokens_of(plain) and made.numbers.accepted > 3


def _chat(rank, world):
    runner = _tree_runner(tiny_model("llama"), dist.group.WORLD)
    text, more, found = prompt(1, 30)[0].tolist(), prompt(1, 5, seed=3)[0].tolist(), []
    for speculates in (False, True):
        made = None
        if speculates and rank == 0:
            made = speculation(Told([whole for whole, _ in found], wrong=5))
        conversation = Conversation(runner, None, end_tokens=(), group=dist.group.WORLD, speculation=made)
        tokens, told = text, []
        for _ in range(2):
            answer = conversation.answer(tokens, SamplingParams(max_tokens=12), keep_logits=True)
            tokens = [*tokens, *answer.tokens]
            assert conversation.held == tokens[:-1] and len(answer.step_s) == 11 and min(answer.step_s) > 0
            told.append((tokens, torch.stack(answer.logits)))
            tokens = [*tokens, *more]
        if speculates:
            assert [whole for whole, _ in told] == [whole for whole, _ in found]
            for (_, own), (_, want) in zip(told, found, strict=True):
                torch.testing.assert_close(own, want, atol=1e-4, rtol=0)
            if rank == 0:
                drafted, accepted, steps = conversation.speculated
                assert steps <= 16 and steps < accepted < drafted
        found = told
        conversation.forget()
    return True


def test_a_conversation_is_followed_on_all_ranks():
    assert run_distributed(_chat, 2) == [True, True]
