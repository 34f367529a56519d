"""Batch generation: requests from a JSONL file, results appended to another; an interrupted run can be resumed.

A line of the input is {"prompt": text} or {"messages": [...]}, and may have "id", "n" and `SamplingParams` options.
The first line of the output records what the results depend on; every other line is the result of one request, in the
order in which they finish:

    {"index": 0, "id": 0, "prompt_tokens": 9, "completion_tokens": 4,
     "answers": [{"text": "...", "finish_reason": "stop", "stop_reason": 2}], "crc32": "0b1c2d3e"}
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from ...core.files import append, check_text, read_json, writing
from ..generation.requests import Event, Request
from ..generation.sampling import SamplingParams, derived_seed, first_fault
from ..generation.scheduler import Scheduler
from .messages import ChatMessage, chat_tokens

VERSION = 2
TOLD_ERRORS = 10
_CHECKSUM = b', "crc32"'
_WAY_OUT = {True: "name another file", False: "delete that line, and its request is answered again"}


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What a batch reads and writes, and the defaults of its lines."""

    input: str
    output: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Its seed is that of the batch: every request draws with a seed derived from it and the request's index."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else the results depend on, as JSON values: the model, its dtype, the number of ranks."""


class BatchResult(NamedTuple):
    """Numbers of requests: finished by this run, finished before, and failed (another run tries these again)."""

    finished: int
    skipped: int
    failed: int


class BatchRequest(NamedTuple):
    """One line of the input."""

    index: int
    id: str | int
    request: Request


def run_batch(scheduler: Scheduler, tokenizer, options: BatchOptions, *, progress: bool = True) -> BatchResult:
    """Serve a file of requests and stop the scheduler. Call it on all ranks; only the leader reads and writes files.

    progress: a bar on the leader's stderr.
    Raises: ``ValueError`` on every rank, before anything runs, that names bad lines (up to ten) or says why the output
        can't be used; ``OSError`` on the leader when a file can't be read or written, while others get a `ValueError`
        or, once the batch runs, a `TreeError`.
    """
    batches: list[_Batch] = []
    scheduler.on_leader(lambda: batches.append(_Batch(scheduler, tokenizer, options)))
    result = None
    if scheduler.is_leader:
        with contextlib.closing(batches[0]) as batch:
            result = batch.run(progress)
    else:
        scheduler.run()
    return BatchResult(*scheduler.on_leader(lambda: list(result)))


class _Batch:
    """The leader's side: the remaining requests, and the output."""

    def __init__(self, scheduler: Scheduler, tokenizer, options: BatchOptions):
        self._scheduler = scheduler
        data = Path(options.input).read_bytes()
        header = {"version": VERSION, "input_sha256": hashlib.sha256(data).hexdigest()}
        header |= {"about": dict(options.about), "sampling": options.sampling.model_dump()}
        self._output = Output(options.output, header)
        try:
            sampling = options.sampling.with_options({"seed": self._output.seed})
            entries = read_requests(data, options.input, scheduler, tokenizer, sampling)
            self._total = len(entries)
            self._todo = deque(entry for entry in entries if key_of(entry.id) not in self._output.done)
            self._output.begin()
        except BaseException:
            self._output.close()
            raise
        self._finished = self._failed = self._open = 0

    def close(self) -> None:
        self._output.close()

    def run(self, progress: bool) -> BatchResult:
        scheduler, skipped = self._scheduler, self._total - len(self._todo)
        bar = tqdm(total=self._total, initial=skipped, unit="request", file=sys.stderr, disable=not progress)
        with bar:
            try:
                while True:
                    while self._todo and scheduler.load.waiting < scheduler.max_waiting:
                        self._submit(self._todo.popleft(), bar)
                    if not self._open:
                        scheduler.stop()
                    if not scheduler.run_once():
                        return BatchResult(self._finished, skipped, self._failed)
            except BaseException as error:
                scheduler.fail(error)
                raise

    def _submit(self, entry: BatchRequest, bar: tqdm) -> None:
        events: list[Event] = []

        def sink(event: Event) -> None:
            events.append(event)
            if not event.last:
                return
            self._open -= 1
            errors = [e.error for e in events if e.finish_reason in ("error", "cancelled")]
            if errors:
                self._failed += 1
                tqdm.write(f"request {entry.id!r} failed: {errors[0]}", file=sys.stderr)
                return
            self._output.append(_result(entry, events))
            self._finished += 1
            bar.update()

        self._open += 1
        self._scheduler.submit(entry.request, sink)


