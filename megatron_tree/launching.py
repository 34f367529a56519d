"""What the launch scripts share: options from a YAML file, their output, and how they end after a failure."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import importlib.util
import logging
import os
import reprlib
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import NoReturn

from .core.arguments import RANK_0_FIRST_S, Parser
from .core.errors import CommError, TreeError
from .core.files import NotWritten, digest_of, read_yaml
from .core.log import logger, say_once

UNREAD = (errno.EPIPE, errno.ENOSPC)  # of output whose reader has left, or whose disk is full
LAST_WORDS_S = 60.0  # for which a rank that has failed lets the others come and hear of it
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_COMPARED = ("config", "api_keys")  # options: a file whose content counts, and secrets

# Notices of other packages that a user of our commands can do nothing about; every rank prints them.
WARNINGS = (
    r".*Apex (is|are) not installed",
    r"full scope is deprecated",
    r".*_tensor` is deprecated. Please use `torch.distributed",
    r".*`load_state_dict` is deprecated and will be removed",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
)
LOG_LINES = {
    "megatron.core.rerun_state_machine": "RerunStateMachine initialized in mode",
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",  # they are one on CPU ranks
}


EXTRAS = {
    "figures": ("matplotlib", "tqdm"),
    "megatron": ("megatron", "einops"),
    "deepspeed": ("deepspeed",),
    "hf": ("accelerate", "gguf", "pydantic", "safetensors", "tokenizers", "tqdm", "transformers"),
    "serve": ("fastapi", "llguidance", "starlette", "uvicorn"),
}
"""By extra of setup.cfg, the modules that it installs."""


def missing_package(error: BaseException) -> str | None:
    """What to install, in one sentence, if an optional package could not be imported; None for any other error."""
    if not isinstance(error, ImportError):
        return None
    while isinstance(error.__cause__, ImportError):
        error = error.__cause__
    module = (error.name or "").partition(".")[0]
    if error.name != "megatron.core" and (not module or importlib.util.find_spec(module) is not None):
        return None  # the package is there; a part of it is not
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"the package {module} is not installed: pip install '.[{extra}]' in the checkout"
    return None


@contextlib.contextmanager
def explain_missing(program: str):
    """End the program with status 1 and one sentence, without a traceback, if an optional package is missing."""
    try:
        yield
    except ImportError as error:
        if (what := missing_package(error)) is None:
            raise
        print(f"{program}: {what}", file=sys.stderr)
        raise SystemExit(1) from None


def check_launched(program: str = "PROGRAM", or_else: str = "") -> None:
    """Raise a ``ValueError`` unless a launcher started this process, and where its variables can't be right. or_else:
    another way to start it."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start this program with a launcher, for instance "
            f"torchrun --nproc-per-node 4 {program}, or deepspeed --num_gpus 4 --no_local_rank {program}{or_else}"
        )
    rank, _, world, port = (_number_of(name) for name in LAUNCHER_VARIABLES if name != "MASTER_ADDR")
    if rank >= world:
        raise ValueError(f"RANK={rank} must be below WORLD_SIZE={world}: let the launcher set both")
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT={port} must be from 1 to 65535: give the launcher another one")
    address = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:  # torch would ask again until its time limit
        what = f"MASTER_ADDR={address!r} can't be found ({error})"
        raise ValueError(f"{what}: give the launcher the first host's name or IP address") from None
    named, there = os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    if named and (unknown := [name for name in named.split(",") if name.partition(":")[0] not in there]):
        raise ValueError(f"GLOO_SOCKET_IFNAME={named!r}: this machine has no {unknown[0]!r}, only {', '.join(there)}")


def quiet() -> None:
    """Hide notices of other packages that mean nothing to a user. Call it before those packages are imported."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name, text in LOG_LINES.items():
        logging.getLogger(name).addFilter(lambda record, text=text: text not in record.getMessage())


def new_parser(prog: str, description: str, epilog: str, *, config: bool = True) -> Parser:
    """The parser of a command. config: with --config, for `parse_with_config`."""
    parser = Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if config:
        parser.add_argument("--config", metavar="YAML", help="file with these options (underscores or dashes); the "
            "command line wins")  # fmt: skip
    return parser


def as_typed(name: str, value: object) -> str:
    """An option of a parsed command line as it was typed: `--seq-length 100`."""
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option} {value!r}"


def parse_with_config(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Options of the command line over those of the YAML file in `--config` over the defaults.

    Raises: ValueError for an unknown or ill-typed option in the file. SystemExit for `--help` and command-line errors.
    """
    path = parser.parse_args(argv).config
    if path is not None:
        parser.set_defaults(**_read_config(path, parser))
    return parser.parse_args(argv)


