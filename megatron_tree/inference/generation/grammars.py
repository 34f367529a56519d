"""Answers of a given form: which tokens keep to a JSON schema, computed in processes beside the model."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ...core.errors import TreeError
from . import grammar_process
from .grammar_process import BUDGET_S, MAX_CHARACTERS, MEMORY_BYTES

REMEMBERED = 32  # schemas that were found right
PREFIX = "json_schema: "
"""Of every message about a schema."""
TOO_MUCH = (
    f"llguidance took more than {BUDGET_S:g} s or {MEMORY_BYTES >> 20} MiB for the next token, or failed: make the "
    "schema simpler, with fewer alternatives, shorter texts and patterns"
)


class Grammars:
    """The process that knows a tokenizer, and makes a copy of itself for every schema. It starts with the first one.

    tokenizer: a fast one of Transformers. vocab_size: of the model. end_tokens: the model's; an answer that is complete
    can only continue with one of them; none: the tokenizer's. on_mask: called from other threads when a mask is there.
    """

    def __init__(
        self,
        tokenizer,
        *,
        vocab_size: int,
        end_tokens: Collection[int] = (),
        on_mask: Callable[[], None] = lambda: None,
    ):
        self._tokenizer, self._end_tokens = tokenizer, sorted(end_tokens)
        self.vocab_size, self.on_mask = vocab_size, on_mask
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self.close: Callable[[], None] = lambda: None
        """End the process. Copies end with their connections."""
        self._lock = threading.Lock()
        self._right: dict[str, None] = {}  # schemas, the latest last

    def require(self, json_schema: str) -> None:
        """What can be said at once. Raises: ``ValueError`` that begins with "json_schema" and says what is wrong."""
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(f"{PREFIX}needs a fast tokenizer: give one to the scheduler")
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError(f"{PREFIX}needs llguidance: pip install '.[serve]' in the checkout")
        if len(json_schema) > MAX_CHARACTERS:
            raise ValueError(f"{PREFIX}it has more than {MAX_CHARACTERS:,} characters: make it smaller")

    def check(self, json_schema: str) -> None:
        """Whether an answer can begin to keep to a schema: for seconds, perhaps. From any thread.

        Raises: as `require`.
        """
        self.require(json_schema)
        with self._lock:
            if json_schema in self._right:
                return
        grammar = Grammar(self, json_schema)
        try:
            grammar.ask(0, []).result()
        except TreeError as error:
            raise ValueError(str(error)) from None
        finally:
            grammar.close()
        with self._lock:
            self._right[json_schema] = None
            if len(self._right) > REMEMBERED:
                del self._right[next(iter(self._right))]

    def grammar(self, json_schema: str | None) -> Grammar | None:
        """For the answers to a request."""
        return None if json_schema is None else Grammar(self, json_schema)

    def connect(self) -> socket.socket:
        """A connection to a new copy of the process. Raises: OSError."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._process is None or self._process.poll() is not None:
                self._start()
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        return ours

    def _start(self) -> None:
        backend = copy.deepcopy(self._tokenizer).backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        about = {"tokenizer": backend.to_str(), "vocab_size": self.vocab_size, "end_tokens": self._end_tokens}
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", grammar_process.__file__, str(theirs.fileno())]
        env = os.environ | {"MALLOC_ARENA_MAX": "1"}  # the limit of memory counts what an arena may take one day
        with theirs, tempfile.TemporaryFile("w+") as file:
            json.dump(about, file)
            file.seek(0)
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, env=env, stdin=file, pass_fds=(theirs.fileno(),), **quiet)
        self.close = weakref.finalize(self, _end, self._process)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


class Grammar:
    """One schema: a process, from the first question on, until `close`."""

    def __init__(self, grammars: Grammars, json_schema: str):
        self._grammars, self._schema = grammars, json_schema
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._socket = self._stream = None

    def matcher(self, answer: int) -> Matcher:
        return Matcher(self, answer)

    def ask(self, answer: int, tokens: Sequence[int]) -> Future[Tensor]:
        """The mask for an answer's next token, after these more tokens: bool [vocab_size], on the CPU.

        It fails with a `TreeError` where nothing more keeps to the schema, or a limit is met.
        """
        mask = self._thread.submit(self._ask, answer, tokens)
        mask.add_done_callback(lambda _: self._grammars.on_mask())
        return mask

    def close(self) -> None:
        """End the process, whatever it does."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the other side has ended
                self._socket.shutdown(socket.SHUT_RDWR)

    def _ask(self, answer: int, tokens: Sequence[int]) -> Tensor:
        try:
            line = self._told(answer, tokens)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise TreeError(f"{PREFIX}{TOO_MUCH}")
        told = json.loads(line)
        if "error" in told:
            raise TreeError(f"{PREFIX}{told['error']}")
        bits = np.frombuffer(bytes.fromhex(told["mask"]), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=self._grammars.vocab_size, bitorder="little")).bool()

    def _told(self, answer: int, tokens: Sequence[int]) -> bytes:
        if self._socket is None:
            self._socket = self._grammars.connect()
            self._stream = self._socket.makefile("rwb")
            self._stream.write(json.dumps(self._schema).encode() + b"\n")
        self._stream.write(json.dumps([answer, list(tokens)]).encode() + b"\n")
        self._stream.flush()
        return self._stream.readline()


class Matcher:
    """What one answer may continue with."""

    def __init__(self, grammar: Grammar, answer: int):
        self._grammar, self._answer = grammar, answer
        self._taken: list[int] = []  # that the grammar does not know yet
        self.mask: Future[Tensor] | None = None
        """For the next token, once `compute` was called; see `Grammar.ask`."""

    def take(self, token: int) -> None:
        """The answer goes on with it."""
        self._taken.append(token)

    def compute(self) -> None:
        """Begin with the next mask."""
        self.mask, self._taken = self._grammar.ask(self._answer, self._taken), []
