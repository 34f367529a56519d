"""Limits of length and time: prompts that are too long, requests that do not come."""

import concurrent.futures
import json
import socket
import threading
import time
import types
import urllib.error
import urllib.request

import pytest

from megatron_tree.core import comm
from megatron_tree.inference.generation.grammars import Grammars
from megatron_tree.inference.serving.http import errors, frontend
from megatron_tree.inference.serving.http.errors import ApiError
from megatron_tree.inference.serving.http.prompts import Prompts
from support.http_server import CHAT, COMPLETION, byte_model, byte_tokenizer, post, serving, until

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    return byte_model()


def test_a_prompt_that_is_too_long_is_refused_by_its_beginning(model, monkeypatch):
    with serving(model, TOKENIZER) as server:
        seen, call = [], type(TOKENIZER).__call__

        def watched(self, text, **options):
            seen.append(len(text))
            return call(self, text, **options)

        monkeypatch.setattr(type(TOKENIZER), "__call__", watched)
        for path, body in (
            ("/v1/completions", COMPLETION | {"prompt": "x" * 5_000_000}),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "y" * 5_000_000}]}),
        ):
            status, _, error = post(server, path, body)
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert "a prompt of more than 256 tokens" in error["message"]
        assert 0 < max(seen) < 5000
        few_tokens = TOKENIZER("a" * 2000).input_ids[:200]
        assert post(server, "/v1/completions", COMPLETION | {"prompt": few_tokens})[0] == 200


def test_long_texts_of_few_tokens_are_served(model):
    """More characters than a first look allows for."""
    prompts = Prompts(TOKENIZER, vocab_size=257, max_model_len=256)
    prompts._tokenizer = lambda text, **_: types.SimpleNamespace(input_ids=list(range(len(text) // 100)))
    assert len(prompts._tokens("x" * 20_000, special=False)) == 200
    with pytest.raises(ApiError, match="more than 256"):
        prompts._tokens("x" * 2_000_000, special=False)
    prompts.close()


def test_clients_that_do_not_send_their_request(model, monkeypatch):
    monkeypatch.setattr(errors, "RECEIVE_TIMEOUT_S", 1.0)
    with serving(model, TOKENIZER) as server:
        host = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        silent = [socket.create_connection(host, timeout=30) for _ in range(5)]
        for i, client in enumerate(silent):
            client.sendall(head[: 3 * i])
        slow = socket.create_connection(host, timeout=30)
        slow.sendall(head + b"Content-Length: 100\r\n\r\n{")
        kept = socket.create_connection(host, timeout=30)
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # the body may come later than the head
            answer += kept.recv(4096)
        assert b"200 OK" in answer
        kept.sendall(head[:20])
        begun = time.monotonic()
        assert [client.recv(100) for client in [*silent, kept]] == [b""] * 6
        answer = b""
        while piece := slow.recv(4096):
            answer += piece
        assert b" 408 " in answer and b"body_too_slow" in answer
        assert time.monotonic() - begun < 20
        for client in (*silent, slow, kept):
            client.close()
        # an answer may take longer than a request
        body = COMPLETION | {"max_tokens": 200, "ignore_eos": True}
        server.runner.gate.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, server, "/v1/completions", body)
            time.sleep(1.3)
            server.runner.gate.set()
            assert answer.result()[0] == 200


def _health(server):
    try:
        answer = urllib.request.urlopen(f"{server.url}/health", timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, json.load(answer)


def test_the_health_check_sees_a_turn_that_does_not_end(model, monkeypatch):
    with serving(model, TOKENIZER) as server:
        server.service.frontend._stalled_after_s = 20.0
        for waited, expected in ((19.0, (200, "ok")), (21.0, (503, "stalled"))):
            monkeypatch.setattr(comm, "waited_s", lambda waited=waited: waited)
            status, found = _health(server)
            assert (status, found["status"]) == expected
            assert ("another rank for 21 s" in found.get("reason", "")) == (status == 503)


def test_others_are_answered_while_a_grammar_is_compiled(model, monkeypatch):
    with serving(model, TOKENIZER) as server:
        begun, done = threading.Semaphore(0), threading.Event()

        def compiling(grammars, schema):
            begun.release()
            assert done.wait(60)
            raise ValueError("json_schema: too large")

        monkeypatch.setattr(Grammars, "check", compiling)
        monkeypatch.setattr(frontend, "MAX_CHECKED", 8)
        formed = COMPLETION | {"response_format": {"type": "json_object"}}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            waits = [pool.submit(post, server, "/v1/completions", formed) for _ in range(8)]
            try:
                assert all(begun.acquire(timeout=60) for _ in range(frontend.CHECKED_AT_ONCE))
                until(lambda: server.service.frontend._num_checked == 8)
                assert post(server, "/v1/completions", COMPLETION)[0] == 200
                status, head, error = post(server, "/v1/completions", formed)
                assert (status, error["code"]) == (429, "queue_full") and "retry-after" in head.lower()
            finally:
                done.set()
            assert all(wait.result()[0] == 400 for wait in waits)
