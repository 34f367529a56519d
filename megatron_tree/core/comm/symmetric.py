"""Partial results of decoding through the GPUs' memory that the ranks of one host read over NVLink: torch's symmetric
memory, in the place of NCCL's all-gather and the streams around it. Three launches on the stream of the call:

    put        each rank copies its state into its own memory
    barrier    torch's: all ranks have put theirs
    merge      each rank reads all states, and merges them in rank order

The memory has two halves, used in turn, so one barrier is enough: a rank writes to a half again after the next merge's
barrier, to which the others come when they have read it. (A second barrier, after the reads, would do with one half,
and cost a launch and a wait more.) Whose turn it is the device knows, not the host (kernels/triton/peers.py): a CUDA
graph may have any number of merges, and run before and after any other. Merges of one group follow one another on the
device: they are on one stream, or on streams that wait for each other.

A barrier gives up after the time limit and ends its kernel by a trap, on the GPU as in a graph. The host hears of it
where it waits for the device next, as an error of CUDA, after which this process can't use the GPU. The memory is never
freed: torch would wait for the device, which may be waiting for a rank that is lost.

It has not run on a GPU yet. tests/comm/test_symmetric.py holds the order of puts, barriers and reads on CPU ranks.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import triton_for
from ..log import say_once
from ..plan.decode import PEERS_BYTES
from .agreement import Refused, unanimous
from .team import in_time
from .work import note

if TYPE_CHECKING:
    from .ranks import Ranks

BACKEND = "CUDA"  # of symmetric memory: plain addresses, and barriers of the GPU's own atomic operations


def join(ranks: Ranks) -> SymmetricMemory | str:
    """The memory of a group, or why there is none: the same on all ranks. Collective."""
    if len(set(ranks.hosts)) > 1:
        return "its ranks are on several hosts"
    memory = None

    def make() -> None:
        nonlocal memory
        limit_s = ranks.timeout_s / 2  # less than the others wait for this rank's answer
        memory = in_time(lambda: SymmetricMemory(*_allocated(ranks)), limit_s, "symmetric memory")

    try:
        gpus = _all_ranks(ranks, "GPUs", lambda: _gpu_of(ranks))
        _all_ranks(ranks, "links", lambda: _check_links(ranks, gpus))
        _all_ranks(ranks, "made", make)
        _all_ranks(ranks, "checked", lambda: memory.check(ranks))
    except Refused as refused:
        say_once(f"partial results of ranks {list(ranks.state.ranks)} go through NCCL, not symmetric memory: {refused}")
        return str(refused)
    return memory


def _all_ranks(ranks: Ranks, step: str, act: Callable[[], str | None]) -> list[str]:
    def said() -> str | None:
        try:
            return act()
        except (ImportError, AttributeError) as error:  # the names that torch gives it may change
            raise Refused(f"torch {torch.__version__} has another one: {error}") from error

    return unanimous(ranks, f"symmetric memory: {step}", said)


def _gpu_of(ranks: Ranks) -> str:
    """The name of this rank's GPU, the same in all processes. Raises `Refused` where it can't take part."""
    from torch.distributed import _symmetric_memory as symm_mem

    if ranks.device_type != "cuda" or torch.version.hip:
        raise Refused("only NVIDIA's GPUs take part")
    if triton_for(torch.empty(0, device=ranks.device)) is None:
        raise Refused("Triton is not installed")
    if (backend := symm_mem.get_backend(ranks.device)) != BACKEND:
        raise Refused(f"torch's backend for it is {backend!r}, not {BACKEND!r}")
    return str(torch.cuda.get_device_properties(ranks.device).uuid)


def _check_links(ranks: Ranks, gpus: list[str]) -> None:
    """Raise `Refused` unless NVLink joins this rank's GPU to all others: atomic operations need it."""
    here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    links = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    for rank, gpu in enumerate(gpus):
        if rank != ranks.rank and gpus[ranks.rank] == gpu:
            raise Refused(f"it has the GPU of rank {ranks.state.ranks[rank]}")
        if gpu not in here:
            raise Refused(
                f"it does not see the GPU of rank {ranks.state.ranks[rank]}: give all ranks the same "
                "CUDA_VISIBLE_DEVICES"
            )
        if rank != ranks.rank and not links[here[gpus[ranks.rank]]][here[gpu]]:
            raise Refused(f"no NVLink joins its GPU to that of rank {ranks.state.ranks[rank]}")


def _allocated(ranks: Ranks) -> tuple[Tensor, object]:
    """fp32 [2, n] in this rank's memory, and torch's handle of all ranks'. Collective."""
    from torch.distributed import _symmetric_memory as symm_mem

    shape, never_freed = (2, PEERS_BYTES // 4), secrets.randbits(63)
    memory = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p(
        shape, (shape[1], 1), torch.float32, ranks.device, alloc_id=never_freed
    )
    return memory, symm_mem.rendezvous(memory, ranks.group)


class SymmetricMemory:
    """The memory of one group on one of its ranks, and merges of the ranks' states in it."""

    capacity = PEERS_BYTES
    """Bytes of a state."""

    def __init__(self, here: Tensor, handle):
        """here: fp32 [2, n], this rank's; handle: torch's `_SymmetricMemory` of it."""
        addresses = [handle.get_buffer(r, here.shape, here.dtype).data_ptr() for r in range(handle.world_size)]
        self._here, self._handle, self._triton = here, handle, triton_for(here)
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=here.device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=here.device)

    def merge_rows(self, state: Tensor, first: int, count: int, ranks: Ranks) -> Tensor:
        """Rows first .. first + count - 1 of the ranks' states [rows, ..., d + 1], merged as by `merge_packed`, bit for
        bit. Every rank calls it.

        state: fp32, contiguous, at most `capacity` bytes.
        """
        note("symmetric merge", ranks.size, state.nbytes)
        ranks.watchdog.note_queued("symmetric merge", ranks.timeout_s)
        inner, width = state.shape[1:-1].numel(), state.shape[-1]
        if not state.numel():
            return state.new_empty((count, *state.shape[1:]))
        self._triton.put_state(state, self._here, self._turns)
        self._handle.barrier(channel=0, timeout_ms=math.ceil(1000 * ranks.timeout_s))
        start = min(first, len(state) - 1) * inner  # a rank without rows merges one all the same: it takes its turn
        num_rows = max(count, 1) * inner
        merged = self._triton.merge_peers(self._peers, self._turns, start, num_rows, width, self._here.shape[1])
        return merged.view(-1, *state.shape[1:])[:count]

    def check(self, ranks: Ranks) -> None:
        """Raise `Refused` unless this rank reads what all have written, in both halves. Every rank calls it."""
        states = [torch.tensor([[float(turn + ranks.rank), 0.0]], device=ranks.device) for turn in range(4)]
        found = torch.cat([self.merge_rows(state, 0, 1, ranks) for state in states]).tolist()  # all of them, to the end
        for turn, state in enumerate(found):
            want = turn + (ranks.size - 1) / 2, math.log(ranks.size)
            if not all(math.isclose(x, y, abs_tol=1e-4) for x, y in zip(state, want, strict=True)):
                raise Refused(f"it read {state} where the ranks wrote {list(want)}")
