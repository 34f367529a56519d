"""How fast a run is: tokens per second, model FLOP/s of a rank, the share of the device's peak (MFU), and memory.

Model FLOPs are counted as in Megatron-LM (arXiv 2104.04473, appendix) and PaLM (arXiv 2204.02311, appendix B): the
matrix products of the forward, two FLOPs a multiplication, and twice that for the backward; recomputation does not
count. Unlike there, a query of causal or windowed attention counts only the keys that it sees: half as many.
"""

from __future__ import annotations

import argparse
import resource
import sys

import torch

FORWARD_AND_BACKWARD = 3
# Dense 16-bit peaks in TFLOP/s, from the manufacturers' data sheets; the first name that is part of the device's wins.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "V100": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250": 181.0,  # one of its two dies, which is a device of its own
}


def flops_per_token(args: argparse.Namespace, *, vocab_size: int) -> float:
    """Model FLOPs of one training step per token, forward and backward.

    Args:
        args: completed options.
        vocab_size: rows of the output layer, padding included.
    """
    width, inner = args.hidden_size, args.num_attention_heads * args.kv_channels
    kv_inner = args.num_query_groups * args.kv_channels
    weights = width * (2 * inner + 2 * kv_inner) + 3 * width * args.ffn_hidden_size
    attention = sum(2 * inner * mean_keys(args, layer) for layer in range(1, args.num_layers + 1))
    return FORWARD_AND_BACKWARD * 2 * (args.num_layers * weights + attention + width * vocab_size)


def mean_keys(args: argparse.Namespace, layer: int) -> float:
    """Keys that a query of this layer (1-based) sees, averaged over the sequence."""
    s = args.seq_length
    skip = args.window_attn_skip_freq
    left = -1 if args.window_size is None or (skip and layer % skip == 0) else args.window_size[0]
    span = s if left < 0 else min(s, left + 1)
    return (span * (span + 1) / 2 + (s - span) * span) / s


def peak_tflops(args: argparse.Namespace, device: torch.device) -> float | None:
    """Peak of a rank's device: `peak_tflops` if given, or a usual GPU's in 16 bit; None where it is not known."""
    if args.peak_tflops is not None:
        return args.peak_tflops
    if device.type != "cuda" or not (args.bf16 or args.fp16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


class Throughput:
    """Turns the seconds of a step into figures.

    Args:
        args: completed options.
        vocab_size: rows of the output layer, padding included.
        world_size: number of ranks.
        device: this rank's.
    """

    def __init__(self, args: argparse.Namespace, *, vocab_size: int, world_size: int, device: torch.device):
        self._tokens = args.global_batch_size * args.seq_length
        self._tflop = self._tokens * flops_per_token(args, vocab_size=vocab_size) / world_size / 1e12
        self._device = device
        self.peak = peak_tflops(args, device)

    def figures(self, seconds: float) -> dict[str, float]:
        """tokens_per_s of all ranks together, tflops of a rank, mfu (where the peak is known), seconds, memory_gib."""
        result = {"tokens_per_s": self._tokens / seconds, "tflops": self._tflop / seconds}
        if self.peak is not None:
            result["mfu"] = result["tflops"] / self.peak
        return result | {"seconds": seconds, "memory_gib": peak_memory(self._device) / 2**30}


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: allocated by torch on a GPU, of the whole process on a CPU. Of this rank."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
