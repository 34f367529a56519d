"""The speed of a rank's attention, and what head chunks and messages cost beside it."""

from __future__ import annotations

import math
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...core.attention.functional import tree_attn_func
from ...core.comm import Transfer
from ...core.config import TreeConfig
from ...core.kernels import KVCache, attn_decode, attn_fwd
from ...core.layout import Segment
from ...core.spec import AttnSpec
from .links import Links, now

REPEATS = 5
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
CACHE_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
ROWS = {"cpu": 512, "cuda": 8192}
CHUNKS = 8  # of a small call
SENT_S = 0.05  # of a message under compute


class Compute(NamedTuple):
    """A rank's attention, while all ranks compute."""

    flops: float
    """Matrix flop/s of the forward in bf16 without a mask."""
    share: float
    """CPU seconds that a rank gets in a second: below 1 with fewer cores than ranks."""
    byte_s: float
    """`Topology.byte_s`"""


def memory_bandwidth(device: torch.device) -> float:
    """Bytes/s at which `kernels.attn_decode` reads a bf16 KV cache that is larger than the processor's caches."""
    slots = CACHE_BYTES[device.type] // (2 * KV_HEADS * HEAD_DIM * 2)
    q = torch.randn(1, 1, HEADS, HEAD_DIM).to(device, torch.bfloat16)
    k, v = (torch.randn(1, slots, KV_HEADS, HEAD_DIM).to(device, torch.bfloat16) for _ in range(2))
    spec = AttnSpec(softmax_scale=HEAD_DIM**-0.5)
    times = _seconds(lambda: attn_decode(q, KVCache(k, v), spec), device)
    return (k.nbytes + v.nbytes) / times[0]


def compute(links: Links, bandwidth: float, host_size: int) -> Compute:
    """Collective. bandwidth: bytes/s of the outermost level, to ranks host_size apart."""
    device = links.device
    rows = ROWS[device.type]
    q, k, v = (torch.randn(1, rows, HEADS, HEAD_DIM).to(device, torch.bfloat16) for _ in range(3))
    whole = (Segment(row=0, pos=0, length=rows),)
    spec = AttnSpec(causal=False, softmax_scale=HEAD_DIM**-0.5)

    def call() -> None:
        attn_fwd(q, k, v, q_segments=whole, k_segments=whole, spec=spec)

    seconds, cpu_s = (links.median(s) for s in _seconds(call, device))
    byte_s = 0.0 if device.type == "cuda" else _byte_s(links, call, seconds, bandwidth, host_size)
    return Compute(4 * HEADS * rows * rows * HEAD_DIM / seconds, min(1.0, cpu_s / seconds), byte_s)


def _byte_s(links: Links, call, seconds: float, bandwidth: float, host_size: int) -> float:
    """Seconds of compute lost per byte, by computing in turns with and without messages under way on all ranks."""
    num_bytes, calls = int(bandwidth * SENT_S), math.ceil(2 * SENT_S / seconds)
    step = host_size % links.world or 1  # to the next host, if there is one
    to, source = (links.rank + step) % links.world, (links.rank - step) % links.world
    sent, arriving, lost = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8), []
    for _ in range(REPEATS):
        times = []
        for sends in (False, True):
            links.share(None)
            start = time.perf_counter()
            if sends:
                transfer = Transfer(sent, to, arriving, source, links.ranks)
            for _ in range(calls):
                call()
            times.append(time.perf_counter() - start)
            if sends:
                transfer.wait()
        lost.append(times[1] - times[0])
    return max(0.0, links.median(statistics.median(lost))) / num_bytes


def chunk_s(links: Links, overhead_s: float) -> float:
    """CPU seconds of a rank for one more head chunk of a pass on two ranks, beside its messages. Collective."""
    pair = dist.new_group([0, 1])
    found = None
    if links.rank < 2:
        inputs = [torch.randn(1, 8, HEADS, 16, requires_grad=True) for _ in range(3)]
        options = dict(topology="ethernet", grid=(1, 2), grid_backward=(1, 2))
        times: dict[int, list[float]] = {1: [], CHUNKS: []}
        for _ in range(2 * REPEATS):
            for chunks, taken in times.items():
                start = time.thread_time()
                out = tree_attn_func(*inputs, cp_group=pair, config=TreeConfig(head_chunks=chunks, **options))
                torch.autograd.grad(out.sum(), inputs)
                taken.append(time.thread_time() - start)
        one, many = (statistics.median(taken[REPEATS:]) for taken in times.values())
        found = (many - one) / (CHUNKS - 1) / 2 - 1.5 * overhead_s  # of two passes with one and two messages
    dist.barrier()
    return max(0.0, links.median(found))


def _seconds(call, device: torch.device) -> tuple[float, float]:
    """(seconds, CPU seconds of this thread) of a call: medians."""
    times = []
    for _ in range(REPEATS + 2):
        start, cpu = now(device), time.thread_time()
        call()
        times.append((now(device) - start, time.thread_time() - cpu))
    return tuple(statistics.median(column) for column in zip(*times[2:]))
