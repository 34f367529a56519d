"""Several ranks, with a GPU each where there are several: the tests over NCCL, and how well messages hide behind
attention."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...core import kernels
from ...core.attention.functional import tree_attn_func
from ...core.comm import Ranks
from ...core.config import TreeConfig
from ...core.layout import Segment
from ...core.spec import AttnSpec
from ..calibrate.kernel_cases import Emit, KernelCase, KernelTiming, inputs
from .tasks import NotHere

TESTS = pathlib.Path(__file__).resolve().parents[3] / "tests"
TIMES = 10
SMALL = 4096  # bytes of a rank in a small all-gather
LIMIT_S = 60.0


def run_tests(emit: Emit, *, device: torch.device, dtype: torch.dtype) -> None:
    """tests/gpu/test_nccl.py. Raises: `NotHere` without two GPUs, pytest or a checkout; RuntimeError if one fails."""
    if torch.cuda.device_count() < 2:
        raise NotHere(f"tests over NCCL need two GPUs, here are {torch.cuda.device_count()}")
    if importlib.util.find_spec("pytest") is None or not TESTS.is_dir():
        raise NotHere("tests over NCCL need pytest and a checkout")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "cuda",
        str(TESTS / "gpu/test_nccl.py"),
    ]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    print(done.stdout[-3000:], flush=True)
    if done.returncode:
        raise RuntimeError(f"tests over NCCL failed: {(done.stdout.splitlines() or done.stderr.splitlines())[-1]}")
    emit(KernelTiming("tests over NCCL", "ranks", "pytest", None, 0.0, "failures"))


def measure(case: KernelCase, backend: str, emit: Emit, *, device: torch.device, dtype: torch.dtype) -> None:
    """The forward of a KV gather in chunks of heads beside its messages and its attention alone, its memory, and a
    small all-gather. Ranks without a GPU each are two of gloo, a rehearsal."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    world, kind = (min(gpus, 8), "nccl") if gpus > 1 else (2, "gloo")
    with tempfile.TemporaryDirectory() as folder:
        values = torch.zeros(5, dtype=torch.float64).share_memory_()
        torch.multiprocessing.spawn(
            _rank, (world, kind, f"file://{folder}/store", values, case, backend, device, dtype), world
        )
    whole, messages, attention, memory, small = values.tolist()
    hidden = max(0.0, min(1.0, (messages + attention - whole) / messages))
    label = f"{world} ranks, {kind}, {case.label}"
    for name, seconds in (("forward", whole), ("its messages alone", messages), ("its attention alone", attention)):
        print(f"  {name}: {seconds * 1e3:.3f} ms", flush=True)
        emit(KernelTiming(label, "ranks", name, seconds * 1e3, 1 / seconds, "steps/s"))
    print(
        f"  hidden behind attention: {hidden:.0%} of the messages; an all-gather of {SMALL} bytes: {small * 1e6:.1f} us"
    )
    emit(KernelTiming(label, "ranks", "messages hidden", None, hidden, "of their time"))
    emit(KernelTiming(label, "ranks", f"all-gather of {SMALL} bytes", small * 1e3, 1 / small, "calls/s"))
    if memory:
        budget = _budget(case, dtype)
        print(f"  peak memory of the forward: {memory / 1e6:.1f} MB, memory_budget {budget / 1e6:.1f} MB", flush=True)
        emit(KernelTiming(label, "ranks", "peak memory over memory_budget", None, memory / budget, "of it"))


def _budget(case: KernelCase, dtype: torch.dtype) -> int:
    """A `memory_budget`: a few times the keys and values of the whole sequence."""
    return 8 * case.kv_bytes(dtype)


def _rank(rank: int, world: int, kind: str, store: str, values, case: KernelCase, backend: str, device, dtype) -> None:
    """One rank; the first one writes seconds of the forward, of its messages and attention, bytes, and seconds."""
    if kind == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    options = dict(device_id=device) if kind == "nccl" else {}
    dist.init_process_group(kind, init_method=store, rank=rank, world_size=world, **options)
    group, grid = dist.group.WORLD, dict(grid=(1, world), head_chunks=min(2, case.h_kv))
    config = TreeConfig(
        backend=backend, transport="builtin", timeout_s=LIMIT_S, memory_budget=_budget(case, dtype), **grid
    )
    ranks = Ranks.of(group, device, config)
    share = case._replace(s=case.s // world)
    q, k, v, _ = inputs(share, device, dtype)
    keys = [torch.cat([x] * world, 1) for x in (k, v)]
    segments = dict(q_segments=(Segment(0, 0, share.s),), k_segments=(Segment(0, 0, share.s * world),))
    spec = AttnSpec(softmax_scale=case.d**-0.5, causal=False)
    calls = {
        "whole": lambda: tree_attn_func(q, k, v, cp_group=group, causal=False, config=config),
        "messages": lambda: [ranks.gather(x.transpose(0, 1).contiguous()) for x in (k, v)],
        "attention": lambda: kernels.attn_fwd(q, *keys, **segments, spec=spec, backend=backend),
    }
    with torch.no_grad():
        times = [_seconds(call, device) for call in calls.values()]
        before = _memory(device)
        calls["whole"]()
        memory = _memory(device, peak=True) - before
        x = torch.zeros(SMALL, dtype=torch.uint8, device=device)
        times += [memory, _seconds(lambda: ranks.gather(x), device)]
    if rank == 0:
        values.copy_(torch.tensor(times, dtype=torch.float64))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of a few calls that all ranks begin together."""
    times = []
    for _ in range(TIMES):
        dist.barrier()
        _wait(device)
        begun = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - begun)
    return sorted(times)[TIMES // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, *, peak: bool = False) -> int:
    """Bytes of a GPU that tensors have, or have had at most since this was last asked without peak; else 0."""
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