def _read_config(path: str, parser: Parser) -> dict[str, object]:
    """The options in a YAML file, each parsed as on the command line."""
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ValueError(f"--config={path!r} {what}: name a YAML file")
    options = read_yaml(path)
    if not isinstance(options, dict | None):
        raise ValueError(f"--config={path!r} must contain options, one `name: value` per line")
    words, complain = [], parser.error
    for name, value in (options or {}).items():
        what, option = f"{path}: {name}={reprlib.repr(value)}", str(name).replace("_", "-")
        if parser.is_switch(f"--{option}") and not isinstance(value, bool):
            raise ValueError(f"{what} must be true or false")
        more = _words(option, value, what)

        def refuse(message: str, what: str = what) -> NoReturn:
            raise ValueError(f"{what}: {parser.advice(message)}")

        parser.error = refuse
        try:
            parser.parse_args(more)
        finally:
            parser.error = complain
        words += more
    return vars(parser.parse_args(words))


def _words(name: str, value: object, what: str) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, (str, int, float, datetime.date)) for item in values):
        raise ValueError(f"{what} must be a value or a list of values")
    if any("\0" in str(item) for item in values):
        raise ValueError(f"{what} contains a NUL character")
    return [f"--{name}", *map(str, values)] if isinstance(value, list) else [f"--{name}={value}"]


class StartError(ValueError):
    """What was asked for can't be run; the text says why. Raised on every rank."""


@contextlib.contextmanager
def start_errors():
    """A ``ValueError`` becomes a `StartError`."""
    try:
        yield
    except ValueError as error:
        raise StartError(str(error)) from error


def run_script(
    name: str,
    argv: list[str],
    build_parser: Callable[[], argparse.ArgumentParser],
    check_arguments: Callable[[argparse.Namespace, int], None],
    load: Callable[[], tuple[Callable[[argparse.Namespace], None], tuple[type[Exception], ...]]],
    *,
    choices: bool = True,
) -> int:
    """Run a launch script on one rank: read the options, run it, and return the exit status.

    load() does the slow imports, after the options have been checked. It returns `run(args)`, and the errors that `run`
    raises on every rank, beside `StartError`: of these only rank 0 prints the text. choices: log which backend and
    schedule are chosen.
    """
    rank = 0
    try:
        rank, world = _number_of("RANK", 0), _number_of("WORLD_SIZE", 1)
        args = parse_with_config(build_parser(), argv)
        check_arguments(args, world)
    except ValueError as error:  # raised on every rank, before any communication
        _print_on_rank_0(name, error, rank)
        return 2
    quiet()
    if choices:
        tell_choices(rank)
    expected: tuple[type[Exception], ...] = ()
    if rank == 0 and sys.stderr is not None and sys.stderr.isatty():
        print(f"{name}: loading on {world} rank{'s' * (world > 1)} ...", file=sys.stderr, flush=True)
    try:
        run, expected = load()
        run(args)
    except KeyboardInterrupt:  # every rank gets Ctrl-C, and its launcher tells of it at length
        if rank == 0:
            print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        leave(130)
    except BaseException as error:
        if not isinstance(error, (*expected, StartError)):
            if rank > 0 and isinstance(error, TreeError) and not isinstance(error, CommError):
                time.sleep(RANK_0_FIRST_S)  # all ranks raise it, or the others what rank 0 has told them
            exit_after_failure(rank, error)
        _print_on_rank_0(name, error, rank)
        return 1
    return 0


def _number_of(variable: str, unset: int = 0) -> int:
    """A launcher's variable. Raises: ValueError for one that is no number."""
    text = os.environ.get(variable, str(unset))
    if not text.isdecimal():
        raise ValueError(f"{variable}={text!r} is not a number: let the launcher (torchrun, deepspeed) set it")
    return int(text)


