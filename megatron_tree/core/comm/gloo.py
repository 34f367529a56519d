"""Particular to gloo: giving up a wait, and telling its errors from others."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from .group import GroupState

UNUSED_TAG = (1 << 31) - 1  # no message has it
_WORDS = ("gloo", "pair closure", "Operation timed out", "Connection closed by peer", "Connection reset by peer")


def interrupt(group) -> None:
    """Make this rank's waits on a gloo group fail now. The group can't be used afterwards.

    gloo gives up a wait only when one times out, which closes all connections of its context. So a receive that no rank
    sends to is made to time out at once. It takes a peer whose connection is still open.
    """
    state = GroupState.of(group)
    for context in range(1 + os.environ.get("GLOO_SOCKET_IFNAME", "").count(",")):  # one for each interface
        for peer in set(range(state.size)) - {state.rank}:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, UNUSED_TAG - context).wait(timedelta(milliseconds=1))


def abort(work: dist.Work) -> None:
    """End a wait for a message that is half sent or half received; ``work.wait()`` returns False then.

    gloo tells nobody of such a message when its connection closes (`Pair::signalException` knows those alone that have
    not begun), so that its wait would go on until the time limit. torch's C++ has a way to end it, and Python's `Work`
    hasn't: it is called here for what certainly is such a message, as the virtual table tells.
    """
    if type(work) is not dist.Work or not (aborts := _aborts()):
        return
    cpp = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value  # pybind11: after the object's head
    table = ctypes.c_void_p.from_address(cpp).value if cpp else None
    if table in aborts:
        aborts[table](cpp)


@functools.cache
def _aborts() -> dict[int, Callable[[int], None]]:
    """`abort` of messages by the address of their class's virtual table; empty where torch is built otherwise."""
    found, pointer = {}, ctypes.sizeof(ctypes.c_void_p)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        for name in ("8SendWork", "8RecvWork"):
            table = ctypes.c_char.in_dll(library, f"_ZTVN4c10d16ProcessGroupGloo{name}E")
            function = library[f"_ZN4c10d16ProcessGroupGloo{name}5abortEv"]
            function.argtypes, function.restype = (ctypes.c_void_p,), None
            found[ctypes.addressof(table) + 2 * pointer] = function  # after the offset to the top and the type
    return found


def is_communication_error(error: Exception) -> bool:
    """Whether an exception comes from torch.distributed; gloo raises plain ``RuntimeError``s."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
    )


def is_timeout(error: Exception) -> bool:
    """Whether the text of an error of torch.distributed or gloo says that a time limit ran out."""
    return re.search(r"timed? ?out|was not made within", str(error), re.IGNORECASE) is not None
