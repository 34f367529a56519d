"""Ranks that may die: real processes whose rank 0 keeps the store, as a launcher starts them, and what becomes of them.

outcomes = run_to_the_end(fn, 4, *args, victims=(3,))     # fn(rank, world, *args), at the top level of a module
assert outcomes[0].error == "CommError" and outcomes[0].code == 1
"""

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_attn_func, tree_decode, tree_prefill
from megatron_tree.core import kernels
from megatron_tree.core.comm import Ranks
from megatron_tree.core.comm.rendezvous import start_default_group
from megatron_tree.core.layout import Segment
from support.processes import free_port
from support.ranks import WORKER_ENV, environment, fork_server, seed_everything

LIMIT = 2.0  # seconds, of every collective
IN_TIME = 15.0  # seconds that a busy machine may add: with them, less than the limits that nobody interrupts
HOWS = ("SIGKILL", "SIGSTOP", "exception", "out of memory")
WHERES = ("forward", "backward", "prefill", "decode")
KERNELS = {"forward": "attn_fwd", "backward": "attn_bwd", "prefill": "attn_fwd", "decode": "attn_decode"}
CALM = TreeConfig(timeout_s=LIMIT)
PATIENT = TreeConfig(timeout_s=30)


class Outcome(NamedTuple):
    """How one rank ended."""

    code: int | None
    """Exit code; None of a process that was still there and had to be killed."""
    error: str
    text: str
    seconds: float
    """From the victim's failure, or `LIMIT` less than it may take for one that is waited for, to the error."""
    value: object


def run_to_the_end(fn, world, *args, victims=(), timeout=150.0, limit=30.0, backend="gloo"):
    """Run `fn(rank, world, *args)` on ranks until all but the victims have ended. Returns an `Outcome` of each.

    limit: seconds, of the default group's collectives. backend: its; with nccl each rank has a GPU, which is bound.
    """
    with tempfile.TemporaryDirectory(prefix="failing-") as folder:
        port, context = free_port(), fork_server()
        with environment({**WORKER_ENV, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
            processes = [
                context.Process(
                    target=_rank,
                    args=(rank, world, port, limit, backend, folder, list(sys.path), fn, args),
                    daemon=True,
                )
                for rank in range(world)
            ]
            for process in processes:
                process.start()
        end = time.monotonic() + timeout
        for rank, process in enumerate(processes):
            if rank not in victims:
                process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        return [_outcome(Path(folder), rank, code) for rank, code in enumerate(codes)]


def own_device(rank, backend, limit=60.0):
    """Start the default group as a command of the package does; returns this rank's device."""
    if backend == "gloo":
        start_default_group("gloo", timeout_s=limit)
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    start_default_group("nccl", timeout_s=limit, device_id=device)
    return device


def _outcome(folder, rank, code):
    path = folder / f"{rank}.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    return Outcome(code, said.get("error", ""), said.get("text", ""), said.get("seconds", 0.0), said.get("value"))


def _rank(rank, world, port, limit, backend, folder, path, fn, args):
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update(WORKER_ENV, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    seed_everything()
    said, code = {}, 0
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        own_device(rank, backend, limit)
        started = time.monotonic()
        said["value"] = fn(rank, world, *args)
    except BaseException as error:
        said = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
        code = 1
    said["seconds"] = time.monotonic() - _clock.get("start", started)
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(said))
    part.rename(part.with_suffix(".json"))
    os._exit(code)


_clock = {}


def start_clock():
    """What comes now is timed."""
    _clock["start"] = time.monotonic()


def die(how):
    """End this rank, or stop it, or fail."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "out of memory":
        room = 64 << 20
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
        torch.empty(8 * room, dtype=torch.uint8)
    raise OSError("the disk is on fire")


def call(where, world, rank, group=None, config=CALM):
    """One call of every kind over 4 tokens a rank. Returns its result, as numbers."""
    group = group or dist.group.WORLD
    q, k, v = (torch.arange(1.0, 4 * h * 8 + 1).sin().reshape(1, 4, h, 8) + rank for h in (4, 2, 2))
    q, k, v = (x.to(Ranks.of(group).device) for x in (q, k, v))
    if where == "decode":
        return tree_decode(q[:, :1] * 0 + 1, k, v, cp_group=group, config=config).sum().item()
    if where == "prefill":
        shares = [[(4 * r, 4)] for r in range(world)]
        segments = [[Segment(0, 4 * r, 4)] for r in range(world)]
        grid = (2, 2) if world == 4 else (world, 1)
        options = dict(shares=shares, key_segments=segments, grid=grid, config=config)
        return tree_prefill(q, k, v, cp_group=group, **options).sum().item()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = tree_attn_func(q, k, v, cp_group=group, config=config)
    out.square().sum().backward()
    return [out.sum().item(), q.grad.sum().item(), k.grad.sum().item()]


def lose(rank, world, how, where, victim, options):
    """The victim fails inside its kernel, in the second call: the first one has agreed on everything."""
    config = TreeConfig(timeout_s=LIMIT, **options)
    for first in (PATIENT, config):  # what a process does once has more time
        call(where, world, rank, config=first)
    dist.barrier()
    if rank == victim:
        setattr(kernels.Backend, KERNELS[where], lambda *args, **kwargs: die(how))
    start_clock()
    for _ in range(3):  # a rank that did not wait for the victim in the first one does in the next
        call(where, world, rank, config=config)
