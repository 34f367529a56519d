"""A real HTTP server in this process: uvicorn on a free loopback port, the real scheduler, a tiny model on one rank."""

import contextlib
import json
import socket
import threading
import time

import openai
import pytest
import torch

import transformers
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.serving.http.app import Service
from megatron_tree.inference.serving.http.frontend import Frontend
from megatron_tree.inference.serving.http.prompts import Prompts
from megatron_tree.inference.serving.http.server import bind, serve
from support import byte_tokens
from support.hf_models import SHAPE
from support.plain_runner import PlainRunner

NAME = "tiny"
END = "<end>"
ASK = [{"role": "user", "content": "why?"}]
COMPLETION = {"model": NAME, "prompt": "a", "max_tokens": 2, "temperature": 0}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}
TEMPLATE = (
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('assistants do not begin') }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(chat_template=TEMPLATE):
    """One token for each byte, and an end token; needs no files."""
    tokenizer = byte_tokens.byte_tokenizer(end=END)
    tokenizer.chat_template = chat_template
    return tokenizer


def byte_model(seed=1):
    """A random Llama for that tokenizer, with weights large enough that greedy answers depend on the prompt."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SHAPE | {"vocab_size": 257})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(40.0 if "lm_head" in name else 4.0)
    return model


class GatedRunner(PlainRunner):
    """Waits before every decoding step until the gate is open; at_gate: it has come to one."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.gate, self.at_gate = threading.Event(), threading.Event()
        self.gate.set()

    def step(self, rows, tokens, **options):
        self.at_gate.set()
        assert self.gate.wait(60)
        return super().step(rows, tokens, **options)


class Server:
    """`serve` in a thread, as rank 0 of one rank runs it."""

    def __init__(
        self,
        model,
        tokenizer,
        *,
        runner=None,
        images=None,
        max_rows=8,
        max_waiting=64,
        grace=20.0,
        max_model_len=256,
        end_tokens=None,
        keep_bytes=0,
        **options,
    ):
        self.runner = runner or GatedRunner(model)
        limits = {"max_rows": max_rows, "max_waiting": max_waiting, "keep_bytes": keep_bytes}
        self.scheduler = Scheduler(self.runner, tokenizer, end_tokens=end_tokens, **limits)
        self.service = Service(
            frontend=Frontend(self.scheduler, self.scheduler.grammars),
            prompts=Prompts(tokenizer, vocab_size=self.runner.vocab_size, max_model_len=max_model_len, images=images),
            models=(NAME,),
            **{"request_timeout": 60.0} | options,
        )
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.failure, self._ready = None, threading.Event()
        self._thread = threading.Thread(target=self._run, args=(grace,), daemon=True)
        self._thread.start()
        assert self._ready.wait(100)

    def _run(self, grace):
        def ready(stop):
            self.ask_to_stop = stop
            self._ready.set()

        try:
            serve(self.scheduler, self.service, self.listener, grace=grace, ready=ready)
        except BaseException as error:
            self.failure = error

    def client(self, **options):
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60} | options
        )

    def chat(self, messages=ASK, **options):
        options = {"max_tokens": 5, "temperature": 0} | options
        return self.client().chat.completions.create(model=NAME, messages=messages, **options)

    def complete(self, **options):
        options = {"prompt": "go", "max_tokens": 8, "temperature": 0} | options
        return self.client().completions.create(model=NAME, **options)

    def wait(self, seconds=100):
        """Until `serve` has returned."""
        self._thread.join(seconds)
        assert not self._thread.is_alive()

    def stop(self):
        if isinstance(self.runner, GatedRunner):
            self.runner.gate.set()
        self.ask_to_stop("the test's end")
        self.wait()


@contextlib.contextmanager
def serving(*args, **options):
    server = Server(*args, **options)
    try:
        yield server
    finally:
        server.stop()


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def bad_request(create, words, **options):
    """The error of a request with these options, whose message matches `words`."""
    with pytest.raises(openai.BadRequestError, match=words) as error:
        create(**options)
    return error.value


def is_idle(server):
    """No requests, and no rows in the cache."""
    return server.scheduler.load == (0, 0) and not server.runner.rows


def raw(server, path, body, *, headers=(), read=True):
    """The response to a POST with nothing between us and the socket; or, read=False, the open socket."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {header.partition(":")[0] for header in headers}
    usual = {"Connection": "close", "Content-Type": "application/json", "Host": "127.0.0.1"}
    usual |= {} if "Transfer-Encoding" in given else {"Content-Length": len(data)}
    head = ["POST " + path + " HTTP/1.1", *headers]
    head += [f"{name}: {value}" for name, value in usual.items() if name not in given]
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)
    connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
    if not read:
        return connection
    with connection, connection.makefile("rb") as file:
        return file.read().decode()


def post(server, path, body, **options):
    """(status, head, the error object or the whole body)."""
    head, _, body = raw(server, path, body, **options).partition("\r\n\r\n")
    found = json.loads(body)
    if "error" in found:
        assert set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}
    return int(head.split()[1]), head, found.get("error", found)
