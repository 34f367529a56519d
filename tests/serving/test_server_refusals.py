"""What the HTTP server refuses, and in which words; keys, names and sizes; its options; how it stops and fails."""

import concurrent.futures
import json
import time

import openai
import pytest

from megatron_tree.inference.serving.http import errors
from megatron_tree.inference.serving.http.arguments import KEY_VARIABLE, build_parser, check_arguments
from megatron_tree.inference.serving.http.protocol import REFUSED, ChatRequest
from megatron_tree.launching import parse_with_config
from support.http_server import CHAT, COMPLETION, byte_model, byte_tokenizer, is_idle, post, raw, serving, until

TOKENIZER = byte_tokenizer()
KEY = "a-key-for-tests"
PATHS = {"completion": ("/v1/completions", COMPLETION), "chat": ("/v1/chat/completions", CHAT)}


@pytest.fixture(scope="module")
def model():
    return byte_model()


@pytest.fixture(scope="module")
def server(model):
    with serving(model, TOKENIZER) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(model):
    with serving(model, TOKENIZER, loopback_names_only=True) as server:
        yield server


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
BAD = [
    ("completion", {"nonsense": 1}, "nonsense", "unknown field"),
    ("completion", {"max_tokens": 0}, "max_tokens", "0 is for echo only"),
    ("completion", {"max_tokens": 400}, "max_tokens", "limit of 256 tokens together"),
    ("completion", {"prompt": "x" * 256, "max_tokens": 1}, None, "a prompt of 256 tokens"),
    ("completion", {"prompt": ["a", "\udfff"]}, "prompt", "character 0 is an unpaired UTF-16 surrogate"),
    ("completion", {"prompt": [1, 257]}, "prompt", "token 257 does not exist"),
    ("completion", {"n": 9}, "n", "max_rows=8"),
    ("completion", {"stop_token_ids": [300]}, "stop_token_ids", "0 to 256"),
    ("completion", {"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages", "[0].role"),
    ("chat", {"messages": [{"role": "user"}]}, "messages", "[0] has no content"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "'text', 'image_url'"),
    ("chat", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "this model reads text only"),
    ("chat", {"messages": [{"role": "assistant", "content": "x"}]}, "messages", "assistants do not begin"),
    ("chat", {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ("chat", {"max_completion_tokens": 3}, "max_tokens", "pass one of the two"),
]


def test_bad_requests(server):
    for kind, change, param, words in BAD:
        path, body = PATHS[kind]
        status, _, error = post(server, path, body | change)
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), change
        assert words in error["message"] and error["code"] is not None, change
    assert is_idle(server)


def test_unsupported_fields(server):
    for name, (neutral, why) in REFUSED.items():
        status, _, error = post(server, "/v1/completions", COMPLETION | {name: {"something": ["else"]}})
        assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        assert error["message"] == f"{name}: {why}"
        for value in (None, *neutral):
            assert ChatRequest.model_validate(CHAT | {name: value}), name


def test_an_unknown_field_names_the_one_that_was_meant(server):
    for field in ("max_token", "max_completion_tokens"):
        status, _, error = post(server, "/v1/completions", COMPLETION | {field: 5})
        assert status == 400 and error["param"] == field
        assert error["message"].startswith(f"{field}: unknown field: leave it out; did you mean 'max_tokens' instead")
    for field in ("allowed_token_ids", "return_token_ids", "repetition_detection"):  # vLLM's, and none of ours
        assert post(server, "/v1/completions", COMPLETION | {field: 5})[2]["message"].endswith("leave it out"), field


def test_other_models_paths_and_methods(server):
    status, _, error = post(server, "/v1/completions", COMPLETION | {"model": "gpt-4o"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "only 'tiny'" in error["message"]
    status, _, error = post(server, "/v1/embeddings", {})
    assert status == 404 and "POST /v1/embeddings" in error["message"]
    assert post(server, "/v1/models", {})[0] == 405


def test_bodies_that_are_too_large(server, monkeypatch):
    monkeypatch.setattr(errors, "MAX_BODY_BYTES", 20_000)
    body = COMPLETION | {"prompt": "x" * 30_000}
    status, _, error = post(server, "/v1/completions", body)
    assert status == 413 and error["code"] == "body_too_large"
    data = json.dumps(body).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    status, _, error = post(server, "/v1/completions", chunked, headers=["Transfer-Encoding: chunked"])
    assert status == 413 and error["code"] == "body_too_large"


def test_the_key(model):
    with serving(model, TOKENIZER, api_keys=(KEY,)) as server:
        for key in ("another-key", KEY + "x", KEY[:-1], "ключ".encode().decode("latin-1")):
            status, head, error = post(server, "/v1/completions", COMPLETION, headers=[f"Authorization: Bearer {key}"])
            assert (status, error["code"]) == (401, "invalid_api_key") and "is wrong" in error["message"]
            assert "www-authenticate: bearer" in head.lower()
        status, _, error = post(server, "/v1/completions", b"x" * 100)
        assert status == 401 and "is missing" in error["message"], "before the body is looked at"
        assert post(server, "/v1/completions", COMPLETION, headers=[f"Authorization: Basic {KEY}"])[0] == 401
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="wrong").models.list()
        assert server.client(api_key=KEY).completions.create(**COMPLETION).choices
        assert post(server, "/health", {})[0] == 405, "needs no key"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("localhost.evil.example", 403),
        ("evil.example.", 403),
        ("localhost..", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("localhost.:80", 200),
        ("[::1]:80", 200),
    ],
)
def test_other_names_are_refused_where_no_key_is_asked_for(guarded, name, status):
    assert post(guarded, "/v1/completions", COMPLETION, headers=[f"Host: {name}"])[0] == status


def test_two_lengths_of_one_body_are_refused_and_the_connection_ends(guarded):
    data = json.dumps(COMPLETION).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    for length in (len(data), len(chunked), 0):
        headers = ["Transfer-Encoding: chunked", f"Content-Length: {length}", "Connection: keep-alive"]
        answer = raw(guarded, "/v1/completions", chunked + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     headers=headers)  # fmt: skip
        head, _, body = answer.partition("\r\n\r\n")
        assert " 400 " in head and "connection: close" in head.lower()
        assert "Content-Length and Transfer-Encoding exclude each other" in body and "HTTP/1.1" not in body
    assert post(guarded, "/v1/completions", chunked, headers=["Transfer-Encoding: chunked"])[0] == 200


def test_errors_are_reported_in_brief(server):
    for change, words in (
        ({"stop_token_ids": ["a"] * 9000}, "stop_token_ids: [0] must be a valid integer"),
        ({"stop_token_ids": list(range(5000))}, "at most 4096 items"),
        ({"logit_bias": {str(i): 0 for i in range(5000)}}, "must have at most 4,096 tokens, not 5,000"),
        ({"logit_bias": {str(i): "x" for i in range(4000)}}, "[3] must be a valid number, and 3996 more"),
        ({"stop": ["a"] * 9000}, "at most 16 items"),
        ({"prompt": [[1]] * 9000}, "at most 256 items"),
        ({"prompt": "x", **{f"field{i}": 1 for i in range(9000)}}, "the body has 9,004 fields, more than 100"),
        ({"field" * 9000: 1}, "unknown field"),
    ):
        status, _, error = post(server, "/v1/completions", COMPLETION | change)
        assert status == 400 and words in error["message"] and len(error["message"]) < 2100, error
    status, _, error = post(server, "/v1/completions", COMPLETION | {"model": "x" * 100_000})
    assert status == 404 and len(error["message"]) < 2100
    many = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": [0] * 200_000}}
    status, _, error = post(server, "/v1/chat/completions", CHAT | many)
    assert status == 400 and "more than 100,000 values" in error["message"]


def test_bodies_that_are_no_json_objects(server):
    for body, words in (
        (b"[1, 2]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[" + b"1," * (1 << 21) + b"1,1]", "commas"),
    ):
        status, _, error = post(server, "/v1/completions", body)
        assert status == 400 and words in error["message"], body[:20]
    head, _, answer = raw(server, "/v1/completions", b"{}", headers=["Content-Type: text/plain"]).partition("\r\n\r\n")
    assert " 400 " in head and "Content-Type: application/json" in answer


def test_stops_in_order(model):
    with serving(model, TOKENIZER, max_rows=1) as server:
        server.runner.gate.clear()
        body = COMPLETION | {"max_tokens": 30}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            running = [pool.submit(post, server, "/v1/completions", body) for _ in range(2)]
            until(lambda: sum(server.scheduler.load) == 2)
            server.ask_to_stop("the test")
            server.ask_to_stop("the test, again")
            until(lambda: server.service.frontend.state == "stopping")
            status, head, error = post(server, "/v1/completions", body)
            assert (status, error["code"]) == (503, "shutting_down") and "retry-after" in head.lower()
            server.runner.gate.set()
            for one in running:
                status, _, answer = one.result()
                assert status == 200 and answer["usage"]["completion_tokens"] <= 30
        server.wait()
        assert server.failure is None
        with pytest.raises(ConnectionRefusedError):
            post(server, "/v1/completions", body)


def test_the_grace_time_ends(model):
    with serving(model, TOKENIZER, grace=0.2) as server:
        server.runner.gate.clear()
        body = COMPLETION | {"max_tokens": 200}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            whole = pool.submit(post, server, "/v1/completions", body)
            stream = pool.submit(raw, server, "/v1/completions", body | {"stream": True})
            until(lambda: sum(server.scheduler.load) == 2)
            server.ask_to_stop("the test")
            until(lambda: time.monotonic() > server.scheduler._deadline)
            server.runner.gate.set()
            assert whole.result()[0] == 503
            assert "shutting_down" in stream.result() and "[DONE]" not in stream.result()
        server.wait()
        assert server.failure is None


def test_a_model_that_fails(model, monkeypatch):
    with serving(model, TOKENIZER) as server:

        def broken(*_):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(server.runner, "step", broken)
        status, _, error = post(server, "/v1/completions", COMPLETION | {"max_tokens": 9, "ignore_eos": True})
        assert (status, error["type"]) == (500, "server_error") and "the device is gone" in error["message"]
        server.wait()
        assert str(server.failure) == "the device is gone"


def _options(*arguments, world=2):
    args = parse_with_config(build_parser(), list(arguments))
    check_arguments(args, world)
    return args


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-rows", "0"], "--max-rows 0 must be 1 or more"),
        (["--request-timeout", "nan"], "--request-timeout nan must be a finite number, more than 0"),
        (["--port", "70000"], "--port 70000"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines could use the model without a key"),
        (["--api-key-file", "no/such/file"], "can't be read"),
    ],
)
def test_options_are_checked_before_anything_is_sent(arguments, words, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=words):
        _options(*arguments)


def test_where_the_key_comes_from(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    args = _options()
    assert (args.api_keys, args.served_model_name) == ((), ["smollm2"])
    (tmp_path / "keys").write_text(f"{KEY}\nsecond-key\n")
    assert _options("--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys")).api_keys == (KEY, "second-key")
    monkeypatch.setenv(KEY_VARIABLE, "from-the-environment")
    assert _options("--host", "::").api_keys == ("from-the-environment",)
    assert _options("--api-key-file", str(tmp_path / "keys")).api_keys == (KEY, "second-key")
    for content, words in (
        (b"\n \n", "is empty: write a key into it"),
        (b"short", "an API key must have 8 or more printable ASCII characters without spaces"),
        (b"with a space in it", "without spaces"),
        ("schl\u00fcssel-mit-umlaut".encode(), "printable ASCII"),
    ):
        (tmp_path / "keys").write_bytes(content)
        with pytest.raises(ValueError, match=f"--api-key-file '.*keys'.* {words}"):
            _options("--api-key-file", str(tmp_path / "keys"))
