"""Messages and collectives in progress: starting them, waiting within the time limit, and the error if they fail. What
this rank sends is recorded for tests and benchmarks that count it (`record`)."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .group import IN_PART, GroupState
from .watchdog import EVERY_GROUP

if TYPE_CHECKING:
    from .ranks import Ranks


class Sent(NamedTuple):
    """One operation of this rank: its name, the ranks that take part, and the payload bytes this rank sends."""

    op: str
    ranks: int
    bytes: int


recorders: list[list[Sent]] = []
"""The open records."""


@contextlib.contextmanager
def record():
    """A list that fills with every operation of this rank while the context is open."""
    log: list[Sent] = []
    recorders.append(log)
    try:
        yield log
    finally:
        recorders.remove(log)


def note(op: str, ranks: int, num_bytes: int) -> None:
    """Add an operation to the open records."""
    for log in recorders:
        log.append(Sent(op, ranks, num_bytes))


TAGS = 1 << 12  # of the collectives in progress; then they start again
CALLS = (1 << 19) - 1  # digests of calls that tags tell apart
ASK_S = 20e-6  # between two calls of is_done


def run(op: str, ranks: Ranks, num_bytes: int, start: Callable[..., dist.Work], x: Tensor) -> None:
    """Wait for start(x), an asynchronous operation of torch.distributed; failures become `CommError`."""
    note(op, ranks.size, num_bytes)
    meet(op, ranks)
    try:
        with nccl_limit(op, ranks.group, ranks):
            work = start(x)
        wait_for(work, ranks, on=ranks.group)
    except RuntimeError as error:
        raise ranks.watchdog.operation_failed(op, ranks.timeout_s, error) from error


@contextlib.contextmanager
def nccl_limit(op: str, group: dist.ProcessGroup, ranks: Ranks) -> Iterator[None]:
    """What starts in this context has the ranks' time limit: NCCL's collectives have their group's, and torch's
    watchdog, which keeps it, knows no other. Ours notes what was started last."""
    if ranks.backend != "nccl":
        yield
        return
    ranks.watchdog.note_queued(op, ranks.timeout_s)
    backend = group._get_backend(ranks.device)
    before = backend.options._timeout
    backend._set_default_timeout(ranks.limit)
    try:
        yield
    finally:
        backend._set_default_timeout(before)


def wait_for(works, ranks: Ranks, *, on) -> None:
    """Wait for one operation or a list of them, on the ranks' group or `on`, a sub-group of it.

    With NCCL the current stream waits, not the host.
    """
    works = works if isinstance(works, list) else [works]
    with ranks.watchdog.waits(on, works):
        for work in works:
            if ranks.backend == "nccl":
                work.wait()  # NCCL's own watchdog keeps the time limit
            else:
                wait_within(ranks.limit, work)


def wait_within(limit: timedelta, work: dist.Work) -> None:
    """Wait for an operation of gloo. Raises ``RuntimeError`` also where the watchdog has aborted it."""
    if not work.wait(limit):
        raise RuntimeError("the watchdog has ended the wait")


def wait_until(is_done: Callable[[], bool], what: str, ranks: Ranks) -> None:
    """Wait for collectives that are queued on a device without time limits (in a CUDA graph), by asking is_done. A
    single rank does not wait.

    Raises: `CommError` after the time limit, or if another rank failed.
    """
    if ranks.size == 1:
        return
    watchdog, end = ranks.watchdog, time.monotonic() + ranks.timeout_s
    try:
        with watchdog.waits(EVERY_GROUP):  # its collectives may belong to several
            while not is_done():
                if watchdog.is_interrupted:
                    raise RuntimeError("another rank failed")
                if time.monotonic() > end:
                    raise RuntimeError(f"timed out after {ranks.timeout_s:g} s")
                time.sleep(ASK_S)
    except RuntimeError as error:
        failure = watchdog.operation_failed(what, ranks.timeout_s, error)
        watchdog.interrupt(EVERY_GROUP)  # the device waits, too
        raise failure from error


def _tag(state: GroupState, number: int) -> int:
    """The tag of messages of the group's current call. number: below TAGS; 0 where messages arrive in order."""
    return number + TAGS * (state.calls.digest % CALLS)


