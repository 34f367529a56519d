"""Decoders that strip, characters of several tokens, several end tokens: texts, bytes and offsets are those of prompt
and answer together."""

import functools
import json

import pytest

from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.serving.batch import BatchOptions, run_batch
from support.bigrams import saying
from support.byte_tokens import byte_tokenizer
from support.http_server import NAME, serving
from support.plain_runner import PlainRunner
from support.word_tokens import END, TURN, word_tokenizer

PROMPT = "The capital of France is"
ANSWER = ("▁is", "▁Paris", ".", "▁a", "▁")  # what it says after the prompt
WORDS = word_tokenizer("{% for m in messages %}[{{ m.content }}] is{% endfor %}")
BYTES = byte_tokenizer()


@pytest.fixture(scope="module")
def server():
    with serving(saying(WORDS, *ANSWER, "b", END), WORDS) as server:
        yield server


@pytest.fixture(scope="module")
def complete(server):
    return functools.partial(server.complete, prompt=PROMPT, max_tokens=4)


def _text_and_logprobs(stream):
    """Of the only choice."""
    text, told = "", {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for chunk in stream:
        text += chunk.choices[0].text
        for name, values in told.items():
            values += getattr(chunk.choices[0].logprobs, name) if chunk.choices[0].logprobs else []
    return text, told


def test_a_completion_continues_its_prompt(complete):
    for prompt in (PROMPT, WORDS(PROMPT).input_ids):
        assert complete(prompt=prompt).choices[0].text == " Paris. a "
        assert _text_and_logprobs(complete(prompt=prompt, stream=True))[0] == " Paris. a "
    assert complete(echo=True).choices[0].text == f"{PROMPT} Paris. a "
    stopped = complete(stop=" Paris").choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    assert complete(stop="Paris").choices[0].text == " "


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_a_completion_are_where_their_offsets_say(complete, echo):
    texts = (["<s>", "The", " capital", " of", " France", " is"] if echo else []) + [" Paris", ".", " a", " "]
    answer = complete(echo=echo, logprobs=1).choices[0]
    told = answer.logprobs
    assert told.tokens == texts and "".join(told.tokens).removeprefix("<s>") == answer.text
    for text, offset in zip(told.tokens, told.text_offset, strict=True):
        assert text == "<s>" or answer.text[offset:].startswith(text), "an offset is not where the token is"
    assert list(told.top_logprobs[-4]) == [" Paris"]
    streamed, of_stream = _text_and_logprobs(complete(echo=echo, logprobs=1, stream=True))
    assert streamed == answer.text and of_stream == {name: getattr(told, name) for name in of_stream}


def test_special_tokens_of_a_prompt_count_where_they_are_in_its_text(complete):
    typed = complete(prompt=f"The{TURN} is", echo=True, logprobs=0).choices[0]
    tokens = complete(prompt=WORDS("The is").input_ids, echo=True, logprobs=0).choices[0]
    assert typed.text.startswith(f"The{TURN} is Paris") and tokens.text.startswith("<s> The is Paris")
    assert typed.logprobs.tokens[:3] == ["<s>", "The", TURN] and typed.logprobs.text_offset[:3] == [0, 0, 3]
    assert tokens.logprobs.tokens[:3] == ["<s>", " The", " is"] and tokens.logprobs.text_offset[:3] == [0, 3, 7]
    for answer in (typed, tokens):
        told = answer.logprobs
        assert answer.text[told.text_offset[-4] :] == "".join(told.tokens[-4:]) == " Paris. a "


def test_a_chats_answer_begins_anew_and_its_tokens_make_it_up(server):
    asked = {"model": NAME, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = server.client().chat.completions.create(messages=[{"role": "user", "content": "a"}], **asked)
    (choice,) = answer.choices
    assert choice.message.content == "Paris. a " and [t.token for t in choice.logprobs.content][1:] == [".", " a", " "]
    for told in choice.logprobs.content:
        assert bytes(told.bytes).decode() == told.token and told.top_logprobs[0].token == told.token
    assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode() == choice.message.content


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["byte-level", "byte fallback"])
def test_characters_of_several_tokens(tokenizer):
    first, *rest = tokenizer("a👍.", add_special_tokens=False).input_ids
    assert len(rest) == 5
    with serving(saying(tokenizer, *tokenizer.convert_ids_to_tokens([first, *rest])), tokenizer) as server:
        asked = {"model": NAME, "temperature": 0, "logprobs": 0, "extra_body": {"add_special_tokens": False}}

        def complete(**options):
            return server.client().completions.create(**asked, **options).choices[0]

        prompt = complete(prompt="a 👍 b", echo=True, max_tokens=0)
        at_end = [4] if tokenizer is BYTES else []  # " b" is one word or two bytes
        assert prompt.logprobs.text_offset == [0, 1, 2, 2, 2, 2, 3, *at_end]
        answer = complete(prompt=[first], max_tokens=5)
        assert (answer.text, answer.logprobs.text_offset) == ("👍.", [0, 0, 0, 0, 1])
        answer = complete(prompt="a", max_tokens=5, echo=True)
        assert (answer.text, answer.logprobs.text_offset) == ("a👍.", [0, 1, 1, 1, 1, 2])
        assert complete(prompt=[first], max_tokens=2).text == "\ufffd" * (2 if tokenizer is WORDS else 1)
        answer = complete(prompt=[first, *rest[:2]], max_tokens=3)
        assert (answer.text, answer.logprobs.text_offset) == ("👍.", [0, 0, 1]), "the prompt's half becomes whole"


def test_bytes_of_a_part_of_a_character_are_its_own():
    for tokenizer in (byte_tokenizer(), word_tokenizer()):
        tokenizer.chat_template = "x"
        pieces = tokenizer.tokenize("x👍")[-5:]
        with serving(saying(tokenizer, *pieces), tokenizer) as server:
            asked = {"model": NAME, "max_tokens": 4, "temperature": 0, "logprobs": True}
            answer = server.client().chat.completions.create(messages=[{"role": "user", "content": "?"}], **asked)
        content = answer.choices[0].logprobs.content
        assert [told.bytes for told in content] == [[byte] for byte in "👍".encode()]
        assert answer.choices[0].message.content == "👍"


def test_a_file_of_prompts_is_continued_and_its_chats_begin_anew(tmp_path):
    lines = [{"prompt": PROMPT}, {"messages": [{"role": "user", "content": "a"}]}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    scheduler = Scheduler(PlainRunner(saying(WORDS, *ANSWER, END)), WORDS, max_rows=2, max_waiting=4)
    options = BatchOptions(
        input=str(tmp_path / "in"), output=str(tmp_path / "out"), sampling=SamplingParams(max_tokens=4)
    )
    run_batch(scheduler, WORDS, options, progress=False)
    results = {line["index"]: line for line in map(json.loads, (tmp_path / "out").read_text().splitlines()[1:])}
    assert [results[i]["answers"][0]["text"] for i in range(2)] == [" Paris. a ", "Paris. a "]


@pytest.mark.parametrize("end", [END, TURN])
def test_each_of_several_end_tokens_ends_an_answer(end):
    ends = WORDS.convert_tokens_to_ids([END, TURN])
    with serving(saying(WORDS, "▁is", "▁Paris", end, "▁b"), WORDS, end_tokens=ends) as server:
        create = server.client().completions.create
        answer = create(model=NAME, prompt=PROMPT, temperature=0, logprobs=0).choices[0]
        assert (answer.text, answer.finish_reason) == (" Paris", "stop")
        goes_on = create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=3, extra_body={"ignore_eos": True})
        assert (goes_on.choices[0].text, goes_on.choices[0].finish_reason) == (" Paris b", "length")
