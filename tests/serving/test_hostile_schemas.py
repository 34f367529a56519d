"""JSON schemas that are too much, sent to a real server: a client that behaves is answered throughout, no rank ends."""

import concurrent.futures
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import types
import urllib.request
from pathlib import Path

import psutil
import pytest

pytest.importorskip("llguidance")

from megatron_tree.inference.generation.grammar_process import MEMORY_BYTES
from support import hostile_schemas
from support.http_server import CHAT, COMPLETION, NAME, byte_model, byte_tokenizer, is_idle, post, serving, until

REPO = Path(__file__).parents[2]
TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
TOKENIZER = byte_tokenizer(TOOLS)
WORDS = {"type": "string", "pattern": "^([a-z]{3},){20}$"}
MIB = 1 << 20
FLAT = [name for name in hostile_schemas.REFUSED if "nested alternatives" not in name]


def _requests(schema):
    """(path, body) of every way that a schema can go in."""
    form = {"name": "x", "schema": schema}
    function, forced = {"name": "f", "parameters": schema}, {"tool_choice": "required"}
    answer = {"model": NAME, "input": "a", "max_output_tokens": 2}
    completion, chat = COMPLETION | {"max_tokens": 60}, CHAT | {"max_tokens": 60}
    return [
        ("/v1/completions", completion | {"response_format": {"type": "json_schema", "json_schema": form}}),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_schema", "json_schema": form}}),
        ("/v1/chat/completions", chat | {"tools": [{"type": "function", "function": function}]} | forced),
        ("/v1/responses", answer | {"text": {"format": {"type": "json_schema"} | form}}),
        ("/v1/responses", answer | {"tools": [{"type": "function"} | function]} | forced),
    ]  # fmt: skip


class Behaves(threading.Thread):
    """A client that asks for texts and for JSON, again and again, and counts answers other than the first ones."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.stopped = server, threading.Event()
        plain = ("/v1/completions", COMPLETION | {"prompt": "go on", "max_tokens": 20})
        self.asks = [plain, _requests(WORDS)[0], _requests(WORDS)[1]]
        self.want = [self._ask(*ask) for ask in self.asks]
        self.answers, self.wrong = 0, []
        self.start()

    def _ask(self, path, body):
        status, _, answer = post(self.server, path, body)
        return status, [choice.get("text", choice.get("message")) for choice in answer.get("choices", [])]

    def run(self):
        while not self.stopped.is_set():
            for ask, want in zip(self.asks, self.want, strict=True):
                got = self._ask(*ask)
                self.answers += 1
                if got != want:
                    self.wrong.append(got)

    def check(self):
        before = self.answers
        until(lambda: self.answers > before + 2 * len(self.asks), 200)
        self.stopped.set()
        self.join(100)
        assert all(status == 200 and texts for status, texts in self.want) and not self.wrong


class Memory(threading.Thread):
    """The most that processes took beyond what they had at first; which: by their command lines, children of ours."""

    def __init__(self, pid, which=""):
        super().__init__(daemon=True)
        self.process, self.which, self.stopped = psutil.Process(pid), which, threading.Event()
        self.first, self.most = self._bytes(), 0
        self.start()

    def _bytes(self):
        total = self.process.memory_info().rss
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if self.which in " ".join(child.cmdline()):
                    memory = child.memory_full_info()  # copies share the tokenizer's
                    total += memory.pss
        return total

    def run(self):
        while not self.stopped.wait(0.05):
            self.most = max(self.most, self._bytes() - self.first)

    def check(self, most):
        self.stopped.set()
        self.join(100)
        assert self.most < most, f"{self.most / MIB:.0f} MiB"


def _attack(server, names):
    """Every schema on some path, four at a time; each is refused in a sentence."""
    asked = [_requests(hostile_schemas.REFUSED[name][0])[i % 5] for i, name in enumerate(names)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda ask: post(server, *ask), asked))
    for name, (status, _, error) in zip(names, answers, strict=True):
        assert status == 400 and error["message"].startswith("json_schema: "), (name, error)
        assert re.search(hostile_schemas.REFUSED[name][1], error["message"]), (name, error)


def test_one_rank_answers_throughout():
    with serving(byte_model(), TOKENIZER, max_rows=4) as server:
        behaves, memory = Behaves(server), Memory(os.getpid(), "grammar_process")
        _attack(server, FLAT)
        later = [post(server, *ask) for ask in _requests(hostile_schemas.LATER)[:2]]
        assert [(status, error["code"]) for status, _, error in later] == 2 * [(400, "invalid_value")]
        assert all("no answer goes on" in error["message"] for _, _, error in later)
        for levels in (100, 480, 100_000):
            nested = '{"anyOf": [' * levels + "{}" + "]}" * levels
            for path, body in _requests("SCHEMA"):
                status, _, error = post(server, path, json.dumps(body).replace('"SCHEMA"', nested).encode())
                assert status == 400 and error["message"], (path, levels)
        behaves.check()
        memory.check(4 * MEMORY_BYTES + 100 * MIB)
        until(lambda: is_idle(server))
        assert server.failure is None


def _metrics(server):
    text = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    return dict(re.findall(r"^megatron_tree_(\w+) (\S+)$", text, re.MULTILINE))


@contextlib.contextmanager
def _served(tmp_path, *options):
    """A server of two ranks as users start it, with its address and process."""
    folder = tmp_path / NAME
    TOKENIZER.save_pretrained(folder)
    byte_model().save_pretrained(folder)
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "megatron_tree", "serve", "--ranks", 2, "--model", folder, "--port", 0, *options]
    process = subprocess.Popen(list(map(str, command)), env=env, cwd=REPO, stdout=subprocess.PIPE, text=True)
    try:
        ready = next(line for line in process.stdout if line.startswith("serving "))
        yield types.SimpleNamespace(url=re.search(r"http://\S+(?=/v1)", ready)[0], process=process)
        process.terminate()
        assert "stopped\n" in process.stdout and process.wait(100) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_two_ranks_answer_throughout(tmp_path):
    with _served(tmp_path, "--max-rows", 16, "--wait-timeout", 20) as server:
        behaves, memory = Behaves(server), Memory(server.process.pid)
        _attack(server, FLAT)
        path, body = _requests({"const": "a" * 200_000})[0]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            heavy = pool.map(lambda n: post(server, path, body | {"n": n, "prompt": ["a", "b"]}), (1, 2, 4, 4))
        assert {status for status, *_ in heavy} <= {200, 400}
        behaves.check()
        memory.check(12 * MEMORY_BYTES)
        assert _metrics(server)["restarts_total"] == "0"
