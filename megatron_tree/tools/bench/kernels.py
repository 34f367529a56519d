"""Attention kernels of one device, in the order of what is worth knowing first: right, fast, decoding, the rest.

Each result is written as soon as it is there. What fails, or does not fit into the budget, is listed at the end.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import platform
import shlex
import time

import torch

from ...core.files import whole_file
from ...core.kernels import fastest
from ..calibrate.kernel_cases import DTYPES, KernelCase, KernelTiming, WrongResult, fastest_backends, time_case
from . import device_checks
from .low_precision import DECODING, TRAINING, check_decoding, check_training
from .results import Curve, Panel, Results, grouped
from .tasks import DONE, FAILED, NotHere, Outcome, Task, run_tasks

CASES = {  # (training, decoding)
    "cuda": (
        [
            *(KernelCase(kind, 1, 16384, 32, 8, d) for d in (128, 64) for kind in ("fwd", "bwd")),
            *(KernelCase(kind, 2, 4096, 32, 32, 128) for kind in ("fwd", "bwd")),
            KernelCase("fwd", 1, 8192, 16, 16, 256),
        ],
        [
            *(KernelCase("decode", 1, s, 64, 8, 128) for s in (131072, 524288, 1048576)),
            KernelCase("decode", 32, 8192, 32, 8, 128),
            *(KernelCase("decode", 1, 524288, 64, 8, 128, cache) for cache in ("paged", "paged int8", "paged fp8")),
            KernelCase("decode", 1, 524288, 64, 1, 576, "latent"),
        ],
    ),
    "cpu": (
        [KernelCase(kind, 1, 1024, 4, 2, 64) for kind in ("fwd", "bwd")],
        [KernelCase("decode", 1, 16384, 8, 2, 64, cache) for cache in ("", "paged int8")],
    ),
    "interpreter": (
        [KernelCase(kind, 1, 64, 2, 1, 16) for kind in ("fwd", "bwd")],
        [
            *(KernelCase("decode", 1, 128, 4, 2, 16, cache) for cache in ("", "paged int8")),
            KernelCase("decode", 1, 128, 4, 1, 576, "latent"),
        ],
    ),
}
TINY_SMOKE = {"training": ("packed",), "decoding": ("int8", "latent")}
COMPILE_S = 100.0  # at most, before the first case
RESERVE_S = 5.0  # of the budget, for the last files


def run(args: argparse.Namespace) -> None:
    """Check, time and print, and write CSV, JSON and PNG into args.out. Raises `WrongResult` if any case failed."""
    end = time.monotonic() + args.budget - RESERVE_S
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or run it on a machine with one")
    device, dtype, gpu = torch.device(args.device), DTYPES[args.dtype], args.device == "cuda"
    about = {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
        "dtype": args.dtype,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "command": shlex.join(["megatron-tree", "bench", *args.argv]),
    }
    if gpu:
        about |= {"cuda": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    results, outcomes = Results(args.out, about), []
    results.add()
    if gpu:
        said = _compile(args, device, dtype, min(COMPILE_S, (end - time.monotonic()) / 3))
        print(said, flush=True)
        results.add(compiled=said)

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        results.add(cases=[x._asdict() for x in outcomes])
        if outcome.said:
            print(f"  {outcome.label}: {outcome.status}: {outcome.said}", flush=True)

    try:
        run_tasks(tasks_of(args, device, dtype), end=end, emit=results.add, ended=ended)
    finally:
        _summary(outcomes)
    if results.rows:
        _finish(results, gpu)
    if failed := [f"{x.label}: {x.said}" for x in outcomes if x.status == FAILED]:
        raise WrongResult(f"{len(failed)} of {len(outcomes)} cases failed:\n" + "\n".join(failed))


def tasks_of(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Task]:
    """All cases in the order in which they run."""
    gpu, tiny = device.type == "cuda", device.type == "cpu" and _interpreting()
    triton = gpu or tiny
    backend = "triton" if triton else "auto"
    training, decoding = CASES["interpreter" if tiny else device.type]

    def task(stage: str, label: str, seconds: float, call, *what) -> Task:
        return Task(stage, label, functools.partial(call, *what, device=device, dtype=dtype), seconds)

    tasks = [
        task("smoke", f"{kind} {name}", 2, _smoke, kind, name, backend)
        for kind, cases in (("training", TRAINING), ("decoding", DECODING))
        for name in (TINY_SMOKE[kind] if tiny else cases)
    ]
    gpus = ("triton", "torch", "aten", "cudnn", "fa3", "fa4")
    which = gpus if gpu else ("triton",) if triton else ("torch", "aten", "reference")
    tasks += [task("beside", case.label, 8, time_case, case, which) for case in training]
    for kernel in ("fwd", "dq", "dkdv"):
        case = next(c for c in training if c.kind == ("fwd" if kernel == "fwd" else "bwd"))
        tasks.append(task("race", f"tiles of {kernel}, {case.label}", 15, _race, case, kernel, backend, tiny))
    which = (backend,) if tiny else ("triton", "torch") if triton else ("auto", "reference")
    tasks += [task("decode", case.label, 6, time_case, case, which) for case in decoding]
    shared = KernelCase("fwd", 1, 32 if tiny else 512, 4, 2, 16 if tiny else 64)
    tasks.append(task("ranks", "two ranks", 25, device_checks.check_ranks, shared, backend))
    step = KernelCase("decode", 2, 256 if tiny else 8192, 32, 8, 128)
    tasks.append(task("graph", f"runner, {step.label}", 15, device_checks.check_step_graph, step, backend))
    elements = 1 << 31 if gpu else 1 << 16
    tasks.append(task("offsets", f"{elements} elements", 10, device_checks.check_offsets, elements, backend))
    return [x for x in tasks if x.stage in args.only]


def _interpreting() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from ...core.kernels.triton import host

    return host.interpreting()


def _smoke(kind: str, name: str, backend: str, emit, *, device, dtype) -> None:
    cases, check = {"training": (TRAINING, check_training), "decoding": (DECODING, check_decoding)}[kind]
    case = cases[name]
    if backend == "triton" and kind == "decoding" and case.page_size:
        from ...core.kernels.triton.decode import check_pages

        try:
            check_pages(torch.empty(0, case.page_size, 1, 1, dtype=case.stored or dtype, device=device))
        except ValueError as error:
            raise NotHere(str(error)) from None
    share = check(case, dtype, device, backend)
    print(f"  {kind} {name}: {share:.2f} of the allowed error", flush=True)
    emit(KernelTiming(f"{kind} {name}", "smoke", backend, None, share, "of the allowed error"))


def _race(case: KernelCase, kernel: str, backend: str, tiny: bool, emit, *, device, dtype) -> None:
    if backend != "triton":
        raise NotHere("tile sizes are Triton's: it needs a GPU, or its interpreter")
    from .race import CANDIDATES, race

    race(case, kernel, CANDIDATES[kernel][: 1 if tiny else None], emit, device=device, dtype=dtype)


def _compile(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, limit_s: float) -> str:
    """Compile what the stages will launch."""
    from . import precompile

    training, decoding = CASES["cuda"]
    launches = {
        "smoke": precompile.launches([*TRAINING.values(), *DECODING.values()], dtype),
        "beside": precompile.launches(training, dtype),
        "decode": precompile.launches(decoding, dtype),
        "race": precompile.race_launches(training[:2], dtype),
    }
    wanted = [launch for stage, of_stage in launches.items() if stage in args.only for launch in of_stage]
    return precompile.compile_all(wanted, precompile.Machine.this(device), limit_s=limit_s) if wanted else "nothing"


def _summary(outcomes: list[Outcome]) -> None:
    done = sum(x.status == DONE for x in outcomes)
    print(f"\n{done} of {len(outcomes)} cases done in {sum(x.seconds for x in outcomes):.0f} s")
    for x in outcomes:
        if x.status != DONE:
            print(f"{x.status}: {x.stage}, {x.label}: {x.said}")


def _finish(results: Results, gpu: bool) -> None:
    """The table of the fastest backends on this GPU, and the plot of what was timed."""
    if gpu and (backends := fastest_backends(results.rows)):
        table = results.folder / fastest.TABLE.name
        with whole_file(table) as path:
            path.write_text(json.dumps(fastest.table() | {results.about["device"]: backends}, indent=1) + "\n")
        print(f"for backend='auto': copy {table} over {fastest.TABLE}")
    title = ", ".join(f"{name} {results.about[name]}" for name in ("device", "dtype", "torch", "triton"))
    panels = [
        Panel(unit, "", [Curve(name, [r.case for r in of], [r.rate for r in of]) for name, of in by_name.items()])
        for unit, rows in grouped([r for r in results.rows if r.ms and r.kind != "race"], lambda r: r.unit).items()
        if (by_name := grouped(rows, lambda r: r.name))
    ]
    results.finish({"results.png": [panels]} if panels else {}, title)