def _result(entry: BatchRequest, events: list[Event]) -> dict[str, Any]:
    answers = []
    for number in range(entry.request.n):
        told = [event for event in events if event.answer == number]
        answer = {"text": "".join(e.text for e in told), "finish_reason": told[-1].finish_reason}
        answer["stop_reason"] = told[-1].stop_reason
        if entry.request.sampling.logprobs is not None:
            answer["logprobs"] = [{"token": e.token, "logprob": e.logprob, "top": e.top_logprobs} for e in told]
        if entry.request.sampling.prompt_logprobs is not None:
            choices = told[0].prompt_logprobs
            answer["prompt_logprobs"] = [
                {"token": c.token, "logprob": c.logprob, "top": c.top_logprobs} for c in choices
            ]
        answers.append(answer)
    usages = [event.usage for event in events if event.usage is not None]
    return {
        "index": entry.index,
        "id": entry.id,
        "prompt_tokens": usages[0].prompt_tokens,
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "answers": answers,
    }


def read_requests(
    data: bytes, name: str, scheduler: Scheduler, tokenizer, sampling: SamplingParams
) -> list[BatchRequest]:
    """The requests of an input file, all of them checked; sampling (with a seed): the defaults of a line.

    Raises: ``ValueError`` that names the file and its first ten bad lines, with the reasons.
    """

    def read(line: bytes, index: int) -> BatchRequest:
        parsed = _parse(line, index, sampling)
        n = 1 if parsed.line.n is None else parsed.line.n
        prompt, continues = _encode(tokenizer, parsed.line), parsed.line.prompt is not None
        request = Request(prompt=prompt, sampling=parsed.sampling, n=n, continues=continues)
        scheduler.check(request)
        return BatchRequest(index, parsed.id, request)

    return _each_line(data, name, read)


def check_lines(path: str) -> None:
    """Check what needs neither a model nor its tokenizer. Raises: as `read_requests`; OSError."""
    _each_line(Path(path).read_bytes(), path, lambda line, index: _parse(line, index, SamplingParams(seed=0)))


