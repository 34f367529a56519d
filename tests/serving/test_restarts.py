"""Ranks that are started again: requests under way go on, and nothing of an answer is lost or repeated."""

import concurrent.futures
import os
import signal
import threading
import urllib.error
import urllib.request
from multiprocessing.connection import Connection

import openai
import pytest
import torch

import transformers
from megatron_tree.core.errors import CommError
from megatron_tree.inference.generation import batcher
from megatron_tree.inference.generation.grammars import Grammars
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.serving.http import link, ranks
from megatron_tree.inference.serving.http import server as http_server
from megatron_tree.inference.serving.http.app import Service
from megatron_tree.inference.serving.http.arguments import LINK, build_parser, check_arguments
from megatron_tree.inference.serving.http.frontend import Frontend
from megatron_tree.inference.serving.http.link import Link
from megatron_tree.inference.serving.http.prompts import Prompts
from megatron_tree.inference.serving.http.ranks import Ranks, RanksError
from megatron_tree.inference.serving.http.server import STOPPING, bind, serve
from support.hf_models import SHAPE
from support.http_server import COMPLETION, NAME, byte_model, byte_tokenizer, until
from support.plain_runner import PlainRunner
from support.scheduling import assert_alike, make_scheduler, request, text_of
from support.scheduling import serve as serve_all
from support.speculation import Told, speculation, whole


@pytest.mark.parametrize("speculates", [False, True])
def test_answers_that_another_scheduler_began_go_on(speculates, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(batcher, "PATIENCE_S", 60.0)  # which rows take part in a step does not depend on the machine
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPE | {"vocab_size": 257})
    model, tokenizer = transformers.AutoModelForCausalLM.from_config(config).eval(), byte_tokenizer()
    hot = {"temperature": 1.0, "seed": 5}
    requests = [
        request(9, 30, n=3, logprobs=2, ignore_eos=True, **hot),
        request(20, 25, ignore_eos=True),
        request(5, 40, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True, **hot),
        request(4, 30, json_schema='{"type": "string", "pattern": "^([a-z]{3},){20}$"}', **hot),
        request(12, 30, stop="no such text", ignore_eos=True),
        request(30, 20, prompt_logprobs=1, top_p=0.8, ignore_eos=True, **hot),
    ]
    all_events = serve_all(make_scheduler(model, tokenizer, max_rows=8)[0], requests)
    cut = 11
    begun, seen = [], []
    for asked, events in zip(requests, all_events, strict=True):
        answers = [[e for e in events if e.answer == i] for i in range(asked.n)]
        begun.append([None if len(a) <= cut else [e.token for e in a[:cut]] for a in answers])
        seen.append([e for a in answers for e in a[: len(a) if len(a) <= cut else cut]])
    begun[0][1], ended = None, [e for e in all_events[0] if e.answer == 1]
    seen[0] = [e for e in seen[0] if e.answer != 1] + ended
    resumed = [Request(prompt=a.prompt, sampling=a.sampling, n=a.n, begun=b) for a, b in zip(requests, begun)]
    options = {"speculation": speculation(Told(whole(requests, all_events), wrong=3))} if speculates else {}
    scheduler, runner = make_scheduler(model, tokenizer, max_rows=8, **options)
    rest = serve_all(scheduler, resumed)
    assert not runner.rows and "," in text_of(rest[3])
    joined = [[e for i in range(a.n) for part in (s, r) for e in part if e.answer == i]
              for a, s, r in zip(requests, seen, rest, strict=True)]  # fmt: skip
    assert_alike(joined, all_events)
    assert [e.usage.completion_tokens for e in rest[1] if e.usage] == [25]


def test_what_can_not_go_on_is_refused():
    scheduler, _ = make_scheduler(byte_model(), byte_tokenizer())
    asked = request(4, 8, temperature=1.0)
    bad = {"2 answers of n=1": [[1], [2]], "one token or more": [[]], "one token": [None],
           "fewer than max_tokens": [[1] * 8], "go on with their seed": [[1]]}  # fmt: skip
    for what, begun in bad.items():
        with pytest.raises(ValueError, match=what):
            scheduler.check(Request(prompt=asked.prompt, sampling=asked.sampling, begun=begun))


