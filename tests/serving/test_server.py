"""The HTTP server with OpenAI's own client: answers, streams, many at once, clients that leave, a full queue."""

import concurrent.futures
import json
import urllib.request

import openai
import pytest

from megatron_tree.inference.serving.http import frontend
from support.http_server import END, NAME, byte_model, byte_tokenizer, is_idle, raw, serving, until

TOKENIZER = byte_tokenizer()
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
SEEDED = {"temperature": 0.9, "seed": 5, "extra_body": {"top_k": 50, "min_p": 0.001, "repetition_penalty": 1.05}}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def model():
    return byte_model()


@pytest.fixture(scope="module")
def server(model):
    with serving(model, TOKENIZER) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def _chunks(stream):
    """(text, finish_reason) of every choice, and the usage, of a stream."""
    texts, reasons, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            assert choice.index not in reasons, "a piece after the end"
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def test_lists_its_model(client):
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.max_model_len) == (NAME, "model", 256)
    assert client.models.retrieve(NAME) == listed
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_completion_is_the_models_own_greedy_answer(model, client):
    answer = client.completions.create(model=NAME, prompt="tell me", max_tokens=12, **GREEDY)
    ids = TOKENIZER("tell me", return_tensors="pt").input_ids
    want = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=0)[0, ids.shape[1] :]
    assert answer.choices[0].text == TOKENIZER.decode(want, skip_special_tokens=True)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


def test_prompts_of_every_form(client):
    texts = ["one", "two!"]
    tokens = [TOKENIZER(text).input_ids for text in texts]
    options = {"model": NAME, "max_tokens": 6, **SEEDED}
    answers = [client.completions.create(prompt=prompt, **options) for prompt in (texts, tokens)]
    assert [c.text for c in answers[0].choices] == [c.text for c in answers[1].choices]
    assert (answers[0].usage.prompt_tokens, answers[0].usage.completion_tokens) == (7, 12)
    single = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in (texts[1], tokens[1])]
    assert single == [answers[0].choices[1].text] * 2
    assert len(client.completions.create(model=NAME, prompt="x").choices[0].text) <= 16, "OpenAI's default"