def meet(op: str, ranks: Ranks) -> None:
    """Before `op`, wait until all ranks are in this rank's call: once in a call, always outside of calls.

    gloo's own collectives need that. They have no tags: different calls would exchange data, or end a process where
    lengths differ. With NCCL the host waits for nothing; its ranks compare their calls afterwards (agreement.py).
    """
    calls = ranks.watchdog.calls
    has_met = IN_PART.get() or (calls.current is not None and calls.met == calls.stamp)
    if has_met or ranks.backend != "gloo" or not calls.meets:
        return
    calls.met, n = calls.stamp, ranks.size
    mail, nothing = Mail(op, ranks), torch.zeros(1, dtype=torch.uint8)
    steps = [1 << bit for bit in range((n - 1).bit_length())]
    arriving = [mail.receive(nothing.clone(), (ranks.rank - step) % n) for step in steps]
    for step, message in zip(steps, arriving):  # after them, all ranks have been heard of
        mail.send(nothing, (ranks.rank + step) % n)
        mail.wait(message)
    mail.sent()


class Message(NamedTuple):
    """One tensor on its way to or from a group rank."""

    work: dist.Work
    peer: int


class Mail:
    """Point-to-point messages of one collective (gloo), among all ranks or some.

    Receives are posted before sends: gloo sends a message only once its receiver has said where to put it. Every
    collective takes a tag of its own, in the order in which the ranks start them, so that several can be in progress.
    The digest of the call is in it: ranks that make different calls get nothing from each other (gloo ends a process
    that receives more than it expects).
    """

    def __init__(self, op: str, ranks: Ranks, among: Sequence[int] | None = None):
        self._op, self._ranks, self._among, self._group = op, ranks, among, ranks.group
        state = ranks.state
        state.calls.made += 1
        self._tag = _tag(state, 1 + next(state.tags) % (TAGS - 1))
        self._sent: list[tuple[Message, Tensor]] = []

    def receive(self, x: Tensor, source: int) -> Message:
        """Post the receive of x, contiguous, from a group rank."""
        return self._start(self._group.recv, x, source)

    def send(self, x: Tensor, to: int) -> None:
        """Start to send x, contiguous; it is kept until `sent`."""
        self._sent.append((self._start(self._group.send, x, to), x))

    def wait(self, *messages: Message) -> None:
        with self._ranks.watchdog.waits(self._group, [message.work for message in messages]):
            for message in messages:
                try:
                    wait_within(self._ranks.limit, message.work)
                except RuntimeError as error:
                    raise self._failure(error, message.peer) from error

    def sent(self) -> None:
        """Wait until everything that was sent has left."""
        self.wait(*(message for message, _ in self._sent))
        self._sent.clear()

    def _start(self, start, x: Tensor, peer: int) -> Message:
        try:
            return Message(start([x], peer, self._tag), peer)  # as dist.isend and irecv, without their checks
        except RuntimeError as error:
            raise self._failure(error, peer) from error

    def _failure(self, error: RuntimeError, peer: int) -> Exception:
        ranks = self._ranks
        return ranks.watchdog.operation_failed(self._op, ranks.timeout_s, error, self._among, (peer,))


def on_streams(device: torch.device) -> bool:
    """Whether collectives of a device's tensors are queued on streams of their own, and the host does not wait."""
    return device.type == "cuda"