class FailingRunner(PlainRunner):
    """Fails after so many steps; None: never."""

    steps = None

    def step(self, rows, tokens, **options):
        if self.steps is not None:
            if not self.steps:
                raise CommError("rank 1 did not respond", (1,))
            self.steps -= 1
        return super().step(rows, tokens, **options)


class ThreadRank:
    """Rank 0 in a thread, instead of a process. fail_after: steps of each start."""

    fail_after: list[int | None]
    model = None

    def __init__(self, command, *, env, pass_fds):
        self._connection, self.status = Connection(os.dup(int(env[LINK]))), None
        runner = FailingRunner(self.model)
        runner.steps = self.fail_after.pop(0) if self.fail_after else None
        self.scheduler = Scheduler(runner, byte_tokenizer(), max_rows=2, max_waiting=4)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        status = 1
        try:
            Link(self.scheduler, {"vocab_size": 257, "max_model_len": 256}, self._connection).run()
            status = 0
        except CommError:
            pass
        finally:
            self._connection.close()
            self.status = status

    def poll(self):
        return self.status

    def kill(self):
        self.scheduler.stop()

    def wait(self):
        self._thread.join(60)


class Supervised:
    """`run_apart` over a rank that is a thread."""

    def __init__(self, restarts, wait_s):
        self.ranks = Ranks(["rank"], size=1, restarts=restarts, wait_s=wait_s, max_rows=2, max_waiting=4)
        self.ranks.start()
        until(lambda: self.ranks.run_once() and self.ranks.limits)
        self.service = Service(
            frontend=Frontend(self.ranks, Grammars(byte_tokenizer(), vocab_size=257)),
            prompts=Prompts(byte_tokenizer(), **self.ranks.limits), models=(NAME,),
            request_timeout=60.0,
        )  # fmt: skip
        self._listener, self.failure, self._ready = bind("127.0.0.1", 0), None, threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(60)

    def _run(self):
        def ready(stop):
            self.ask_to_stop = stop
            self._ready.set()

        try:
            serve(self.ranks, self.service, self._listener, grace=5, ready=ready)
        except RanksError as error:
            self.failure = error

    def stop(self):
        self.ask_to_stop("the test's end")
        self.thread.join(60)
        self.ranks.close()
        assert not self.thread.is_alive()


@pytest.fixture
def supervised(monkeypatch):
    made = []
    monkeypatch.setattr(ranks.subprocess, "Popen", ThreadRank)
    monkeypatch.setattr(link, "leave", lambda status: None)
    ThreadRank.model = byte_model()

    def make(fail_after, restarts=3, wait_s=60):
        ThreadRank.fail_after = fail_after
        made.append(Supervised(restarts, wait_s))
        return made[-1]

    yield make
    for server in made:
        server.stop()


LONG = COMPLETION | {"max_tokens": 40, "extra_body": {"ignore_eos": True}}


def test_a_stream_goes_on_with_new_ranks(supervised):
    hot = {"n": 2, "temperature": 0.9, "seed": 3, "logprobs": 1}
    one = supervised([])
    want = [one.client.completions.create(**LONG), one.client.completions.create(**LONG | hot)]
    one.stop()
    server = supervised([0, 13, 60, None])
    stream = list(server.client.completions.create(**LONG, stream=True))
    assert "".join(chunk.choices[0].text for chunk in stream) == want[0].choices[0].text
    answer = server.client.completions.create(**LONG | hot)
    assert [c.text for c in answer.choices] == [c.text for c in want[1].choices]
    assert [c.logprobs.tokens for c in answer.choices] == [c.logprobs.tokens for c in want[1].choices]
    assert answer.usage.completion_tokens == 80
    metrics = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    assert "megatron_tree_restarts_total 3" in metrics and "megatron_tree_requests_running 0" in metrics
    with pytest.raises(openai.BadRequestError, match="tokens"):  # what rank 0 refuses
        server.client.completions.create(**COMPLETION | {"prompt": [1], "logit_bias": {"300": 1}})


