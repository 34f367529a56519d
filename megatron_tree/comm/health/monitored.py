"""Regions of a run in which all ranks of the job find out together which one failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from ...errors import CommError
from ..group import GroupState
from . import gloo
from .reports import Report
from .watchdog import EVERY_GROUP, Watchdog, region


@contextlib.contextmanager
def monitored(name: str) -> Iterator[None]:
    """A region of a run in which all ranks of the job take part, collectives of other libraries included.

    An error that one rank raises in it becomes a `CommError` of all ranks that wait for it, whatever they wait in. The
    error has its name, for instance "step 5". A region inside another one is a part of that.
    """
    job = GroupState.of(dist.group.WORLD)
    if job.size == 1 or job.region:
        yield
        return
    watchdog = Watchdog.of(dist.group.WORLD)
    job.region, watchdog.waiting_on = name, EVERY_GROUP
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
        job.region, watchdog.waiting_on = "", None
