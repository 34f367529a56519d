"""JSON values between ranks: plans of the scheduler, figures, the outcome of a check. No pickle comes off a network."""

from __future__ import annotations

import json
from typing import Any

import torch

from ..config import default_config
from ..errors import TreeError
from ..files import NotWritten
from .collectives import broadcast
from .group import GroupState, group_rank, group_size

PACKET = 1024  # bytes of the first message; a usual decoding step needs no second one
LENGTH = 8  # of them: the value's length


def share(
    value: Any,
    group,
    *,
    source: int = 0,
    device: torch.device | None = None,
    transport: str | None = None,
    timeout_s: float = 600.0,
) -> Any:
    """`value` of group rank `source` on all ranks of the group, made of what JSON has; other ranks pass anything.

    One broadcast of 1 KiB, and a second one for what does not fit into it. device: of the messages where the group's
    backend needs one (NCCL); default the current GPU. transport: as in `TreeConfig`; default that of
    `default_config()`. Raises: `CommError` when it fails or runs past timeout_s.
    """
    if group_size(group) == 1:
        return value
    if "cpu" in GroupState.of(group).backends:
        device = torch.device("cpu")
    elif device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    sends = group_rank(group) == source
    data = json.dumps(value, separators=(",", ":")).encode() if sends else b""
    packet = (len(data).to_bytes(LENGTH, "little") + data[: PACKET - LENGTH]).ljust(PACKET, b"\0")
    packet = _broadcast(packet, group, source, device, transport, timeout_s)
    length, first = int.from_bytes(packet[:LENGTH], "little"), packet[LENGTH:]
    if length > len(first):
        rest = data[len(first) :] if sends else bytes(length - len(first))
        first += _broadcast(rest, group, source, device, transport, timeout_s)
    return value if sends else json.loads(first[:length])


def share_all(value: Any, group, *, timeout_s: float = 600.0) -> list[Any]:
    """Every rank's `value` on all ranks, by group rank; a rank gets its own back as it is. See `share`."""
    return [share(value, group, source=rank, timeout_s=timeout_s) for rank in range(group_size(group))]


def _broadcast(data: bytes, group, source: int, device: torch.device, transport: str | None, timeout_s: float) -> bytes:
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    transport = transport or default_config().transport
    return bytes(broadcast(message, group, source, transport=transport, timeout_s=timeout_s).cpu().numpy())


def share_check(check, group, **options) -> Any:
    """What `check()` returns on group rank 0, on all ranks; it runs there only, and its value must fit into JSON.
    options: device, transport and timeout_s of `share`.

    Raises: the ``ValueError`` of rank 0, and its `NotWritten`, on every rank; another ``OSError`` of rank 0 as it is
        there, and as a ``ValueError`` with its text elsewhere; what else fails there is a `TreeError` elsewhere.
    """
    if group_rank(group) != 0:
        outcome = share(None, group, **options)
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
        share({"not written" if isinstance(error, NotWritten) else "error": str(error)}, group, **options)
        raise
    except BaseException as error:
        share({"failed": f"{type(error).__name__}: {error}"}, group, **options)
        raise
    share({"value": value}, group, **options)
    return value
