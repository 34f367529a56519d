"""Functions run on forked ranks: the common part of an emulated cluster and of local ranks."""

from __future__ import annotations

import gc
import os
import pickle
import struct
import sys
from collections.abc import Callable

from .ranks import Rank, Ranks

_NUMBER = struct.Struct("=I")
_SHOWN_RANKS = 4  # ranks whose stacks an error message shows


class Forked:
    """Ranks that `run` forks from this process (Linux). Subclasses define their number and their environment."""

    world_size: int

    def run(self, fn: Callable, *args, timeout_s: float = 120.0) -> list:
        """Run fn(*args) on every rank at once; returns the results by rank.

        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set; fn
        calls `torch.distributed.init_process_group("gloo")` itself. A rank's process stays until all ranks have
        returned, so fn needs no barrier at its end. fn and args need not be picklable; results must be.

        Raises: RuntimeError with the last output of the ranks that failed, or with the stacks of those that have not
        returned after timeout_s seconds. All ranks are ended first.
        """
        results = [os.memfd_create(f"result of rank {number}") for number in range(self.world_size)]
        returned, leave = os.pipe(), os.pipe()

        def body(number: int) -> int:
            with open(results[number], "wb", closefd=False) as file:
                pickle.dump(fn(*args), file)
            os.write(returned[1], _NUMBER.pack(number))
            os.read(leave[0], 1)
            return 0

        def one_returned() -> None:
            ranks.idle.update(_NUMBER.unpack(os.read(returned[0], _NUMBER.size)))
            if len(ranks.idle) == self.world_size:
                os.write(leave[1], b"." * self.world_size)

        try:
            with Ranks() as ranks:
                ranks.call_when_readable(returned[0], one_returned)
                self._start(ranks, body)
                self._wait(ranks, timeout_s)
                if failed := ranks.failed():
                    raise RuntimeError("\n\n".join(map(self._describe, failed)))
            return [_load(result) for result in results]
        finally:
            for fd in (*results, *returned, *leave):
                os.close(fd)

    def _start(self, ranks: Ranks, body: Callable[[int], int]) -> None:
        """Start body(number) on every rank."""
        self._check()
        _require_forkable()
        port = self._port()
        for number in range(self.world_size):
            ranks.start(number, lambda number=number: self._place_and_run(number, port, body))

    def _wait(self, ranks: Ranks, timeout_s: float) -> None:
        """Wait until all ranks have ended or one has failed. Raises RuntimeError at the time limit."""
        seconds, limit = self._time_limit(timeout_s)
        ranks.wait(seconds, self._check)
        if late := ranks.late:
            stacks = "\n\n".join(map(self._describe, late[:_SHOWN_RANKS]))
            raise RuntimeError(f"ranks {[rank.number for rank in late]} had not finished after {limit}\n\n{stacks}")

    def _place_and_run(self, number: int, port: int, body: Callable[[int], int]) -> int:
        gc.freeze()  # what the parent made is not collected here: looking at it would copy its pages
        common = dict(RANK=number, WORLD_SIZE=self.world_size, MASTER_PORT=port, OMP_NUM_THREADS=1)
        os.environ.update({name: str(value) for name, value in {**common, **self._take_place(number)}.items()})
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the parent's thread pool does not survive the fork
        return body(number)

    def _take_place(self, number: int) -> dict:
        """In a forked rank: enter its node; returns LOCAL_RANK and its other environment variables."""
        raise NotImplementedError

    def _port(self) -> int:
        """A free port on the first rank's node for the rendezvous."""
        raise NotImplementedError

    def _time_limit(self, timeout_s: float) -> tuple[float, str]:
        """Seconds that a run may take, and the name of the limit."""
        return timeout_s, f"timeout_s={timeout_s:g}"

    def _check(self) -> None:
        """Raise RuntimeError if ranks can't start or continue."""

    def _describe(self, rank: Rank) -> str:
        return rank.describe()


def _require_forkable() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        raise RuntimeError("torch.distributed is initialized in this process, and its threads don't survive a fork")


def _load(result: int):
    with open(result, "rb", closefd=False) as file:
        file.seek(0)
        return pickle.load(file)