def test_chat_goes_through_the_template(client):
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=9, **GREEDY)
    prompt = "<system>be brief\n<user>why?\n<assistant>"
    want = client.completions.create(model=NAME, prompt=prompt, max_tokens=9, **GREEDY)
    assert answer.choices[0].message.content == want.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage == want.usage and answer.usage.prompt_tokens == len(prompt)
    parts = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [
        {"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]}]  # fmt: skip
    again = client.chat.completions.create(model=NAME, messages=parts, max_tokens=9, **GREEDY)
    assert again.choices[0].message == answer.choices[0].message


def test_a_chat_without_a_limit_goes_on_to_the_models_last_position(client):
    long = [{"role": "user", "content": "x" * 200}]
    answer = client.chat.completions.create(model=NAME, messages=long, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"


def test_streams_add_up_to_the_whole_answer(client):
    options = {"model": NAME, "n": 2, "max_tokens": 20, **SEEDED}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    whole = client.completions.create(prompt=["ab", "c"], **options)
    texts, reasons, usage = _chunks(client.completions.create(prompt=["ab", "c"], **options, **streaming))
    assert texts == {choice.index: choice.text for choice in whole.choices} and len(texts) == 4
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    whole = client.chat.completions.create(messages=MESSAGES, **options)
    texts, reasons, usage = _chunks(client.chat.completions.create(messages=MESSAGES, **options, **streaming))
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    assert len(set(texts.values())) == 2, "every choice draws for itself"


def test_a_stream_as_it_is_sent(server):
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 3, "temperature": 0, "stream": True}
    events = raw(server, "/v1/chat/completions", body).partition("\r\n\r\n")
    assert "content-type: text/event-stream" in events[0].lower()
    lines = [line for line in events[2].splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    first, *_, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "length"
    assert "usage" not in first and first["id"] == last["id"] and first["object"] == "chat.completion.chunk"


def test_stop_texts_and_end_tokens(client):
    options = {"model": NAME, "prompt": "go", "max_tokens": 50, "temperature": 2.0, "seed": 5}
    free = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    stop = next(character for character in free[4:] if character.isascii() and character.isprintable())
    ended = client.completions.create(**options, stop=["no such text", stop], extra_body={"ignore_eos": True})
    assert ended.choices[0].text == free[: free.index(stop)]
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens < 50
    body = {"ignore_eos": True, "stop_token_ids": TOKENIZER(stop).input_ids}
    by_token = client.completions.create(**options, extra_body=body)
    assert by_token.choices[0].text == free[: free.index(stop)]
    assert by_token.choices[0].finish_reason == "stop"
    body = {"logit_bias": {"0": 30.0}}
    answer = client.completions.create(**options, extra_body=body)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < 50
    assert END not in answer.choices[0].text
    further = client.completions.create(**options, extra_body=body | {"ignore_eos": True}).choices[0]
    assert further.finish_reason == "length" and further.text.startswith(answer.choices[0].text.rstrip("\ufffd"))


def test_logprobs(client):
    options = {"model": NAME, "max_tokens": 10, **SEEDED}
    completion = client.completions.create(prompt="p", logprobs=3, **options)
    told = completion.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == completion.usage.completion_tokens
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert "\ufffd" in token or completion.choices[0].text[offset:].startswith(token)
    assert all(logprob <= 0 for logprob in told.token_logprobs)
    assert all(1 <= len(top) <= 3 for top in told.top_logprobs)
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, **options)
    stream = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, stream=True, **options
    )
    streamed = {0: [], 1: []}
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in chat.choices:
        assert streamed[choice.index] == choice.logprobs.content
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 2
            assert token.top_logprobs[0].logprob >= max(token.logprob, token.top_logprobs[1].logprob)
            assert bytes(token.bytes).decode("utf-8", "replace") == token.token
    plain = client.chat.completions.create(messages=MESSAGES, logprobs=True, **options).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in plain)


