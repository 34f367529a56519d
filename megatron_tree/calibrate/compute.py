"""The speed of one rank's attention kernels while all ranks compute, as in a real step."""

from __future__ import annotations

import statistics

import torch

from ..config import AttnSpec
from ..kernels import KVCache, attn_decode, attn_fwd
from ..layout import Segment
from .links import now

_REPEATS = 5
_HEADS, _KV_HEADS, _HEAD_DIM = 16, 8, 128
_CACHE_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
_ROWS = {"cpu": 512, "cuda": 8192}


def memory_bandwidth(device: torch.device) -> float:
    """Bytes/s at which `kernels.attn_decode` reads a bf16 KV cache that is larger than the processor's caches."""
    slots = _CACHE_BYTES[device.type] // (2 * _KV_HEADS * _HEAD_DIM * 2)
    q = torch.randn(1, 1, _HEADS, _HEAD_DIM).to(device, torch.bfloat16)
    k, v = (torch.randn(1, slots, _KV_HEADS, _HEAD_DIM).to(device, torch.bfloat16) for _ in range(2))
    spec = AttnSpec(softmax_scale=_HEAD_DIM**-0.5)
    return (k.nbytes + v.nbytes) / _median_s(lambda: attn_decode(q, KVCache(k, v), spec), device)


def flops(device: torch.device) -> float:
    """Matrix flop/s of `kernels.attn_fwd` in bf16 without a mask."""
    rows = _ROWS[device.type]
    q, k, v = (torch.randn(1, rows, _HEADS, _HEAD_DIM).to(device, torch.bfloat16) for _ in range(3))
    whole = (Segment(row=0, pos=0, length=rows),)
    spec = AttnSpec(causal=False, softmax_scale=_HEAD_DIM**-0.5)
    seconds = _median_s(lambda: attn_fwd(q, k, v, q_segments=whole, k_segments=whole, spec=spec), device)
    return 4 * _HEADS * rows * rows * _HEAD_DIM / seconds


def _median_s(call, device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 2):
        start = now(device)
        call()
        times.append(now(device) - start)
    return statistics.median(times[2:])
