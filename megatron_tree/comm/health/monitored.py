"""Regions of a run in which all ranks of the job find out together which one failed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import torch.distributed as dist

from ...errors import CommError
from ..group import GroupState
from . import gloo
from .reports import Report
from .watchdog import EVERY_GROUP, Watchdog, region


@contextlib.contextmanager
def monitored(name: str, *, wait_limit_s: float = math.inf) -> Iterator[None]:
    """A region of a run in which all ranks of the job take part, collectives of other libraries included.

    An error that one rank raises in it becomes a `CommError` of all ranks that wait for it, whatever they wait in. The
    error has its name, for instance "step 5". No group can be used any more then. A region inside another one is a part
    of that.

    wait_limit_s: seconds for which a rank may wait for others in one collective of this package, where that is less
    than the collective's own time limit. What a rank computes itself does not count. With NCCL the host does not wait.
    """
    job = GroupState.of(dist.group.WORLD)
    if job.size == 1 or job.region:
        yield
        return
    watchdog = Watchdog.of(dist.group.WORLD)
    job.region, job.wait_limit_s, watchdog.waiting_on = name, wait_limit_s, EVERY_GROUP
    try:
        yield
    except Exception as error:
        conclusion = watchdog.conclude(_report(watchdog, error))
        for other in watchdog.store.watchdogs:  # whose ranks may go on to other calls now
            if other.error is None:
                other.note_failure(conclusion)
        waited = isinstance(error, CommError) or gloo.is_communication_error(error)
        if not waited or (isinstance(error, CommError) and error.ranks == getattr(conclusion, "ranks", None)):
            raise
        raise conclusion from error
    finally:
        job.region, job.wait_limit_s, watchdog.waiting_on = "", math.inf, None


def _report(watchdog: Watchdog, error: Exception) -> Report:
    """Of a rank that leaves a region by this error."""
    what = f"{type(error).__name__}: {error}, on rank {watchdog.rank}{region()}"
    if isinstance(error, CommError):  # of a smaller group, and the rank that failed may not be in it
        return Report(str(error), error.ranks)
    if gloo.is_communication_error(error):
        return Report(what, tuple(r for r in range(watchdog.world) if r != watchdog.rank))
    if any(x.is_known(error) for x in watchdog.store.watchdogs):  # another rank's, which its text names
        return Report(str(error), cause="input")
    return Report(what, cause="error")


def waited_s() -> float:
    """Seconds for which this rank has been waiting for others; 0 if it does not wait. From any thread."""
    if not dist.is_initialized() or (store := GroupState.of(dist.group.WORLD).store) is None:
        return 0.0
    since = min(x.waiting_since for x in (store, *store.watchdogs))
    return max(0.0, time.monotonic() - since)
