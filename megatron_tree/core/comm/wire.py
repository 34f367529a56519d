"""JSON values between ranks: turns of the scheduler, figures, the outcome of a check. No pickle comes off a network."""

from __future__ import annotations

import json
from typing import Any

import torch

from ..errors import TreeError
from ..files import NotWritten
from .ranks import Ranks

PACKET = 1024  # bytes of the first message; a usual decoding step needs no second one
LENGTH = 8  # of them: the value's length


def share(value: Any, ranks: Ranks, *, source: int = 0) -> Any:
    """`value` of rank `source` on all ranks, made of what JSON has; other ranks pass anything.

    One broadcast of 1 KiB, and a second one for what does not fit into it. Raises: `CommError` when it fails or takes
    too long.
    """
    if ranks.size == 1:
        return value
    if "cpu" in ranks.state.backends:
        ranks = ranks.on_host
    sends = ranks.rank == source
    data = json.dumps(value, separators=(",", ":")).encode() if sends else b""
    packet = (len(data).to_bytes(LENGTH, "little") + data[: PACKET - LENGTH]).ljust(PACKET, b"\0")
    packet = _broadcast(packet, ranks, source)
    length, first = int.from_bytes(packet[:LENGTH], "little"), packet[LENGTH:]
    if length > len(first):
        rest = data[len(first) :] if sends else bytes(length - len(first))
        first += _broadcast(rest, ranks, source)
    return value if sends else json.loads(first[:length])


def share_all(value: Any, ranks: Ranks) -> list[Any]:
    """Every rank's `value` on all ranks, by rank; a rank gets its own back as it is. See `share`."""
    return [share(value, ranks, source=rank) for rank in range(ranks.size)]


def _broadcast(data: bytes, ranks: Ranks, source: int) -> bytes:
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(ranks.device)
    return bytes(ranks.broadcast(message, source).cpu().numpy())


def share_check(check, ranks: Ranks) -> Any:
    """What `check()` returns on rank 0, on all ranks; it runs there only, and its value must fit into JSON.

    Raises: the ``ValueError`` of rank 0, and its `NotWritten`, on every rank; another ``OSError`` of rank 0 as it is
        there, and as a ``ValueError`` with its text elsewhere; what else fails there is a `TreeError` elsewhere.
    """
    if ranks.rank != 0:
        outcome = share(None, ranks)
        if "error" in outcome:
            raise ValueError(outcome["error"])
        if "not written" in outcome:
            raise NotWritten(outcome["not written"])
        if "failed" in outcome:
            raise TreeError(f"rank 0 failed: {outcome['failed']}")
        return outcome["value"]
    try:
        value = check()
    except (ValueError, OSError) as error:
        share({"not written" if isinstance(error, NotWritten) else "error": str(error)}, ranks)
        raise
    except BaseException as error:
        share({"failed": f"{type(error).__name__}: {error}"}, ranks)
        raise
    share({"value": value}, ranks)
    return value