def _each_line(data: bytes, name: str, read: Callable[[bytes, int], Any]) -> list:
    """read(line, index) of every line that is not empty, with ids that differ; ValueError with up to ten bad lines."""
    entries, errors, lines = [], [], {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = read(line, len(entries) + len(errors))
            if (before := lines.setdefault(key_of(entry.id), number)) != number:
                raise ValueError(f"id {entry.id!r} is used in line {before} already: ids must differ")
            entries.append(entry)
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        more = f"\nand {len(errors) - TOLD_ERRORS} more" if len(errors) > TOLD_ERRORS else ""
        raise ValueError(f"{name} can't be run:\n" + "\n".join(errors[:TOLD_ERRORS]) + more)
    if not entries:
        raise ValueError(f"{name} holds no requests: one JSON object a line, such as {{'prompt': 'Once'}}")
    return entries


class Line(BaseModel):
    """One line of the input. Its other fields are options of `SamplingParams`."""

    model_config = ConfigDict(strict=True, extra="allow")
    id: int | str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    n: int | None = None


class _Parsed(NamedTuple):
    id: str | int
    line: Line
    sampling: SamplingParams


def _parse(line: bytes, index: int, sampling: SamplingParams) -> _Parsed:
    try:
        fields = read_json(line)
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object, such as {'prompt': 'Once'}")
    try:
        read = Line(**fields)
    except ValidationError as error:
        raise ValueError(" ".join(first_fault(error.errors()))) from None
    if (read.prompt is None) == (read.messages is None):
        raise ValueError("must have one of 'prompt' and 'messages'")
    if read.prompt is not None:
        check_text("prompt", read.prompt)
    options = dict(read.model_extra)
    if options.get("seed") is None:
        options["seed"] = derived_seed(sampling.seed, index)
    return _Parsed(index if read.id is None else read.id, read, sampling.with_options(options))


def _encode(tokenizer, line: Line) -> list[int]:
    if line.prompt is not None:
        return tokenizer(line.prompt).input_ids
    if not tokenizer.chat_template:
        raise ValueError("messages: the model's tokenizer has no chat template: use 'prompt'")
    if any(message.image_urls for message in line.messages):
        raise ValueError("messages: a file of prompts has no images: ask megatron-tree generate --image, or a server")
    return chat_tokens(tokenizer, [message.for_template() for message in line.messages])


class Output:
    """The output file: locked while it is open; all lines are complete, except the last one after a crash.

    Attributes: done: ids with a result, as JSON. seed: that of the batch.
    Raises: ``ValueError`` for a file that may not be written to: it belongs to a run that runs, or was written with
        other options or by something else. Such a file is left as it is.
    """

    def __init__(self, path: str, header: Mapping[str, Any]):
        self._path, self.done = path, set()
        with writing(Path(path)):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"output {path!r} is being written to by another run: wait for its end") from None
            self._header = json.loads(json.dumps(header))
            if self._header["sampling"]["seed"] is None:
                self._header["sampling"]["seed"] = secrets.randbits(63)
            data = Path(path).read_bytes()
            self._size, self._whole = len(data), data.rfind(b"\n") + 1
            self._read(data[: self._whole], header["sampling"]["seed"])
        except BaseException:
            self.close()
            raise
        self.seed = self._header["sampling"]["seed"]

    def _read(self, data: bytes, seed: int | None) -> None:
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            try:
                entry = read_json(line)
                value = entry["job"]["sampling"]["seed"] if number == 1 else key_of(entry["id"])
            except (KeyError, TypeError, ValueError):
                what = "the output of a batch" if number == 1 else "a result: something else wrote it, or it is damaged"
                raise ValueError(
                    f"output {self._path!r}, line {number}, is not {what}; {_WAY_OUT[number == 1]}"
                ) from None
            if number == 1:
                self._header["sampling"]["seed"] = value if seed is None else seed
                self._check_header(entry["job"])
            if _checksum(line[: line.rfind(_CHECKSUM)]) != entry.get("crc32"):
                raise ValueError(
                    f"output {self._path!r}, line {number}, holds other bytes than were written (its crc32 differs); "
                    + _WAY_OUT[number == 1]
                )
            if number > 1:
                self.done.add(value)

    def _check_header(self, header: Mapping[str, Any]) -> None:
        now, then = _flat(self._header), _flat(header)
        other = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
        if other:
            changes = "; ".join(f"{name}={then.get(name)!r} then, {now.get(name)!r} now" for name in other)
            raise ValueError(
                f"output {self._path!r} was written with other options: {changes}. Use the same, or name another file"
            )

    def begin(self) -> None:
        """Prepare it for appending: remove an incomplete last line and write the header."""
        if self._whole < self._size:
            os.ftruncate(self._fd, self._whole)
            left = self._size - self._whole
            print(f"{self._path}: removed an incomplete last line of {left} bytes", file=sys.stderr, flush=True)
        if not self._whole:
            self.append({"job": self._header})

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line with a checksum of its bytes at the end, and sync it to disk."""
        text = json.dumps(entry).encode()[:-1]
        append(self._fd, text + _CHECKSUM + b': "' + _checksum(text).encode() + b'"}\n', Path(self._path))
        with writing(Path(self._path)):
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def key_of(identity: str | int) -> str:
    """A key that differs for different ids: 1 and "1" are two ids."""
    return json.dumps(identity)


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in options.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
