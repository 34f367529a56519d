"""Attention kernels of one device, in the order of what is worth knowing first: right, fast, decoding, the rest.

Each result is written as soon as it is there. What fails, or does not fit into the budget, is listed at the end.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import pathlib
import platform
import shlex
import time
from collections.abc import Callable

import torch

from . import device_checks
from .contenders import time_case
from .kernel_cases import CPU_CASES, CPU_DECODING, DTYPES, GPU_CASES, GPU_DECODING, Case, Timing
from .kernel_record import Record
from .low_precision import DECODING, TRAINING, check_decoding, check_training
from .results import WrongResult
from .supervised import FAILED, NOT_RUN, InThisProcess, NotHere, Outcome, Task, Worker, run_tasks

EXAMPLES = """\
examples:
  megatron-tree bench kernels --out docs/gpu-results/today --budget 540
  megatron-tree bench kernels --only smoke decode --dtype fp16
  megatron-tree bench kernels --device cpu
  TRITON_INTERPRET=1 megatron-tree bench kernels --device cpu --dtype fp16 --tiny
"""
STAGES = {
    "smoke": "every kernel against dense attention in the same dtype",
    "beside": "forward and backward: our backends and torch's kernels",
    "race": "other tile sizes at head_dim 128 (GPU)",
    "decode": "caches in tensors, in pages, in 8 bits, and latents",
    "ranks": "two ranks that share the device, over gloo",
    "graph": "a decode step, and one of the cache's runner, in a CUDA graph (GPU)",
    "offsets": "tensors of more than 2^31 elements",
    "flex": "torch's FlexAttention beside them (--flex)",
}
TINY = {"training": ("packed",), "decoding": ("int8", "latent")}  # cases of the first stage
COMPILE_S = 100.0  # at most, before the first case
RESERVE_S = 5.0  # of the budget, for the last files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench kernels`."""
    gpu, stages = torch.cuda.is_available(), tuple(STAGES)[:-1]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    what = "; ".join(f"{name}: {text}" for name, text in STAGES.items())
    parser.add_argument("--only", choices=stages, nargs="+", default=stages, help=f"stages, in this order: {what}")
    parser.add_argument("--flex", action="store_true", help="FlexAttention as well, last: it compiles for minutes")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="the whole run's, kept")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: a rehearsal, whose times mean nothing")
    parser.add_argument(
        "--in-process", action="store_true", help="no process for the cases: for a debugger; nothing stops a case"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-results/kernels"))


def run(args: argparse.Namespace) -> None:
    """Check, time and print, and write CSV, JSON and PNG into args.out. Raises `WrongResult` if any case failed."""
    end = time.monotonic() + args.budget - RESERVE_S
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or run it on a machine with one")
    device, dtype, gpu = torch.device(args.device), DTYPES[args.dtype], args.device == "cuda"
    about = {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
        "dtype": args.dtype,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "command": shlex.join(["python", "-m", "megatron_tree", "bench", *args.argv]),
    }
    if gpu:
        about |= {"cuda": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    record = Record(args.out, about)
    tasks = tasks_of(args, device, dtype)
    if gpu:
        record.compiled(_compile(args, device, dtype, min(COMPILE_S, (end - time.monotonic()) / 3)))
    start = InThisProcess if args.in_process else Worker
    try:
        run_tasks(tasks, end=end, emit=record.row, ended=functools.partial(_ended, record), start=start)
    finally:
        _summary(record.outcomes)
        record.finish()
    if failed := [f"{x.label}: {x.said}" for x in record.outcomes if x.status == FAILED]:
        raise WrongResult(f"{len(failed)} of {len(record.outcomes)} cases failed:\n" + "\n".join(failed))


def tasks_of(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Task]:
    """All cases in the order in which they run."""
    gpu, tiny = device.type == "cuda", args.tiny
    backend = "triton" if gpu or _interpreting() else "auto"
    where = dict(device=device, dtype=dtype)
    tasks = []

    def add(stage: str, label: str, call: Callable, *what, seconds: float) -> None:
        if stage in args.only or (stage == "flex" and args.flex):
            tasks.append(Task(stage, label, functools.partial(call, *what, **where), seconds))

    for kind, cases in (("training", TRAINING), ("decoding", DECODING)):
        for name in TINY[kind] if tiny else cases:
            add("smoke", f"{kind} {name}", _smoke, kind, name, backend, seconds=2)
    training, decoding = _cases(gpu, tiny)
    which = (
        ("triton", "torch", "aten", "cudnn", "fa3", "fa4")
        if gpu
        else ("triton",)
        if backend == "triton"
        else ("torch", "aten", "reference")
    )
    for case in training:
        add("beside", case.label, time_case, case, which, seconds=8)
    for kernel in ("fwd", "dq", "dkdv"):
        case = next(c for c in training if c.kind == ("fwd" if kernel == "fwd" else "bwd"))
        add("race", f"tiles of {kernel}, {case.label}", _race, case, kernel, backend, tiny, seconds=15)
    for case in decoding:
        which = (
            ("triton", "torch") if backend == "triton" and not tiny else (backend,) if tiny else ("auto", "reference")
        )
        add("decode", case.label, time_case, case, which, seconds=6)
    shared = Case("fwd", 1, 32 if tiny else 512, 4, 2, 16 if tiny else 64)
    add("ranks", "two ranks", device_checks.check_ranks, shared, backend, seconds=25)
    step = Case("decode", 2, 256 if tiny else 8192, 32, 8, 128)
    add("graph", step.label, device_checks.check_graph, step, backend, seconds=8)
    add("graph", f"runner, {step.label}", device_checks.check_step_graph, step, backend, seconds=15)
    elements = 1 << 31 if gpu and not tiny else 1 << 16
    add("offsets", f"{elements} elements", device_checks.check_offsets, elements, backend, seconds=10)
    for case in training[:2]:
        add("flex", case.label, time_case, case, ("triton" if backend == "triton" else "aten", "flex"), seconds=90)
    return tasks


def _cases(gpu: bool, tiny: bool) -> tuple[list[Case], list[Case]]:
    """Training and decoding."""
    if tiny:
        kinds = ("", "paged int8", "latent")
        small = [
            Case("decode", 1, 128, 4, 1 if "latent" in kind else 2, 576 if "latent" in kind else 16, kind)
            for kind in kinds
        ]
        return [Case("fwd", 1, 64, 2, 1, 16), Case("bwd", 1, 64, 2, 1, 16)], small
    return (GPU_CASES, GPU_DECODING) if gpu else (CPU_CASES, CPU_DECODING)


def _interpreting() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from ..kernels.triton import host

    return host.interpreting()


def _smoke(kind: str, name: str, backend: str, emit, *, device, dtype) -> None:
    cases, check = {"training": (TRAINING, check_training), "decoding": (DECODING, check_decoding)}[kind]
    case = cases[name]
    if backend == "triton":
        from ..kernels.triton.decode import check_pages

        if kind == "decoding" and case.page_size:
            try:
                check_pages(torch.empty(0, case.page_size, 1, 1, dtype=case.stored or dtype, device=device))
            except ValueError as error:
                raise NotHere(str(error)) from None
    share = check(case, dtype, device, backend)
    print(f"  {kind} {name}: {share:.2f} of the allowed error", flush=True)
    emit(Timing(f"{kind} {name}", "smoke", backend, None, share, "of the allowed error"))


def _race(case: Case, kernel: str, backend: str, tiny: bool, emit, *, device, dtype) -> None:
    if backend != "triton":
        raise NotHere("tile sizes are Triton's: it needs a GPU, or its interpreter")
    from .race import CANDIDATES, race

    candidates = CANDIDATES[kernel][:1] if tiny else CANDIDATES[kernel]
    race(case, kernel, candidates, emit, device=device, dtype=dtype)


def _compile(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, limit_s: float) -> str:
    """Compile what the stages will launch."""
    from . import precompile

    training, decoding = _cases(True, args.tiny)
    launches = precompile.smoke_launches(dtype) if "smoke" in args.only else []
    launches += precompile.case_launches(training, dtype) if "beside" in args.only else []
    launches += precompile.case_launches(decoding, dtype) if "decode" in args.only else []
    launches += precompile.race_launches(training[:2], dtype) if "race" in args.only else []
    return precompile.compile_all(launches, precompile.Machine.this(device), limit_s=limit_s) if launches else "nothing"


def _ended(record: Record, outcome: Outcome) -> None:
    record.ended(outcome)
    if outcome.said:
        print(f"  {outcome.label}: {outcome.status}: {outcome.said}", flush=True)


def _summary(outcomes: list[Outcome]) -> None:
    print("\nstage     done  failed  not run  seconds")
    for stage in dict.fromkeys(x.stage for x in outcomes):
        mine = [x for x in outcomes if x.stage == stage]
        failed, left = (sum(x.status == status for x in mine) for status in (FAILED, NOT_RUN))
        seconds = sum(x.seconds for x in mine)
        print(f"{stage:<8} {len(mine) - failed - left:5} {failed:7} {left:8} {seconds:8.0f}")
    for x in outcomes:
        if x.status != "done":
            print(f"{x.status}: {x.stage}, {x.label}: {x.said}")