def test_a_request_that_ends_the_ranks_again_and_again_is_given_up(supervised):
    server = supervised([5, 5, 5])
    with pytest.raises(openai.InternalServerError, match="failed 3 times while it was open: CommError: rank 1"):
        server.client.completions.create(**LONG)
    until(lambda: not server.ranks.failure)
    assert server.client.completions.create(**LONG).choices[0].text


def test_a_crash_loop_ends(supervised):
    server = supervised([5, 5], restarts=1)
    with pytest.raises(openai.InternalServerError, match=r"after 1 restarts within an hour\): CommError: rank 1"):
        server.client.completions.create(**LONG)
    server.thread.join(60)
    assert "rank 1 did not respond" in str(server.failure)


def test_while_ranks_start_new_requests_wait_outside(supervised, monkeypatch):
    hold, start = threading.Event(), Link.run
    server = supervised([30])
    monkeypatch.setattr(Link, "run", lambda self: (hold.wait(60), start(self)))
    stream = server.client.completions.create(**LONG, stream=True)
    pieces = [next(stream)]
    until(lambda: server.ranks.restarts)
    with pytest.raises(openai.APIStatusError) as refused:
        server.client.completions.create(**COMPLETION)
    assert refused.value.status_code == 503 and refused.value.code == "restarting"
    assert 1 <= int(refused.value.response.headers["Retry-After"]) < 60
    with pytest.raises(urllib.error.HTTPError) as health:
        urllib.request.urlopen(f"{server.url}/health")
    assert health.value.code == 503 and '"restarting","reason":"CommError: rank 1' in health.value.read().decode()
    hold.set()
    pieces += list(stream)
    assert len(pieces) > 5 and pieces[-1].choices[0].finish_reason == "length"
    patient = server.client.with_options(max_retries=2)
    assert patient.completions.create(**COMPLETION).choices[0].text


def test_a_client_that_leaves_meanwhile_is_forgotten(supervised, monkeypatch):
    hold, start = threading.Event(), Link.run
    server = supervised([30])
    monkeypatch.setattr(Link, "run", lambda self: (hold.wait(60), start(self)))
    stream = server.client.completions.create(**LONG, stream=True)
    next(stream)
    until(lambda: server.ranks.restarts)
    stream.close()
    until(lambda: any(request.cancelled for request in server.ranks._open.values()))
    hold.set()
    until(lambda: server.ranks.load == (0, 0))


def test_a_rank_that_says_nothing_counts_as_lost(supervised, monkeypatch, caplog):
    monkeypatch.setattr(link, "LOAD_S", 100.0)
    monkeypatch.setattr(ranks, "LAST_WORDS_S", 0.1)
    server = supervised([], restarts=50, wait_s=1.0)
    until(lambda: server.ranks.restarts)
    monkeypatch.setattr(link, "LOAD_S", 0.1)
    assert "(restart 1): rank 0 has said nothing for 1 s" in caplog.text
    assert server.client.with_options(max_retries=9).completions.create(**COMPLETION).choices[0].text


def test_an_answer_that_is_faster_than_the_word_that_it_was_taken(supervised, monkeypatch):
    """Rank 0's thread that takes requests may be slower than its loop."""
    ended, send = threading.Event(), Link._send

    def late(self, what, *about):
        if what == "taken":
            assert ended.wait(60)
        send(self, what, *about)
        if what == "events":
            ended.set()

    monkeypatch.setattr(Link, "_send", late)
    server = supervised([])
    assert server.client.completions.create(**COMPLETION | {"max_tokens": 1}).choices[0].text
    assert not server.ranks._open


def _rank_0(monkeypatch):
    """The ranks that are made from now on."""
    made, init = [], ThreadRank.__init__
    monkeypatch.setattr(ThreadRank, "__init__", lambda self, *a, **k: (made.append(self), init(self, *a, **k))[1])
    return made


def test_rank_0_refuses_what_comes_while_it_stops(supervised, monkeypatch):
    made = _rank_0(monkeypatch)
    server = supervised([])
    stream = server.client.completions.create(**LONG, stream=True)
    pieces = [next(stream)]
    made[0].scheduler.stop(grace_s=60)  # as if the front end's word were on its way to other threads
    with pytest.raises(openai.InternalServerError) as refused:
        server.client.completions.create(**COMPLETION)
    assert refused.value.status_code == 503 and refused.value.code == "shutting_down"
    assert refused.value.response.headers["Retry-After"]
    pieces += list(stream)
    assert pieces[-1].choices[0].finish_reason == "length", "what was accepted is answered"


