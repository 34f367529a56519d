"""The default process group, and its store, which listens on MASTER_ADDR and not on every interface."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommError, name_ranks
from ..log import logger, say_once
from .store import POLL_S, POLLS_PER_S
from .team import options_of_group

BACKLOG = 2048  # every rank connects, and some do so more than once
NOTICE_S = 10.0  # of waiting for ranks to start, after which the log names them


def start_on_own_device(timeout_s: float) -> torch.device:
    """Initialize the default group (nccl on GPUs, gloo on CPUs) if there is none yet. Returns this rank's device, which
    is made current.

    With DS_ACCELERATOR=cpu, which DeepSpeed reads, GPUs are left alone.
    Raises: ``ValueError`` if the machine has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu":
        if not dist.is_initialized():
            start_default_group("gloo", timeout_s=timeout_s)
        return torch.device("cpu")
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ValueError(f"LOCAL_RANK={local_rank}, but this machine has {gpus} GPUs: start fewer ranks on it")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        start_default_group("nccl", timeout_s=timeout_s, device_id=device)
    return device


def start_default_group(backend: str, *, timeout_s: float, **options: Any) -> None:
    """Initialize the default process group as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

    Torch lets the store listen on all interfaces. Here it listens on MASTER_ADDR alone where that is an address or
    "localhost"; a name may mean another address on another host, so with one torch does as it always does. So does
    torchrun, whose agent holds the store. options: of `torch.distributed.init_process_group`.
    Raises: ``ValueError`` on rank 0 when the port can't be had; `CommError` with the ranks that don't start within
        timeout_s. They are named in the log after some seconds.
    """
    rank, world, limit = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    place = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    try:
        store = _store(rank, world, limit)
        missing = _missing(store, rank, world, place, timeout_s)
    except dist.DistNetworkError as error:
        raise CommError(f"rank {rank} does not reach the job's store at {place}: {error}") from error
    if missing:
        raise CommError(f"{name_ranks(missing)} of {world} did not start at {place} within {timeout_s:g} s", missing)
    options.setdefault("pg_options", options_of_group(backend, limit))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, **options)


def _store(rank: int, world: int, limit: timedelta) -> dist.Store:
    """The job's store, which rank 0 or torchrun's agent holds."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not agent:
        listener = _listen(address, port) if _is_address(address) else None
        try:
            return dist.TCPStore(address, port, world, True, limit, wait_for_workers=False, master_listen_fd=listener)
        except dist.DistNetworkError as error:
            raise _cannot_listen(address, port, error) from error
    text = "rank %d waits for %s, at MASTER_ADDR=%s, MASTER_PORT=%d"
    holder = "torchrun's agent" if agent else "rank 0"
    notice = threading.Timer(NOTICE_S, logger.warning, (text, rank, holder, address, port))
    notice.daemon = True
    notice.start()
    try:
        if agent:
            return next(dist.rendezvous("env://", rank, world, timeout=limit))[0]
        return dist.TCPStore(address, port, world, False, limit, wait_for_workers=False)
    finally:
        notice.cancel()


def _missing(store: dist.Store, rank: int, world: int, place: str, timeout_s: float) -> tuple[int, ...]:
    """Wait until all ranks have the store; returns those that don't come in time."""
    key, end = "megatron_tree/started", time.monotonic() + timeout_s
    store.set(f"{key}/{rank}", "")
    store.add(key, 1)
    notice = min(end, time.monotonic() + NOTICE_S)
    while store.add(key, 0) < world:
        if time.monotonic() > notice:
            missing = tuple(r for r in range(world) if not store.check([f"{key}/{r}"]))
            if time.monotonic() > end:
                return missing
            logger.warning("rank %d waits for %s of %d to start, at %s", rank, name_ranks(missing), world, place)
            notice = end
        time.sleep(max(POLL_S, world / POLLS_PER_S))
    return ()


def host_store() -> dist.TCPStore:
    """The store of ranks that this process is about to start on this machine, on a free port of 127.0.0.1.

    They join it with TORCHELASTIC_USE_AGENT_STORE=True. It is closed when it is no longer referenced.
    """
    listener = _listen("127.0.0.1", 0)
    with socket.socket(fileno=os.dup(listener)) as copy:
        port = copy.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return text == "localhost"
    return True


def _listen(address: str, port: int) -> int | None:
    """A listening socket, which the caller owns; None where the address is another's and only leads to this machine."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise _cannot_listen(address, port, error) from error
            say_once(f"MASTER_ADDR={address} is not an address of this machine: the store listens on all interfaces")
            return None
        return listener.detach()


def _cannot_listen(address: str, port: int, error: Exception) -> ValueError:
    return ValueError(
        f"MASTER_ADDR={address}, MASTER_PORT={port}: the store can't listen there ({error}): choose another port "
        "(--port of the launch scripts)"
    )
