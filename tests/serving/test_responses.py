"""/v1/responses as OpenAI's client reads it: the chat's answers in another form."""

import functools
import json
from typing import Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response

from support.http_server import NAME, byte_model, byte_tokenizer, post, serving

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}, {"type": "function", "name": "t"}]
GREEDY = {"model": NAME, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    with serving(byte_model(), byte_tokenizer(TEMPLATE), max_model_len=256) as server:
        yield server


@pytest.fixture(scope="module")
def respond(server):
    def create(asked="why?", **options):
        return server.client().responses.create(input=asked, **GREEDY | {"max_output_tokens": 8} | options)

    return create


@pytest.fixture(scope="module")
def chat(server):
    return functools.partial(server.chat, max_tokens=8)


def test_the_same_answer_as_a_chat(respond, chat):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    want = chat(messages)
    answer = respond(instructions="be brief", metadata={"a": "b"}, store=True)
    assert answer.output_text == want.choices[0].message.content and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.instructions == "be brief"
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
        want.usage.prompt_tokens, 8, want.usage.total_tokens)  # fmt: skip
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "wh"}, {"type": "input_text", "text": "y?"}]}]
    assert respond(parts, instructions="be brief").output_text == answer.output_text
    Response.model_validate(answer.model_dump(), strict=True)
    # answers go back as they came
    further = [*parts, *answer.output, {"role": "user", "content": "and?"}]
    want = chat(
        [*messages[1:], {"role": "assistant", "content": answer.output_text}, {"role": "user", "content": "and?"}]
    )
    assert respond(further).output_text == want.choices[0].message.content


def test_a_stream_builds_the_response(respond):
    whole = respond(include=["message.output_text.logprobs"], top_logprobs=2)
    events = list(respond(include=["message.output_text.logprobs"], top_logprobs=2, stream=True))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[4 + len(deltas) :] == ["response.output_text.done", "response.content_part.done",
                                        "response.output_item.done", "response.incomplete"]  # fmt: skip
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-1].response.output_text
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == 8 and len(logprobs[0].top_logprobs) == 2
    assert sum(len(event.logprobs) for event in deltas) <= 8
    assert events[-1].response.output[0].content[0].logprobs == logprobs
    assert events[-1].response.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_tools(respond, chat, stream):
    options = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 90}
    answer = respond(**options, stream=stream)
    if stream:
        events = list(answer)
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds == ["created", "in_progress", "output_item.added", "function_call_arguments.delta",
                         "function_call_arguments.done", "output_item.done", "completed"]  # fmt: skip
        answer = events[-1].response
        assert events[4].arguments == answer.output[0].arguments
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "weather" and answer.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    asked = {"role": "user", "content": "why?"}
    back = [asked, call, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    function = {"name": call.name, "arguments": call.arguments}
    messages = [asked, {"role": "assistant", "content": None, "tool_calls": [
        {"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"}]  # fmt: skip
    assert respond(back).output_text == chat(messages).choices[0].message.content


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


def test_a_form_is_kept_to(server, respond):
    made = server.client().responses.parse(input="why?", text_format=Weather, **GREEDY, max_output_tokens=60)
    assert made.output_parsed.city in ("Rome", "Oslo") and made.status == "completed"
    with server.client().responses.stream(input="why?", text_format=Weather, **GREEDY) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_parsed == made.output_parsed
    form = {"type": "json_schema", "name": "city", "schema": CITY}
    assert json.loads(respond(text={"format": form}, max_output_tokens=60).output_text)["city"] in ("Rome", "Oslo")


def test_what_is_not_supported_is_named(respond, server):
    for options, what in (
        ({"previous_response_id": "resp_1"}, "previous_response_id: no response is kept here"),
        ({"conversation": "c"}, "conversation: no response is kept"),
        ({"background": True}, "background: a request is answered while"),
        ({"truncation": "auto"}, "truncation: no input is left out"),
        ({"include": ["file_search_call.results"]}, "include: 'file_search_call.results' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools: only functions"),
        ({"text": {"verbosity": "low"}}, "text: verbosity"),
        ({"reasoning": {"effort": "low"}}, "reasoning: the model's chat template takes none"),
        ({"reasoning": {"summary": "auto"}}, "reasoning: summary is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be greater"),
        ({"temperature": 9}, "temperature: must be less"),
        ({"extra_body": {"n": 2}}, "n: this is no field of /v1/responses"),
        ({"asked": [{"type": "reasoning", "id": "r", "summary": []}]}, "input: .0.: items of the type 'reasoning'"),
        ({"asked": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input: .*image_url"),
        (
            {"asked": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input: image_url: this model reads text only",
        ),
        ({"asked": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "'input_file' are not"),
        ({"asked": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input: .0..content"),
        ({"asked": [{"role": "judge", "content": "x"}]}, "input: .0..role"),
        ({"asked": []}, "input: "),
    ):
        with pytest.raises(openai.BadRequestError, match=what):
            respond(**options)
    for more, message in (({}, "input: is missing"), ({"input": "x", "include": [{}]}, "include: {} is not supported"),
                          ({"input": "x", "tool_choice": "none", "tools": [{"type": "function", "name": "a",
                            "parameters": {"x": float("nan")}}]}, "tools: can't be repeated as JSON")):  # fmt: skip
        status, _, error = post(server, "/v1/responses", {"model": NAME} | more)
        assert status == 400 and error["message"].startswith(message)
    with pytest.raises(openai.NotFoundError):
        server.client().responses.retrieve("resp_1")


def test_a_stream_that_fails_ends_with_its_error(server):
    with serving(byte_model(), byte_tokenizer(TEMPLATE), request_timeout=1.0) as slow:
        slow.runner.gate.clear()
        events = list(slow.client().responses.create(input="x", stream=True, **GREEDY))
    assert events[-1].type == "response.failed" and "limit of 1 s" in events[-1].response.error.message
