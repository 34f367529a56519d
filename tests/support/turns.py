"""Tests that run in parallel (pytest-xdist) take turns where they would starve each other.

- `turn(alone)`: a test marked `alone` has the machine to itself; all others share it.
- `enough_cores(num_ranks)`: one run of `CROWD` ranks or more at a time for every `CROWD` cores.

Turns are file locks, which the kernel gives back when a process dies. Without pytest-xdist nobody waits.
"""

import contextlib
import fcntl
import functools
import os
import signal
import tempfile
import time
from pathlib import Path

CROWD = 4
_folder = None  # of the locks


@functools.cache
def new_folder():
    """For the locks of all processes of a session. It goes with the process that asked for it."""
    return tempfile.TemporaryDirectory(prefix="tests-")


def take_turns(folder):
    """From now on this process takes turns with all others that were given this folder."""
    global _folder
    _folder = Path(folder)


@contextlib.contextmanager
def turn(alone):
    """Hold the machine, alone or with others, while the context is open."""
    if _folder is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with _lock("gate", fcntl.LOCK_EX):  # whoever waits to be alone keeps new ones out
            stack.enter_context(_lock("machine", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def enough_cores(num_ranks):
    """Hold one of the places for runs of many ranks while the context is open. The test's time limit waits, too."""
    if _folder is None or num_ranks < CROWD:
        yield
        return
    places = range(max(1, len(os.sched_getaffinity(0)) // CROWD))
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's clock
    with contextlib.ExitStack() as stack:
        while not any(_takes(stack, f"place{i}") for i in places):
            time.sleep(0.05)
        signal.setitimer(signal.ITIMER_REAL, left)
        yield


@contextlib.contextmanager
def _lock(name, mode):
    with open(_folder / name, "w") as file:  # closing it gives the lock back
        fcntl.flock(file, mode)
        yield


def _takes(stack, name):
    try:
        stack.enter_context(_lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
