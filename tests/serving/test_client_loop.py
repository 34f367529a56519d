"""What programs written for OpenAI's client do: answers sent back, tools, forms of answers, other servers' options."""

import json
import time
from typing import Literal

import pydantic
import pytest
import torch

from megatron_tree.inference.serving.http.tools import ToolText
from support.http_server import ASK, NAME, bad_request, byte_model, byte_tokenizer, serving

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ ' ' + m.name if m.name else '' }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if thinking %}(thinking){% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "it rains", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]


@pytest.fixture(scope="module")
def server():
    with serving(byte_model(), TOKENIZER, max_model_len=256) as server:
        yield server


@pytest.fixture(scope="module")
def chat(server):
    return server.chat


@pytest.fixture(scope="module")
def complete(server):
    return server.complete


def test_answers_are_sent_back_as_they_came(chat):
    messages = list(ASK)
    for dump in (lambda message: message, lambda message: message.model_dump()):
        answer = chat(messages)
        prompt = "".join(f"<{m['role']}>{m['content']}\n" for m in map(dict, messages)) + "<assistant>"
        assert answer.usage.prompt_tokens == len(prompt.encode())
        messages += [dump(answer.choices[0].message), {"role": "user", "content": "and then?"}]


def test_fields_of_messages(chat):
    plain = chat([{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]).usage.prompt_tokens
    null = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "annotations": [], "audio": None}]
    assert chat(null).usage.prompt_tokens == plain
    refusal = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "refusal": "no"}]
    assert chat(refusal).usage.prompt_tokens == plain + 2
    refusal[1] = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert chat(refusal).usage.prompt_tokens == plain + 2
    assert chat([{"role": "user", "content": "x", "name": "me"}]).usage.prompt_tokens == len("<user me>x\n<assistant>")


def test_tools_go_through_the_template(chat):
    plain = chat().usage.prompt_tokens
    assert chat(tools=TOOLS).usage.prompt_tokens == plain + len("[weather][time]")
    assert chat(tools=TOOLS, tool_choice="none").usage.prompt_tokens == plain
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    text = "<user>why?\n<assistant>weather(Rome)\n<tool>rain\n<assistant>"
    assert chat(messages).usage.prompt_tokens == len(text)
    bad_request(chat, "names must differ", tools=[TOOLS[0], TOOLS[0]])
    bad_request(chat, "no tool 'x', only 'weather', 'time'", tools=TOOLS, tool_choice={
        "type": "function", "function": {"name": "x"}})  # fmt: skip
    bad_request(chat, "tool_choice: needs tools", tool_choice="required")
    bad_request(chat, "set tool_choice to 'none'", tools=TOOLS, response_format={"type": "json_object"})


def test_a_template_without_tools_says_so():
    with serving(byte_model(), byte_tokenizer()) as server:
        create = server.client().chat.completions.create
        bad_request(create, "the model's chat template takes no tools", model=NAME, messages=ASK, tools=TOOLS)
        bad_request(create, "reasoning_effort: the model's", model=NAME, messages=ASK, reasoning_effort="low")


@pytest.mark.parametrize("stream", [False, True])
def test_the_ordinary_loop_of_tools(chat, stream):
    pytest.importorskip("llguidance")
    messages, options = list(ASK), {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120, "seed": 3}
    options |= {"temperature": 1.0, "parallel_tool_calls": False}
    if stream:
        chunks = list(chat(messages, stream=True, **options))
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert call.index == 0 and not any(chunk.choices[0].delta.content for chunk in chunks)
        messages.append({"role": "assistant", "content": None, "tool_calls": [call.model_dump()]})
    else:
        choice = chat(messages, **options).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        messages.append(choice.message)
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    assert call.function.name in ("weather", "time") and call.id.startswith("call_")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
    assert chat(messages, tools=TOOLS).choices[0].message.role == "assistant"
    named = {"type": "function", "function": {"name": "weather"}}
    (call,) = chat(**options | {"tool_choice": named}).choices[0].message.tool_calls
    assert call.function.name == "weather"


class _Land(pydantic.BaseModel, extra="forbid"):
    code: Literal["IT", "NO"]


class _Place(pydantic.BaseModel, extra="forbid"):
    name: Literal["Rome", "Oslo"]
    land: _Land


class _Trip(pydantic.BaseModel, extra="forbid"):
    start: _Place
    default: _Place  # a name, not the keyword