def test_a_request_that_rank_0_has_not_read_when_it_ends_gets_a_503(supervised, monkeypatch):
    made, take = _rank_0(monkeypatch), Link._take
    server = supervised([])
    monkeypatch.setattr(Link, "_take", lambda self, what, *about: what == "submit" or take(self, what, *about))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waits = pool.submit(server.client.completions.create, **COMPLETION)
        until(lambda: server.ranks._open)
        server.ask_to_stop("the test")
        with pytest.raises(openai.InternalServerError) as refused:
            waits.result()
    assert refused.value.status_code == 503 and refused.value.response.headers["Retry-After"]
    server.thread.join(60)
    assert made and server.failure is None


def test_a_request_that_rank_0_fails_on_is_not_the_end_of_others(supervised, monkeypatch):
    read = link.request_from_json

    def broken(value):
        if value["prompt"] == [1, 2, 3]:
            raise TypeError("a bug")
        return read(value)

    monkeypatch.setattr(link, "request_from_json", broken)
    server = supervised([])
    with pytest.raises(openai.InternalServerError, match="TypeError: a bug") as failed:
        server.client.completions.create(**COMPLETION | {"prompt": [1, 2, 3]})
    assert failed.value.status_code == 500
    assert server.client.completions.create(**COMPLETION).choices[0].text


def test_every_request_under_load_gets_its_answer_or_a_503(supervised):
    server, found = supervised([]), []

    def ask():
        while True:
            try:
                server.client.completions.create(**COMPLETION | {"max_tokens": 3})
                found.append((200, None))
            except openai.APIStatusError as error:
                found.append((error.status_code, error.response.headers.get("Retry-After")))
            except openai.APIConnectionError:  # nobody listens
                return

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask) for _ in range(16)]
        until(lambda: found.count((200, None)) > 5)
        server.ask_to_stop("the test")
        for one in asking:
            one.result()
    server.thread.join(60)
    assert server.failure is None
    assert all(status == 200 or (status in (429, 503) and after) for status, after in found), found


def test_signals_are_noted_and_no_more(monkeypatch):
    """A handler may interrupt `Popen.wait`, whose lock is not reentrant."""
    before = [signal.getsignal(number) for number in STOPPING]
    lock, closed = threading.Lock(), []

    class Starting:
        def __init__(self, *args, **options):
            self.limits = {}

        def start(self):
            pass

        def run_once(self):
            with lock:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)

        def close(self):
            assert lock.acquire(timeout=10), "the handler waits for what it interrupted"
            lock.release()
            closed.append(True)

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(http_server, "Ranks", Starting)
    monkeypatch.setattr(http_server, "leave", leave)
    monkeypatch.setattr(http_server.models, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(http_server.models, "model_folder", lambda name: None)
    args = build_parser().parse_args(["--ranks", "2", "--port", "0"])
    try:
        with pytest.raises(SystemExit) as left:
            http_server.run_apart(args, [])
    finally:
        for number, handler in zip(STOPPING, before, strict=True):
            signal.signal(number, handler)
    assert left.value.code == 128 + signal.SIGINT and closed


def test_options(monkeypatch):
    for variable in ("RANK", LINK):
        monkeypatch.delenv(variable, raising=False)
    parse = build_parser().parse_args
    args = parse(["--ranks", "2", "--restarts", "3", "--tensor-model-parallel-size", "2"])
    check_arguments(args, 1)
    assert args.starts_ranks
    for options, what in ((["--restarts", "1"], "needs --ranks"), (["--ranks", "0"], "1 or more")):
        with pytest.raises(ValueError, match=what):
            check_arguments(parse(options), 1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="without a launcher"):
        check_arguments(parse(["--ranks", "2"]), 2)
    monkeypatch.setenv(LINK, "5")
    check_arguments(args := parse(["--ranks", "2"]), 2)
    assert not args.starts_ranks
