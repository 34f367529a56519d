"""HTTP requests with bytes flipped or cut, and with every wrong value: an answer, or an error object with 4xx.

Never a 500, a traceback or a wait without end; afterwards the server holds nothing and answers as before.
"""

import asyncio
import json
import socket

import pytest

pytest.importorskip("h11")

import h11

from megatron_tree.inference.serving.http import errors, responses
from megatron_tree.inference.serving.http.app import create_app
from megatron_tree.inference.serving.http.protocol import IGNORED, REFUSED, ChatRequest, CompletionRequest
from support.damage import chances, damaged, examples
from support.http_server import CHAT, COMPLETION, NAME, byte_model, byte_tokenizer, is_idle, serving, until

RESPONSE = {"model": NAME, "input": "a", "max_output_tokens": 2, "temperature": 0}
BODIES = {
    "/v1/completions": (COMPLETION, CompletionRequest.model_fields),
    "/v1/chat/completions": (CHAT, ChatRequest.model_fields),
    responses.PATH: (RESPONSE, responses.TRANSLATED | {*responses.REFUSED}),
}
ROUTES = ["/", "/v1/models/\udcff", "/v1/models/../x", "//v1", "/v1/completions/", "/v1/chat", "/health"]
LIMIT_S = 60


def nested(depth):
    return "[" * depth + "]" * depth


# As JSON texts, since some of them are none.
VALUES = [
    *("null", "true", "false", "0", "-1", "1", "2", "1.5", "NaN", "Infinity", "-Infinity", "1e400", "-0.0", "1e-300"),
    *(
        "9" * 30,
        "9" * 5000,
        '""',
        '"x"',
        '"\\ud800"',
        '"\\u0000"',
        '"' + "y" * 3000 + '"',
        "[]",
        "{}",
        "[[]]",
        "[null]",
    ),
    *("[1, 2]", "[-1]", "[999999999999999999999]", '["a", ""]', '["a", 1]', '[["a"]]', "[[1], [2, 3]]"),
    *('[{"a": 1}]',),
    *('{"include_usage": 1}', '{"include_usage": true}', '[{"role": "user", "content": [{"type": "text"}]}]'),
    *('[{"role": "tool", "content": "x"}]', '[{"role": "user", "content": "x", "\\ud800": 1}]', "{", "nul", "'x'"),
    *('[{"role": "assistant", "content": "x"}]', nested(50), nested(200_000), '{"\\ud800": []}', "1_000", "0x10"),
]
HEADERS = [
    *(
        (b"content-type", value)
        for value in (b"text/plain", b"application/json; charset=utf-16", b"\xff", b"a/b/c", b"")
    ),
    *((b"content-length", value) for value in (b"", b"-1", b"x", b"9" * 30, "٣".encode(), b"1e3", b"0", b"1, 1")),
    *((b"host", value) for value in (b"", b"[", b"[::1", b"[::1]:x", b"evil.example", b"\xff", b"127.0.0.1:99999")),
    *((b"authorization", value) for value in (b"", b"Bearer", b"Bearer \xff", b"Basic eDp5", b"Bearer " + b"k" * 9000)),
    (b"transfer-encoding", b"chunked"),
    (b"content-encoding", b"gzip"),
    (b"expect", b"100-continue"),
]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, serving(byte_model(), byte_tokenizer(), max_model_len=64) as server:
        patch.setattr(errors, "MAX_BODY_BYTES", 500_000)
        yield server


