"""What clients do to a server that no program should: each attack is a function of the server's address."""

import base64
import concurrent.futures
import contextlib
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from PIL import Image

NAME = "tiny"


def ask(url, path, body, *, key="none", seconds=300):
    """(status, bytes of the answer) of a POST, or of a GET if there is no body."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=seconds) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def connected(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def picture(width, height, kind="png"):
    """A data URL of a small file."""
    file = io.BytesIO()
    Image.new("1" if kind == "png" else "L", (width, height)).save(file, kind)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def about(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}


def endless_errors(url, **key):
    """Bodies with as many errors as fit."""
    many, text = 60_000, {"model": NAME, "prompt": "a"}
    message = {"role": "user", "content": "a"}
    for path, body in (
        ("/v1/completions", text | {"stop_token_ids": ["a"] * many}),
        ("/v1/completions", text | {"prompt": [[{}]] * many}),
        ("/v1/completions", text | {"logit_bias": {f"t{i}": "x" for i in range(many)}}),
        ("/v1/completions", text | {f"field{i}": i for i in range(many)}),
        ("/v1/completions", text | {"x" * 5_000_000: 1}),
        ("/v1/completions", text | {"model": "x" * 5_000_000}),
        ("/v1/completions", b"[" * 2_000_000),
        ("/v1/completions", b"[" + b"1," * 3_000_000 + b"1]"),
        ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user"}] * many}),
        ("/v1/chat/completions", {"model": NAME, "messages": [message | {f"field{i}": i for i in range(many)}]}),
        ("/v1/chat/completions", {"model": NAME, "messages": [message], "tools": [{}] * many}),
        ("/v1/responses", {"model": NAME, "input": [{"role": "user", "content": [{"type": "input_text"}] * many}]}),
    ):
        status, answer = ask(url, path, body, **key)
        assert status in (400, 404) and len(answer) < 10_000, (path, status, answer[:300])


def image_bombs(url, side=5700, **key):
    """Small files of very many pixels, and one that makes a reader start a program. side: of the largest square that is
    served."""
    large = picture(side, side)
    for urls in ([picture(8192, 8191)], [large, large]):
        status, answer = ask(url, "/v1/chat/completions", about(*urls), **key)
        assert status == 400 and b"pixels in all" in answer, answer
    status, answer = ask(url, "/v1/chat/completions", about(picture(30, 20, "eps")), **key)
    assert status == 400 and b"no PNG" in answer, answer
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ask(url, "/v1/chat/completions", about(large), **key)[0], range(4)))
    assert set(found) <= {200, 503}, found


HOLD = """
import socket, sys, time
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = []
for _ in range(count):
    try:
        held.append(socket.create_connection((host, port), timeout=60))
    except OSError:
        pass
print(len(held), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def idle_connections(url, count):
    """A process of its own holds them: descriptors of this one are scarce."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    command = [sys.executable, "-S", "-c", HOLD, host, port, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert int(process.stdout.readline()) > count // 2
            yield
        finally:
            process.stdin.close()


def malformed(url, **key):
    """Requests that are none: each could be a line of the log."""
    for i in range(200):
        with connected(url) as connection:
            connection.sendall(b"nonsense %d\r\n\r\n" % i)
            assert b" 400 " in connection.recv(100)


def slow_and_deaf(url, *, key="none"):
    """Bodies that do not come, and answers that nobody reads; returns the connections of both."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n".encode()
    slow, deaf = [], []
    for _ in range(2):
        slow.append(connected(url))
        slow[-1].sendall(head + b"Content-Length: 30000000\r\n\r\n" + b"[" + b"1," * 1_000_000)
        body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 100, "stream": True, "logprobs": 20}).encode()
        deaf.append(connected(url))
        deaf[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        deaf[-1].sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return slow, deaf


def read_all(connection):
    """What comes until the connection ends, however it does."""
    found = b""
    with connection, contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def stop_under_load(url, process, *, key="none", clients=40):
    """SIGTERM while clients ask: each is answered, or told to come again later, until nobody listens."""
    found = []
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 3}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def go_on():
        while True:
            try:
                with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:
                    found.append((answer.status, None))
            except urllib.error.HTTPError as error:
                found.append((error.code, error.headers.get("Retry-After")))
            except (urllib.error.URLError, ConnectionError):
                return

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(go_on) for _ in range(clients)]
        while len(found) < clients:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        for one in asking:
            one.result()
    assert all(status == 200 or (status in (429, 503) and after) for status, after in found), found


class GoodClient:
    """Asks again and again, and notes what it is told."""

    def __init__(self, url, **key):
        self._url, self._key = url, key
        self._over, self.answers = threading.Event(), []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        text = {"model": NAME, "prompt": "hello", "max_tokens": 2, "temperature": 0}
        chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}
        asked = [("/health", None), ("/v1/completions", text), ("/v1/chat/completions", chat)]
        while not self._over.is_set():
            for path, body in asked:
                try:
                    self.answers.append(ask(self._url, path, body, **self._key)[0])
                except OSError as error:
                    self.answers.append(error)
            self._over.wait(0.02)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join(300)


def peak_bytes(pid="self"):
    """The most memory that a process has had since this was asked."""
    with open(f"/proc/{pid}/status") as status:
        peak = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")
    return peak
