"""Hostile clients against a real server: another client is answered throughout, and memory stays bounded."""

import concurrent.futures
import os
import re
import resource
import signal
import socket
import threading
import types

import psutil
import pytest

pytest.importorskip("PIL", reason="Pillow reads images")

import transformers
from megatron_tree.core import log
from megatron_tree.inference.serving import images
from megatron_tree.inference.serving.http import errors, guard
from megatron_tree.inference.serving.http import server as http_server
from megatron_tree.inference.serving.http.guard import TimedProtocol
from megatron_tree.inference.serving.http.prompts import Prompts
from megatron_tree.inference.serving.images import ImagePrompts
from support.hostile import (
    GoodClient,
    ask,
    connected,
    endless_errors,
    idle_connections,
    image_bombs,
    malformed,
    peak_bytes,
    read_all,
    slow_and_deaf,
    stop_under_load,
)
from support.http_server import byte_model, byte_tokenizer, serving, until
from support.launched import KEY, launched, process_of
from support.llava import llava_runner, save_llava


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_llava(folder)
    return folder


@pytest.fixture(scope="module")
def make_server(folder):
    tokenizer, runner = transformers.AutoTokenizer.from_pretrained(folder), llava_runner(folder)
    return lambda: serving(None, tokenizer, runner=runner, images=ImagePrompts(folder), loopback_names_only=True)


@pytest.fixture(scope="module")
def server(make_server):
    with make_server() as server:
        yield server


def _assert_answered(good, least):
    assert len(good.answers) >= least and set(good.answers) == {200}, good.answers


def _small_bombs(url):
    image_bombs(url, side=2000)


@pytest.mark.parametrize("attack", [endless_errors, _small_bombs])
def test_a_good_client_is_answered_during(server, attack, monkeypatch):
    monkeypatch.setattr(images, "MOST_PIXELS", 1 << 22)
    with GoodClient(server.url) as good:
        until(lambda: len(good.answers) >= 3)
        before = peak_bytes()
        attack(server.url)
        assert peak_bytes() - before < 400 << 20
    _assert_answered(good, 6)


def test_malformed_requests_do_not_fill_the_log(server, monkeypatch, caplog):
    monkeypatch.setattr(log, "_said_at", {})
    with GoodClient(server.url) as good:
        malformed(server.url)
    _assert_answered(good, 3)
    assert sum("Invalid HTTP request" in record.message for record in caplog.records) == 1


def test_clients_that_do_not_send_or_read_do_not_stay(monkeypatch):
    monkeypatch.setattr(errors, "RECEIVE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(errors, "MAX_BODIES_BYTES", 11 << 20)
    with serving(byte_model(), byte_tokenizer()) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        slow, deaf = slow_and_deaf(server.url)
        with GoodClient(server.url) as good:
            until(lambda: len(good.answers) >= 9)
            large = {"model": "tiny", "prompt": "a" * 10_000_000}
            found = ask(server.url, "/v1/completions", large)[0]
            until(lambda: ask(server.url, "/v1/completions", large)[0] == 400)  # too long: it was read
        _assert_answered(good, 9)
        assert found in (400, 503)
        assert all(b" 408 " in read_all(connection) for connection in slow)
        until(lambda: server.scheduler.load == (0, 0))
        port = server.listener.getsockname()[1]
        until(lambda: not [c for c in psutil.Process().net_connections() if c.laddr.port == port and c.raddr])
        for connection in deaf:
            connection.close()


def test_a_client_that_reads_slowly_is_waited_for():
    unread, timers, aborted = [100, 60, 60, 60], [], []
    protocol = object.__new__(TimedProtocol)
    protocol.loop = types.SimpleNamespace(call_later=lambda seconds, call: timers.append(call))
    protocol.transport = types.SimpleNamespace(
        get_write_buffer_size=lambda: unread.pop(0), abort=lambda: aborted.append(len(timers))
    )
    protocol._wait()
    for call in timers:
        call()
    assert aborted == [2], "not while it reads, and then at once"


def test_a_request_that_comes_while_the_server_ends_gets_a_503(monkeypatch):
    monkeypatch.setattr(guard, "LINGER_S", 300.0)
    monkeypatch.setattr(http_server, "FLUSH_S", 30.0)
    with serving(byte_model(), byte_tokenizer()) as server, connected(server.url) as before:
        assert ask(server.url, "/health", None)[0] == 200  # so the one before it is accepted
        server.ask_to_stop("the test")
        until(lambda: not _listens(server.url))
        before.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                       b"Content-Type: application/json\r\nContent-Length: 31\r\n\r\n"
                       b'{"model": "tiny", "prompt":"a"}')  # fmt: skip
        answer = read_all(before)
        assert b" 503 " in answer and b"retry-after" in answer.lower()


