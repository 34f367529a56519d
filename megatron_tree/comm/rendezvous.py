"""The default process group, and its store, which listens on MASTER_ADDR and not on every interface."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..log import say_once

BACKLOG = 2048  # every rank connects, and some do so more than once
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_launched() -> None:
    """Raise a ``ValueError`` unless a launcher started this process."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start this program with a launcher, for instance\n"
            "  torchrun --nproc-per-node 4 PROGRAM, or deepspeed --num_gpus 4 --no_local_rank PROGRAM\n"
            "(on a machine without an accelerator with DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front)"
        )


def start_on_own_device(timeout_s: float) -> torch.device:
    """Initialize the default group (nccl on GPUs, gloo on CPUs). Returns this rank's device, which is made current.

    Raises: ``ValueError`` if the machine has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        start_default_group("gloo", timeout_s=timeout_s)
        return torch.device("cpu")
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ValueError(f"LOCAL_RANK={local_rank}, but this machine has {gpus} GPUs: start fewer ranks on it")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    start_default_group("nccl", timeout_s=timeout_s, device_id=device)
    return device


def start_default_group(backend: str, *, timeout_s: float, **options: Any) -> None:
    """Initialize the default process group as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

    Torch lets the store listen on all interfaces. Here it listens on MASTER_ADDR alone where that is an address or
    "localhost"; a name may mean another address on another host, so with one torch does as it always does. So does
    torchrun, whose agent holds the store. options: of `torch.distributed.init_process_group`.
    Raises: ``ValueError`` on rank 0 when the port can't be had.
    """
    limit = timedelta(seconds=timeout_s)
    address, rank, world = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not _is_address(address):
        dist.init_process_group(backend, timeout=limit, **options)
        return
    port = int(os.environ["MASTER_PORT"])
    listener = _listen(address, port) if rank == 0 else None
    store = dist.TCPStore(address, port, world, rank == 0, limit, master_listen_fd=listener)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, **options)


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
                raise ValueError(
                    f"MASTER_ADDR={address}, MASTER_PORT={port}: the store can't listen there ({error}): choose "
                    "another port (--port of the launch scripts)"
                ) from error
            say_once(f"MASTER_ADDR={address} is not an address of this machine: the store listens on all interfaces")
            return None
        return listener.detach()