@pytest.mark.parametrize("tools", [1, 2])
def test_a_tool_refers_to_its_own_definitions(server, chat, tools):
    pytest.importorskip("llguidance")
    trip = {"type": "function", "function": {"name": "trip", "parameters": _Trip.model_json_schema()}}
    place = {"type": "function", "function": {"name": "place", "parameters": _Place.model_json_schema()}}
    options = {
        "tools": [place, trip][-tools:],
        "max_tokens": 220,
        "temperature": 1.0,
        "seed": 5,
        "parallel_tool_calls": False,
    }
    named = {"type": "function", "function": {"name": "trip"}}
    for choice in ("required", named):
        (call, *_) = chat(tool_choice=choice, **options).choices[0].message.tool_calls
        (_Trip if call.function.name == "trip" else _Place).model_validate_json(call.function.arguments)
    flat = [{"type": "function", **tool["function"]} for tool in options.pop("tools")]
    options["max_output_tokens"] = options.pop("max_tokens")
    del options["seed"]
    answer = server.client().responses.create(model=NAME, input="go", tools=flat, tool_choice="required", **options)
    (call, *_) = [item for item in answer.output if item.type == "function_call"]
    (_Trip if call.name == "trip" else _Place).model_validate_json(call.arguments)


@pytest.mark.parametrize("place", ["#/definitions/town", "urn:towns#/definitions/town"])
def test_tools_refer_within_their_own_ids(chat, place):
    pytest.importorskip("llguidance")
    towns, tools = {"north": "Oslo", "south": "Rome"}, []
    for name, town in towns.items():
        parameters = {"$id": "urn:towns", "definitions": {"town": {"enum": [town]}}, "type": "object",
                      "properties": {"enum": {"$ref": place}}, "required": ["enum"],
                      "additionalProperties": False}  # fmt: skip
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    for tool in tools:
        name = tool["function"]["name"]
        named = {"type": "function", "function": {"name": name}}
        (call,) = chat(tools=tools, tool_choice=named, max_tokens=120).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"enum": towns[name]}
        answer = chat(tools=tools, tool_choice="required", max_tokens=120, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"enum": towns[call.function.name]}


def _in_pieces(text, size, **options):
    found = ToolText(["f", "g"], **options)
    sent = "".join(found.add(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = found.finish()
    return sent + rest, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "options", "want"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', {}, ("", [("f", {"a": 1})])),
        ('let me <tool_call>{"name": "f"}</tool_call>', {}, ("let me ", [("f", {})])),
        ('<tool_call>[{"name": "f"}, {"name": "g"}]', {}, ("", [("f", {}), ("g", {})])),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', {"most": 1}, ("", [("f", {})])),
        ('{"name": "g", "parameters": {"b": [2]}}', {}, ("", [("g", {"b": [2]})])),
        ('{"name": "unknown"}', {}, ('{"name": "unknown"}', [])),
        ('{"a": "<tool_call>"}', {}, ('{"a": "<tool_call>"}', [])),
        ("<tool_call>{broken</tool_call>", {}, ("<tool_call>{broken</tool_call>", [])),
        ("a < b <tool", {}, ("a < b <tool", [])),
        ('[{"name": "f", "arguments": {}}]', {"forced": True}, ("", [("f", {})])),
        ('[{"name": "f", "argum', {"forced": True}, ('[{"name": "f", "argum', [])),
    ],
)
def test_calls_in_what_a_model_writes(text, options, want, size):
    assert _in_pieces(text, size, **options) == want