def test_many_at_once_get_what_each_gets_alone(server, client):
    def ask(i):
        options = GREEDY if i % 2 else {"temperature": 1.0, "seed": i}
        if i < 6:
            return client.completions.create(
                model=NAME, prompt="prompt " * (i + 1), max_tokens=8 + 2 * i, **options
            ).model_dump(include={"choices", "usage"})
        return _chunks(
            client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, max_tokens=20, **options)
        )

    alone = [ask(i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    until(lambda: is_idle(server))


@pytest.mark.parametrize(("stream", "waiting"), [(False, True), (True, False)])
def test_a_client_that_leaves_frees_its_rows(model, stream, waiting):
    with serving(model, TOKENIZER, max_rows=1) as server:
        server.runner.gate.clear()
        body = {"model": NAME, "prompt": "long", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        connections = [raw(server, "/v1/completions", body, read=False) for _ in range(1 + waiting)]
        assert server.runner.at_gate.wait(20)
        until(lambda: server.scheduler.load == (int(waiting), 1))
        connections.pop().close()
        until(lambda: server.scheduler._cancels)
        for connection in connections:
            connection.close()
        until(lambda: len(server.scheduler._cancels) == 1 + waiting)
        server.runner.gate.set()
        until(lambda: is_idle(server))
        steps = sum(1 for call in server.runner.calls if call[0] == "step")
        assert steps < 50, "it went on for nobody"


def test_a_queue_that_is_full(model):
    with serving(model, TOKENIZER, max_rows=1, max_waiting=1) as server:
        server.runner.gate.clear()
        body = {"model": NAME, "prompt": "x", "max_tokens": 5, "temperature": 0}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(raw, server, "/v1/completions", body)
            until(lambda: server.scheduler.load.served == 1)
            second = pool.submit(raw, server, "/v1/completions", body)
            until(lambda: server.scheduler.load.waiting == 1)
            with pytest.raises(openai.RateLimitError, match="max_waiting=1 requests wait already") as error:
                server.client().completions.create(**body)
            assert int(error.value.response.headers["Retry-After"]) > 0
            with pytest.raises(openai.BadRequestError, match="2 prompts are more than this server's queue holds"):
                server.client().completions.create(**body | {"prompt": ["x", "y"]})
            server.runner.gate.set()
            assert " 200 OK" in first.result() and " 200 OK" in second.result()
        # a client that waits as Retry-After says gets its answer in the end
        assert server.client(max_retries=2).completions.create(**body).choices[0].text


def test_metrics(model):
    with serving(model, TOKENIZER) as server:

        def told():
            return dict(line.rsplit(" ", 1) for line in _page(server) if not line.startswith("#"))

        before = told()
        assert before["megatron_tree_generation_tokens_total"] == "0"
        assert before["megatron_tree_requests_served_total"] == "0"
        body = {"model": NAME, "prompt": ["abc", "d"], "max_tokens": 5, "n": 2, "extra_body": {"ignore_eos": True}}
        server.client().completions.create(**body)
        after = told()
        assert set(after) == set(before)
        assert after["megatron_tree_prompt_tokens_total"] == "4"
        assert after["megatron_tree_generation_tokens_total"] == "20"
        assert after['megatron_tree_answers_total{finish_reason="length"}'] == "4"
        assert after["megatron_tree_time_to_first_token_seconds_count"] == "4"
        assert after['megatron_tree_time_per_output_token_seconds_bucket{le="+Inf"}'] == "16"
        assert after["megatron_tree_preemptions_total"] == "0"
        assert after["megatron_tree_waiting_seconds_count"] == "2"
        assert after["megatron_tree_rows"] == "8" and after["megatron_tree_rows_in_use"] == "0"
        assert float(after["megatron_tree_row_seconds"]) > 0 == float(after["megatron_tree_expected_wait_seconds"])
        assert after["megatron_tree_requests_served_total"] == "1"
        assert after["megatron_tree_drafted_tokens_total"] == after["megatron_tree_accepted_tokens_total"] == "0"
        assert after["megatron_tree_requests_waiting"] == after["megatron_tree_requests_running"] == "0"
        counts = [int(n) for name, n in after.items() if name.startswith("megatron_tree_answer_seconds_bucket")]
        assert counts == sorted(counts) and counts[-1] == 4


def test_a_long_queue_is_told_of(model, monkeypatch, caplog):
    monkeypatch.setattr(frontend, "LONG_WAIT_S", 0.0)
    body = {"model": NAME, "prompt": "abc", "max_tokens": 5}
    with serving(model, TOKENIZER, max_rows=1) as server, concurrent.futures.ThreadPoolExecutor(3) as pool:
        server.client().completions.create(**body)
        server.runner.gate.clear()
        asked = [pool.submit(server.client().completions.create, **body) for _ in range(3)]
        until(lambda: server.scheduler.load == (2, 1))
        told = dict(line.rsplit(" ", 1) for line in _page(server) if not line.startswith("#"))
        wait, each = (float(told[f"megatron_tree_{name}"]) for name in ("expected_wait_seconds", "row_seconds"))
        assert told["megatron_tree_rows_in_use"] == "1" and wait == pytest.approx(2 * each) and each > 0
        server.runner.gate.set()
        assert all(one.result().choices[0].finish_reason for one in asked)
    (warning,) = [record.getMessage() for record in caplog.records if "wait for 1 rows" in record.getMessage()]
    assert "Rows and queue" in warning


def _page(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        return page.read().decode().splitlines()


def test_a_request_that_takes_too_long_is_cancelled(model):
    with serving(model, TOKENIZER, request_timeout=0.3) as server:
        server.runner.gate.clear()
        body = {"model": NAME, "prompt": "x", "max_tokens": 50}
        with pytest.raises(openai.InternalServerError, match="limit of 0.3 s") as error:
            server.client().completions.create(**body)
        assert error.value.status_code == 504 and error.value.code == "timeout"
        with pytest.raises(openai.APIError, match="limit of 0.3 s"):
            list(server.client().completions.create(**body, stream=True))
        server.runner.gate.set()
        until(lambda: is_idle(server))
