"""The process that computes by llguidance which tokens keep to a JSON schema; see `Grammars`, which starts it.

A schema can take any time and memory, and can overflow the stack. So each has a copy of this process (a fork, which
shares the tokenizer's memory) with limits that end the copy alone. Only the standard library and llguidance are
imported, and nothing of this package.

Standard input: {"tokenizer": its JSON, "vocab_size", "end_tokens"}. A copy is made for every socket that comes over the
connection whose file descriptor is the argument. On that socket the first line is a schema, as a JSON string. Each line
after it, [answer, tokens], adds these tokens to one of several answers, and is answered by {"mask": hexadecimal bits of
the tokens that may follow} or {"error": text}. All ends with the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

BUDGET_S = 2.0  # of computing, for a mask, or for a schema and its first one
MEMORY_BYTES = 256 << 20  # of one schema, beyond the tokenizer's
NICE = 5  # the model goes first
MAX_CHARACTERS = 1 << 18
MAX_VALUES = 50_000
MAX_DEFINITIONS = 1_000
MAX_DEPTH = 500
# As json.dumps writes it: models do not get lost in spaces
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _Size:
    """Counts what a schema holds. Raises: ``ValueError`` for one that is too large."""

    def __init__(self, schema: Any):
        self._schema, self._values, self._definitions = schema, 0, 0
        self._depths: dict[str, int] = {}  # below references; 0: of one that refers to itself

    def depth(self, value: Any, above: int = 0) -> int:
        """Levels of a value, with what it refers to."""
        self._values += 1
        self._check(above + 1, MAX_DEPTH, "levels, references included")
        self._check(self._values, MAX_VALUES, "values")
        if isinstance(value, list):
            return 1 + max([self.depth(item, above + 1) for item in value], default=0)
        if not isinstance(value, dict):
            return 1
        found = [value[name] for name in ("$defs", "definitions") if isinstance(value.get(name), dict)]
        self._definitions += sum(map(len, found))
        self._check(self._definitions, MAX_DEFINITIONS, "definitions")
        below = max([self.depth(item, above + 1) for item in value.values()], default=0)
        reference = value.get("$ref")
        if isinstance(reference, str):
            self._check_end(reference)
            if reference not in self._depths:
                self._depths[reference] = 0
                self._depths[reference] = self.depth(self._target(reference), above + 1)
            below = max(below, self._depths[reference])
            self._check(above + 1 + below, MAX_DEPTH, "levels, references included")
        return 1 + below

    def _check_end(self, reference: str) -> None:
        """Raise ``ValueError`` for a reference that leads to nothing but itself."""
        seen: set[str] = set()
        while isinstance(reference, str):
            if reference in seen:
                raise ValueError(f"{reference} refers to itself, and says nothing else")
            seen.add(reference)
            target = self._target(reference)
            reference = target.get("$ref") if isinstance(target, dict) else None

    def _target(self, reference: str) -> Any:
        """None where there is none, or elsewhere."""
        value = self._schema
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(name)] if isinstance(value, list) else value[name]
            except (KeyError, ValueError, IndexError, TypeError):
                return None
        return value

    def _check(self, found: int, most: int, what: str) -> None:
        if found > most:
            raise ValueError(f"it has more than {most:,} {what}: make it smaller")


class _Answers:
    """The answers that keep to one schema. Raises: ``ValueError`` for a schema that is not valid or is too large."""

    def __init__(self, schema: str, tokens):
        from llguidance import LLMatcher, LLParserLimits

        if isinstance(tokens, Exception):
            raise ValueError(f"llguidance can't read the tokenizer: {tokens}")
        try:
            parsed = json.loads(schema)
            _Size(parsed).depth(parsed)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
        limits = LLParserLimits(verbose_errors=False)
        self._first, self._matchers = LLMatcher(tokens, grammar, log_level=0, limits=limits), {}
        if self._first.is_error():
            raise ValueError(_first_line(self._first.get_error()))

    def mask(self, answer: int, tokens: list[int]) -> str:
        if answer not in self._matchers:
            self._matchers[answer] = self._first.deep_copy()
        matcher = self._matchers[answer]
        matcher.consume_tokens(tokens)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"no answer goes on that keeps to it: {_first_line(matcher.get_error())}")
        return mask.hex()


def _first_line(error: str) -> str:
    return error.partition("\n")[0]


def _serve(connection: socket.socket, tokens) -> NoReturn:
    """Answer a connection's lines, within the limits."""
    try:
        _answer(connection, tokens)
    finally:
        os._exit(1)


def _answer(connection: socket.socket, tokens) -> NoReturn:
    sys.setrecursionlimit(10 * MAX_DEPTH)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    lines, stream = queue.SimpleQueue(), connection.makefile("rwb")
    threading.Thread(target=_read, args=(stream, lines), daemon=True).start()
    schema, answers = json.loads(lines.get()), None
    while True:
        asked = json.loads(lines.get())
        signal.setitimer(signal.ITIMER_PROF, BUDGET_S)  # of this process's CPU time; then SIGPROF ends it
        try:
            if answers is None:
                answers = _Answers(schema, tokens)
            told = {"mask": answers.mask(*asked)}
        except ValueError as error:
            told = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(json.dumps(told).encode() + b"\n")
        stream.flush()


def _read(stream, lines: queue.SimpleQueue) -> None:
    """Nobody waits for what is being computed once the other side has gone."""
    for line in stream:
        lines.put(line)
    os._exit(0)


def _tokens(tokenizer: str, vocab_size: int, end_tokens: list[int]):
    """The tokenizer as llguidance takes it, or why it does not."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=end_tokens or None)
    except Exception as error:
        return error


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the ranks answer what they have accepted
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how copies end
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    tokens = _tokens(**json.load(sys.stdin))
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while received := socket.recv_fds(control, 1, 1)[1]:
            with socket.socket(fileno=received[0]) as connection, contextlib.suppress(BlockingIOError):
                if os.fork() == 0:  # an error is that there is no room for another: the other side sees the end
                    control.close()
                    _serve(connection, tokens)


if __name__ == "__main__":
    main()