def _ask(app, path, body, *, method="POST", headers=(), cut=False):
    """(status, body) of a request to the application itself; cut: the client leaves in the middle of the body."""
    parts = [{"type": "http.request", "body": body[: len(body) // 2], "more_body": True}]
    parts += [{"type": "http.disconnect"}] if cut else [{"type": "http.request", "body": body[len(body) // 2 :]}]
    given = {name for name, _ in headers}
    usual = [
        (b"host", b"127.0.0.1"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode("utf-8", "replace"), "query_string": b"", "root_path": "",
        "headers": [*(pair for pair in usual if pair[0] not in given), *headers], "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }  # fmt: skip
    sent = []

    async def run():
        left = asyncio.Event()

        async def receive():
            if parts:
                return parts.pop(0)
            await left.wait()  # a client that stays
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await asyncio.wait_for(app(scope, receive, send), LIMIT_S)

    asyncio.run(run())
    if not sent:
        return None, b""
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _check(status, body, what):
    """A whole answer, a stream, or an error object that says something; or the way to a path without its last slash."""
    if status == 307:
        return
    assert status is not None and (status == 200 or 400 <= status < 500), (status, body[:300], what)
    if status == 200:
        if body.startswith(b"data: "):
            assert body.endswith(b"data: [DONE]\n\n"), what
        elif body.startswith(b"event: response.created\n"):
            assert b"event: response.incomplete\n" in body or b"event: response.completed\n" in body, what
        else:
            assert json.loads(body).keys() & {"object", "status"}, what
        return
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 8, what
    assert "Traceback" not in error["message"], what


def _with_value(body, fields, chance):
    """JSON text of a body in which one field has an odd value, in place of what was there or beside it."""
    text, value = dict(body), chance.choice(VALUES)
    name = chance.choice([*sorted(fields), *REFUSED, *IGNORED, "extra", "\ud800"])
    if name in text and chance.random() < 0.2:
        del text[name]
    else:
        text[name] = "@"
    if chance.random() < 0.3:
        text["stream"] = True
    return json.dumps(text).replace('"@"', value).encode()


@examples(32, 500)
def test_bodies_and_headers(server, seed, count):
    app = create_app(server.service)
    good = _ask(app, "/v1/completions", json.dumps(COMPLETION).encode())
    assert good[0] == 200
    for chance in chances(seed, count):
        path = chance.choice(list(BODIES))
        body, fields = BODIES[path]
        data, options = json.dumps(body).encode(), {}
        match chance.choice(("bytes", "value", "value", "header", "route", "size", "cut")):
            case "bytes":
                data = damaged(data, chance)
            case "value":
                data = _with_value(body, fields, chance)
            case "header":
                options["headers"] = [chance.choice(HEADERS)]
            case "route":
                path = chance.choice(ROUTES)
                options["method"] = chance.choice(["GET", "PUT", "DELETE", "OPTIONS", "POST", "BREW", ""])
            case "size":
                data = chance.choice([b"", b" " * 600_000, data[:-1] + b" " * 600_000, b"[" * 499_999])
            case "cut":
                options["cut"] = True
        status, answer = _ask(app, path, data, **options)
        if options.get("cut") and status is None:
            continue
        _check(status, answer, (path, data[:300], options))
    until(lambda: is_idle(server), LIMIT_S)
    again = _ask(app, "/v1/completions", json.dumps(COMPLETION).encode())
    assert json.loads(again[1])["choices"] == json.loads(good[1])["choices"]


def _is_complete(data):
    """Whether h11 finds a whole request, or one that it refuses: then the server must say something."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        while (event := connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.EndOfMessage):
                return True
    except h11.RemoteProtocolError:
        return True
    return False


@examples(10, 120)
def test_bytes_on_the_wire(server, seed, count):
    body = json.dumps(COMPLETION).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    usual = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = usual.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked").replace(
        body, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    )
    both = usual.replace(b"Connection: close", b"Connection: close\r\nTransfer-Encoding: chunked")
    for chance in chances(seed, count):
        whole = chance.choice((usual, chunked, both, usual.replace(b"HTTP/1.1", b"HTTP/1.0"), chance.randbytes(200)))
        data = damaged(whole, chance) if chance.random() < 0.9 else whole
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=LIMIT_S) as client:
            client.sendall(data)
            if not _is_complete(data):
                client.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := client.recv(65536):
                    answer += piece
                    if b"Connection: close" not in data and _is_whole(answer):
                        break
            except ConnectionResetError:
                assert not _is_complete(data) or answer, data
        assert answer or not _is_complete(data), data
        if answer:
            status = int(answer.split()[1])
            assert status == 200 or 400 <= status < 500, (data, answer)
    until(lambda: is_idle(server), LIMIT_S)
    assert server.client().completions.create(**COMPLETION).choices[0].text


def _is_whole(answer):
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(answer)
    while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        if isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            return True
    return False
