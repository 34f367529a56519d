"""Particular to gloo: giving up a wait, and telling its errors from others."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ..group import group_rank, group_size

UNUSED_TAG = (1 << 31) - 1  # no message has it
_WORDS = ("gloo", "pair closure", "Operation timed out", "Connection closed by peer", "Connection reset by peer")


def interrupt(group) -> None:
    """Make this rank's waits on a gloo group fail now. The group can't be used afterwards.

    gloo gives up a wait only when one times out, which closes all connections of its context. So a receive that no rank
    sends to is made to time out at once. It takes a peer whose connection is still open.
    """
    for context in range(1 + os.environ.get("GLOO_SOCKET_IFNAME", "").count(",")):  # one for each interface
        for peer in range(group_size(group)):
            if peer != group_rank(group):
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, UNUSED_TAG - context).wait(timedelta(milliseconds=1))


def is_communication_error(error: Exception) -> bool:
    """Whether an exception comes from torch.distributed; gloo raises plain ``RuntimeError``s."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
    )


def is_timeout(error: Exception) -> bool:
    """Whether the text of an error of torch.distributed or gloo says that a time limit ran out."""
    return re.search(r"timed? ?out|was not made within", str(error), re.IGNORECASE) is not None


@functools.cache
def settle_at_exit() -> None:
    """gloo's threads drop finished work late; one that asks an ending interpreter for its lock aborts the process."""
    atexit.register(time.sleep, 0.1)