class Pending:
    """A collective in progress: a generator that yields wherever it has to wait, and returns the result.

    On a CPU its first messages are started at once, later ones in `advance`. On a GPU all of it is queued on a stream
    for its kind ("gather", "reduce", "exchange"), so that different kinds overlap, and `wait` lets the stream
    that has started it wait for that one.

    No memory waits for the GPU: the inputs are kept until `wait`, and a result may be dropped once what reads it is
    queued. The next collective of the kind may write there: its stream first waits for the one that starts it.
    """

    def __init__(
        self,
        steps: Generator[None, None, object],
        device: torch.device,
        inputs: tuple[Tensor, ...] = (),
        kind: str = "gather",
    ):
        self._steps, self._stream, self._finished, self._result = steps, None, False, None
        if on_streams(device):
            self._start = torch.cuda.current_stream(device)
            self._stream = _side_stream(self._start, kind)
            self._inputs = weakref.finalize(self, _keep, inputs, self._stream)  # called where nobody waits
            self._inputs.atexit = False
            self._stream.wait_stream(self._start)
            with torch.cuda.stream(self._stream):
                while not self._finished:
                    self._step()
        else:
            self._step()

    def _step(self) -> None:
        try:
            next(self._steps)
        except StopIteration as stop:
            self._finished, self._result = True, stop.value

    def advance(self) -> None:
        """Wait for the messages in progress and start those that depend on them."""
        if not self._finished:
            self._step()

    def wait(self):
        while not self._finished:
            self._step()
        if self._stream is not None:
            if torch.cuda.current_stream(self._start.device) != self._start:
                raise RuntimeError("a collective is waited for on the stream that has started it, and on no other")
            self._start.wait_stream(self._stream)
            self._inputs.detach()
        return self._result


def _keep(tensors: tuple[Tensor, ...], stream: torch.cuda.Stream) -> None:
    """Keep the memory of tensors until the device has come to where the stream is now."""
    for x in tensors:
        x.record_stream(stream)


@functools.cache
def _side_stream(stream: torch.cuda.Stream, kind: str) -> torch.cuda.Stream:
    """The stream of a kind of collectives that `stream` starts and waits for. Its kernels come first where those of
    attention, thousands of blocks, are queued."""
    return torch.cuda.Stream(stream.device, priority=-1)


def _on_host(x: Tensor) -> bool:
    return x.is_cpu


class Transfer:
    """One tensor sent to a rank, another received (either may be None); `wait` gives what was received.

    gloo sends and receives the host's memory alone, whatever it is given: with a GPU's tensors, their copies there.
    """

    def __init__(self, send: Tensor | None, dst: int, recv: Tensor | None, src: int, ranks: Ranks):
        gloo, group = ranks.backend == "gloo", ranks.group
        if gloo:
            arriving = recv if recv is None or _on_host(recv) else torch.empty_like(recv, device="cpu")
            send = send if send is None or _on_host(send) else send.cpu()
        else:
            arriving = recv
        self._recv, self._arriving, self._send, self._src, self._ranks = recv, arriving, send, src, ranks
        self._name = f"send/receive with group ranks {sorted({dst, src})}"
        ops, tag = [], _tag(ranks.state, 0) if gloo else 0
        if recv is not None:
            ops.append(dist.P2POp(dist.irecv, arriving, group=group, tag=tag, group_peer=src))
        if send is not None:
            note("send", ranks.size, send.nbytes)
            ops.append(dist.P2POp(dist.isend, send, group=group, tag=tag, group_peer=dst))
        try:
            with nccl_limit(self._name, group, ranks):
                self._work = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self) -> Tensor | None:
        try:
            wait_for(self._work, self._ranks, on=self._ranks.group)
        except RuntimeError as error:
            raise self._failed(error) from error
        self._send = None
        if self._arriving is not self._recv:
            self._recv.copy_(self._arriving)
        return self._recv

    def _failed(self, error: RuntimeError) -> Exception:
        ranks = self._ranks
        return ranks.watchdog.operation_failed(self._name, ranks.timeout_s, error, peers=(self._src,))


def start_shift(send: Tensor | None, recv: Tensor | None, order: tuple[int, ...], ranks: Ranks) -> Transfer:
    """Start passing `send` to the next rank of the ring `order` while `recv` is filled by the previous one.

    Both contiguous; None where there is nothing to pass on, which the other side must know.
    """
    at, n = order.index(ranks.rank), len(order)
    return Transfer(send, order[(at + 1) % n], recv, order[at - 1], ranks)
