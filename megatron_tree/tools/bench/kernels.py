"""The first ten minutes on a GPU, in the order of what is worth knowing first; each step is useful alone.

Each result is written as soon as it is there. What fails, or does not fit into the budget, is listed at the end.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import platform
import shlex
import time

import torch

from ...core.files import whole_file
from ...core.kernels import fastest
from ..calibrate.kernel_cases import DTYPES, KernelCase, KernelTiming, WrongResult, fastest_backends, time_case
from . import device_checks, overlap
from .low_precision import DECODING, TRAINING, check_decoding, check_training
from .machine import show_machine
from .options import STAGES
from .results import Curve, Panel, Results, grouped
from .tasks import DONE, FAILED, NotHere, Outcome, Task, run_tasks
from .verdict import verdict

# seconds of a run of 540 until the end of each stage; what one leaves, the next ones have
ENDS = dict(machine=25, correct=150, beside=270, tiles=360, decode=430, step=460, ranks=535, verdict=540)
MASKS = "window", "packed"
CASES = {  # (training, decoding)
    "cuda": (
        [
            *(KernelCase(kind, 1, 16384, 32, 8, d) for d in (128, 64) for kind in ("fwd", "bwd")),
            *(KernelCase(kind, 1, 8192, 16, 16, d) for d in (192, 256) for kind in ("fwd", "bwd")),
            *(KernelCase(kind, 1, 16384, 32, 8, 128, "", mask) for mask in MASKS for kind in ("fwd", "bwd")),
            KernelCase("fwd", 1, 16384, 32, 8, 128, "", "zigzag"),
        ],
        [
            *(KernelCase("decode", 1, s, 64, 8, 128) for s in (131072, 524288, 1048576)),
            KernelCase("decode", 32, 8192, 32, 8, 128),
            *(KernelCase("decode", 1, 524288, 64, 8, 128, cache) for cache in ("paged", "paged int8", "paged fp8")),
            KernelCase("decode", 1, 524288, 64, 1, 576, "latent"),
        ],
    ),
    "cpu": (
        [KernelCase(kind, 1, 1024, 4, 2, 64, "", mask) for mask in ("", *MASKS) for kind in ("fwd", "bwd")],
        [KernelCase("decode", 1, 16384, 8, 2, 64, cache) for cache in ("", "paged int8")],
    ),
    "interpreter": (
        [
            *(KernelCase(kind, 1, 64, 2, 1, 16) for kind in ("fwd", "bwd")),
            *(KernelCase("fwd", 1, 64, 2, 1, d, "", mask) for d, mask in ((192, ""), (16, "packed"), (16, "zigzag"))),
        ],
        [
            *(KernelCase("decode", 1, 128, 4, 2, 16, cache) for cache in ("", "paged int8")),
            KernelCase("decode", 1, 128, 4, 1, 576, "latent"),
        ],
    ),
}
TINY = {"training": ("packed",), "decoding": ("int8", "latent")}
OTHER_DTYPES = {"training": ("64", "mla", "window", "packed"), "decoding": ("plain", "int8", "128")}
RACED = 128, 192, 64, 256  # head sizes, in this order
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
    ends = stage_ends(time.monotonic(), end) if gpu and set(args.only) == set(STAGES) else {}

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        results.add(cases=[x._asdict() for x in outcomes])
        if outcome.said:
            print(f"  {outcome.label}: {outcome.status}: {outcome.said}", flush=True)

    try:
        run_tasks(tasks_of(args, device, dtype), end=end, ends=ends, emit=results.add, ended=ended)
    finally:
        _summary(outcomes)
    if results.rows:
        _finish(results, gpu, "verdict" in args.only)
    if failed := [f"{x.label}: {x.said}" for x in outcomes if x.status == FAILED]:
        raise WrongResult(f"{len(failed)} of {len(outcomes)} cases failed:\n" + "\n".join(failed))


def stage_ends(begun: float, end: float) -> dict[str, float]:
    """The instants until which stages may run that share the time from `begun` to `end`."""
    share = (end - begun) / max(ENDS.values())
    return {stage: begun + seconds * share for stage, seconds in ENDS.items()}


def tasks_of(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Task]:
    """All cases in the order in which they run."""
    gpu, tiny = device.type == "cuda", device.type == "cpu" and _interpreting()
    triton = gpu or tiny
    backend = "triton" if triton else "auto"
    training, decoding = CASES["interpreter" if tiny else device.type]

    def task(stage: str, label: str, seconds: float, call, *what) -> Task:
        return Task(stage, label, functools.partial(call, *what, device=device, dtype=dtype), seconds)

    tasks = [task("machine", "device", 8, show_machine)]
    others = [x for x in DTYPES.values() if x != dtype and not (tiny and x == torch.bfloat16)]
    tasks += [
        task("correct", f"{kind} {name}, {x}".replace("torch.", ""), 8 if tiny else 2, _check, kind, name, x, backend)
        for x in (dtype, *others)
        for kind, cases in (("training", TRAINING), ("decoding", DECODING))
        for name in (TINY[kind] if tiny else cases if x == dtype else OTHER_DTYPES[kind])
        if not (tiny and x != dtype and name != "packed")
    ]
    tasks += [task("correct", tool, 20, device_checks.sanitize, tool, backend) for tool in device_checks.SANITIZERS]
    elements = 1 << 31 if gpu else 1 << 16
    tasks.append(task("correct", f"{elements} elements", 10, device_checks.check_offsets, elements, backend))
    gpus = ("triton", "torch", "others", "aten", "cudnn", "fa3", "fa4")
    which = gpus if gpu else ("triton",) if triton else ("torch", "aten", "reference")
    tasks += [task("beside", case.label, 6, time_case, case, which) for case in training]
    tasks += [
        task("tiles", f"{kernel}, {case.label}", 10, _race, case, kernel, backend, tiny)
        for kernel, case in _raced(training, decoding)
    ]
    which = (backend,) if tiny else ("triton", "torch", "others") if triton else ("auto", "reference")
    tasks += [task("decode", case.label, 5, time_case, case, which) for case in decoding]
    if triton:
        small = KernelCase("decode", 1, 128, 4, 2, 16) if tiny else KernelCase("decode", 1, 1024, 8, 2, 128)
        tasks.append(task("decode", "a launch", 5, device_checks.time_launch, small, backend))
    step = KernelCase("decode", 1, 32, 2, 1, 16) if tiny else KernelCase("decode", 2, 8192, 32, 8, 128)
    tasks.append(task("step", f"runner, {step.label}", 15, device_checks.check_step_graph, step, backend))
    shared = KernelCase("fwd", 1, 32 if tiny else 512, 4, 2, 16 if tiny else 64)
    tasks.append(task("ranks", "two ranks", 25, device_checks.check_ranks, shared, backend))
    tasks.append(task("ranks", "tests over NCCL", 60, overlap.run_tests))
    long = KernelCase(
        "fwd", 1, 65536 if gpu else 64 if tiny else 1024, 32 if gpu else 4, 8 if gpu else 2, 128 if gpu else 16
    )
    tasks.append(task("ranks", "overlap", 20, overlap.measure, long, backend))
    return [x for x in tasks if x.stage in args.only]


def _raced(training: list[KernelCase], decoding: list[KernelCase]) -> list[tuple[str, KernelCase]]:
    """The kernels whose tiles are raced, and on what: the most common head sizes first."""
    plain = {(case.kind, case.d): case for case in reversed(training) if not case.mask}
    kinds = {"fwd": "fwd", "dq": "bwd", "dkdv": "bwd"}
    widths = sorted({d for _, d in plain}, key=lambda d: RACED.index(d) if d in RACED else len(RACED))
    of_training = [(name, plain[kind, d]) for d in widths for name, kind in kinds.items() if (kind, d) in plain]
    of_decoding = [("latents" if x.cache else "decode", x) for x in decoding if x.cache in ("", "latent")]
    first = dict(reversed(of_decoding))  # of each kind
    return [*of_training[:3], *first.items(), *of_training[3:]]


def _interpreting() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from ...core.kernels.triton import host

    return host.interpreting()


def _check(kind: str, name: str, of: torch.dtype, backend: str, emit, *, device, dtype) -> None:
    cases, check = {"training": (TRAINING, check_training), "decoding": (DECODING, check_decoding)}[kind]
    case = cases[name]
    if backend == "triton" and kind == "decoding" and case.page_size:
        from ...core.kernels.triton.decode import check_pages

        try:
            check_pages(torch.empty(0, case.page_size, 1, 1, dtype=case.stored or of, device=device))
        except ValueError as error:
            raise NotHere(str(error)) from None
    share = check(case, of, device, backend)
    print(f"  {kind} {name}, {of}: {share:.2f} of the allowed error", flush=True)
    emit(KernelTiming(f"{kind} {name}, {of}", "correct", backend, None, share, "of the allowed error"))


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
        "correct": precompile.launches([*TRAINING.values(), *DECODING.values()], dtype),
        "beside": precompile.launches(training, dtype),
        "decode": precompile.launches(decoding, dtype),
        "tiles": precompile.race_launches(training[:2], dtype),
    }
    wanted = [launch for stage, of_stage in launches.items() if stage in args.only for launch in of_stage]
    return precompile.compile_all(wanted, precompile.Machine.this(device), limit_s=limit_s) if wanted else "nothing"


def _summary(outcomes: list[Outcome]) -> None:
    done = sum(x.status == DONE for x in outcomes)
    print(f"\n{done} of {len(outcomes)} cases done in {sum(x.seconds for x in outcomes):.0f} s")
    for x in outcomes:
        if x.status != DONE:
            print(f"{x.status}: {x.stage}, {x.label}: {x.said}")


def _finish(results: Results, gpu: bool, judge: bool) -> None:
    """Keep which backends are the fastest on this GPU; the verdict; and the plot of what was timed."""
    if gpu and (backends := fastest_backends(results.rows)):
        path = fastest.keep(results.about["device"], backends)
        print(f"for backend='auto', in {path}: {backends}")
    if judge:
        said = verdict(results.rows, results.about)
        with whole_file(results.folder / "verdict.md") as part:
            part.write_text(said + "\n")
        print(f"\n{said}")
    title = ", ".join(f"{name} {results.about[name]}" for name in ("device", "dtype", "torch", "triton"))
    panels = [
        Panel(unit, "", [Curve(name, [r.case for r in of], [r.rate for r in of]) for name, of in by_name.items()])
        for unit, rows in grouped(
            [r for r in results.rows if r.ms and r.kind in ("fwd", "bwd", "decode")], lambda r: r.unit
        ).items()
        if (by_name := grouped(rows, lambda r: r.name))
    ]
    results.finish({"results.png": [panels]} if panels else {}, title)
