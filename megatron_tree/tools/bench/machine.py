"""What the device is and can do at most, before any kernel of ours runs on it."""

from __future__ import annotations

import platform
import shutil
import subprocess

import torch

from ..calibrate.kernel_cases import DTYPES, Emit, KernelTiming, clock

ASKED = (
    "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,"
    "clocks_throttle_reasons.active,mig.mode.current"
)
COMMANDS = (
    ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv"],
    ["nvidia-smi", "topo", "-m"],
    ["nvidia-smi", "nvlink", "--status"],
    ["rocm-smi"],
)


def show_machine(emit: Emit, *, device: torch.device, dtype: torch.dtype) -> None:
    """Print the driver, clocks, power and links as the driver's tools tell them, and time a copy and matrix products in
    every dtype: the ceilings of what is measured later."""
    found = [command for command in COMMANDS if device.type == "cuda" and shutil.which(command[0])]
    if not found:
        print(f"  {platform.platform()}, {platform.processor() or platform.machine()}: no driver to ask", flush=True)
    for command in found:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        print(f"$ {' '.join(command)}\n{(done.stdout + done.stderr).rstrip()}", flush=True)
    a = torch.empty(1 << (30 if device.type == "cuda" else 22), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    seconds = clock(lambda: b.copy_(a), device)
    emit(KernelTiming("ceiling", "machine", "device copy", seconds * 1e3, 2 * a.nbytes / 1e9 / seconds, "GB/s"))
    print(f"  a copy reads and writes {2 * a.nbytes / 1e9 / seconds:.4g} GB/s", flush=True)
    n = 8192 if device.type == "cuda" else 256
    for name, kind in DTYPES.items():
        x, y = torch.randn(2, n, n, device=device, dtype=kind)
        seconds = clock(lambda x=x, y=y: x @ y, device)
        rate = 2 * n**3 / 1e12 / seconds
        emit(KernelTiming("ceiling", "machine", f"matrix product, {name}", seconds * 1e3, rate, "TFLOP/s"))
        print(f"  matrix products in {name}: {rate:.4g} TFLOP/s", flush=True)