@contextlib.contextmanager
def together(args: argparse.Namespace, ranks):
    """The first thing that the ranks of a command do once they have a process group: in this context each rank does by
    itself what may fail on one of them. What one rank raises all raise; then the ranks compare their options, once, and
    rank 0 says if its host has too few cores for them.

    ranks: all of them, a `comm.Ranks`.
    Raises on every rank: ``ValueError`` for options that differ, and for a ``ValueError`` or an ``OSError`` of another
        rank, a `TreeError` for other errors there; `CommError` naming the ranks that don't come in time.
    """
    from .core.comm import Ranks
    from .core.comm.wire import share_all

    options = {name: repr(value) for name, value in vars(args).items() if name not in NOT_COMPARED}
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        with contextlib.suppress(CommError):  # the rank's own error says more
            share_all([kind, str(error)], Ranks.of(ranks.group, limit_s=min(ranks.timeout_s, LAST_WORDS_S)))
        raise
    said = share_all(digest_of(options), ranks)
    for rank, error in enumerate(said):
        if isinstance(error, list):
            kind, text = error
            raise TreeError(f"rank {rank} failed: {kind}{text}") if kind else ValueError(text)
    if len(set(said)) > 1:
        raise ValueError(_difference(share_all(options, ranks)))
    if ranks.rank == 0 and (text := _crowd()):
        say_once(text)


def _crowd() -> str | None:
    """What to say, and what to do, if the ranks of this host compute on CPUs and are too many for its cores. The
    launcher tells how many they are: torchrun, or DeepSpeed's."""
    import torch

    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    cores = own if own > 1 else os.cpu_count() or 1  # a rank that has one core to itself does not see the others'
    ranks, threads = int(told or 1), torch.get_num_threads()
    if torch.cuda.is_available() or ranks * threads <= cores:
        return None
    if ranks > cores:
        return f"{ranks} ranks share {cores} cores and wait for one another: start {cores} for the best speed"
    return f"{ranks} ranks of {threads} threads share {cores} cores: set OMP_NUM_THREADS={cores // ranks}"


def _difference(of_ranks: list[dict[str, str]]) -> str:
    """What to say of options that differ between ranks."""
    names = sorted({name for options in of_ranks for name in options})
    texts = []
    for name in names:
        values = [options.get(name, "nothing") for options in of_ranks]
        if other := next((rank for rank, value in enumerate(values) if value != values[0]), None):
            texts.append(f"--{name.replace('_', '-')} is {values[0]} on rank 0 and {values[other]} on rank {other}")
    return f"the ranks were started with different options: {'; '.join(texts)}"


def _print_on_rank_0(name: str, error: BaseException, rank: int) -> None:
    """Print on rank 0 what every rank raised; on another rank, what it alone raised."""
    if rank > 0:  # a launcher ends all ranks when the first one exits: let that be rank 0
        time.sleep(RANK_0_FIRST_S)
        name = f"{name}: rank {rank}"
    print(f"{name}: {error}", file=sys.stderr, flush=True)


def tell_choices(rank: int) -> None:
    """Log on rank 0, once each, which backend and which schedule is chosen, and why."""
    if rank == 0:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


@contextlib.contextmanager
def hold_log():
    """Log lines below a warning wait until the end of the block, so that none lands inside a streamed answer."""
    handlers = logger.handlers[:]
    for handler in handlers:
        logger.removeHandler(handler)
        logger.addHandler(MemoryHandler(sys.maxsize, flushLevel=logging.WARNING, target=handler))
    try:
        yield
    finally:
        for held in [handler for handler in logger.handlers if isinstance(handler, MemoryHandler)]:
            logger.removeHandler(held)
            held.close()
        for handler in handlers:
            logger.addHandler(handler)


def leave(status: int) -> None:
    """End the process immediately: gloo's threads may abort while the interpreter shuts down."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # >&- closes it
                stream.flush()
        except OSError:
            status = status or 1
    os._exit(status)


def exit_after_failure(rank: int, error: BaseException) -> None:
    """Print what failed on this rank and end the process at once, with exit code 1. There is no traceback if an
    optional package is missing, if a file or the output can't be written, and for a `TreeError`, whose text is enough.

    It does not wait for other ranks: they find their connection closed (or time out), and the launcher ends the rest.
    """
    known = isinstance(error, NotWritten) or (isinstance(error, OSError) and error.errno in UNREAD)
    what = str(error) if known else missing_package(error)
    if what is None:
        if not isinstance(error, TreeError):
            traceback.print_exception(error)
        what = f"{type(error).__name__}: {error}"
    print(f"rank {rank} failed: {what}", file=sys.stderr)
    leave(1)