class Trip(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    nights: Literal[1, 2, 3]


def test_answers_of_a_given_form(server, chat, complete):
    pytest.importorskip("llguidance")
    sampled = {"temperature": 1.0, "seed": 4, "max_tokens": 100}
    parsed = server.client().chat.completions.parse(model=NAME, messages=ASK, response_format=Trip, n=8, **sampled)
    trips = [choice.message.parsed for choice in parsed.choices]
    assert all(isinstance(trip, Trip) for trip in trips) and len({trip.model_dump_json() for trip in trips}) > 1
    assert {choice.finish_reason for choice in parsed.choices} == {"stop"}
    text = chat(response_format={"type": "json_object"}, **sampled | {"logit_bias": {"93": 100}}).choices[0]
    assert text.message.content.startswith("{")


def _form(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema belongs to the type"),
        ({"response_format": _form({"type": "string", "pattern": "("})}, "regex parse error"),
        ({"response_format": _form({"$ref": "http://127.0.0.1:9/x"})}, "does not fetch"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ends with it"),
    ],
)
def test_forms_that_are_refused(complete, options, words):
    pytest.importorskip("llguidance")
    assert bad_request(complete, words, extra_body=options).code == "invalid_value"


def test_calls_in_long_texts_are_found_in_time_in_proportion():
    """CPU seconds; in pieces of one letter, and as a whole, 400,000 letters once took minutes."""
    began = time.process_time()
    for text in ('{"name": "' + "x" * 400_000, "y" * 400_000):
        for options in ({}, {"forced": True}):
            assert _in_pieces(text, 1, **options) == _in_pieces(text, len(text), **options) == (text, [])
    assert time.process_time() - began < 30


def test_marks_in_the_arguments_of_a_forced_call():
    text = '[{"name": "f", "arguments": {"a": "<tool_call>b</tool_call>"}}]'
    assert _in_pieces(text, 3, forced=True) == ("", [("f", {"a": "<tool_call>b</tool_call>"})])


def test_bias(complete):
    free = complete(logprobs=2).choices[0]
    token = TOKENIZER("Q").input_ids[0]
    assert complete(logit_bias={str(token): 100}).choices[0].text == "Q" * 8
    first = TOKENIZER(free.text[0]).input_ids[0]
    other = complete(logit_bias={str(first): -100}, logprobs=2).choices[0]
    assert other.text[0] != free.text[0] and free.text[0] not in other.text
    assert other.logprobs.top_logprobs[0] == free.logprobs.top_logprobs[0], "log-probabilities are the model's own"
    bad_request(complete, "logit_bias=.*0 to 256", logit_bias={"300": 1})
    assert bad_request(complete, "less than or equal to 100", logit_bias={"3": 101}).param == "logit_bias"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs_of_the_prompt_as_lm_eval_reads_them(server, complete, max_tokens):
    texts = ["the quick brown fox " * 7, "b"]  # 140 tokens: more than a chunk
    tokens = [TOKENIZER(text).input_ids for text in texts]
    options = {"max_tokens": max_tokens, "logprobs": 2, "echo": True, "n": 2}
    answer = complete(prompt=tokens, **options)
    assert answer.usage.completion_tokens == 4 * max_tokens
    model = server.runner.model
    for choice in answer.choices:
        text, ids = texts[choice.index // 2], torch.tensor(tokens[choice.index // 2])
        told = choice.logprobs
        assert choice.text.startswith(text) and told.tokens[: len(ids)] == list(text)
        assert len(told.tokens) == len(ids) + max_tokens
        assert told.text_offset[: len(ids)] == list(range(len(ids)))
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        with torch.no_grad():
            want = model(ids[None]).logits[0].double().log_softmax(-1)
        own = want[:-1].gather(1, ids[1:, None])[:, 0]
        assert torch.allclose(torch.tensor(told.token_logprobs[1 : len(ids)], dtype=torch.float64), own, atol=1e-3)
        greedy = [logprob == max(top.values()) for logprob, top in zip(told.token_logprobs[1:], told.top_logprobs[1:])]
        assert greedy[: len(ids) - 1] == (want[:-1].argmax(-1) == ids[1:]).tolist()
        assert all(greedy[len(ids) - 1 :])
    whole = complete(prompt=texts, **options)
    assert [choice.text for choice in whole.choices] == [choice.text for choice in answer.choices]
    assert whole.choices[0].logprobs == answer.choices[0].logprobs
    streamed = {index: ["", []] for index in range(4)}
    for chunk in complete(prompt=texts, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index][0] += choice.text
            streamed[choice.index][1] += choice.logprobs.token_logprobs
    assert streamed == {c.index: [c.text, c.logprobs.token_logprobs] for c in answer.choices}


def test_echo_without_logprobs(complete):
    answer = complete(echo=True).choices[0]
    assert answer.text == "go" + complete().choices[0].text and answer.logprobs is None
    bad_request(complete, "0 is for echo only", max_tokens=0)


def test_options_as_others_take_them(complete):
    greedy = complete().choices[0].text
    for temperature in (1e-6, 1e-40, 1e-3 / 2):
        assert complete(temperature=temperature, seed=2).choices[0].text == greedy
    sampled = {"temperature": 1.0, "seed": 5}
    free = complete(**sampled).choices[0].text
    assert all(complete(extra_body={"top_k": k}, **sampled).choices[0].text == free for k in (-1, 0))
    assert len({complete(temperature=2.0, seed=-1).choices[0].text for _ in range(4)}) > 1, "-1 draws a seed"
    same = [complete(temperature=1.0, seed=-7).choices[0].text for _ in range(2)]
    assert same[0] == same[1] and complete(best_of=1).choices[0].text == greedy


def test_options_for_the_template(chat):
    plain = chat().usage.prompt_tokens
    think = {"chat_template_kwargs": {"thinking": True}}
    assert chat(extra_body=think).usage.prompt_tokens == plain + len("(thinking)")
    for name in ("tokenize", "chat_template", "tools", "messages"):
        bad_request(chat, f"can't set {name}", extra_body={"chat_template_kwargs": {name: "x"}})
