"""One process per rank: what the launcher says, the process group, and agreement between ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..comm.rendezvous import start_default_group
from ..comm.wire import share_all, share_check

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchedRank(NamedTuple):
    """This process's place, as the launcher put it into the environment."""

    rank: int
    local_rank: int
    world_size: int


def launched_rank(environ=os.environ) -> LaunchedRank:
    """Read RANK, LOCAL_RANK and WORLD_SIZE.

    Raises: ValueError if this process was not started by a launcher, or there are fewer GPUs than ranks on the machine.
    """
    missing = [name for name in _VARIABLES if name not in environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start this script by the launcher, for instance\n"
            "  deepspeed --num_gpus 4 --no_local_rank launch/train_gpt.py --config configs/train/quickstart.yaml\n"
            "(on a machine without an accelerator with DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front)"
        )
    place = LaunchedRank(*(int(environ[name]) for name in _VARIABLES[:3]))
    if torch.cuda.is_available() and place.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK={place.local_rank}, but this machine has {torch.cuda.device_count()} GPUs: "
            "start fewer ranks on it"
        )
    return place


def start_process_group(place: LaunchedRank, timeout_minutes: float) -> torch.device:
    """Initialize the default group (nccl on GPUs, gloo on CPUs). Returns this rank's device."""
    if not torch.cuda.is_available():
        start_default_group("gloo", timeout_s=60 * timeout_minutes)
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    start_default_group("nccl", timeout_s=60 * timeout_minutes, device_id=device)
    return device


def require_equal(what: str, value: str) -> None:
    """Raise a ValueError on every rank if `value` is not the same on all of them."""
    values = share_all(value, dist.group.WORLD)
    differing = [rank for rank, other in enumerate(values) if other != values[0]]
    if differing:
        raise ValueError(f"{what} differs between rank 0 and ranks {differing}: it must be the same on all ranks")


def on_first_rank(action: Callable[[], Any], timeout_minutes: float) -> Any:
    """Run `action` on rank 0; all ranks return its result, a JSON value, or raise its error."""
    return share_check(action, dist.group.WORLD, timeout_s=60 * timeout_minutes)


def on_all_ranks(action: Callable[[], Any], timeout_minutes: float) -> list[Any]:
    """Run `action` everywhere; all ranks return all results, by rank, or raise a ValueError if one failed."""
    try:
        outcome = {"value": action()}
    except (OSError, ValueError) as error:
        outcome = {"error": str(error)}
    outcomes = share_all(outcome, dist.group.WORLD, timeout_s=60 * timeout_minutes)
    for rank, told in enumerate(outcomes):
        if "error" in told:
            raise ValueError(f"rank {rank}: {told['error']}")
    return [told["value"] for told in outcomes]
