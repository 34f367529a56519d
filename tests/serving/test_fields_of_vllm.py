"""Fields that clients of vLLM send: where answers end, what of it they show, messages that go on, priorities."""

import functools

import pytest

from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from support.http_server import ASK, NAME, bad_request, byte_model, byte_tokenizer, serving

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
LETTERS = {str(token): -100 for token in range(257) if not TOKENIZER.decode([token]).isascii()}
TO_END = LETTERS | {str(END): 100}


@pytest.fixture(scope="module")
def server():
    with serving(byte_model(), TOKENIZER) as server:
        yield server


@pytest.fixture(scope="module")
def chat(server):
    return functools.partial(server.chat, logit_bias=LETTERS)


@pytest.fixture(scope="module")
def complete(server):
    return functools.partial(server.complete, logit_bias=LETTERS)


def _same(create, text_of, **options):
    """Whole and in a stream."""
    whole = create(**options).choices[0]
    chunks = list(create(stream=True, **options))
    assert "".join(map(text_of, (chunk.choices[0] for chunk in chunks))) == text_of(whole)
    return text_of(whole), whole.finish_reason


def test_least_tokens(server, complete):
    free = complete(max_tokens=20).choices[0].text
    for least in (0, 1, 7):
        answer = complete(max_tokens=20, logit_bias=TO_END, extra_body={"min_tokens": least})
        assert answer.usage.completion_tokens == least + 1 and answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text == free[:least]
    often = max(free[:6], key=free[:6].count)
    letter = TOKENIZER(often).input_ids[0]
    without = complete(max_tokens=20, extra_body={"min_tokens": 8, "stop_token_ids": [letter]}).choices[0].text
    assert often not in without[:8] and without[:8] != free[:8]
    pairs = [free[i : i + 2] for i in range(1, 18)]
    stop = next(pair for i, pair in enumerate(pairs, 1) if free.index(pair) == i and pair in free[i + 2 :])
    first = free.index(stop)
    again = free.index(stop, first + 2)
    for least, end in ((0, first), (first + 1, first), (first + 2, again)):  # a stop text ends with a later token
        assert complete(max_tokens=20, stop=stop, extra_body={"min_tokens": least}).choices[0].text == free[:end]
    bad_request(complete, "min_tokens=9 must be at most max_tokens=8", extra_body={"min_tokens": 9})
    form = {"min_tokens": 2, "response_format": {"type": "json_object"}}
    bad_request(complete, "min_tokens: an answer with a JSON schema", extra_body=form)
    assert server.client().responses.create(
        model=NAME, input="a", max_output_tokens=20, temperature=0,
        extra_body={"logit_bias": TO_END, "min_tokens": 4},
    ).usage.output_tokens == 5  # fmt: skip


def test_what_ends_an_answer_can_be_part_of_it(complete):
    free = complete(max_tokens=20).choices[0].text
    included = {"include_stop_str_in_output": True}
    want = free[: free.index(free[3:5]) + 2]
    assert _same(complete, lambda c: c.text, max_tokens=20, stop=free[3:5], extra_body=included) == (want, "stop")
    token = {"stop_token_ids": TOKENIZER(free[7]).input_ids}
    want = free[: free.index(free[7])]
    assert _same(complete, lambda c: c.text, max_tokens=20, extra_body=token) == (want, "stop")
    assert _same(complete, lambda c: c.text, max_tokens=20, extra_body=token | included) == (want + free[7], "stop")


def test_special_tokens_in_the_text(complete, chat):
    shown, included = {"skip_special_tokens": False}, {"include_stop_str_in_output": True}
    on, end = {"ignore_eos": True}, TOKENIZER.decode([END])
    for create, text_of in ((complete, lambda c: c.text), (chat, lambda c: _content(c))):
        for options, want in ((shown | on, 3 * end), (on, ""), (shown, ""), (shown | included, end), (included, "")):
            found = _same(create, text_of, max_tokens=3, logit_bias=TO_END, extra_body=options)
            assert found == (want, "length" if options.get("ignore_eos") else "stop"), options


def _content(choice):
    return (choice.message if hasattr(choice, "message") else choice.delta).content or ""


def test_a_message_that_the_model_continues(server, chat, complete):
    begun = [*ASK, {"role": "assistant", "content": "because  "}]
    want = complete(prompt="<user>why?\n<assistant>because  ", max_tokens=5).choices[0].text
    for options in ({}, {"add_generation_prompt": False}):
        answer = chat(begun, extra_body={"continue_final_message": True} | options)
        assert answer.choices[0].message.content == want and answer.usage.prompt_tokens == 31
    want = complete(prompt="<user>why?\n", max_tokens=5).choices[0].text
    assert chat(ASK, extra_body={"add_generation_prompt": False}).choices[0].message.content == want
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert bad_request(chat, "set add_generation_prompt to false", messages=begun, extra_body=both).param
    answer = server.client().responses.create(
        model=NAME, input=begun, max_output_tokens=5, temperature=0, extra_body={"continue_final_message": True}
    )
    assert answer.usage.input_tokens == 31
    own = {"chat_template_kwargs": {"continue_final_message": True}}
    bad_request(chat, "can't set continue_final_message", messages=begun, extra_body=own)


def test_priority_is_refused_where_it_would_matter(server, chat, complete):
    respond = server.client().responses.create
    for create, options in (
        (chat, {}),
        (complete, {}),
        (respond, {"model": NAME, "input": "a", "max_output_tokens": 2}),
    ):
        assert create(**options, extra_body={"priority": 0})
        assert (
            bad_request(create, "in the order in which they come", extra_body={"priority": 1}, **options).param
            == "priority"
        )


def test_what_the_cache_holds_is_shared_by_key_and_salt():
    model, keys = byte_model(), ("a-key-for-tests", "another-for-tests")
    model.set_attn_implementation("tree")
    runner = Runner(model, TreeCache(model.config, page_size=4))
    with serving(model, TOKENIZER, runner=runner, keep_bytes=1 << 30, api_keys=keys) as server:
        prompt = "the quick brown fox jumps"

        def cached(key, **more):
            client = server.client(api_key=keys[key])
            asked = {"model": NAME, "max_tokens": 1, "extra_body": more}
            whole = client.completions.create(prompt=prompt, **asked).usage.prompt_tokens_details
            chat = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **asked)
            asked["max_output_tokens"] = asked.pop("max_tokens") + 1
            answer = client.responses.create(input=prompt, **asked).usage
            return whole.cached_tokens, chat.usage.prompt_tokens_details.cached_tokens, answer.input_tokens_details

        for key, more in (
            (0, {}),
            (1, {}),
            (0, {"cache_salt": "s"}),
            (1, {"cache_salt": "s"}),
            (0, {"cache_salt": "t"}),
        ):
            for again in (False, True):
                whole, chat, answer = cached(key, **more)
                assert (whole > 0, chat > 0) == (again, again) and answer.cached_tokens > 0, (key, more, again)
        bad_request(lambda **more: cached(0, **more), "cache_salt: must have at least 1 character", cache_salt="")