def _listens(url):
    try:
        connected(url).close()
    except ConnectionError:
        return False
    return True


def test_a_request_that_is_not_answered_when_the_server_ends_gets_a_503(monkeypatch):
    monkeypatch.setattr(http_server, "FLUSH_S", 1.0)
    begun, over = threading.Event(), threading.Event()

    def encode(self, *args):
        begun.set()
        assert over.wait(100)

    monkeypatch.setattr(Prompts, "_encode", encode)
    with serving(byte_model(), byte_tokenizer()) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(ask, server.url, "/v1/completions", {"model": "tiny", "prompt": "a"})
        assert begun.wait(60)
        server.ask_to_stop("the test")
        status, answer = stuck.result()
        over.set()
    assert status == 503 and b"shutting_down" in answer


def test_more_connections_than_descriptors(make_server, monkeypatch, caplog):
    monkeypatch.setattr(log, "_said_at", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 250
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with make_server() as server, GoodClient(server.url) as good, idle_connections(server.url, 500):
            seen = len(good.answers)
            until(lambda: len(good.answers) >= seen + 9)
            assert len(os.listdir("/proc/self/fd")) < few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _assert_answered(good, 12)
    lines = [record.message for record in caplog.records]
    assert sum("connections are open" in line for line in lines) == 1 and len(lines) < 5, lines


FEW_DESCRIPTORS = 300


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_rank_ends(folder, ranks):
    """All of them, one after another, against the processes of a server without a launcher."""
    options = ("--ranks", ranks, "--restarts", 1, "--model", folder, "--port", 0, "--max-rows", 4)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))}
    with launched(*options, launcher=False, **limit) as (process, lines, over):
        url = re.search(r"serving tiny at (\S+)/v1", "".join(lines))[1]
        pids = [process.pid, *(process_of(process.pid, rank).pid for rank in range(ranks))]
        memory = {}
        with GoodClient(url, key=KEY) as good:
            until(lambda: len(good.answers) >= 3)
            for attack in (endless_errors, image_bombs, malformed):
                memory |= {pid: peak_bytes(pid) for pid in pids}
                attack(url, key=KEY)
                grown = [peak_bytes(pid) - memory[pid] for pid in pids]
                assert max(grown) < 900 << 20, (attack, grown)
            slow, deaf = slow_and_deaf(url, key=KEY)
            with idle_connections(url, 500):
                seen = len(good.answers)
                until(lambda: len(good.answers) >= seen + 9, 300)
            for connection in (*slow, *deaf):
                connection.close()
        _assert_answered(good, 20)
        assert [process_of(process.pid, rank).pid for rank in range(ranks)] == pids[1:]
        said = "".join(lines)
        assert "started again" not in said and len(lines) < 40, said
        stop_under_load(url, process, key=KEY)
        assert over.wait(200) and process.wait(100) == 0 and lines[-1] == "stopped\n", "".join(lines)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)])
def test_more_signals_than_one_while_ranks_start(folder, numbers):
    options = ("--ranks", 2, "--model", folder, "--port", 0)
    with launched(*options, launcher=False, wait=False, start_new_session=True) as (process, lines, over):
        until(lambda: len(psutil.Process(process.pid).children()) == 2, 300)
        for number in numbers:
            os.killpg(process.pid, number)  # as a terminal does
        assert over.wait(200), "".join(lines)
        assert process.wait(100) - 128 in numbers
