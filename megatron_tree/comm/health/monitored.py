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
    error has its name, for instance "step 5". A region inside another one is a part of that.

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
    except CommError as error:  # of a smaller group, and the rank that failed may not be in it
        conclusion = watchdog.conclude(Report(str(error), error.ranks))
        if isinstance(conclusion, CommError) and conclusion.ranks == error.ranks:
            raise
        raise conclusion from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}, on rank {watchdog.rank}{region()}"
        if not gloo.is_communication_error(error):
            watchdog.conclude(Report(what, cause="error"))
            raise
        raise watchdog.conclude(Report(what, tuple(r for r in range(job.size) if r != job.rank))) from error
    finally:
        job.region, job.wait_limit_s, watchdog.waiting_on = "", math.inf, None


def waited_s() -> float:
    """Seconds for which this rank has been waiting for others; 0 if it does not wait. From any thread."""
    if not dist.is_initialized() or (store := GroupState.of(dist.group.WORLD).store) is None:
        return 0.0
    since = min(x.waiting_since for x in (store, *store.watchdogs))
    return max(0.0, time.monotonic() - since)
