"""One run of megatron-tree serve on one rank: load, shard, serve until a signal, shut down in order."""

from __future__ import annotations

import functools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import uvicorn

from ....core import comm
from ....core.errors import TreeError
from ....core.log import Seldom, logger
from ....integrations.transformers import models
from ....integrations.transformers.families.rope import num_positions
from ....integrations.transformers.infer.runner import Runner
from ....launching import StartError, leave
from ...generation.grammars import Grammars
from ...generation.requests import Request
from ...generation.sampling import SamplingParams
from ...generation.scheduler import Scheduler
from ..images import ImagePrompts
from ..start import Worker, start
from .app import Service, create_app
from .arguments import LINK
from .frontend import Frontend
from .guard import AT_ONCE, QUEUE, Connections, TimedProtocol, most_connections
from .link import Link
from .prompts import Prompts
from .ranks import Ranks, RanksError

STOPPING = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 20.0  # for accepted requests after a signal; the launcher kills at 30
FLUSH_S = 5.0  # for the last bytes of responses
SELDOM = Seldom(60.0)  # lines that clients cause


class StopSignals:
    """SIGTERM and SIGINT from now on. Handlers only take a note, since they may interrupt the holder of any lock."""

    def __init__(self):
        self._caught: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in STOPPING:
            signal.signal(number, lambda number, _: self._caught.put(number))

    @property
    def came(self) -> bool:
        """Whether there is one that nobody has taken."""
        return not self._caught.empty()

    def take(self) -> int:
        """The first of these, or the next one that comes."""
        return self._caught.get()

    def call(self, stop: Callable[[str], None]) -> None:
        """Call stop(the signal's name) in a thread of its own, for each signal that came and that comes."""

        def wait() -> None:
            while True:
                stop(signal.Signals(self.take()).name)

        threading.Thread(target=wait, name="signals", daemon=True).start()


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound to this address and does not listen yet. Port 0: any free port.

    Raises: `StartError` if the address is not available.
    """
    listener = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = addresses[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise StartError(f"--host {host} --port {port}: {error}; port 0 takes a free one") from error
    return listener


class HttpServer:
    """uvicorn in a thread of its own, on a bound socket. `failure`: what ended it before `stop`."""

    def __init__(self, service: Service, listener: socket.socket):
        self._socket = listener
        config = uvicorn.Config(
            create_app(service),
            loop="asyncio",
            http=functools.partial(TimedProtocol, others=Connections(most_connections())),
            backlog=AT_ONCE,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(FLUSH_S),
        )
        for name in ("asyncio", "uvicorn.error"):
            logging.getLogger(name).addFilter(SELDOM)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.failure: BaseException | None = None

    def start(self, on_failure: Callable[[], None]) -> None:
        """Listen. on_failure: called from the thread when the server ends without `stop`."""
        self._on_failure = on_failure
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if self._server.started:
            self._socket.listen(QUEUE)  # asyncio's own backlog is also how many it accepts in one go

    def stop(self) -> None:
        """Finish active responses, then end."""
        self._server.should_exit = True
        self._thread.join(2 * FLUSH_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:
            self.failure = error
        if not self._server.should_exit:
            self.failure = self.failure or TreeError("the HTTP server ended")
            self._on_failure()


def serve(
    scheduler: Scheduler | Ranks,
    service: Service,
    listener: socket.socket,
    *,
    grace: float,
    ready: Callable[[Callable[[str], None]], None],
) -> None:
    """Serve until a stop is asked for, see `ready`. On the leader; the other ranks call `scheduler.run()`.

    listener: from `bind`; it is closed at the end. ready: called as soon as requests are answered, with the function
    that begins to stop: it takes the reason, returns at once, and may be called from any thread and more than once.
    Raises: what ends the scheduler's loop or the HTTP server before that; clients that wait get a 500.
    """
    frontend, http, asked = service.frontend, HttpServer(service, listener), []

    def stop(why: str) -> None:
        frontend.state = "stopping"
        asked.append(why)
        scheduler.stop(grace_s=grace)

    try:
        http.start(on_failure=scheduler.stop)
        ready(stop)
        while not asked and scheduler.run_once():
            pass
        if asked:
            waiting, served = scheduler.load
            logger.info("%s: %d requests wait and %d are served; they have %g s", asked[0], waiting, served, grace)
        scheduler.run()
    except BaseException as error:
        frontend.state, frontend.failure = "failed", f"{type(error).__name__}: {error}"
        scheduler.fail(error)
        raise
    finally:
        http.stop()
        frontend.close()
        service.prompts.close()
    if http.failure is not None:
        raise http.failure


def run(args: Namespace) -> None:
    """Serve, on this rank; collective over all ranks. Returns when the server was stopped by a signal to rank 0."""
    at = start(args, lambda _, config: (_max_model_len(args, config), _bound(args)))
    with comm.monitored("the first turns"):
        runner = at.engine.new_runner(capacity_tokens=args.cache_tokens)
        if runner.free_tokens == 0:
            raise StartError(
                f"--cache-tokens {args.cache_tokens} is less than a page of the cache: give {runner.page_size} or more"
            )
        _warm_up(at, runner)
    with comm.monitored("serving", wait_limit_s=args.wait_timeout):
        _run(args, at, runner)


def run_apart(args: Namespace, argv: list[str]) -> None:
    """Serve from this process, which runs no model: it starts the ranks with the same options argv, and starts them
    again when one is lost, at most args.restarts times in an hour.

    Raises: `StartError` if the address is not available. `RanksError` when the ranks have ended for good.
    """
    listener = bind(args.host, args.port)
    command = [sys.executable, "-m", "megatron_tree", "serve", *argv]
    limits = {"wait_s": args.wait_timeout, "max_rows": args.max_rows, "max_waiting": args.max_waiting}
    ranks = Ranks(command, size=args.ranks, restarts=args.restarts, **limits)
    signals = StopSignals()
    try:
        tokenizer = _wait_for(ranks, signals, args.model)
        _serve(args, ranks, tokenizer, listener, signals, **ranks.limits)
    finally:
        ranks.close()


def _wait_for(ranks: Ranks, signals: StopSignals, model: str) -> Any:
    """Start the ranks; returns the tokenizer, once they are ready. A signal before that ends this process."""
    ranks.start()
    loading = ThreadPoolExecutor(1).submit(lambda: models.load_tokenizer(models.model_folder(model)))
    try:
        while not (ranks.limits and loading.done()) and not signals.came:
            ranks.run_once()
            if loading.done():
                loading.result()
    except RanksError:
        if not signals.came:  # to the ranks, too
            raise
    if signals.came:
        ranks.close()
        leave(128 + signals.take())
    return loading.result()


def _warm_up(at: Worker, runner: Runner) -> None:
    """Answer a short request: kernels are compiled before anybody waits, outside the limit on waits."""
    limits = (32, at.prepared[0] - 2, (runner.free_tokens or 34) - 2)
    scheduler = Scheduler(runner, max_rows=1, max_waiting=1, group=at.ranks.group, timeout_s=at.ranks.timeout_s)
    if at.rank == 0 and (tokens := min(limits)) > 0:
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        scheduler.submit(Request(prompt=[0] * tokens, sampling=sampling), lambda _: None)
    scheduler.run_until_idle()


def _run(args: Namespace, at: Worker, runner: Runner) -> None:
    max_model_len, listener = at.prepared
    apart = LINK in os.environ
    max_waiting = args.max_waiting + apart * args.max_rows  # requests that were served come back after a restart
    scheduler = at.scheduler(runner, max_rows=args.max_rows, max_waiting=max_waiting, keep_bytes=args.cache_bytes)
    limits = {"vocab_size": runner.vocab_size, "max_model_len": max_model_len}
    if at.rank != 0 or apart:
        for number in STOPPING:  # all ranks receive them; the leader, or the front end, decides when to stop
            signal.signal(number, signal.SIG_IGN)
    if at.rank != 0:
        scheduler.run()
    elif apart:
        Link(scheduler, limits, Connection(int(os.environ[LINK]))).run()
    else:
        _serve(args, scheduler, at.tokenizer, listener, StopSignals(), **limits)
    at.ranks.reduce(torch.zeros(1))  # no rank leaves before the others are done


def _serve(
    args: Namespace,
    scheduler: Scheduler | Ranks,
    tokenizer,
    listener: socket.socket,
    signals: StopSignals,
    *,
    vocab_size: int,
    max_model_len: int,
) -> None:
    folder = models.model_folder(args.model)
    grammars = Grammars(tokenizer, vocab_size=vocab_size)
    images = ImagePrompts(folder) if models.takes_images(models.load_config(folder), folder) else None
    service = Service(
        frontend=Frontend(scheduler, grammars, stalled_after_s=args.wait_timeout / 3),
        prompts=Prompts(tokenizer, vocab_size=vocab_size, max_model_len=max_model_len, images=images),
        models=tuple(args.served_model_name),
        request_timeout=args.request_timeout,
        api_keys=args.api_keys,
        loopback_names_only=not args.api_keys,
    )

    def ready(stop: Callable[[str], None]) -> None:
        signals.call(stop)
        address = f"[{args.host}]" if ":" in args.host else args.host
        print(
            f"serving {', '.join(service.models)} at http://{address}:{listener.getsockname()[1]}/v1, up to "
            f"{max_model_len:,} tokens, {'with' if args.api_keys else 'without'} an API key",
            flush=True,
        )

    serve(scheduler, service, listener, grace=GRACE_S, ready=ready)
    print("stopped", flush=True)


def _bound(args: Namespace) -> socket.socket | None:
    """Rank 0's socket, unless the front end has it. It is bound before the weights are loaded, since that may fail."""
    return bind(args.host, args.port) if dist.get_rank() == 0 and LINK not in os.environ else None


def _max_model_len(args: Namespace, config) -> int:
    positions = num_positions(config)
    if args.max_model_len is None and positions is None:
        raise ValueError("the model's configuration names no limit of length: pass --max-model-len")
    if None not in (args.max_model_len, positions) and args.max_model_len > positions:
        raise ValueError(
            f"--max-model-len {args.max_model_len:,} exceeds the model's {positions:,} positions: give at most those, "
            "or leave it out"
        )
    return args.max_model_len or positions
